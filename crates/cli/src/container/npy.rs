//! `.npy`: magic, version, the length of a header, a Python dict as header, data.
//!
//! Arrays are written through npyz. The header is read here, because npyz (0.9) allocates whatever
//! length the file announces, multiplies the shape without checking, parses brackets by recursion
//! to any depth, and does not know the `4L` of Python 2.

use std::borrow::Cow;
use std::io::BufWriter;
use std::path::Path;

use npyz::WriterBuilder;

use super::error::{ContainerError, Fault};
use super::tensor::{Kind, Tensor, checked_bytes, swap_bytes};

pub(super) const MAGIC: &[u8] = b"\x93NUMPY";

/// A header, checked, and where the data starts.
#[derive(Debug)]
pub(super) struct Header {
    kind: Kind,
    big_endian: bool,
    fortran: bool,
    shape: Vec<usize>,
    bytes: u64,
    data_start: usize,
}

impl Header {
    /// Bytes of header and data together.
    pub(super) fn file_len(&self) -> u64 {
        self.data_start as u64 + self.bytes
    }

    /// Checks that a file of `len` bytes holds this header, its data and nothing else.
    pub(super) fn check_len(&self, len: u64) -> Result<(), Fault> {
        let available = len.saturating_sub(self.data_start as u64);
        if available < self.bytes {
            return Err(Fault::Truncated {
                what: "the data",
                needed: self.bytes,
                available,
            });
        }
        if available > self.bytes {
            return Err(Fault::TrailingData(available - self.bytes));
        }
        Ok(())
    }

    /// Reads the header at the start of `bytes`, which need not hold all the data.
    /// `raw`: what two-byte raw elements (`V2`) are.
    pub(super) fn parse(bytes: &[u8], raw: Option<Kind>) -> Result<Header, Fault> {
        let rest = bytes
            .strip_prefix(MAGIC)
            .ok_or(Fault::BadMagic { expected: ".npy" })?;
        let (version, rest) = rest
            .split_first_chunk::<2>()
            .ok_or(Fault::HeaderTooSmall(bytes.len()))?;
        let length_bytes = match version {
            [1, 0] => 2,
            [2 | 3, 0] => 4,
            &[major, minor] => return Err(Fault::UnsupportedVersion { major, minor }),
        };
        let (length, rest) = rest
            .split_at_checked(length_bytes)
            .ok_or(Fault::HeaderTooSmall(bytes.len()))?;
        let length = length
            .iter()
            .rev()
            .fold(0u64, |sum, &byte| sum << 8 | u64::from(byte));
        let text = usize::try_from(length)
            .ok()
            .and_then(|length| rest.get(..length))
            .ok_or(Fault::Truncated {
                what: "the header",
                needed: length,
                available: rest.len() as u64,
            })?;
        // Versions 1 and 2 are latin-1, of which all that can matter here is ASCII.
        let text = std::str::from_utf8(text)
            .map_err(|_| Fault::BadHeader("it is no ASCII or UTF-8 text".into()))?;
        let fields = Fields::parse(text)?;
        let (kind, big_endian) = element(&fields.descr, raw)?;
        let bytes = checked_bytes(&fields.shape, kind.size())?;
        Ok(Header {
            kind,
            big_endian,
            fortran: fields.fortran_order,
            shape: fields
                .shape
                .iter()
                .map(|&dim| {
                    usize::try_from(dim).map_err(|_| Fault::SizeOverflow(fields.shape.clone()))
                })
                .collect::<Result<_, _>>()?,
            bytes,
            data_start: MAGIC.len() + 2 + length_bytes + text.len(),
        })
    }

