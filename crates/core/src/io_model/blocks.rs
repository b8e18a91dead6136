//! Block sizes as FA2 takes them. FA1's formula stands beside its schedule:
//! [`fa1_block_sizes`](crate::fa1_block_sizes).

use crate::dtype::DType;
use crate::schedule::BlockSizes;

/// FA2's list: {64, 128} rows × {64, 128} keys (Dao 2023, section 3.3), the least traffic first:
/// K and V pass by once for each block of rows, so rows count before keys.
pub const FA2_BLOCK_SIZES: [(usize, usize); 4] = [(128, 128), (128, 64), (64, 128), (64, 64)];

/// A choice of [`fa2_block_sizes`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockChoice {
    /// B_r and B_c.
    pub sizes: BlockSizes,
    /// Whether they are of FA2's list. Where none of it fits, 64 × 64 is halved until it does.
    pub of_the_list: bool,
    /// Bytes of fast memory that one tile of q, k and v takes.
    pub bytes: usize,
}

/// The first of FA2's list of which one tile each of q, k and v fits `fast_bytes` (S, P and Õ are in
/// registers).
///
/// ```
/// use tilewise_core::DType;
/// use tilewise_core::io_model::fa2_block_sizes;
/// let choice = fa2_block_sizes(164 * 1024, DType::BF16, 128, 128);
/// assert_eq!((choice.sizes.rows(), choice.sizes.keys()), (128, 128));
/// ```
pub fn fa2_block_sizes(
    fast_bytes: usize,
    dtype: DType,
    head_dim: usize,
    head_dim_v: usize,
) -> BlockChoice {
    let bytes = |(rows, keys): (usize, usize)| {
        let width = head_dim.saturating_add(head_dim_v);
        let elements = rows
            .saturating_mul(head_dim)
            .saturating_add(keys.saturating_mul(width));
        elements.saturating_mul(dtype.size())
    };
    let listed = FA2_BLOCK_SIZES
        .into_iter()
        .find(|&sizes| bytes(sizes) <= fast_bytes);
    let mut sizes = listed.unwrap_or((32, 32));
    while listed.is_none() && bytes(sizes) > fast_bytes && sizes.0 > 1 {
        sizes = (sizes.0 / 2, sizes.1 / 2);
    }
    BlockChoice {
        bytes: bytes(sizes),
        sizes: BlockSizes::of(sizes),
        of_the_list: listed.is_some(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(fast_bytes: usize, dtype: DType, head_dim: usize) -> (usize, usize, bool) {
        let choice = fa2_block_sizes(fast_bytes, dtype, head_dim, head_dim);
        assert!(choice.bytes <= fast_bytes || choice.sizes.rows() == 1);
        (choice.sizes.rows(), choice.sizes.keys(), choice.of_the_list)
    }

    #[test]
    fn the_largest_of_the_list_that_fits_is_taken() {
        assert_eq!(chosen(228 << 10, DType::BF16, 64), (128, 128, true));
        // Three tiles of 128 × 256 in two bytes are 192 KiB; with half the keys 128 KiB.
        assert_eq!(chosen(164 << 10, DType::BF16, 256), (128, 64, true));
        assert_eq!(chosen(100 << 10, DType::F32, 128), (64, 64, true));
        assert_eq!(chosen(32 << 10, DType::F32, 128), (16, 16, false));
        assert_eq!(chosen(0, DType::F32, 128), (1, 1, false));
    }
}
