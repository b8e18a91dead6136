// Shared by every kernel family: types, the argument block, tensor-core products and shared-memory tiles.
//
// No CUDA header is included: NVRTC has the builtins, everything else is declared here, so that a host needs no toolkit.
// The specialisation arrives as macros:
//   DTYPE  0 = f16, 1 = bf16, 2 = f32           DP    head_dim padded to a multiple of 16
//   MASK   0 = every key live, 1 = upper bound   VEC   1 = rows are 16-byte aligned with unit element stride
//          (causal), 2 = both bounds (window)    SCORE, DROPOUT: see score.cu
// Tile macros (BM, BN, WARPS, ...) are described where they are used.

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;
typedef long long i64;

#define DEV [[maybe_unused]] static __device__ __forceinline__
#ifndef PAIRS
#define PAIRS 0
#endif
#define IO32 (DTYPE == 2)         // bias, out and values of Q, K and V are f32
#define F32 (IO32 && !PAIRS)      // and so are tiles
#define NEG_INF (-__int_as_float(0x7f800000))
#define LOG2E 1.4426950408889634f
#define LN2 0.6931471805599453f

// What tiles hold, and what the caller's tensors hold: the same but where pairs of f16 stand for f32 (see pairs.cu).
#if F32
typedef float elem;
#else
typedef u16 elem;
#endif
#if IO32
typedef float io;
#else
typedef u16 io;
#endif

#define ESZ ((int)sizeof(elem))
#define EPC (16 / ESZ)          // elements in one 16-byte chunk
#define PITCH_OF(cols) ((cols) * ESZ + 16)
// An odd number of 16-byte chunks a row: eight consecutive rows then start in eight different bank groups, so ldmatrix and the
// row-wise stores are free of conflicts without an XOR in any address.
#define PITCH PITCH_OF(DP)

// Mirrored by `launch::Args` (repr(C)); strides count elements.
struct Tensor {
    u64 ptr;
    i64 sb, sh, ss, sd;
};

struct Args {
    Tensor q, k, v, o;
    Tensor bias, mask, keep; // [batch, heads, sq, sk]: the input's dtype, bytes, bytes; stride 0 where broadcast; ptr 0 = none
    u64 lse;          // f32 [batch, heads, lse_ld], or 0
    u64 m, l, acc;    // f32 state [batch, heads, sq], [batch, heads, sq], [batch, heads, sq, dv]
    u64 s, p;         // score and probability matrices of `standard`
    u64 alibi, sinks; // f32 [heads], or 0
    u64 seqs, work;   // sequences and row blocks of SEQS, heaviest first
    u64 drop_threshold;           // p x 2^32
    i64 ld_s, ld_p;               // row lengths of s and p in elements
    int batch, heads, group_size; // group_size = heads / kv_heads
    int sq, sk, d, dv;
    int lo_off, hi_off;           // key j is live for row i iff i + lo_off <= j <= i + hi_off
    int diag;                     // row i stands at key i + diag
    int row_blocks, pairs_per_group, last_group;
    int turn;                     // from this block on the order is reversed; 0 = never
    int pair0, pairs;             // (batch, head) pairs this launch covers
    int row0, rows;               // rows of a pair that `standard` holds in s and p
    int lse_ld;                   // rows of a (batch, head) pair in lse
    int seq0;                     // number of the sequence that batch entry 0 holds
    u32 drop_key0, drop_key1, drop_offset;
    float scale;                  // softmax_scale, natural units
    float softcap;                // 0 = none
    float drop_scale;             // 1/(1 - p)
};

DEV u32 smem_u32(const void* p) { return (u32)__cvta_generic_to_shared(p); }

DEV float ex2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

DEV void cp_async16(u32 dst, const void* src, int bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(bytes) : "memory");
}
DEV void cp_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> DEV void cp_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }

