//! AMX: products of 16 × 32 tiles of bf16, in inline assembly, since the intrinsics are not stable.

use std::arch::asm;
use std::arch::x86_64::{
    __cpuid_count, __m512bh, __m512i, _mm512_cvtne2ps_pbh, _mm512_storeu_si512,
};
use std::sync::OnceLock;

use super::{COLUMNS, DEPTH, MOST_ROWS, Pairs, Product, ROW_STRIDE};
use crate::kernel::ask;
use crate::simd::avx512::F32x16;

/// `tdpbf16ps`, the rest in AVX-512.
pub(crate) struct Amx;

/// What `ldtilecfg` reads: all eight tiles are 16 rows of 64 bytes.
#[repr(C, align(64))]
struct Configuration {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

static ALL_WHOLE: Configuration = {
    let mut configuration = Configuration {
        palette: 1,
        start_row: 0,
        reserved: [0; 14],
        row_bytes: [0; 16],
        rows: [0; 16],
    };
    let mut tile = 0;
    while tile < 8 {
        configuration.row_bytes[tile] = 64;
        configuration.rows[tile] = 16;
        tile += 1;
    }
    configuration
};

/// Whether the processor has AMX for bf16 and the kernel lets this process use it, which is asked for
/// once: threads inherit the permission.
pub(crate) fn is_available() -> bool {
    static AVAILABLE: OnceLock<bool> = OnceLock::new();
    *AVAILABLE.get_or_init(|| has_instructions() && may_use_tiles())
}

fn has_instructions() -> bool {
    const AMX_BF16: u32 = 1 << 22;
    const AMX_TILE: u32 = 1 << 24;
    // Unsafe in earlier versions of Rust.
    #[allow(unused_unsafe)]
    // SAFETY: leaf 0 says whether there is a leaf 7.
    let features = unsafe {
        if __cpuid_count(0, 0).eax < 7 {
            0
        } else {
            __cpuid_count(7, 0).edx
        }
    };
    features & (AMX_BF16 | AMX_TILE) == AMX_BF16 | AMX_TILE
}

/// Linux hands out the tiles' state (8 KiB a thread) to processes that ask for it.
fn may_use_tiles() -> bool {
    const ARCH_PRCTL: u64 = 158;
    const ARCH_REQ_XCOMP_PERM: u64 = 0x1023;
    const XFEATURE_XTILEDATA: u64 = 18;
    let result: i64;
    // SAFETY: this system call reads no memory; a kernel that does not know it returns an error. It
    // clobbers rcx and r11.
    unsafe {
        asm!(
            "syscall",
            inlateout("rax") ARCH_PRCTL => result,
            in("rdi") ARCH_REQ_XCOMP_PERM,
            in("rsi") XFEATURE_XTILEDATA,
            out("rcx") _,
            out("r11") _,
            options(nostack),
        );
    }
    result == 0
}

/// One assembly block: C in tmm0 to tmm3, rows of A in tmm4 and tmm5, panels of B in tmm6 and tmm7.
/// `$load`, `$zero` and `$store` bring C in and out, `$step` is one depth.
macro_rules! tiles {
    ($c:expr, $c_stride:expr, $a:expr, $b:expr, $panel:expr, $steps:expr, $add:expr,
     zero $zero:literal, load $load:literal, step $step:literal, store $store:literal) => {
        asm!(
            "test {add}, {add}",
            "jnz 2f",
            $zero,
            "jmp 3f",
            "2:",
            $load,
            "3:",
            $step,
            // Named so that every form may leave it unused.
            "/* {c2} */",
            "add {a0}, 64",
            "add {a1}, 64",
            "add {b0}, 1024",
            "add {b1}, 1024",
            "dec {steps}",
            "jnz 3b",
            $store,
            add = in(reg) usize::from($add),
            a0 = inout(reg) $a => _,
            a1 = inout(reg) $a.wrapping_add(16 * ROW_STRIDE) => _,
            b0 = inout(reg) $b => _,
            b1 = inout(reg) $b.wrapping_add($panel) => _,
            steps = inout(reg) $steps => _,
            c0 = in(reg) $c,
            c2 = in(reg) $c.wrapping_add(16 * $c_stride),
            cs = in(reg) 4 * $c_stride,
            ars = in(reg) 2 * ROW_STRIDE,
            brs = in(reg) 64usize,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack),
        )
    };
}

// SAFETY: AMX_TILE, AMX_BF16, AVX-512 F and AVX512_BF16, which every processor with AMX has.
unsafe impl Pairs for Amx {
    type V = F32x16;
    const ROW_BLOCKS: &'static [usize] = &[16, MOST_ROWS];

    #[inline(always)]
    unsafe fn begin() {
        // SAFETY: the caller's promise: AMX is there and permitted.
        unsafe {
            asm!(
                "ldtilecfg [{}]",
                in(reg) &raw const ALL_WHOLE,
                options(nostack, preserves_flags, readonly),
            );
        }
    }

    #[inline(always)]
    unsafe fn end() {
        // SAFETY: as above. A thread with tiles in use costs more at every switch.
        unsafe { asm!("tilerelease", options(nostack, preserves_flags, nomem)) }
    }

    const PROBE_FLOPS: usize = 2 * 16 * DEPTH * COLUMNS;

