// Few queries over many keys: FlashAttention-2's inner loop with the keys split ("flash decoding", Dao, Haziza, Massa and Sizov 2023).
//
// Rows are the queries of all heads that share a K and V head, row n * sq + i for head n of the group and query i, so that one
// pass over K and V serves them all. Each warp takes every WARPS-th step of keys through a cp.async pipeline of its own
// and keeps a state (m, l, O~) of its own: no barrier stands between a warp and its next load.
//
// The keys are cut into chunks at absolute positions that follow from seqlen_k and the number of K and V heads alone. At the end of a chunk the warps' states are
// joined in order, and the chunk's state is folded into what came before it. A block takes `parts`-th of a head's chunks: the
// first block folds as it goes, the others write each chunk's state, and the blocks of tw_decode_merge fold those, in the same
// order by the same arithmetic. So the bits depend neither on how many blocks shared a head nor on the batch.
//
//   WARPS   WM x 16 rows a block   STEP keys a step   STAGES steps a warp has in flight, one less while it computes   CHUNK keys at least a chunk
//   XC columns of O~ exchanged at a time   QREG 1 = Q fragments stay in registers   PAGED 1 = K and V are pages behind a table
//   MERGE 1 = tw_decode_merge in place of tw_decode
//   ONCE 1 = K and V go first when the second-level cache needs room
//   SCORE 1 = scale, softcap, ALiBi, bias and boolean mask are applied to each score   MINB blocks a multiprocessor

#define BM (WM * 16)
#if !MERGE
#define NT (WARPS * 32)
#define NS (STEP / 8)                     // groups of eight keys
// Rows of K and V that are whole 128-byte lines stand one after another, their chunks permuted within the line by the row's
// number: a line of memory then goes to one line of shared memory, and is asked for once. Padded rows would straddle lines, and
// the sectors where they are cut would be fetched twice. ldmatrix meets no bank conflict either way.
#define DENSE (DP * (F32 ? 4 : 2) % 128 == 0)
#define KV_PITCH (DENSE ? DP * ESZ : PITCH)
#define TILE_BYTES (STEP * KV_PITCH)
#define STEP_BYTES (2 * TILE_BYTES)
#define XPITCH (XC + 8)                  // floats: rows of a half-warp's stores start eight banks apart
#define XTHREADS (BM * XC / 4)           // threads that join states, four columns each
#define XBYTES (WARPS * BM * XPITCH * 4)
#define QBYTES (BM * PITCH)
#endif
#define MOST_CHUNKS 128
#define CHUNK_UNIT 128

// Rows and keys of one sequence, mirrored by `raw::Sequence`.
// k_batch -1: rows of no sequence, which not even a sink reaches.
struct Members {
    int q_batch, q_start, sq, k_batch, k_start, sk;
};

// Mirrored by `raw::Decode`.
struct Decode {
    Tensor q, k, v, o;      // k and v: [pages, kv_heads, page_size, d] where they come in pages
    Tensor bias, mask;      // elem and u8 [batch, heads, sq, sk] with any strides, or ptr 0
    u64 lse;                // f32 [batch, heads, lse_rows], or 0
    u64 sequences;          // Members[], or 0: every batch entry has sq rows and sk keys
    u64 table;              // int [batch, width]
    u64 slopes, sinks;      // f32 [heads], or 0
    u64 m, l, acc;          // states of chunks: f32 [slot, rows], [slot, rows], [slot, rows, DP]
    int kv_heads, group, sq, sk, d, dv;
    int left, right;        // key j is live for query i iff i + diag - left <= j <= i + diag + right
    int bottom_right;       // diag = sk - sq, else 0
    int parts;              // blocks that share a head's keys
    int slots, rows;        // chunks a head may have, rows a block may have
    int row_blocks, lse_rows;
    int page_size, width, pages;
    int most_rows;          // rows of the largest group
    float scale, softcap;
};

// One group's rows and which keys and chunks they see.
struct Group {
    Members s;
    int kv, rows, r0, r1, diag;
    int lo, hi;             // keys that some row of the block sees: lo..=hi
    int lo_all, hi_all;     // keys that every row of the block sees
    int chunk, first, chunks;
    int folded;             // chunks that the first part folds
};

DEV int first_key(const Decode& a, const Group& w, int i) { return max(0, i + w.diag - a.left); }
DEV int last_key(const Decode& a, const Group& w, int i) { return min(w.s.sk - 1, i + w.diag + a.right); }

// The rule of `decode::chunk_keys`; divisions by constants.
DEV int chunk_keys(int sk, int heads) {
    const int least = heads >= 8 ? (sk + 31) / 32 : heads >= 4 ? (sk + 63) / 64 : (sk + 127) / 128;
    return max(CHUNK, (least + CHUNK_UNIT - 1) / CHUNK_UNIT * CHUNK_UNIT);
}

// Which of the group's chunks a part begins with: both are few, so that their product is no large number.
DEV int cut(const Decode& a, const Group& w, int part) { return (part * w.chunks + a.parts - 1) / a.parts; }

