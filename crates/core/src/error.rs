//! What can go wrong, said so that the caller can mend it: the tensor, what was expected, what came.

use std::borrow::Cow;

use crate::dtype::DType;

/// `Result` with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A rejected input, an unsupported request or a backend's failure.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A tensor's shape does not fit the others.
    #[error("{tensor}: expected {expected}, got {got}")]
    Shape {
        /// Name of the tensor.
        tensor: Cow<'static, str>,
        /// What would have been right.
        expected: String,
        /// What came.
        got: String,
    },
    /// Shape, strides and offset reach outside the memory given, or an output overlaps itself.
    #[error(
        "{tensor}: {problem} (shape {shape:?}, strides {strides:?}, offset {offset}, {len} elements of memory)"
    )]
    View {
        /// Name of the tensor.
        tensor: Cow<'static, str>,
        /// Which rule is broken.
        problem: &'static str,
        /// The shape asked for.
        shape: [usize; 4],
        /// The strides asked for, in elements.
        strides: [isize; 4],
        /// The offset asked for, in elements.
        offset: usize,
        /// Length of the memory, in elements.
        len: usize,
    },
    /// num_heads is no multiple of num_kv_heads.
    #[error("num_heads: expected a multiple of num_kv_heads = {num_kv_heads}, got {num_heads}")]
    Heads {
        /// Query heads.
        num_heads: usize,
        /// Key and value heads.
        num_kv_heads: usize,
    },
    /// cu_seqlens or seqused_k are inconsistent.
    #[error("{tensor}: expected {expected}, got {got}")]
    Lengths {
        /// `cu_seqlens_q`, `cu_seqlens_k` or `seqused_k`.
        tensor: Cow<'static, str>,
        /// What would have been right.
        expected: String,
        /// What came.
        got: String,
    },
    /// A block table points outside the pages, or is too narrow.
    #[error("block_table: expected {expected}, got {got}")]
    Table {
        /// What would have been right.
        expected: String,
        /// What came.
        got: String,
    },
    /// A tensor's element type does not fit.
    #[error("{tensor}: expected dtype {expected}, got {got}")]
    DType {
        /// Name of the tensor.
        tensor: Cow<'static, str>,
        /// What would have been right.
        expected: DType,
        /// What came.
        got: DType,
    },
    /// An option's value is outside its domain.
    #[error("{option}: expected {expected}, got {got}")]
    Option {
        /// Name of the option.
        option: &'static str,
        /// What would have been right.
        expected: &'static str,
        /// What came.
        got: String,
    },
    /// The backend cannot do this. Nothing was computed and nothing else was tried.
    #[error("{backend} does not support {what}")]
    Unsupported {
        /// Name of the backend.
        backend: String,
        /// What it does not support.
        what: String,
    },
    /// The backend asked for cannot be used on this machine.
    #[error("backend {backend} is not available: {reason}")]
    Unavailable {
        /// Name of the backend.
        backend: String,
        /// Exactly what is missing.
        reason: String,
    },
    /// Memory ran out.
    #[error("{backend}: {bytes} bytes for {what} cannot be had")]
    OutOfMemory {
        /// Name of the backend.
        backend: String,
        /// What the memory was for.
        what: String,
        /// How much was asked for.
        bytes: u64,
    },
    /// An operation of the backend failed.
    #[error("{backend}: {op} failed: {message}")]
    Backend {
        /// Name of the backend.
        backend: String,
        /// The operation, for example `cuLaunchKernel`.
        op: String,
        /// What the operation said.
        message: String,
    },
}

/// The family of an [`Error`], for callers that branch on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorClass {
    /// Shapes, strides or element types.
    Shape,
    /// Head counts.
    Heads,
    /// Sequence lengths.
    Lengths,
    /// Block tables.
    Table,
    /// Option values.
    Option,
    /// Sound request, but not supported here.
    Unsupported,
    /// Backend missing, out of memory or failed.
    Backend,
}

impl Error {
    /// The family this error belongs to.
    pub fn class(&self) -> ErrorClass {
        match self {
            Error::Shape { .. } | Error::View { .. } | Error::DType { .. } => ErrorClass::Shape,
            Error::Heads { .. } => ErrorClass::Heads,
            Error::Lengths { .. } => ErrorClass::Lengths,
            Error::Table { .. } => ErrorClass::Table,
            Error::Option { .. } => ErrorClass::Option,
            Error::Unsupported { .. } => ErrorClass::Unsupported,
            Error::Unavailable { .. } | Error::OutOfMemory { .. } | Error::Backend { .. } => {
                ErrorClass::Backend
            }
        }
    }

    /// The same error, about the tensor called `name`: views are checked before they have a name.
    pub fn named(mut self, name: impl Into<Cow<'static, str>>) -> Self {
        match &mut self {
            Error::Shape { tensor, .. }
            | Error::View { tensor, .. }
            | Error::Lengths { tensor, .. }
            | Error::DType { tensor, .. } => *tensor = name.into(),
            _ => {}
        }
        self
    }

    /// A shape mismatch.
    pub fn shape(
        tensor: impl Into<Cow<'static, str>>,
        expected: impl Into<String>,
        got: impl Into<String>,
    ) -> Self {
        Error::Shape {
            tensor: tensor.into(),
            expected: expected.into(),
            got: got.into(),
        }
    }

    /// Refuses a tensor whose shape is not the expected one.
    ///
    /// # Errors
    /// [`Error::Shape`] with both shapes.
    pub fn expect_shape(
        tensor: impl Into<Cow<'static, str>>,
        got: [usize; 4],
        expected: [usize; 4],
    ) -> Result<()> {
        if got == expected {
            return Ok(());
        }
        Err(Error::shape(
            tensor,
            format!("{expected:?}"),
            format!("{got:?}"),
        ))
    }

    /// Inconsistent sequence lengths.
    pub fn lengths(
        tensor: impl Into<Cow<'static, str>>,
        expected: impl Into<String>,
        got: impl Into<String>,
    ) -> Self {
        Error::Lengths {
            tensor: tensor.into(),
            expected: expected.into(),
            got: got.into(),
        }
    }

    /// An option outside its domain.
    pub fn option(option: &'static str, expected: &'static str, got: impl Into<String>) -> Self {
        Error::Option {
            option,
            expected,
            got: got.into(),
        }
    }

    /// A refusal.
    pub fn unsupported(backend: impl Into<String>, what: impl Into<String>) -> Self {
        Error::Unsupported {
            backend: backend.into(),
            what: what.into(),
        }
    }
}