DEV void ldsm4(u32 (&r)[4], u32 addr) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(addr) : "memory");
}
DEV void ldsm4t(u32 (&r)[4], u32 addr) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(addr) : "memory");
}
DEV u32 lds32(u32 addr) {
    u32 x;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(addr) : "memory");
    return x;
}

// ---- element conversions -------------------------------------------------------------------------------------------------

DEV u32 pack2(float lo, float hi) {
    u32 d;
#if DTYPE == 1
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(hi), "f"(lo));
#else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(hi), "f"(lo));
#endif
    return d;
}

DEV elem to_elem(float x) {
#if F32
    return x;
#else
    return (u16)(pack2(x, 0.f) & 0xffffu);
#endif
}

DEV float to_float(elem x) {
#if F32
    return x;
#elif DTYPE == 1
    return __int_as_float((u32)x << 16);
#else
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
    return y;
#endif
}

DEV float io_float(io x) {
#if IO32
    return x;
#else
    return to_float(x);
#endif
}

// ---- products ------------------------------------------------------------------------------------------------------------

#if !F32
DEV void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#if DTYPE == 1
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#endif
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
#else
DEV void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// x = hi + lo with both parts in tf32: the product of two such sums without lo*lo keeps about 22 bits of each factor.
// fmaxf drops the NaN that inf - inf leaves in lo; no finite x has a lo below the bound.
DEV void split(u32 x, u32& hi, u32& lo) {
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(hi) : "f"(__int_as_float(x)));
    float r = __int_as_float(x) - __int_as_float(hi);
    lo = __float_as_uint(fmaxf(r, -1.7e35f));
}
template <int N> DEV void split_all(const u32 (&x)[N], u32 (&hi)[N], u32 (&lo)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) split(x[i], hi[i], lo[i]);
}
// The small products first, so that the large one does not swallow them.
DEV void mma3(float (&c)[4], const u32 (&ah)[4], const u32 (&al)[4], u32 b0h, u32 b0l, u32 b1h, u32 b1l) {
    mma(c, al, b0h, b1h);
    mma(c, ah, b0l, b1l);
    mma(c, ah, b0h, b1h);
}
#endif

// ---- tiles in shared memory ----------------------------------------------------------------------------------------------

// Where 16-byte chunk c of row r of a tile stands. DENSE: a row begins on a 128-byte line, and chunks are permuted within each line
// by the row's number. A line of memory then lands in one line of shared memory and is asked for once; rows padded by one chunk
// straddle lines. ldmatrix meets no bank conflict either way.
#define DENSE_PITCH(cols) (((cols) * ESZ + 127) / 128 * 128)
template <int P, bool DENSE> DEV u32 chunk_at(int r, int c) { return r * P + (DENSE ? c ^ (r & 7) : c) * 16; }
// Byte of a row where columns [16 n, 16 n + 16) of 2-byte elements begin, for a lane whose chunk of the first of them is at `column`.
template <bool DENSE> DEV u32 along(u32 column, int n) { return DENSE ? (column ^ (n & 3) * 32) + (n >> 2) * 128 : column + n * 32; }

// How NT threads share the chunks of a tile: LANES neighbours side by side in a row, which then walk down the rows, and in wide rows
// along them too; 0 where the chunks are numbered through instead.
template <int COLS, int NT, bool DENSE> struct Share {
    static constexpr int CH = COLS / EPC, EVEN = CH & -CH;
    // Padded rows that go into the block evenly: numbered through, a thread keeps its column.
    static constexpr bool COLUMN = VEC && !DENSE && NT % CH == 0;
    static constexpr int LANES = !VEC || COLUMN || EVEN < 4 || NT % EVEN ? 0 : EVEN < 32 ? EVEN : 32;
};