DEV Group group_of(const Decode& a, int pair, int rb) {
    Group w;
    const int n = pair / a.kv_heads;
    w.kv = pair - n * a.kv_heads;
    if (a.sequences) w.s = ((const Members*)a.sequences)[n];
    else w.s = Members{n, 0, a.sq, n, 0, a.sk};
    w.rows = a.group * w.s.sq;
    w.r0 = rb * BM;
    w.r1 = min(w.r0 + BM, w.rows);
    if (w.r0 >= w.r1) return w;
    w.diag = a.bottom_right ? w.s.sk - w.s.sq : 0;
    int i0 = 0, i1 = 0;
    // Nothing is loaded before this is known: one query needs no division.
    if (w.s.sq > 1) {
        const bool wraps = w.r0 / w.s.sq != (w.r1 - 1) / w.s.sq;
        i0 = wraps ? 0 : w.r0 % w.s.sq;
        i1 = wraps ? w.s.sq - 1 : (w.r1 - 1) % w.s.sq;
    }
    w.lo = first_key(a, w, i0);
    w.hi = last_key(a, w, i1);
    w.lo_all = first_key(a, w, i1);
    w.hi_all = last_key(a, w, i0);
    w.chunk = chunk_keys(w.s.sk, a.kv_heads);
    w.first = w.lo <= w.hi ? w.lo / w.chunk : 0;
    w.chunks = w.lo <= w.hi ? w.hi / w.chunk + 1 - w.first : 0;
    w.folded = cut(a, w, 1);
    return w;
}

// ---- joining states ------------------------------------------------------------------------------------------------------

struct Joint {
    float m, a, b; // the joint maximum; factors of the state before and of the one that comes
};
DEV Joint weigh(float m, float next, float c) {
    const float top = fmaxf(m, next), ref = top == NEG_INF ? 0.f : top;
    return {top, ex2(__fmul_rn(__fsub_rn(m, ref), c)), ex2(__fmul_rn(__fsub_rn(next, ref), c))};
}
DEV float join(float x, float a, float next, float b) { return __fmaf_rn(next, b, __fmul_rn(x, a)); }

// Scores in the exponent's units times this are powers of two.
DEV float exponent(const Decode& a) { return SCORE ? LOG2E : a.scale * LOG2E; }

// How far a score is above its row's reference, as an exponent of two; mc = the reference, times c unless SCORE.
// A bias may be the most negative number there is: its product with c would be infinite.
DEV float above(float s, float mc, float c) { return SCORE ? (s - mc) * c : fmaf(s, c, -mc); }

// What joins the states of a head runs once, when all else has ended, and each of its instructions would come from device memory
// then. So it runs twice: first without touching memory (`really` false), while others still read their keys. The instructions
// that touch memory are predicated ones for that, and no branch leads around what they need.
#define ONLY_IF "{.reg .pred p; setp.ne.s32 p, %0, 0; @p "
DEV void store_if(bool really, float* at, float x) { asm volatile(ONLY_IF "st.global.f32 [%1], %2;}" ::"r"((int)really), "l"(at), "f"(x) : "memory"); }
DEV void store_if(bool really, u16* at, u16 x) { asm volatile(ONLY_IF "st.global.u16 [%1], %2;}" ::"r"((int)really), "l"(at), "h"(x) : "memory"); }
// By way of L2, where other blocks' states are; volatile, so that no load waits until another has been used.
DEV float fetch_if(bool really, const float* at) {
    float x = 0.f;
    asm volatile("{.reg .pred p; setp.ne.s32 p, %1, 0; @p ld.global.cg.f32 %0, [%2];}" : "+f"(x) : "r"((int)really), "l"(at) : "memory");
    return x;
}

// Writes N columns of O and, where `first`, L, of row r of the group. Sinks enter here and nowhere else.
// Unless `really`, all but the stores; four aligned columns are always meant.
template <int N> DEV void emit(const Decode& a, const Group& w, int r, int col, bool first, const float (&x)[N], float m, float l, bool really = true) {
    const int n = r / w.s.sq, i = w.s.q_start + (r - n * w.s.sq), h = w.kv * a.group + n;
    const float top = SCORE ? m : __fmul_rn(m, a.scale);
    float inv = l == 0.f ? 0.f : 1.f / l, sum = l == 0.f ? NEG_INF : top + logf(l);
    if (a.sinks && w.s.k_batch >= 0) {
        const float sink = ((const float*)a.sinks)[h], ref = fmaxf(l == 0.f ? NEG_INF : top, sink);
        if (ref > NEG_INF) {
            const float part = l == 0.f ? 0.f : expf(top - ref), all = part * l + expf(sink - ref);
            inv = part / all;
            sum = ref + logf(all);
        }
    }
    if (first && a.lse) store_if(really, (float*)a.lse + ((i64)w.s.q_batch * (a.kv_heads * a.group) + h) * a.lse_rows + i, sum);
    elem* to = (elem*)a.o.ptr + w.s.q_batch * a.o.sb + h * a.o.sh + i * a.o.ss + col;
    if constexpr (VEC && N == 4) {
        if (col >= a.dv) return;
#if F32
        *(float4*)to = make_float4(x[0] * inv, x[1] * inv, x[2] * inv, x[3] * inv);
#else
        *(uint2*)to = make_uint2(pack2(x[0] * inv, x[1] * inv), pack2(x[2] * inv, x[3] * inv));
#endif
    } else {
#pragma unroll
        for (int e = 0; e < N; ++e)
            if (col + e < a.dv) store_if(really, to + e, to_elem(x[e] * inv));
    }
}