    /// The tensor whose header this is, from all the bytes of its file.
    pub(super) fn tensor<'a>(
        &self,
        path: &Path,
        name: &str,
        file: Cow<'a, [u8]>,
    ) -> Result<Tensor<'a>, Fault> {
        self.check_len(file.len() as u64)?;
        let mut data = match file {
            Cow::Borrowed(bytes) => Cow::Borrowed(&bytes[self.data_start..]),
            Cow::Owned(mut bytes) => {
                bytes.drain(..self.data_start);
                Cow::Owned(bytes)
            }
        };
        if self.big_endian != cfg!(target_endian = "big") && self.kind.size() > 1 {
            swap_bytes(data.to_mut(), self.kind.size());
        }
        Ok(Tensor {
            path: path.to_owned(),
            name: name.to_owned(),
            kind: self.kind,
            shape: self.shape.clone(),
            fortran: self.fortran,
            data,
        })
    }
}

/// Element type and whether it is big-endian.
fn element(descr: &Descr, raw: Option<Kind>) -> Result<(Kind, bool), Fault> {
    let refuse = |dtype: &str, hint| {
        Err(Fault::UnsupportedDtype {
            dtype: format!("{dtype:?}"),
            hint,
        })
    };
    let Descr::Plain(text) = descr else {
        return refuse("structured", "");
    };
    let (order, code) = match text.split_at_checked(1) {
        Some((order @ ("<" | ">" | "|" | "="), code)) => (order, code),
        _ => ("=", text.as_str()),
    };
    let kind = match code {
        "f8" => Kind::F64,
        "f4" => Kind::F32,
        "f2" => Kind::F16,
        "i8" => Kind::I64,
        "i4" => Kind::I32,
        "i2" => Kind::I16,
        "i1" => Kind::I8,
        "u8" => Kind::U64,
        "u4" => Kind::U32,
        "u2" => Kind::U16,
        "u1" => Kind::U8,
        "b1" | "?" => Kind::Bool,
        "V2" => match raw {
            Some(kind) if kind.size() == 2 => kind,
            _ => {
                return refuse(
                    text,
                    ": two raw bytes, which is how numpy writes bfloat16; say bf16 if that is what they are",
                );
            }
        },
        _ if code.starts_with('O') => {
            return refuse(text, ": pickled objects are never unpickled");
        }
        _ => return refuse(text, ""),
    };
    let big = match order {
        ">" => true,
        "=" => cfg!(target_endian = "big"),
        _ => false,
    };
    Ok((kind, big))
}

#[derive(Debug, PartialEq)]
enum Descr {
    /// `'<f4'`
    Plain(String),
    /// `[('a', '<f4'), …]`
    Structured,
}

#[derive(Debug, PartialEq)]
struct Fields {
    descr: Descr,
    fortran_order: bool,
    shape: Vec<u64>,
}

impl Fields {
    /// Parses `{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }`, keys in any order.
    fn parse(text: &str) -> Result<Fields, Fault> {
        let mut reader = Reader { rest: text };
        let (mut descr, mut fortran_order, mut shape) = (None, None, None);
        reader.expect('{')?;
        while !reader.take('}') {
            let key = reader.string()?;
            reader.expect(':')?;
            let twice = match key {
                "descr" => descr.replace(reader.descr()?).is_some(),
                "fortran_order" => fortran_order.replace(reader.boolean()?).is_some(),
                "shape" => shape.replace(reader.shape()?).is_some(),
                _ => return Err(bad(format!("unexpected key {key:?}"))),
            };
            if twice {
                return Err(bad(format!("{key:?} appears twice")));
            }
            if !reader.take(',') {
                reader.expect('}')?;
                break;
            }
        }
        reader.end()?;
        let missing = |key: &str| bad(format!("{key:?} is missing"));
        Ok(Fields {
            descr: descr.ok_or_else(|| missing("descr"))?,
            fortran_order: fortran_order.ok_or_else(|| missing("fortran_order"))?,
            shape: shape.ok_or_else(|| missing("shape"))?,
        })
    }
}

fn bad(what: String) -> Fault {
    Fault::BadHeader(what)
}

/// A cursor over the header's text.
struct Reader<'a> {
    rest: &'a str,
}

impl<'a> Reader<'a> {
    fn space(&mut self) {
        self.rest = self.rest.trim_start();
    }