// Brings rows [row, row + ROWS) of a [seqlen, d] matrix into shared memory, zero beyond `limit` rows and `d` columns, so that
// nothing that lies there can reach a product. Thread t always owns the same chunks (see scan_tile).
template <int ROWS, int COLS, int NT, int P = PITCH_OF(COLS), bool DENSE = false> DEV void load_tile(u32 dst, const Tensor& t, const elem* base, int row, int limit, int d, int tid) {
    constexpr int CH = COLS / EPC, LANES = Share<COLS, NT, DENSE>::LANES;
    constexpr int STEPS = (ROWS * CH + NT - 1) / NT;
    if constexpr (Share<COLS, NT, DENSE>::COLUMN) {
        const int r0 = tid / CH, c = tid % CH;
        const char* from = (const char*)(base + (i64)(row + r0) * t.ss + c * EPC);
        const i64 step = t.ss * ((NT / CH) * ESZ);
        const int rows = c * EPC < d ? limit - row - r0 : 0;
        const u32 to = dst + r0 * P + c * 16;
#pragma unroll
        for (int i = 0; i < STEPS; ++i) {
            if (ROWS % (NT / CH) != 0 && r0 + i * (NT / CH) >= ROWS) break;
            cp_async16(to + i * (NT / CH) * P, from, i * (NT / CH) < rows ? 16 : 0);
            from += step;
        }
    } else if constexpr (LANES > 0) {
        constexpr int DOWN = NT / LANES;
        const int r0 = tid / LANES, c0 = tid % LANES;
        const char* from = (const char*)(base + (i64)(row + r0) * t.ss + c0 * EPC);
        const i64 step = t.ss * (DOWN * ESZ);
        const int rows = limit - row - r0, columns = d - c0 * EPC;
#pragma unroll
        for (int i = 0; i < (ROWS + DOWN - 1) / DOWN; ++i) {
            if (ROWS % DOWN != 0 && r0 + i * DOWN >= ROWS) break;
#pragma unroll
            for (int c = 0; c < CH; c += LANES)
                cp_async16(dst + chunk_at<P, DENSE>(r0 + i * DOWN, c0 + c), from + c * 16, i * DOWN < rows && c * EPC < columns ? 16 : 0);
            from += step;
        }
    } else {
#pragma unroll
        for (int i = 0; i < STEPS; ++i) {
            int idx = tid + i * NT;
            if ((ROWS * CH) % NT != 0 && idx >= ROWS * CH) break;
            int r = idx / CH, c = idx % CH;
            u32 to = dst + chunk_at<P, DENSE>(r, c);
#if VEC
            const elem* from = base + (i64)(row + r) * t.ss + c * EPC;
            cp_async16(to, from, (row + r < limit && c * EPC < d) ? 16 : 0);
#else
            // Any strides, any head_dim: element by element.
            elem e[EPC];
#pragma unroll
            for (int x = 0; x < EPC; ++x) {
                bool live = row + r < limit && c * EPC + x < d;
                e[x] = live ? base[(i64)(row + r) * t.ss + (i64)(c * EPC + x) * t.sd] : (elem)0;
            }
            u32 w[4];
#pragma unroll
            for (int x = 0; x < 4; ++x) {
#if F32
                w[x] = __float_as_uint(e[x]);
#else
                w[x] = (u32)e[2 * x] | (u32)e[2 * x + 1] << 16;
#endif
            }
            asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(to), "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]) : "memory");
#endif
        }
    }
}

#if F32
#define EXP_BITS 0x7f800000u
#define EXP_ONE 0x00800000u
#define EXP_TOP 0x80000000u
#elif DTYPE == 1
#define EXP_BITS 0x7f807f80u
#define EXP_ONE 0x00800080u
#define EXP_TOP 0x80008000u
#else
#define EXP_BITS 0x7c007c00u
#define EXP_ONE 0x04000400u
#define EXP_TOP 0x80008000u
#endif

// Whether V tiles are looked through for NaN and infinity at all: where keys can be hidden or dropped, and in the split products of f32,
// where the zero low part of a factor would meet an infinity.
#define GUARD_V (MASK >= 1 || IO32 || SCORE == 2 || DROPOUT)