#if !MERGE
#ifndef ONCE
#define ONCE 0
#endif
// ---- tiles of K and V ----------------------------------------------------------------------------------------------------

DEV u32 place_at(int row, int byte) { return row * KV_PITCH + (DENSE ? byte ^ (row & 7) * 16 : byte); }

// A piece of K or V.
DEV void bring16(u32 dst, const void* src, int bytes) {
#if ONCE
    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(dst), "l"(src), "r"(bytes), "l"(policy) : "memory");
#else
    cp_async16(dst, src, bytes);
#endif
}

// Whether a tile has NaN or infinite values, as scan_tile; and clear_tile.
DEV u32 scan(u32 tile, int lane) {
#if DENSE
    u32 found = 0;
#pragma unroll 4
    for (int at = lane * 16; at < TILE_BYTES; at += 512) {
        u32 x[4];
        asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(tile + at) : "memory");
#pragma unroll
        for (int y = 0; y < 4; ++y) found |= (x[y] & EXP_BITS) + EXP_ONE;
    }
    return found & EXP_TOP;
#else
    return scan_tile<STEP, DP, 32>(tile, lane);
#endif
}
DEV void clear(u32 tile, int lane) {
#if DENSE
#pragma unroll 1
    for (int at = lane * 4; at < TILE_BYTES; at += 128) {
        u32 x = lds32(tile + at);
        const u32 bad = ((x & EXP_BITS) + EXP_ONE) & EXP_TOP;
#if F32
        if (bad) x = 0;
#else
        if (bad & 0x8000u) x &= 0xffff0000u;
        if (bad & 0x80000000u) x &= 0x0000ffffu;
#endif
        if (bad) asm volatile("st.shared.u32 [%0], %1;" ::"r"(tile + at), "r"(x) : "memory");
    }
#else
    clear_tile<STEP, DP, 32>(tile, lane);
#endif
}

// c += Q K^T, as product_nt, with K where place_at says.
template <bool AREG> DEV void scores(float (&c)[WM][NS][4], u32 q, const u32 (*areg)[WM][4], u32 k, int lane) {
    const u32 bat = k + ((lane & 7) + ((lane >> 4) << 3)) * KV_PITCH, half = lane >> 3 & 1, column = (DENSE ? half ^ (lane & 7) : half) * 16;
#if !F32
    const u32 aat = q + (lane & 15) * PITCH + (lane >> 4) * 16;
#pragma unroll
    for (int kk = 0; kk < DP / 16; ++kk) {
        u32 af[WM][4];
#pragma unroll
        for (int m = 0; m < WM; ++m) {
            if constexpr (AREG) {
#pragma unroll
                for (int x = 0; x < 4; ++x) af[m][x] = areg[kk][m][x];
            } else {
                ldsm4(af[m], aat + m * 16 * PITCH + kk * 32);
            }
        }
#pragma unroll
        for (int n = 0; n < NS / 2; ++n) {
            u32 bf[4];
            ldsm4(bf, bat + n * 16 * KV_PITCH + (DENSE ? column ^ kk * 32 : column + kk * 32));
#pragma unroll
            for (int m = 0; m < WM; ++m) {
                mma(c[m][2 * n], af[m], bf[0], bf[1]);
                mma(c[m][2 * n + 1], af[m], bf[2], bf[3]);
            }
        }
    }
#else
    const u32 aat = q + ((lane & 7) + ((lane >> 3) & 1) * 8) * PITCH + (lane >> 4) * 16;
    // The tensor core truncates as it accumulates: four steps at a time are summed apart and then added with rounding.
#pragma unroll 1
    for (int k4 = 0; k4 < DP / 8; k4 += 4) {
        float part[WM][NS][4];
#pragma unroll
        for (int m = 0; m < WM; ++m)
#pragma unroll
            for (int n = 0; n < NS; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) part[m][n][e] = 0.f;
#pragma unroll
        for (int kk = k4; kk < k4 + 4; ++kk) {
            if (DP % 32 != 0 && kk >= DP / 8) break;
            u32 ah[WM][4], al[WM][4];
#pragma unroll
            for (int m = 0; m < WM; ++m) {
                u32 af[4];
                ldsm4(af, aat + m * 16 * PITCH + kk * 32);
                split_all(af, ah[m], al[m]);
            }
#pragma unroll
            for (int n = 0; n < NS / 2; ++n) {
                u32 bf[4], bh[4], bl[4];
                ldsm4(bf, bat + n * 16 * KV_PITCH + (DENSE ? column ^ kk * 32 : column + kk * 32));
                split_all(bf, bh, bl);
#pragma unroll
                for (int m = 0; m < WM; ++m) {
                    mma3(part[m][2 * n], ah[m], al[m], bh[0], bl[0], bh[1], bl[1]);
                    mma3(part[m][2 * n + 1], ah[m], al[m], bh[2], bl[2], bh[3], bl[3]);
                }
            }
        }
#pragma unroll
        for (int m = 0; m < WM; ++m)
#pragma unroll
            for (int n = 0; n < NS; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) c[m][n][e] += part[m][n][e];
    }
#endif
}

// ---- the split -----------------------------------------------------------------------------------------------------------