    fn take(&mut self, token: char) -> bool {
        self.space();
        match self.rest.strip_prefix(token) {
            Some(rest) => {
                self.rest = rest;
                true
            }
            None => false,
        }
    }

    fn wanted(&self, what: &str) -> Fault {
        match self.rest.chars().next() {
            Some(found) => bad(format!("expected {what}, found {found:?}")),
            None => bad(format!("expected {what}, found the end")),
        }
    }

    fn expect(&mut self, token: char) -> Result<(), Fault> {
        if self.take(token) {
            Ok(())
        } else {
            Err(self.wanted(&format!("{token:?}")))
        }
    }

    fn end(&mut self) -> Result<(), Fault> {
        self.space();
        if self.rest.trim_end_matches('\0').is_empty() {
            Ok(())
        } else {
            Err(self.wanted("the end"))
        }
    }

    /// A quoted string without escapes: no key or type code has one.
    fn string(&mut self) -> Result<&'a str, Fault> {
        self.space();
        let quote = match self.rest.chars().next() {
            Some(quote @ ('\'' | '"')) => quote,
            _ => return Err(self.wanted("a string")),
        };
        let (string, rest) = self.rest[1..]
            .split_once(quote)
            .ok_or_else(|| bad("a string has no end".into()))?;
        self.rest = rest;
        Ok(string)
    }

    fn boolean(&mut self) -> Result<bool, Fault> {
        self.space();
        for (word, value) in [("False", false), ("True", true)] {
            if let Some(rest) = self.rest.strip_prefix(word) {
                self.rest = rest;
                return Ok(value);
            }
        }
        Err(self.wanted("True or False"))
    }

    /// A type code, or the bracketed description of a structured type, which is skipped.
    fn descr(&mut self) -> Result<Descr, Fault> {
        self.space();
        if !self.rest.starts_with(['[', '(']) {
            return self.string().map(|code| Descr::Plain(code.to_owned()));
        }
        let mut depth = 0usize;
        loop {
            self.space();
            match self.rest.chars().next() {
                None => return Err(self.wanted("a closing bracket")),
                Some('\'' | '"') => {
                    self.string()?;
                    continue;
                }
                Some('[' | '(') => depth += 1,
                Some(']' | ')') => depth -= 1,
                Some(_) => {}
            }
            let first = self.rest.chars().next().map_or(0, char::len_utf8);
            self.rest = &self.rest[first..];
            if depth == 0 {
                return Ok(Descr::Structured);
            }
        }
    }

    /// `()`, `(3,)`, `(2, 3)` or a list of the same.
    fn shape(&mut self) -> Result<Vec<u64>, Fault> {
        let close = if self.take('(') {
            ')'
        } else if self.take('[') {
            ']'
        } else {
            return Err(self.wanted("a tuple"));
        };
        let mut shape = Vec::new();
        while !self.take(close) {
            shape.push(self.dimension()?);
            if !self.take(',') {
                self.expect(close)?;
                break;
            }
        }
        Ok(shape)
    }

    fn dimension(&mut self) -> Result<u64, Fault> {
        self.space();
        let end = self
            .rest
            .find(|c: char| !c.is_ascii_digit())
            .unwrap_or(self.rest.len());
        let (digits, rest) = self.rest.split_at(end);
        if digits.is_empty() {
            return Err(self.wanted("a size"));
        }
        let size = digits
            .parse()
            .map_err(|_| bad(format!("a size of {} digits", digits.len())))?;
        // Python 2 writes long integers as 4L.
        self.rest = rest.strip_prefix('L').unwrap_or(rest);
        Ok(size)
    }
}

/// Writes one array. bfloat16, which numpy does not know, goes out as two raw bytes (`V2`), as
/// numpy itself saves it.
///
/// # Errors
/// [`Fault::Io`].
pub fn write_npy(path: &Path, tensor: &Tensor<'_>) -> Result<(), ContainerError> {
    let fault = |e: std::io::Error| ContainerError::new(path, Fault::Io(e.to_string()));
    let file = std::fs::File::create(path).map_err(fault)?;
    write_to(BufWriter::new(file), tensor).map_err(fault)
}

