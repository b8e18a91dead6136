//! From files and arguments to the tensors and options of one problem.

mod axes;
mod case;
mod direct;
mod source;

use anyhow::{Context, Result, anyhow};
use tilewise::half::{bf16, f16};
use tilewise::{BlockTable, DType, Element, Inputs, Lengths, Options, TensorView};

use crate::args::problem::ProblemArgs;
use crate::args::tensors::{Layout, TensorArgs};
use crate::container::{Kind, Plain, Tensor};
use source::Source;

pub(crate) use direct::{Matrix, direct};

/// Elements in the order in which the file holds them, and how to step through them.
#[derive(Debug)]
struct Placed<T> {
    data: Vec<T>,
    shape: [usize; 4],
    strides: [isize; 4],
}

impl<T: Copy> Placed<T> {
    fn view(&self, tensor: &'static str) -> tilewise::Result<TensorView<'_, T>> {
        TensorView::from_strides(&self.data, self.shape, self.strides, 0)
            .map_err(|error| error.named(tensor))
    }
}

/// Everything read from the files.
#[derive(Debug)]
pub(crate) struct Loaded<T> {
    /// The files.
    pub(crate) source: Vec<String>,
    pub(crate) options: Options,
    /// Expected results, if the files hold any that can be compared.
    pub(crate) expected: Option<Expected>,
    /// Axes of q in the file.
    pub(crate) rank: usize,
    /// What a reader of the results should know about how the files were read.
    pub(crate) notes: Vec<String>,
    q: Placed<T>,
    k: Placed<T>,
    v: Placed<T>,
    bias: Option<Placed<T>>,
    mask: Option<Placed<u8>>,
    /// What dropout keeps, if the options ask for it.
    keep: Option<Placed<u8>>,
    /// `do` and `dlse`: gradients that arrive.
    dout: Option<Placed<T>>,
    dlse: Option<Placed<f32>>,
    cu_seqlens_q: Option<Vec<i32>>,
    cu_seqlens_k: Option<Vec<i32>>,
    seqused_k: Option<Vec<i32>>,
    /// Pages and entries a sequence.
    block_table: Option<(Vec<i32>, usize)>,
}

/// [`Loaded`] of any element type.
pub(crate) enum AnyLoaded {
    F64(Loaded<f64>),
    F32(Loaded<f32>),
    F16(Loaded<f16>),
    BF16(Loaded<bf16>),
}

/// `o` and `lse` of the files.
#[derive(Debug)]
pub(crate) struct Expected {
    o: Placed<f64>,
    lse: Option<Placed<f32>>,
}

impl Expected {
    pub(crate) fn o_view(&self) -> tilewise::Result<TensorView<'_, f64>> {
        self.o.view("o")
    }

    pub(crate) fn lse_view(&self) -> tilewise::Result<Option<TensorView<'_, f32>>> {
        self.lse.as_ref().map(|lse| lse.view("lse")).transpose()
    }
}

impl<T: Element> Loaded<T> {
    /// `do` of the files.
    pub(crate) fn dout(&self) -> tilewise::Result<Option<TensorView<'_, T>>> {
        self.dout.as_ref().map(|p| p.view("do")).transpose()
    }

    /// `dlse` of the files.
    pub(crate) fn dlse(&self) -> tilewise::Result<Option<TensorView<'_, f32>>> {
        self.dlse.as_ref().map(|p| p.view("dlse")).transpose()
    }

    /// The tensors, as attention takes them.
    pub(crate) fn inputs(&self) -> tilewise::Result<Inputs<'_, T>> {
        Ok(Inputs {
            q: self.q.view("q")?,
            k: self.k.view("k")?,
            v: self.v.view("v")?,
            bias: self.bias.as_ref().map(|p| p.view("bias")).transpose()?,
            mask: self.mask.as_ref().map(|p| p.view("mask")).transpose()?,
            keep_mask: self
                .keep
                .as_ref()
                .map(|p| p.view("keep_mask"))
                .transpose()?,
            lengths: Lengths {
                cu_seqlens_q: self.cu_seqlens_q.as_deref(),
                cu_seqlens_k: self.cu_seqlens_k.as_deref(),
                seqused_k: self.seqused_k.as_deref(),
            },
            block_table: self.block_table.as_ref().map(|(pages, width)| BlockTable {
                pages,
                width: *width,
            }),
        })
    }
}

