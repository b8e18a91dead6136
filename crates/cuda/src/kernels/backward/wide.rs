//! Tiles and launches of `wide.cu`: head_dim or head_dim_v above 256.

use tilewise_core::DType;

use super::super::{Family, Spec, Variant, pitch};

const WARPS: u32 = 8;

/// Keys, or rows, a block.
pub const OWN: u32 = WARPS * 8;

/// Columns of a gradient that blocks make for rows of `width` columns at most: as few blocks as a
/// width of `most` allows, all of one width.
fn columns(width: usize, most: u32) -> u32 {
    let width = width as u32;
    width.div_ceil(width.div_ceil(most)).next_multiple_of(128)
}

/// How a call is cut.
#[derive(Clone, Debug)]
pub struct Cut {
    /// dK and dV of blocks of keys.
    pub keys: Variant,
    /// dQ of blocks of rows.
    pub rows: Variant,
    /// Blocks side by side for dK, for dV and for dQ.
    pub slices: [u64; 3],
}

/// The kernels for `spec` and rows of the given widths (of q and k, and of v) within `limit` bytes of
/// shared memory.
pub fn cut(spec: &Spec, [head_dim, head_dim_v]: [usize; 2], limit: u32) -> Option<Cut> {
    // Of the other operand a tile; most columns; columns a slice of both.
    let tiles = match spec.dtype {
        DType::F32 => [(32, 512, 64), (32, 256, 32)],
        _ => [(64, 512, 128), (32, 512, 64)],
    };
    tiles.into_iter().find_map(|(tile, most, slice)| {
        let make = |is_keys: bool, width: usize| {
            let columns = columns(width, most);
            let row = pitch(spec.dtype, columns);
            let used = tile * row
                + 2 * (OWN + tile) * pitch(spec.dtype, slice)
                + OWN * pitch(spec.dtype, tile)
                // A bit for each row.
                + tile.div_ceil(32) * 4;
            let shared = used.max(OWN * row);
            let spec = Spec {
                padded: slice,
                padded_v: columns,
                ..*spec
            };
            let defines = [
                ("KEYS", i32::from(is_keys)),
                ("WARPS", WARPS as i32),
                ("BY", tile as i32),
            ];
            (shared <= limit).then(|| {
                let family = Family::BackwardWide;
                let variant =
                    Variant::new(family, "tw_bwd_wide", &spec, &defines, WARPS * 32, shared);
                (variant, columns as usize)
            })
        };
        let (keys, of_keys) = make(true, head_dim.max(head_dim_v))?;
        let (rows, of_rows) = make(false, head_dim)?;
        Some(Cut {
            keys,
            rows,
            slices: [
                head_dim.div_ceil(of_keys) as u64,
                head_dim_v.div_ceil(of_keys) as u64,
                head_dim.div_ceil(of_rows) as u64,
            ],
        })
    })
}
