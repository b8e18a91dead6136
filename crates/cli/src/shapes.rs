//! Shapes on the command line: `b,hq,hkv,sq,sk,d[,dv][,causal]`, with lists and ranges.

use std::fmt;

use tilewise::{Dims, Options};

/// Sizes of a problem, and whether it is causal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shape {
    pub(crate) dims: Dims,
    pub(crate) causal: bool,
}

impl Shape {
    pub(crate) fn options(&self) -> Options {
        Options::new().causal(self.causal)
    }
}

impl fmt::Display for Shape {
    /// As [`parse`] reads it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let d = &self.dims;
        write!(
            f,
            "{},{},{},{},{},{}",
            d.batch, d.num_heads, d.num_kv_heads, d.seqlen_q, d.seqlen_k, d.head_dim
        )?;
        if d.head_dim_v != d.head_dim {
            write!(f, ",{}", d.head_dim_v)?;
        }
        if self.causal {
            write!(f, ",causal")?;
        }
        Ok(())
    }
}

/// Axes in the order in which they are written.
const AXES: [&str; 7] = ["b", "hq", "hkv", "sq", "sk", "d", "dv"];
/// More combinations than this are taken for a slip.
const MOST: usize = 4096;

pub(crate) const HELP: &str = "\
A shape is b,hq,hkv,sq,sk,d[,dv][,causal]: batch, query heads, key and value heads, queries, keys,
head_dim, head_dim of v. Each may be a list (64:80:128) or a range (512..16384*2, 1..16+5), and all
combinations are taken. Axes may be named: b=1,hq=8,sq=512..4096*2,d=64 stands for hkv=hq, sk=sq, dv=d.";

/// The values of one axis.
enum Values {
    List(Vec<usize>),
    /// The value of another axis.
    Same(usize),
}

fn parse_values(text: &str, part: &str) -> Result<Values, String> {
    if let Some(axis) = AXES.iter().position(|&axis| axis == text) {
        return Ok(Values::Same(axis));
    }
    let number = |text: &str| {
        text.trim().parse::<usize>().map_err(|_| {
            format!(
                "{part}: expected a number, a list such as 64:80 or a range such as 512..4096*2"
            )
        })
    };
    let mut list = Vec::new();
    for item in text.split(':') {
        let Some((first, rest)) = item.split_once("..") else {
            list.push(number(item)?);
            continue;
        };
        // One of factor and addend is the one that does nothing.
        let (last, factor, addend) = if let Some((last, factor)) = rest.split_once('*') {
            (last, number(factor)?, 0)
        } else if let Some((last, addend)) = rest.split_once('+') {
            (last, 1, number(addend)?)
        } else {
            (rest, 1, 1)
        };
        let (mut x, last) = (number(first)?, number(last)?);
        while x <= last {
            list.push(x);
            if list.len() > MOST {
                return Err(format!("{part}: more than {MOST} values"));
            }
            match x.checked_mul(factor).and_then(|x| x.checked_add(addend)) {
                Some(next) if next > x => x = next,
                _ => return Err(format!("{part}: the range does not advance")),
            }
        }
    }
    if list.is_empty() {
        return Err(format!("{part}: an empty range"));
    }
    Ok(Values::List(list))
}