// A zero probability times a NaN or infinite value is NaN, so a V tile that holds hidden keys of some row must not go into a
// matrix product with such values in it. scan_tile finds them among the chunks this thread itself brought in (no barrier
// needed before), clear_tile replaces them by zero, and add_nonfinite gives each row the ones that are live for it.
template <int ROWS, int COLS, int NT, int P = PITCH_OF(COLS), bool DENSE = false> DEV u32 scan_tile(u32 tile, int tid) {
    constexpr int CH = COLS / EPC, LANES = Share<COLS, NT, DENSE>::LANES;
    constexpr int STEPS = LANES ? (ROWS * LANES + NT - 1) / NT * (CH / (LANES ? LANES : 1)) : (ROWS * CH + NT - 1) / NT;
    // A sum of products with zero is 0, or NaN where one factor is NaN or infinite.
    u32 found = 0;
#pragma unroll 4
    for (int i = 0; i < STEPS; ++i) {
        int r, c;
        if constexpr (LANES > 0) {
            constexpr int ALONG = CH / LANES;
            r = tid / LANES + i / ALONG * (NT / LANES);
            c = tid % LANES + i % ALONG * LANES;
            if (ROWS % (NT / LANES) != 0 && r >= ROWS) break;
        } else {
            const int idx = tid + i * NT;
            if ((ROWS * CH) % NT != 0 && idx >= ROWS * CH) break;
            r = idx / CH;
            c = idx % CH;
        }
        u32 at = tile + chunk_at<P, DENSE>(r, c), w[4];
        asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3]) : "r"(at) : "memory");
#pragma unroll
        for (int x = 0; x < 4; ++x) {
#if F32
            asm("fma.rn.f32 %0, %1, %2, %0;" : "+r"(found) : "r"(w[x]), "r"(0u));
#elif DTYPE == 1
            asm("fma.rn.bf16x2 %0, %1, %2, %0;" : "+r"(found) : "r"(w[x]), "r"(0u));
#else
            asm("fma.rn.f16x2 %0, %1, %2, %0;" : "+r"(found) : "r"(w[x]), "r"(0u));
#endif
        }
    }
    return found & (F32 ? 0x7fffffffu : 0x7fff7fffu);
}

// Of DENSE tiles all of P counts as columns: the chunks of a line that is not full stand anywhere in it.
template <int ROWS, int COLS, int NT, int P = PITCH_OF(COLS)> DEV void clear_tile(u32 tile, int tid) {
    constexpr int CH = COLS / EPC;
#pragma unroll 1
    for (int idx = tid; idx < ROWS * CH * 4; idx += NT) {
        u32 at = tile + (idx / (CH * 4)) * P + (idx % (CH * 4)) * 4;
        u32 w = lds32(at), bad = ((w & EXP_BITS) + EXP_ONE) & EXP_TOP;
#if F32
        if (bad) w = 0;
#else
        if (bad & 0x8000u) w &= 0xffff0000u;
        if (bad & 0x80000000u) w &= 0x0000ffffu;
#endif
        if (bad) asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(w) : "memory");
    }
}

template <bool DENSE = false> DEV float nonfinite_at(u32 tile, int pitch, int row, int col) {
    u32 at = tile + row * pitch + (DENSE ? col * ESZ ^ (row & 7) * 16 : col * ESZ);
#if F32
    u32 w = lds32(at);
    return (w & EXP_BITS) == EXP_BITS ? __int_as_float(w) : 0.f;
#else
    u16 h;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(h) : "r"(at) : "memory");
    return (h & (EXP_BITS & 0xffffu)) == (EXP_BITS & 0xffffu) ? to_float(h) : 0.f;
#endif
}