extern "C" __global__ void __launch_bounds__(NT, MINB) tw_decode(const __grid_constant__ Decode a) {
    extern __shared__ __align__(128) char smem[];
    const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
    const int rb = blockIdx.x % a.row_blocks, part = blockIdx.x / a.row_blocks % a.parts, pair = blockIdx.x / a.row_blocks / a.parts;
    const Group w = group_of(a, pair, rb);
    if (w.r0 >= w.r1) return;
    const int c0 = w.first + cut(a, w, part), c1 = w.first + cut(a, w, part + 1);
    if (part > 0 && c0 >= c1) return;
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif

    const u32 kv_at = smem_u32(smem) + warp * STAGES * STEP_BYTES;
    char* const after = smem + WARPS * STAGES * STEP_BYTES;
    // Q fragments that go to registers pass through the exchange buffer.
    const u32 q_at = smem_u32(after);
    float* const exchange = (float*)(after + (QREG ? 0 : QBYTES));
    float* const ml = (float*)(after + (QREG ? (XBYTES > QBYTES ? XBYTES : QBYTES) : QBYTES + XBYTES));

    // ---- the pipeline of this warp
    const int begin = max(c0 * w.chunk, w.lo), end = min(c1 * w.chunk, w.hi + 1);
    const elem* kp = (const elem*)a.k.ptr + w.kv * a.k.sh;
    const elem* vp = (const elem*)a.v.ptr + w.kv * a.v.sh;
#if PAGED
    const int* const table = (const int*)a.table + (i64)w.s.k_batch * a.width;
    int page = 0, inside = 0; // of key `lane` of the step that is loaded next
    bool lost = false;        // a table on the device is not checked before: a page that is not there makes its rows NaN
    auto look_up = [&](int g) {
        const int key = g * STEP + (lane & (STEP - 1));
        if (key < w.s.sk) {
            const int entry = key / a.page_size;
            inside = key - entry * a.page_size;
            page = table[entry];
            if ((u32)page >= (u32)a.pages) { page = 0; lost = true; }
        }
    };
#else
    kp += w.s.k_batch * a.k.sb + w.s.k_start * a.k.ss;
    vp += w.s.k_batch * a.v.sb + w.s.k_start * a.v.ss;
#endif
    auto load = [&](int g, int slot) {
        constexpr int CH = DP / EPC, STEPS = (STEP * CH + 31) / 32;
        const u32 to = kv_at + slot * STEP_BYTES;
        const int key0 = g * STEP;
#if VEC && !PAGED && 512 % (DP * (F32 ? 4 : 2)) == 0
        {
            // A lane keeps its column. Addresses by addition: offsets of all rows would take half of the registers.
            constexpr int ROWS = 32 / CH;
            const int r0 = lane / CH, c = lane % CH, live = w.s.sk - key0 - r0;
            const char* kf = (const char*)(kp + (i64)(key0 + r0) * a.k.ss + c * EPC);
            const char* vf = (const char*)(vp + (i64)(key0 + r0) * a.v.ss + c * EPC);
            const i64 k_step = a.k.ss * (ROWS * ESZ), v_step = a.v.ss * (ROWS * ESZ);
            const int k_live = c * EPC < a.d ? live : 0, v_live = c * EPC < a.dv ? live : 0;
            const u32 at = to + r0 * KV_PITCH, column = (DENSE ? c ^ r0 : c) * 16;
#pragma unroll
            for (int x = 0; x < STEPS; ++x) {
                bring16(at + x * ROWS * KV_PITCH + (DENSE ? column ^ (x * ROWS & 7) * 16 : column), kf, x * ROWS < k_live ? 16 : 0);
                kf += k_step;
            }
#pragma unroll
            for (int x = 0; x < STEPS; ++x) {
                bring16(at + TILE_BYTES + x * ROWS * KV_PITCH + (DENSE ? column ^ (x * ROWS & 7) * 16 : column), vf, x * ROWS < v_live ? 16 : 0);
                vf += v_step;
            }
        }
#else
#pragma unroll
        for (int x = 0; x < STEPS; ++x) {
            const int r = (lane + x * 32) / CH, c = (lane + x * 32) % CH;
#if PAGED
            const int p = __shfl_sync(0xffffffffu, page, r & (STEP - 1)), in = __shfl_sync(0xffffffffu, inside, r & (STEP - 1));
            const elem* kf = kp + (i64)p * a.k.sb + (i64)in * a.k.ss;
            const elem* vf = vp + (i64)p * a.v.sb + (i64)in * a.v.ss;
#else
            const elem* kf = kp + (i64)(key0 + r) * a.k.ss;
            const elem* vf = vp + (i64)(key0 + r) * a.v.ss;
#endif
            if ((STEP * CH) % 32 != 0 && r >= STEP) continue;
            const bool in_use = key0 + r < w.s.sk;
            const u32 at = to + place_at(r, c * 16);
#if VEC
            cp_async16(at, kf + c * EPC, in_use && c * EPC < a.d ? 16 : 0);
            cp_async16(at + TILE_BYTES, vf + c * EPC, in_use && c * EPC < a.dv ? 16 : 0);
#else
            for (int e = 0; e < EPC; ++e) {
                const int col = c * EPC + e;
                char* here = smem + (at - smem_u32(smem)) + e * ESZ;
                *(elem*)here = in_use && col < a.d ? kf[col * a.k.sd] : (elem)0;
                *(elem*)(here + TILE_BYTES) = in_use && col < a.dv ? vf[col * a.v.sd] : (elem)0;
            }
#endif
        }
#endif
    };

    int g = begin / STEP;
    g += (warp - g) & (WARPS - 1);
    const int g_end = begin < end ? (end + STEP - 1) / STEP : 0;
    int ahead = g;
#if PAGED
    look_up(ahead);
#endif
    auto load_q = [&] {
        constexpr int CH = DP / EPC;
#pragma unroll 1
        for (int idx = tid; idx < BM * CH; idx += NT) {
            const int r = w.r0 + idx / CH, c = idx % CH, n = r / w.s.sq, i = r - n * w.s.sq;
            const elem* from = (const elem*)a.q.ptr + w.s.q_batch * a.q.sb + (i64)(w.kv * a.group + n) * a.q.sh + (i64)(w.s.q_start + i) * a.q.ss;
            const u32 to = q_at + idx / CH * PITCH + c * 16;
#if VEC
            cp_async16(to, from + c * EPC, r < w.r1 && c * EPC < a.d ? 16 : 0);
#else
            for (int e = 0; e < EPC; ++e) {
                const int col = c * EPC + e;
                *(elem*)(after + (to - q_at) + e * ESZ) = r < w.r1 && col < a.d ? from[col * a.q.sd] : (elem)0;
            }
#endif
        }
    };
    auto advance = [&](int slot, bool first = false) {
        if (ahead < g_end) load(ahead, slot);
        // Q arrives with the first keys and is asked for behind them.
        if (first) load_q();
        cp_commit();
        ahead += WARPS;
#if PAGED
        if (ahead < g_end) look_up(ahead);
#endif
    };
#pragma unroll
    for (int x = 0; x < STAGES - 1; ++x) advance(x, x == 0);

    // ---- what a lane knows of its rows
    int row_lo[WM][2], row_hi[WM][2];
#pragma unroll
    for (int x = 0; x < WM; ++x)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int row = w.r0 + x * 16 + r * 8 + (lane >> 2), i = row % w.s.sq;
            row_lo[x][r] = first_key(a, w, i);
            row_hi[x][r] = row < w.r1 ? last_key(a, w, i) : -1;
        }

    cp_wait<STAGES - 2>();
    __syncthreads();