fn write_to(writer: impl std::io::Write, tensor: &Tensor<'_>) -> std::io::Result<()> {
    fn put<T>(writer: impl std::io::Write, tensor: &Tensor<'_>) -> std::io::Result<()>
    where
        T: super::Plain + npyz::AutoSerialize,
    {
        begin(writer, tensor, T::default_dtype(), |x: T| x)
    }
    fn begin<T, U>(
        writer: impl std::io::Write,
        tensor: &Tensor<'_>,
        dtype: npyz::DType,
        convert: impl Fn(T) -> U,
    ) -> std::io::Result<()>
    where
        T: super::Plain,
        U: npyz::Serialize,
    {
        let shape: Vec<u64> = tensor.shape.iter().map(|&dim| dim as u64).collect();
        let mut out = npyz::WriteOptions::<U>::new()
            .dtype(dtype)
            .shape(&shape)
            .order(if tensor.fortran {
                npyz::Order::Fortran
            } else {
                npyz::Order::C
            })
            .writer(writer)
            .begin_nd()?;
        out.extend(tensor.elements().map(convert))?;
        out.finish()
    }
    match tensor.kind {
        Kind::F64 => put::<f64>(writer, tensor),
        Kind::F32 => put::<f32>(writer, tensor),
        Kind::F16 => put::<half::f16>(writer, tensor),
        Kind::BF16 => {
            let code = "|V2".parse().map_err(std::io::Error::other)?;
            let dtype = npyz::DType::new_scalar(code);
            begin(writer, tensor, dtype, |x: half::bf16| {
                x.to_le_bytes().to_vec()
            })
        }
        Kind::I64 => put::<i64>(writer, tensor),
        Kind::I32 => put::<i32>(writer, tensor),
        Kind::I16 => put::<i16>(writer, tensor),
        Kind::I8 => put::<i8>(writer, tensor),
        Kind::U64 => put::<u64>(writer, tensor),
        Kind::U32 => put::<u32>(writer, tensor),
        Kind::U16 => put::<u16>(writer, tensor),
        Kind::U8 => put::<u8>(writer, tensor),
        Kind::Bool => {
            let dtype = <bool as npyz::AutoSerialize>::default_dtype();
            begin(writer, tensor, dtype, |x: u8| x != 0)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_of_any_writer_are_read() {
        let fields =
            Fields::parse("{\"shape\": [2, 3], 'fortran_order':True,'descr' : \"<f4\"}  \n")
                .unwrap();
        assert_eq!(fields.shape, [2, 3]);
        assert!(fields.fortran_order);
        assert_eq!(
            Fields::parse(
                "{'descr': [('a', '<f4', (2, 3))], 'fortran_order': False, 'shape': (4L,), }"
            )
            .unwrap(),
            Fields {
                descr: Descr::Structured,
                fortran_order: false,
                shape: vec![4]
            }
        );
    }

    #[test]
    fn broken_headers_are_errors_not_panics() {
        for text in [
            "",
            "{",
            "[]",
            "{'descr': }",
            "{'descr': '<f4', 'fortran_order': False, 'shape': (-1,)}",
            "{'descr': '<f4', 'fortran_order': False, 'shape': (1 2)}",
            "{'descr': '<f4', 'fortran_order': False, 'shape': (99999999999999999999999,)}",
            "{'descr': '<f4', 'fortran_order': 0, 'shape': ()}",
            "{'descr': '<f4', 'descr': '<f4', 'fortran_order': False, 'shape': ()}",
            "{'descr': '<f4', 'fortran_order': False, 'shape': ()} x",
            "{'descr': '<f4",
            "{'descr': é, 'shape': ()}",
            "{'descr': [é",
        ] {
            assert!(Fields::parse(text).is_err(), "{text}");
        }
        let deep = format!("{{'descr': {}", "(".repeat(1 << 16));
        assert!(Fields::parse(&deep).is_err());
    }
}