// Live keys of row i, as absolute bounds.
DEV int last_key(const Args& a, int i) { return MASK >= 1 ? min(a.sk - 1, i + a.hi_off) : a.sk - 1; }
DEV int first_key(const Args& a, int i) { return MASK == 2 ? max(0, i + a.lo_off) : 0; }

DEV float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}
DEV float quad_sum(float x) {
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// Accumulator fragments (m16n8): lane t holds rows t/4 and t/4 + 8, columns 2(t%4) and 2(t%4) + 1.
// c += A B^T for WMT row tiles of A (at `a`, row-major, pitch apitch) and NTL column tiles of B (at `b`, row-major by column of c).
template <int WMT, int NTL, int K, bool AREG, bool DENSE = false> DEV void product_nt(float (&c)[WMT][NTL][4], u32 a, int apitch, const u32 (*areg)[WMT][4], u32 b, int bpitch, int lane) {
#if !F32
    u32 aat = a + (lane & 15) * apitch + (lane >> 4) * 16;
    const u32 bat = b + ((lane & 7) + ((lane >> 4) << 3)) * bpitch, half = lane >> 3 & 1;
    const u32 column = (DENSE ? half ^ (lane & 7) : half) * 16;
#pragma unroll
    for (int kk = 0; kk < K / 16; ++kk) {
        u32 af[WMT][4];
#pragma unroll
        for (int m = 0; m < WMT; ++m) {
            if constexpr (AREG) {
#pragma unroll
                for (int x = 0; x < 4; ++x) af[m][x] = areg[kk][m][x];
            } else {
                ldsm4(af[m], aat + m * 16 * apitch + kk * 32);
            }
        }
#pragma unroll
        for (int n = 0; n < NTL / 2; ++n) {
            u32 bf[4];
            ldsm4(bf, bat + n * 16 * bpitch + along<DENSE>(column, kk));
#pragma unroll
            for (int m = 0; m < WMT; ++m) {
                mma(c[m][2 * n], af[m], bf[0], bf[1]);
                mma(c[m][2 * n + 1], af[m], bf[2], bf[3]);
            }
        }
    }
#else
    u32 aat = a + ((lane & 7) + ((lane >> 3) & 1) * 8) * apitch + (lane >> 4) * 16;
    u32 bat = b + ((lane & 7) + ((lane >> 4) << 3)) * bpitch + ((lane >> 3) & 1) * 16;
    // The tensor core truncates as it accumulates: four steps at a time are summed apart and then added with rounding.
#pragma unroll 1
    for (int k4 = 0; k4 < K / 8; k4 += 4) {
        float part[WMT][NTL][4];
#pragma unroll
        for (int m = 0; m < WMT; ++m)
#pragma unroll
            for (int n = 0; n < NTL; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) part[m][n][e] = 0.f;
#pragma unroll
        for (int kk = k4; kk < k4 + 4; ++kk) {
            if (K % 32 != 0 && kk >= K / 8) break;
            u32 ah[WMT][4], al[WMT][4];
#pragma unroll
            for (int m = 0; m < WMT; ++m) {
                u32 af[4];
                ldsm4(af, aat + m * 16 * apitch + kk * 32);
                split_all(af, ah[m], al[m]);
            }
#pragma unroll
            for (int n = 0; n < NTL / 2; ++n) {
                u32 bf[4], bh[4], bl[4];
                ldsm4(bf, bat + n * 16 * bpitch + kk * 32);
                split_all(bf, bh, bl);
#pragma unroll
                for (int m = 0; m < WMT; ++m) {
                    mma3(part[m][2 * n], ah[m], al[m], bh[0], bl[0], bh[1], bl[1]);
                    mma3(part[m][2 * n + 1], ah[m], al[m], bh[2], bl[2], bh[3], bl[3]);
                }
            }
        }
#pragma unroll
        for (int m = 0; m < WMT; ++m)
#pragma unroll
            for (int n = 0; n < NTL; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) c[m][n][e] += part[m][n][e];
    }
#endif
}