#if QREG
    u32 qf[DP / 16][WM][4];
    {
        const u32 at = q_at + (lane & 15) * PITCH + (lane >> 4) * 16;
#pragma unroll
        for (int kk = 0; kk < DP / 16; ++kk)
#pragma unroll
            for (int x = 0; x < WM; ++x) ldsm4(qf[kk][x], at + x * 16 * PITCH + kk * 32);
    }
    __syncthreads();
#endif

    const float c = exponent(a);
    float run[DP / XC][4], run_m = NEG_INF, run_l = 0.f;
#pragma unroll
    for (int n = 0; n < DP / XC; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) run[n][e] = 0.f;
    int slot = 0;

#pragma unroll 1
    for (int ch = c0; ch < c1; ++ch) {
        float acc[WM][DP / 8][4], m[WM][2], l[WM][2];
#pragma unroll
        for (int x = 0; x < WM; ++x) {
#pragma unroll
            for (int n = 0; n < DP / 8; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) acc[x][n][e] = 0.f;
#pragma unroll
            for (int r = 0; r < 2; ++r) { m[x][r] = NEG_INF; l[x][r] = 0.f; }
        }
        const int stop = min((ch + 1) * (w.chunk / STEP), g_end);
#pragma unroll 1
        for (; g < stop; g += WARPS) {
            cp_wait<STAGES - 2>();
            __syncwarp();
            advance(slot == 0 ? STAGES - 1 : slot - 1);
            const u32 k_at = kv_at + slot * STEP_BYTES, v_at = k_at + TILE_BYTES;
            slot = slot + 1 == STAGES ? 0 : slot + 1;
            const int key0 = g * STEP;

            float s[WM][NS][4];
#pragma unroll
            for (int x = 0; x < WM; ++x)
#pragma unroll
                for (int n = 0; n < NS; ++n)
#pragma unroll
                    for (int e = 0; e < 4; ++e) s[x][n][e] = 0.f;
#if QREG
            scores<true>(s, 0, qf, k_at, lane);
#else
            scores<false>(s, q_at, nullptr, k_at, lane);
#endif
            // Some row of the block cannot see some key of this step.
            bool edge = key0 + STEP - 1 > w.hi_all || key0 < w.lo_all;
#if SCORE
            edge |= (a.bias.ptr | a.mask.ptr) != 0;
#pragma unroll
            for (int x = 0; x < WM; ++x)
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    const int row = w.r0 + x * 16 + r * 8 + (lane >> 2), n = row / w.s.sq, i = row - n * w.s.sq, h = w.kv * a.group + n;
                    const float slope = a.slopes && row < w.r1 ? ((const float*)a.slopes)[h] : 0.f;
#pragma unroll
                    for (int y = 0; y < 2 * NS; ++y) {
                        const int j = key0 + (y >> 1) * 8 + 2 * (lane & 3) + (y & 1);
                        float& z = s[x][y >> 1][2 * r + (y & 1)];
                        z *= a.scale;
                        if (a.softcap > 0.f) z = a.softcap * tanhf(z / a.softcap);
                        if (a.slopes) z -= slope * fabsf((float)(i + w.diag - j));
                        if (edge && j >= row_lo[x][r] && j <= row_hi[x][r]) {
                            const i64 row_at = w.s.q_start + i, key_at = w.s.k_start + j;
                            if (a.bias.ptr) z += to_float(((const elem*)a.bias.ptr)[w.s.q_batch * a.bias.sb + h * a.bias.sh + row_at * a.bias.ss + key_at * a.bias.sd]);
                            if (a.mask.ptr && !((const unsigned char*)a.mask.ptr)[w.s.q_batch * a.mask.sb + h * a.mask.sh + row_at * a.mask.ss + key_at * a.mask.sd]) z = NEG_INF;
                        }
                    }
                }
#endif
            if (edge) {
#pragma unroll
                for (int x = 0; x < WM; ++x)
#pragma unroll
                    for (int e = 0; e < 4 * NS; ++e) {
                        const int j = key0 + (e >> 2) * 8 + 2 * (lane & 3) + (e & 1), r = (e >> 1) & 1;
                        if (j < row_lo[x][r] || j > row_hi[x][r]) s[x][e >> 2][e & 3] = NEG_INF;
                    }
            }
            if (edge || F32) {
                // Rare: V has NaN or infinite values. Rows that see one get it at once; the products get zero instead.
                if (__any_sync(0xffffffffu, scan(v_at, lane))) {
#pragma unroll
                    for (int n8 = 0; n8 < NS; ++n8)
#pragma unroll 1
                    for (int k = n8 * 8; k < n8 * 8 + 8; ++k)
#pragma unroll
                        for (int x = 0; x < WM; ++x)
#pragma unroll
                            for (int r = 0; r < 2; ++r) {
                                const float its = k & 1 ? s[x][n8][2 * r + 1] : s[x][n8][2 * r];
                                const float seen = __shfl_sync(0xffffffffu, its, (lane & 28) | ((k & 7) >> 1));
                                if (seen == NEG_INF) continue;
#pragma unroll
                                for (int n = 0; n < DP / 8; ++n)
#pragma unroll
                                    for (int e = 0; e < 2; ++e) acc[x][n][2 * r + e] += nonfinite_at(v_at + place_at(k, (n * 8 + 2 * (lane & 3) + e) * ESZ), 0, 0, 0);
                            }
                    __syncwarp();
                    clear(v_at, lane);
                    __syncwarp();
                }
            }

            float mc[WM][2], alpha[WM][2];
            bool moved = false;
#pragma unroll
            for (int x = 0; x < WM; ++x)
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    float top = s[x][0][2 * r];
#pragma unroll
                    for (int n = 0; n < NS; ++n) top = fmaxf(fmaxf(top, s[x][n][2 * r]), s[x][n][2 * r + 1]);
                    const float now = fmaxf(m[x][r], quad_max(top));
                    // A row with nothing live yet keeps m = -inf; any finite reference gives it p = 0.
                    const float ref = now == NEG_INF ? 0.f : now;
                    alpha[x][r] = m[x][r] == NEG_INF ? 1.f : ex2((m[x][r] - ref) * c);
                    m[x][r] = now;
                    mc[x][r] = SCORE ? ref : ref * c;
                    l[x][r] *= alpha[x][r];
                    moved |= alpha[x][r] != 1.f;
                }
            if (__any_sync(0xffffffffu, moved)) {
#pragma unroll
                for (int x = 0; x < WM; ++x)
#pragma unroll
                    for (int n = 0; n < DP / 8; ++n)
#pragma unroll
                        for (int e = 0; e < 4; ++e) acc[x][n][e] *= alpha[x][e >> 1];
            }
