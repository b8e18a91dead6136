//! Inputs of one head given as numbers, not as files.

use std::str::FromStr;

use anyhow::{Result, bail};
use tilewise::half::{bf16, f16};
use tilewise::{DType, Element, Options};

use super::{AnyLoaded, Loaded, Placed, row_major};
use crate::args::problem::ProblemArgs;

/// Rows of numbers, all equally long: `1,0;0,1` (or with spaces) is two rows of two.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Matrix {
    rows: usize,
    columns: usize,
    data: Vec<f64>,
}

impl Matrix {
    /// One row after another.
    #[cfg(test)]
    pub(crate) fn new(rows: usize, columns: usize, data: Vec<f64>) -> Matrix {
        assert_eq!(data.len(), rows * columns);
        Matrix {
            rows,
            columns,
            data,
        }
    }
}

impl FromStr for Matrix {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut matrix = Matrix {
            rows: 0,
            columns: 0,
            data: Vec::new(),
        };
        for row in text.split(';') {
            let before = matrix.data.len();
            for word in row
                .split(|c: char| c == ',' || c.is_whitespace())
                .filter(|word| !word.is_empty())
            {
                let number = word.parse().map_err(|_| format!("{word:?} is no number"))?;
                matrix.data.push(number);
            }
            let columns = matrix.data.len() - before;
            if columns == 0 {
                return Err("expected rows of numbers, for example \"1,0; 0,1\"".into());
            }
            if matrix.rows > 0 && columns != matrix.columns {
                return Err(format!(
                    "rows of {} and of {columns} numbers",
                    matrix.columns
                ));
            }
            matrix.columns = columns;
            matrix.rows += 1;
        }
        Ok(matrix)
    }
}

/// q, k and v of one head, and what arrives at its output, rounded to `dtype`.
///
/// # Errors
/// If `dtype` is not one that inputs can have.
pub(crate) fn direct(
    source: &str,
    matrices: [&Matrix; 3],
    dout: Option<&Matrix>,
    dtype: DType,
    problem: &ProblemArgs,
) -> Result<AnyLoaded> {
    Ok(match dtype {
        DType::F64 => AnyLoaded::F64(typed(source, matrices, dout, problem)),
        DType::F32 => AnyLoaded::F32(typed(source, matrices, dout, problem)),
        DType::F16 => AnyLoaded::F16(typed::<f16>(source, matrices, dout, problem)),
        DType::BF16 => AnyLoaded::BF16(typed::<bf16>(source, matrices, dout, problem)),
        other => bail!("--dtype: {other} is not read"),
    })
}

fn typed<T: Element>(
    source: &str,
    matrices: [&Matrix; 3],
    dout: Option<&Matrix>,
    problem: &ProblemArgs,
) -> Loaded<T> {
    let placed = |matrix: &Matrix| {
        let shape = [1, 1, matrix.rows, matrix.columns];
        let strides = row_major(&shape);
        Placed {
            data: matrix.data.iter().map(|&x| T::from_f64(x)).collect(),
            shape,
            strides: [strides[0], strides[1], strides[2], strides[3]],
        }
    };
    let [q, k, v] = matrices.map(placed);
    Loaded {
        source: vec![source.into()],
        options: problem.apply(Options::new(), 1),
        expected: None,
        rank: 2,
        notes: Vec::new(),
        q,
        k,
        v,
        bias: None,
        mask: None,
        keep: None,
        dout: dout.map(placed),
        dlse: None,
        cu_seqlens_q: None,
        cu_seqlens_k: None,
        seqused_k: None,
        block_table: None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn matrices_are_read() {
        let two_by_three = Matrix::new(2, 3, vec![1.0, 2.5, -3.0, 0.0, f64::NEG_INFINITY, 1e3]);
        assert_eq!("1,2.5,-3;0,-inf,1e3".parse(), Ok(two_by_three.clone()));
        assert_eq!(" 1 2.5 -3 ; 0, -inf 1e3".parse(), Ok(two_by_three));
        for wrong in ["", "1,2;3", "1;;2", "1,x", "1;"] {
            assert!(wrong.parse::<Matrix>().is_err(), "{wrong}");
        }
    }
}
