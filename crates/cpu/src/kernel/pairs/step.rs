//! One step of FlashAttention-2 on products of pairs, and its parts.

use super::{CHUNK, COLUMNS, PairBlock, Pairs, Product, ROW_STRIDE};
use crate::kernel::{LINE, s_stride, scores, softmax};
use crate::simd::Vector;

/// Products, masking, online softmax, rounding of P and weighted values.
///
/// # Safety
/// Of the functions below.
#[inline(always)]
pub(crate) unsafe fn absorb<D: Pairs>(pairs: &PairBlock<f32>) {
    // SAFETY: the caller's promise.
    unsafe {
        products::<D>(pairs);
        hide(pairs);
        self::softmax::<D>(pairs);
        weighted_values::<D>(pairs);
    }
}

/// S = q kᵀ in the columns of the strip that hold keys some row sees, rounded outwards to whole
/// grains.
///
/// # Safety
/// The processor has D's instructions and [`Pairs::begin`] was called; the pointers cover what the
/// sizes say.
#[inline(always)]
pub(crate) unsafe fn products<D: Pairs>(pairs: &PairBlock<f32>) {
    let block = &pairs.block;
    let (lo, hi) = pairs.columns();
    for first in (0..block.head_dim).step_by(CHUNK) {
        // SAFETY: the caller's promise.
        unsafe {
            D::multiply(&Product {
                rows: block.mr,
                depth: (block.head_dim - first).min(CHUNK),
                a: pairs.q.add(first / CHUNK * pairs.q_chunk),
                b: pairs.k.add(lo / COLUMNS * pairs.k_panel + first * COLUMNS),
                panel: pairs.k_panel,
                panels: (hi - lo) / COLUMNS,
                c: block.s.add(lo),
                c_stride: s_stride::<f32>(),
                add: first > 0,
                ahead: match first {
                    0 => (
                        block
                            .ahead
                            .k
                            .wrapping_add(lo / COLUMNS * block.ahead.k_lines * LINE),
                        block.ahead.k_lines,
                    ),
                    _ => (block.ahead.k, 0),
                },
            });
        }
    }
}

/// −∞ where a row does not see a key, in the columns that [`products`] fills.
///
/// # Safety
/// As [`products`].
#[inline(always)]
pub(crate) unsafe fn hide(pairs: &PairBlock<f32>) {
    let (from, to) = pairs.columns();
    for row in 0..pairs.block.rows {
        // SAFETY: the caller's promise.
        unsafe {
            let s = pairs.block.s.add(row * s_stride::<f32>());
            scores::hide_row(s, from, to, pairs.live[row]);
        }
    }
}

/// [`softmax::online_rounded`] of the block.
///
/// # Safety
/// As [`products`].
#[inline(always)]
pub(crate) unsafe fn softmax<D: Pairs>(pairs: &PairBlock<f32>) {
    let (lo, hi) = pairs.columns();
    // SAFETY: the caller's promise.
    unsafe { softmax::online_rounded::<D>(&pairs.block, lo, hi) }
}

/// Rounds P to bf16 where it stands: what [`softmax::online_rounded`] does at once.
///
/// # Safety
/// As [`products`].
#[inline(always)]
pub(crate) unsafe fn round<D: Pairs>(pairs: &PairBlock<f32>) {
    let (from, to) = pairs.columns();
    for row in 0..pairs.block.rows {
        // SAFETY: the caller's promise. What is written lies before what is read next.
        unsafe {
            let s = pairs.block.s.add(row * s_stride::<f32>());
            for column in (from..to).step_by(2 * D::V::LANES) {
                let low = D::V::load(s.add(column));
                // The strip has room for a whole register behind its last columns; nothing reads what
                // is put there.
                let high = D::V::load(s.add(column + D::V::LANES));
                D::round(low, high, s.cast::<u16>().add(column));
            }
        }
    }
}

/// Õ += P v.
///
/// # Safety
/// As [`products`]; the strip holds P as bf16.
#[inline(always)]
pub(crate) unsafe fn weighted_values<D: Pairs>(pairs: &PairBlock<f32>) {
    let block = &pairs.block;
    let (lo, hi) = pairs.columns();
    const { assert!(2 * s_stride::<f32>() == ROW_STRIDE) };
    debug_assert!(lo.is_multiple_of(2) && block.width.is_multiple_of(COLUMNS));
    // SAFETY: the caller's promise.
    unsafe {
        D::multiply(&Product {
            rows: block.mr,
            depth: hi - lo,
            a: block.s.cast::<u16>().cast_const().add(lo),
            b: pairs.v.add(lo * COLUMNS),
            panel: pairs.v_panel,
            panels: block.width / COLUMNS,
            c: block.acc,
            c_stride: block.width,
            add: true,
            ahead: (block.ahead.v, block.ahead.v_lines),
        });
    }
}