#if !F32
            const u32 vat = v_at + (lane & 15) * KV_PITCH, column = (DENSE ? (lane >> 4) ^ (lane & 7) : lane >> 4) * 16;
#pragma unroll
            for (int kk = 0; kk < STEP / 16; ++kk) {
                u32 pf[WM][4];
#pragma unroll
                for (int x = 0; x < WM; ++x)
#pragma unroll
                    for (int half = 0; half < 2; ++half)
#pragma unroll
                        for (int r = 0; r < 2; ++r) {
                            const float p0 = ex2(above(s[x][2 * kk + half][2 * r], mc[x][r], c)), p1 = ex2(above(s[x][2 * kk + half][2 * r + 1], mc[x][r], c));
                            l[x][r] += p0 + p1;
                            pf[x][half * 2 + r] = pack2(p0, p1);
                        }
#pragma unroll
                for (int n = 0; n < DP / 16; ++n) {
                    u32 vf[4];
                    ldsm4t(vf, vat + kk * 16 * KV_PITCH + (DENSE ? column ^ n * 32 : column + n * 32));
#pragma unroll
                    for (int x = 0; x < WM; ++x) {
                        mma(acc[x][2 * n], pf[x], vf[0], vf[1]);
                        mma(acc[x][2 * n + 1], pf[x], vf[2], vf[3]);
                    }
                }
            }
#else
            // As in fa2.cu: keys 2t and 2t+1 stand where the operand wants t and t+4, and a step's part of the output is summed apart.
            u32 ph[WM][NS][4], pl[WM][NS][4];