/// Reads the files.
///
/// # Errors
/// Of one line, naming the file and what is wrong.
pub(crate) fn load(args: &TensorArgs, problem: &ProblemArgs) -> Result<AnyLoaded> {
    let source = Source::open(args)?;
    let q = source.required("q")?;
    let dtype = match args.read.dtype {
        Some(dtype) => dtype,
        None => float(&q)?,
    };
    Ok(match dtype {
        DType::F64 => AnyLoaded::F64(load_as(args, problem, &source)?),
        DType::F32 => AnyLoaded::F32(load_as(args, problem, &source)?),
        DType::F16 => AnyLoaded::F16(load_as(args, problem, &source)?),
        DType::BF16 => AnyLoaded::BF16(load_as(args, problem, &source)?),
        other => {
            return Err(anyhow!(
                "{}: dtype {other} is not read",
                source.file_of("q")
            ));
        }
    })
}

/// The element type of a tensor of floats.
fn float(tensor: &Tensor<'_>) -> Result<DType> {
    match tensor.kind() {
        Kind::F64 => Ok(DType::F64),
        Kind::F32 => Ok(DType::F32),
        Kind::F16 => Ok(DType::F16),
        Kind::BF16 => Ok(DType::BF16),
        other => Err(tensor
            .error(crate::container::Fault::Type {
                expected: "f64, f32, f16 or bf16",
                got: other.name(),
            })
            .into()),
    }
}

fn load_as<T: Element + Plain>(
    args: &TensorArgs,
    problem: &ProblemArgs,
    source: &Source<'_>,
) -> Result<Loaded<T>> {
    let mut notes = Vec::new();
    // Case files hold gathered copies beside the pages: the pages are the harder way.
    let table = source.optional("block_table")?;
    let paged = table.is_some();
    let (k_name, v_name) = if paged {
        ("k_pages", "v_pages")
    } else {
        ("k", "v")
    };
    let mut rounded = false;
    let mut attention = |name: &str| -> Result<Placed<T>> {
        let tensor = source.required(name)?;
        rounded |= float(&tensor)? != T::DTYPE;
        let data = elements(&tensor, args.read.dtype.is_some())?;
        let (data, strides) = data;
        let (shape, strides) = axes::attention(name, tensor.shape(), &strides, args.read.layout)
            .with_context(|| source.file_of(name))?;
        Ok(Placed {
            data,
            shape,
            strides,
        })
    };
    let (q, k, v) = (attention("q")?, attention(k_name)?, attention(v_name)?);
    // Heads that do not fit, and would if the axes stood the other way round.
    let fits = |axis: usize| k.shape[axis] > 0 && q.shape[axis] % k.shape[axis] == 0;
    let could_be_bshd = k.shape[1] > 0 && !fits(1) && fits(2);
    if args.read.layout == Layout::Bhsd && !paged && could_be_bshd {
        return Err(anyhow!(
            "{}: k: {} heads for the {} of q; --layout bshd reads [batch, seqlen, heads, head_dim]",
            source.file_of("k"),
            k.shape[1],
            q.shape[1]
        ));
    }

    let mut options = match source.metadata("case") {
        Some(text) => {
            notes.push("options are those of the case in the file, and the command line's".into());
            case::options(&text).with_context(|| source.file_of("q"))?
        }
        None => Options::new(),
    };
    let list = |name: &str| -> Result<Option<Tensor<'_>>> {
        let tensor = source.optional(name)?;
        if let Some(tensor) = &tensor {
            axes::list(name, tensor.shape()).with_context(|| source.file_of(name))?;
        }
        Ok(tensor)
    };
    if let Some(slopes) = list("alibi_slopes")? {
        options = options.alibi_slopes(slopes.to_f32()?);
    }
    if let Some(sinks) = list("sinks")? {
        options = options.sinks(sinks.to_f32()?);
    }
    let options = problem.apply(options, q.shape[1]);

    let keep = match options.get_dropout() {
        Some(_) => mask("keep_mask", source)?,
        None => None,
    };
    let dout = match source.optional("do")? {
        Some(_) => Some(attention("do")?),
        None => None,
    };
    let integers = |name: &str| -> Result<Option<Vec<i32>>> {
        Ok(list(name)?.map(|t| t.to_i32()).transpose()?)
    };
    let block_table = match table {
        Some(table) => {
            let width = match *table.shape() {
                [_, width] => width,
                ref other => {
                    return Err(anyhow!(
                        "{}: block_table: expected shape [batch, width], got {other:?}",
                        source.file_of("block_table")
                    ));
                }
            };
            Some((table.to_i32()?, width))
        }
        None => None,
    };
    let expected = expected(args.read.layout, source)?;
    if expected.is_none() && source.optional("lse")?.is_some() {
        notes.push("lse of the file is not compared: the file holds no o".into());
    }
    let expected = if rounded && expected.is_some() {
        notes.push(format!(
            "o of the file is not compared: the inputs were converted to {}",
            T::DTYPE
        ));
        None
    } else {
        expected
    };
    Ok(Loaded {
        source: source.describe(),
        options,
        expected,
        rank: source.required("q")?.shape().len(),
        notes,
        q,
        k,
        v,
        bias: bias(source, args.read.dtype.is_some())?,
        mask: mask("mask", source)?,
        keep,
        dout,
        dlse: rows_of_lse(source, "dlse")?,
        cu_seqlens_q: integers("cu_seqlens_q")?,
        cu_seqlens_k: integers("cu_seqlens_k")?,
        seqused_k: integers("seqused_k")?,
        block_table,
    })
}