/// Every shape that `text` stands for, the last axis running fastest.
pub(crate) fn parse(text: &str) -> Result<Vec<Shape>, String> {
    let mut axes: [Option<Values>; 7] = Default::default();
    let mut causal = false;
    for (place, part) in text.split(',').map(str::trim).enumerate() {
        match part {
            "causal" => causal = true,
            "full" => causal = false,
            _ => {
                let (axis, values) = match part.split_once('=') {
                    Some((name, values)) => (
                        AXES.iter()
                            .position(|&axis| axis == name.trim())
                            .ok_or_else(|| format!("{part}: axes are {}", AXES.join(", ")))?,
                        values.trim(),
                    ),
                    None if place < AXES.len() => (place, part),
                    None => return Err(format!("{part}: expected b,hq,hkv,sq,sk,d[,dv][,causal]")),
                };
                if axes[axis].is_some() {
                    return Err(format!("{part}: {} is given twice", AXES[axis]));
                }
                axes[axis] = Some(parse_values(values, part)?);
            }
        }
    }
    // What a missing axis is: 1, or the same as another.
    for (axis, like) in [
        (0, None),
        (1, None),
        (2, Some(1)),
        (4, Some(3)),
        (6, Some(5)),
    ] {
        axes[axis].get_or_insert(match like {
            None => Values::List(vec![1]),
            Some(other) => Values::Same(other),
        });
    }
    let mut shapes = vec![[None; 7]];
    for (axis, values) in axes.iter().enumerate() {
        let Some(values) = values else {
            return Err(format!("{text}: {} is missing", AXES[axis]));
        };
        if let Values::List(list) = values {
            if shapes.len() * list.len() > MOST {
                return Err(format!("{text}: more than {MOST} shapes"));
            }
            shapes = shapes
                .iter()
                .flat_map(|shape| {
                    list.iter().map(move |&value| {
                        let mut shape = *shape;
                        shape[axis] = Some(value);
                        shape
                    })
                })
                .collect();
        }
    }
    shapes
        .into_iter()
        .map(|mut shape: [Option<usize>; 7]| {
            // Each round resolves at least one reference, unless they are circular.
            for _ in 0..AXES.len() {
                for (axis, values) in axes.iter().enumerate() {
                    if let Some(Values::Same(other)) = values {
                        shape[axis] = shape[*other];
                    }
                }
            }
            let [
                Some(batch),
                Some(num_heads),
                Some(num_kv_heads),
                Some(seqlen_q),
                Some(seqlen_k),
                Some(head_dim),
                Some(head_dim_v),
            ] = shape
            else {
                return Err(format!("{text}: axes refer to each other in a circle"));
            };
            Ok(Shape {
                dims: Dims {
                    batch,
                    num_heads,
                    num_kv_heads,
                    seqlen_q,
                    seqlen_k,
                    head_dim,
                    head_dim_v,
                },
                causal,
            })
        })
        .collect()
}

/// The shape that `text` stands for, if it is one.
pub(crate) fn parse_one(text: &str) -> Result<Shape, String> {
    match parse(text)?.as_slice() {
        [shape] => Ok(*shape),
        shapes => Err(format!("{text}: expected one shape, got {}", shapes.len())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(text: &str) -> Vec<String> {
        parse(text).unwrap().iter().map(Shape::to_string).collect()
    }

    #[test]
    fn a_plain_shape_is_read_as_it_is_written() {
        for text in [
            "1,8,8,1024,1024,64",
            "2,32,8,1,8192,128,causal",
            "1,4,4,10,20,80,96",
            "1,1,1,1,1,1,2,causal",
        ] {
            assert_eq!(written(text), [text]);
        }
        assert_eq!(written("1,8,8,4,4,64,full"), ["1,8,8,4,4,64"]);
    }

    #[test]
    fn lists_and_ranges_make_all_combinations() {
        assert_eq!(
            written("1,8,8,1,sk=512..2048*2,64:128"),
            [
                "1,8,8,1,512,64",
                "1,8,8,1,512,128",
                "1,8,8,1,1024,64",
                "1,8,8,1,1024,128",
                "1,8,8,1,2048,64",
                "1,8,8,1,2048,128",
            ]
        );
        assert_eq!(written("sq=1..16+5,d=8,causal").len(), 4);
        assert_eq!(written("hq=2,sq=3..4,d=8"), ["1,2,2,3,3,8", "1,2,2,4,4,8"]);
        assert_eq!(
            written("b=1,hq=8,hkv=2,sq=1,sk=7,dv=4,d=8"),
            ["1,8,2,1,7,8,4"]
        );
    }

    #[test]
    fn slips_are_named() {
        for (text, says) in [
            ("1,8,8,4,4", "d is missing"),
            ("1,8,8,4,4,x", "expected a number"),
            ("1,8,8,4,4,64,64,64", "expected b,hq"),
            ("1,8,8,4,4,64,d=64", "given twice"),
            ("1,8,8,4,4,z=64", "axes are"),
            ("sq=4..1,d=8", "empty range"),
            ("sq=1..8*1,d=8", "does not advance"),
            ("sq=0..8*2,d=8", "does not advance"),
            ("sq=1..99999,d=8", "more than"),
            ("sq=sk,sk=sq,d=8", "circle"),
            ("", "expected a number"),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.contains(says), "{text}: {error}");
        }
        assert!(parse_one("sq=1:2,d=8").is_err());
    }
}