#pragma unroll
            for (int x = 0; x < WM; ++x)
#pragma unroll
                for (int kk = 0; kk < NS; ++kk) {
                    float p[4];
#pragma unroll
                    for (int e = 0; e < 4; ++e) {
                        p[e] = ex2(above(s[x][kk][e], mc[x][e >> 1], c));
                        l[x][e >> 1] += p[e];
                    }
                    u32 u[4] = {__float_as_uint(p[0]), __float_as_uint(p[2]), __float_as_uint(p[1]), __float_as_uint(p[3])};
                    split_all(u, ph[x][kk], pl[x][kk]);
                }
            const int even = 2 * (lane & 3);
            const u32 vat = v_at + even * KV_PITCH, column = (lane >> 2) * 4;
#pragma unroll
            for (int n = 0; n < DP / 8; ++n) {
                float sum[WM][4];
#pragma unroll
                for (int x = 0; x < WM; ++x)
#pragma unroll
                    for (int e = 0; e < 4; ++e) sum[x][e] = 0.f;
#pragma unroll
                for (int kk = 0; kk < NS; ++kk) {
                    const u32 at = DENSE ? (column + n * 32) ^ even * 16 : column + n * 32, odd_at = DENSE ? at ^ 16 : at;
                    u32 v[2] = {lds32(vat + kk * 8 * KV_PITCH + at), lds32(vat + (kk * 8 + 1) * KV_PITCH + odd_at)}, vh[2], vl[2];
                    split_all(v, vh, vl);
#pragma unroll
                    for (int x = 0; x < WM; ++x) mma3(sum[x], ph[x][kk], pl[x][kk], vh[0], vl[0], vh[1], vl[1]);
                }
#pragma unroll
                for (int x = 0; x < WM; ++x)
#pragma unroll
                    for (int e = 0; e < 4; ++e) acc[x][n][e] += sum[x][e];
            }
#endif
        }

        // ---- the end of a chunk: the warps' states become one, in order
#pragma unroll
        for (int x = 0; x < WM; ++x)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                float sum = quad_sum(l[x][r]);
#if PAGED
                if (__any_sync(0xffffffffu, lost)) sum = __int_as_float(0x7fffffff);
#endif
                if ((lane & 3) == 0) {
                    const int row = x * 16 + r * 8 + (lane >> 2);
                    ml[(warp * BM + row) * 2] = m[x][r];
                    ml[(warp * BM + row) * 2 + 1] = sum;
                }
            }
        const int row = tid / (XC / 4), col = tid % (XC / 4) * 4;
        const bool mine = tid < XTHREADS && w.r0 + row < w.r1, folds = part == 0;
        float factor[WARPS], chunk_m = NEG_INF, chunk_l = 0.f;
        Joint into = {};
#pragma unroll
        for (int n = 0; n < DP / XC; ++n) {
#pragma unroll
            for (int x = 0; x < WM; ++x)
#pragma unroll
                for (int y = 0; y < XC / 8; ++y)
#pragma unroll
                    for (int r = 0; r < 2; ++r) {
                        float* to = exchange + (warp * BM + x * 16 + r * 8 + (lane >> 2)) * XPITCH + y * 8 + 2 * (lane & 3);
                        *(float2*)to = make_float2(acc[x][n * (XC / 8) + y][2 * r], acc[x][n * (XC / 8) + y][2 * r + 1]);
                    }
            __syncthreads();
            if (mine) {
                if (n == 0) {
#pragma unroll
                    for (int k = 0; k < WARPS; ++k) chunk_m = fmaxf(chunk_m, ml[(k * BM + row) * 2]);
                    const float ref = chunk_m == NEG_INF ? 0.f : chunk_m;
#pragma unroll
                    for (int k = 0; k < WARPS; ++k) {
                        factor[k] = ex2((ml[(k * BM + row) * 2] - ref) * c);
                        chunk_l = fmaf(factor[k], ml[(k * BM + row) * 2 + 1], chunk_l);
                    }
                    into = weigh(run_m, chunk_m, c);
                }
                float x[4] = {};
#pragma unroll
                for (int k = 0; k < WARPS; ++k) {
                    const float4 y = *(const float4*)(exchange + (k * BM + row) * XPITCH + col);
                    x[0] = fmaf(factor[k], y.x, x[0]);
                    x[1] = fmaf(factor[k], y.y, x[1]);
                    x[2] = fmaf(factor[k], y.z, x[2]);
                    x[3] = fmaf(factor[k], y.w, x[3]);
                }
                if (folds) {
#pragma unroll
                    for (int e = 0; e < 4; ++e) run[n][e] = join(run[n][e], into.a, x[e], into.b);
                } else {
                    const i64 at = (((i64)pair * a.row_blocks + rb) * a.slots + (ch - w.first)) * a.rows + row;
                    *(float4*)((float*)a.acc + at * DP + n * XC + col) = make_float4(x[0], x[1], x[2], x[3]);
                    if (n == 0 && col == 0) {
                        ((float*)a.m)[at] = chunk_m;
                        ((float*)a.l)[at] = chunk_l;
                    }
                }
            }
            __syncthreads();
        }
        if (mine && folds) {
            run_l = join(run_l, into.a, chunk_l, into.b);
            run_m = into.m;
        }
    }
    cp_wait<0>();

    const i64 base = ((i64)pair * a.row_blocks + rb) * a.slots * a.rows;
    if (part == 0) {
        const int row = tid / (XC / 4), col = tid % (XC / 4) * 4;
        const bool mine = tid < XTHREADS && w.r0 + row < w.r1;
        if (w.folded >= w.chunks) {
            if (!mine) return;
#pragma unroll
            for (int n = 0; n < DP / XC; ++n) emit(a, w, w.r0 + row, n * XC + col, n == 0 && col == 0, run[n], run_m, run_l);
            return;
        }
        if (mine) {
#pragma unroll
            for (int n = 0; n < DP / XC; ++n)
                *(float4*)((float*)a.acc + (base + row) * DP + n * XC + col) = make_float4(run[n][0], run[n][1], run[n][2], run[n][3]);
            if (col == 0) {
                ((float*)a.m)[base + row] = run_m;
                ((float*)a.l)[base + row] = run_l;
            }
        }
    }
}