/// Elements and strides, in the file's order if its type is `T`, otherwise converted if that is
/// allowed.
fn elements<T: Element + Plain>(
    tensor: &Tensor<'_>,
    convert: bool,
) -> Result<(Vec<T>, Vec<isize>)> {
    if !convert || tensor.kind() == T::KIND {
        let data = tensor.as_slice::<T>()?.into_owned();
        return Ok((data, tensor.strides()));
    }
    float(tensor)?;
    let data = tensor.to_f64().into_iter().map(T::from_f64).collect();
    Ok((data, row_major(tensor.shape())))
}

fn row_major(shape: &[usize]) -> Vec<isize> {
    let mut strides = vec![0; shape.len()];
    let mut step = 1isize;
    for (stride, &size) in strides.iter_mut().zip(shape).rev() {
        *stride = step;
        step = step.saturating_mul(isize::try_from(size).unwrap_or(isize::MAX));
    }
    strides
}

/// The bias, in the dtype of q. Models often keep it wider: that is taken where nothing is lost.
fn bias<T: Element + Plain>(source: &Source<'_>, convert: bool) -> Result<Option<Placed<T>>> {
    let Some(tensor) = source.optional("bias")? else {
        return Ok(None);
    };
    let dtype = float(&tensor)?;
    let (data, strides) = elements(&tensor, true)?;
    if !convert && dtype != T::DTYPE {
        let same = |narrow: T, wide: f64| narrow.to_f64() == wide || wide.is_nan();
        if !(data.iter().zip(tensor.to_f64())).all(|(&narrow, wide)| same(narrow, wide)) {
            return Err(anyhow!(
                "{}: bias: its {dtype} values do not fit the {} of q (--dtype rounds all inputs)",
                source.file_of("bias"),
                T::DTYPE
            ));
        }
    }
    let (shape, strides) = axes::broadcast("bias", tensor.shape(), &strides)
        .with_context(|| source.file_of("bias"))?;
    Ok(Some(Placed {
        data,
        shape,
        strides,
    }))
}

fn mask(name: &str, source: &Source<'_>) -> Result<Option<Placed<u8>>> {
    let Some(tensor) = source.optional(name)? else {
        return Ok(None);
    };
    let (data, strides) = match tensor.kind() {
        Kind::Bool | Kind::U8 => (tensor.as_slice::<u8>()?.into_owned(), tensor.strides()),
        Kind::F64 | Kind::F32 | Kind::F16 | Kind::BF16 => {
            return Err(anyhow!(
                "{}: {name}: expected bools or integers (1 = visible), got {}; \
                 a mask that is added to scores is a bias (--name bias=NAME)",
                source.file_of(name),
                tensor.kind()
            ));
        }
        _ => (
            tensor
                .to_f64()
                .into_iter()
                .map(|x| u8::from(x != 0.0))
                .collect(),
            row_major(tensor.shape()),
        ),
    };
    let (shape, strides) =
        axes::broadcast(name, tensor.shape(), &strides).with_context(|| source.file_of(name))?;
    Ok(Some(Placed {
        data,
        shape,
        strides,
    }))
}

fn expected(layout: Layout, source: &Source<'_>) -> Result<Option<Expected>> {
    let Some(o) = source.optional("o")? else {
        return Ok(None);
    };
    float(&o)?;
    let (shape, strides) = axes::attention("o", o.shape(), &row_major(o.shape()), layout)
        .with_context(|| source.file_of("o"))?;
    let o = Placed {
        data: o.to_f64(),
        shape,
        strides,
    };
    let lse = rows_of_lse(source, "lse")?;
    Ok(Some(Expected { o, lse }))
}

/// A tensor with a number a row: lse, or the gradient that arrives there.
fn rows_of_lse(source: &Source<'_>, name: &str) -> Result<Option<Placed<f32>>> {
    let Some(tensor) = source.optional(name)? else {
        return Ok(None);
    };
    let [b, h, s] = axes::lse(name, tensor.shape()).with_context(|| source.file_of(name))?;
    let shape = [b, h, s, 1];
    let strides = row_major(&shape);
    Ok(Some(Placed {
        data: tensor.to_f32()?,
        shape,
        strides: [strides[0], strides[1], strides[2], strides[3]],
    }))
}