    #[inline(always)]
    unsafe fn probe(rounds: usize) -> f64 {
        // 2⁻⁷, whose products are neither 0 nor soon large: zeros would need less power.
        let numbers = [0x3c00u16; 16 * DEPTH];
        let mut sums = [0f32; 16 * COLUMNS];
        // SAFETY: the caller's promise: tiles are configured; all are of 1 KiB, as both arrays are.
        unsafe {
            asm!(
                "tileloadd tmm4, [{numbers} + {step}*1]",
                "tileloadd tmm5, [{numbers} + {step}*1]",
                "tileloadd tmm6, [{numbers} + {step}*1]",
                "tileloadd tmm7, [{numbers} + {step}*1]",
                "tilezero tmm0",
                "tilezero tmm1",
                "tilezero tmm2",
                "tilezero tmm3",
                "2:",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tdpbf16ps tmm1, tmm4, tmm7",
                "tdpbf16ps tmm2, tmm5, tmm6",
                "tdpbf16ps tmm3, tmm5, tmm7",
                "dec {rounds}",
                "jnz 2b",
                "tilestored [{sums} + {step}*1], tmm3",
                numbers = in(reg) &raw const numbers,
                sums = in(reg) &raw mut sums,
                step = in(reg) 64usize,
                rounds = inout(reg) rounds.max(1) => _,
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(nostack),
            );
        }
        sums.iter().map(|&x| f64::from(x)).sum()
    }

    unsafe fn multiply(product: &Product) {
        let Product {
            rows,
            depth,
            a,
            panel,
            panels,
            c_stride,
            add,
            ahead,
            ..
        } = *product;
        let steps = depth.div_ceil(DEPTH);
        debug_assert!(steps > 0 && (rows == 16 || rows == 32));
        for first in (0..panels).step_by(2) {
            let pair = first + 2 <= panels;
            ask(ahead.0, first, ahead.1);
            if pair {
                ask(ahead.0, first + 1, ahead.1);
            }
            // SAFETY: the caller's promise: tiles are configured; 16 or 32 rows of A and C, one or two
            // panels of B and C are covered over whole depths. Pointers to what a form does not use are
            // not dereferenced.
            unsafe {
                let b = product.b.add(first * panel);
                let c = product.c.add(first * COLUMNS);
                match (rows, pair) {
                    (32, true) => tiles!(
                        c, c_stride, a, b, panel, steps, add,
                        zero "tilezero tmm0\n tilezero tmm1\n tilezero tmm2\n tilezero tmm3",
                        load "tileloadd tmm0, [{c0} + {cs}*1]\n tileloadd tmm1, [{c0} + {cs}*1 + 64]\n \
                              tileloadd tmm2, [{c2} + {cs}*1]\n tileloadd tmm3, [{c2} + {cs}*1 + 64]",
                        step "tileloadd tmm4, [{a0} + {ars}*1]\n tileloadd tmm6, [{b0} + {brs}*1]\n \
                              tdpbf16ps tmm0, tmm4, tmm6\n tileloadd tmm7, [{b1} + {brs}*1]\n \
                              tdpbf16ps tmm1, tmm4, tmm7\n tileloadd tmm5, [{a1} + {ars}*1]\n \
                              tdpbf16ps tmm2, tmm5, tmm6\n tdpbf16ps tmm3, tmm5, tmm7",
                        store "tilestored [{c0} + {cs}*1], tmm0\n tilestored [{c0} + {cs}*1 + 64], tmm1\n \
                               tilestored [{c2} + {cs}*1], tmm2\n tilestored [{c2} + {cs}*1 + 64], tmm3"
                    ),
                    (32, false) => tiles!(
                        c, c_stride, a, b, panel, steps, add,
                        zero "tilezero tmm0\n tilezero tmm2",
                        load "tileloadd tmm0, [{c0} + {cs}*1]\n tileloadd tmm2, [{c2} + {cs}*1]",
                        step "tileloadd tmm4, [{a0} + {ars}*1]\n tileloadd tmm6, [{b0} + {brs}*1]\n \
                              tdpbf16ps tmm0, tmm4, tmm6\n tileloadd tmm5, [{a1} + {ars}*1]\n \
                              tdpbf16ps tmm2, tmm5, tmm6",
                        store "tilestored [{c0} + {cs}*1], tmm0\n tilestored [{c2} + {cs}*1], tmm2"
                    ),
                    (_, true) => tiles!(
                        c, c_stride, a, b, panel, steps, add,
                        zero "tilezero tmm0\n tilezero tmm1",
                        load "tileloadd tmm0, [{c0} + {cs}*1]\n tileloadd tmm1, [{c0} + {cs}*1 + 64]",
                        step "tileloadd tmm4, [{a0} + {ars}*1]\n tileloadd tmm6, [{b0} + {brs}*1]\n \
                              tdpbf16ps tmm0, tmm4, tmm6\n tileloadd tmm7, [{b1} + {brs}*1]\n \
                              tdpbf16ps tmm1, tmm4, tmm7",
                        store "tilestored [{c0} + {cs}*1], tmm0\n tilestored [{c0} + {cs}*1 + 64], tmm1"
                    ),
                    (_, false) => tiles!(
                        c, c_stride, a, b, panel, steps, add,
                        zero "tilezero tmm0",
                        load "tileloadd tmm0, [{c0} + {cs}*1]",
                        step "tileloadd tmm4, [{a0} + {ars}*1]\n tileloadd tmm6, [{b0} + {brs}*1]\n \
                              tdpbf16ps tmm0, tmm4, tmm6",
                        store "tilestored [{c0} + {cs}*1], tmm0"
                    ),
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn round(low: F32x16, high: F32x16, to: *mut u16) {
        // SAFETY: the caller's promise.
        unsafe {
            let rounded = _mm512_cvtne2ps_pbh(high.register(), low.register());
            _mm512_storeu_si512(to.cast(), std::mem::transmute::<__m512bh, __m512i>(rounded));
        }
    }
}