#else
// The merge may be launched before the split has ended (programmatic dependent launch) and waits here for all it wrote.
#if __CUDA_ARCH__ >= 900
#define AFTER_THE_SPLIT asm volatile("griddepcontrol.wait;" ::: "memory");
#else
#define AFTER_THE_SPLIT
#endif
// ---- the merge -----------------------------------------------------------------------------------------------------------

// A block folds 32 columns of a row, a lane a column. State 0 is what the first part folded; the rest are chunks in order. All of
// them are asked for at once; one warp then folds them.
#define WIDE ((DP + 31) / 32) // blocks a row
#define MERGERS 128
extern "C" __global__ void __launch_bounds__(MERGERS) tw_decode_merge(const __grid_constant__ Decode a) {
    static_assert(MOST_CHUNKS <= MERGERS, "each thread has one chunk's m and l");
    __shared__ __align__(16) float pieces[MOST_CHUNKS][32];
    __shared__ float2 factors[MERGERS];
    __shared__ float sums[MERGERS], tops[MERGERS / 32];
    const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
    const int job = blockIdx.x / WIDE, col = (blockIdx.x - job * WIDE) * 32;
    const int pair = job / a.most_rows, r = job - pair * a.most_rows, rb = r / BM;
    const Group w = group_of(a, pair, rb);
    const int rest = r < w.r1 ? w.chunks - w.folded : 0;
    if (rest <= 0) {
        // Whatever comes next must find the split ended.
        AFTER_THE_SPLIT
        return;
    }
    const float c = exponent(a);
    const i64 base = ((i64)pair * a.row_blocks + rb) * a.slots * a.rows + (r - w.r0), step = (i64)a.rows * DP;
    const float *const ms = (const float*)a.m + base, *const ls = (const float*)a.l + base, *const xs = (const float*)a.acc + base * DP + col;
    const i64 own = (i64)(w.folded + min(tid, rest - 1)) * a.rows;
    // Four columns of every 16th chunk.
    const int piece = (tid & 7) * 4, first = tid >> 3;
#pragma unroll 1
    for (int turn = a.most_rows > 0 ? 0 : 1; turn < 2; ++turn) {
        const bool really = turn == 1;
        if (really) {
            AFTER_THE_SPLIT
        }
        const float* from = xs + (w.folded + first) * step + piece;
        u32 to = smem_u32(&pieces[first][piece]);
#pragma unroll 4
        for (int k = first; k < rest; k += MERGERS / 8) {
            cp_async16(to, from, really && col + piece < DP ? 16 : 0);
            to += MERGERS / 8 * 32 * 4;
            from += MERGERS / 8 * step;
        }
        cp_commit();
        float its = fetch_if(really, ms + own), m = fetch_if(really, ms), l = fetch_if(really, ls);
        float x[1] = {fetch_if(really && col + lane < DP, xs + lane)};
        sums[tid] = fetch_if(really, ls + own);
        // With the running maxima known, so are all factors.
        if (tid >= rest) its = NEG_INF;
        float top = its;
#pragma unroll
        for (int d = 1; d < 32; d *= 2) {
            const float other = __shfl_up_sync(0xffffffffu, top, d);
            if (lane >= d) top = fmaxf(top, other);
        }
        if (lane == 31) tops[warp] = top;
        __syncthreads();
        float most = m;
#pragma unroll
        for (int k = 0; k < MERGERS / 32; ++k) {
            if (k < warp) m = fmaxf(m, tops[k]);
            most = fmaxf(most, tops[k]);
        }
        top = fmaxf(top, m);
        float before = __shfl_up_sync(0xffffffffu, top, 1);
        if (lane == 0) before = m;
        const Joint f = weigh(before, its, c);
        factors[tid] = make_float2(f.a, f.b);
        cp_wait<0>();
        __syncthreads();
        if (warp == 0) {
#pragma unroll 4
            for (int k = 0; k < rest; ++k) {
                const float2 g = factors[k];
                x[0] = join(x[0], g.x, pieces[k][lane], g.y);
                l = join(l, g.x, sums[k], g.y);
            }
            if (col + lane < DP) emit(a, w, r, col + lane, col + lane == 0, x, most, l, really);
        }
        __syncthreads();
    }
}
#endif
