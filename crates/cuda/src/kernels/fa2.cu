// FlashAttention-2 forward (Dao 2023, Algorithm 1): outer loop over row blocks (the grid), inner loop over key blocks.
//
// Each warp owns WM x 16 query rows and all their keys, so m, l and the unnormalised output never leave its registers and warps
// exchange nothing; the division by l happens once. K and V tiles arrive by cp.async: double-buffered with one barrier a tile, or
// (STAGES 1, where shared memory is short or a second block fits instead) K under the softmax and V under the scores.
// Keys run from the last live tile to the first, so that the tiles an edge crosses come first.
//
//   BM = WARPS * WM * 16 rows a block     BN keys a tile     STAGES of K and V     QREG 1 = Q fragments stay in registers     MINB blocks a multiprocessor
//   STATE 1 = absorb keys into a running (m, l, O~) in device memory in place of writing O (scores in natural units)

#define NT (WARPS * 32)
#define BM (WARPS * WM * 16)
#define TILE_BYTES (BN * PITCH)

#if GUARD_V
#define NONFINITE(tile) (edge || F32 ? __syncthreads_or(scan_tile<BN, DP, NT>(tile, tid)) : (__syncthreads(), 0))
// Rare: this V tile has NaN or infinite values. Rows that see one get it at once; the products get zero instead.
#define POISON(tile)                                                                                                         \
    if (poison) {                                                                                                            \
        _Pragma("unroll 1") for (int k = 0; k < BN; ++k) {                                                                   \
            _Pragma("unroll") for (int x = 0; x < WM; ++x) _Pragma("unroll") for (int r = 0; r < 2; ++r) {                   \
                int row = row0 + x * 16 + r * 8;                                                                             \
                if (key0 + k > last_key(a, row) || key0 + k < first_key(a, row)) continue;                                   \
                _Pragma("unroll") for (int n = 0; n < DP / 8; ++n) _Pragma("unroll") for (int e = 0; e < 2; ++e)             \
                    acc[x][n][2 * r + e] += nonfinite_at(tile, PITCH, k, n * 8 + 2 * (lane & 3) + e);                        \
            }                                                                                                                \
        }                                                                                                                    \
        __syncthreads();                                                                                                     \
        clear_tile<BN, DP, NT>(tile, tid);                                                                                   \
        __syncthreads();                                                                                                     \
    }
#else
#define NONFINITE(tile) (__syncthreads(), 0)
#define POISON(tile)
#endif

extern "C" __global__ void __launch_bounds__(NT, MINB) tw_fa2(const __grid_constant__ Args a) {
    extern __shared__ __align__(128) char smem[];
    const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
    const u32 sq_at = smem_u32(smem), kv_at = sq_at + BM * PITCH;

    // Blocks of one group of (batch, head) pairs run together, so that their K and V stay in L2; inside a group the row
    // blocks with the most keys go first.
    int pair, rb;
    {
        int per = a.row_blocks * a.pairs_per_group;
        int g = blockIdx.x / per, r = blockIdx.x - g * per;
        int width = min(a.pairs_per_group, a.pairs - g * a.pairs_per_group);
        rb = r / width;
        pair = a.pair0 + g * a.pairs_per_group + (r - rb * width);
        if (MASK >= 1) rb = a.row_blocks - 1 - rb;
    }
    const int b = pair / a.heads, h = pair - b * a.heads, hk = h / a.group_size;
    const elem* qp = (const elem*)a.q.ptr + b * a.q.sb + h * a.q.sh;
    const elem* kp = (const elem*)a.k.ptr + b * a.k.sb + hk * a.k.sh;
    const elem* vp = (const elem*)a.v.ptr + b * a.v.sb + hk * a.v.sh;

    const int i0 = rb * BM, i1 = min(i0 + BM, a.sq);
    const int key_hi = last_key(a, i1 - 1), key_lo = first_key(a, i0);
    const bool any = key_hi >= key_lo;
    const int jmax = any ? key_hi / BN : -1, jmin = any ? key_lo / BN : 0;
    const int w0 = i0 + warp * WM * 16;                 // first row of this warp
    const int row0 = w0 + (lane >> 2);                  // first row of this lane
    // Live range of the warp's rows: tiles outside it hold nothing for this warp.
    const int w_hi = last_key(a, min(w0 + WM * 16, a.sq) - 1), w_lo = first_key(a, w0);

    load_tile<BM, DP, NT>(sq_at, a.q, qp, i0, a.sq, a.d, tid);
    if (any) {
        load_tile<BN, DP, NT>(kv_at, a.k, kp, jmax * BN, a.sk, a.d, tid);
        if (STAGES == 2) load_tile<BN, DP, NT>(kv_at + TILE_BYTES, a.v, vp, jmax * BN, a.sk, a.d, tid);
    }
    cp_commit();

    float acc[WM][DP / 8][4], m[WM][2], l[WM][2];
#pragma unroll
    for (int x = 0; x < WM; ++x)
#pragma unroll
        for (int n = 0; n < DP / 8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) acc[x][n][e] = 0.f;
#pragma unroll
    for (int x = 0; x < WM; ++x)
#pragma unroll
        for (int r = 0; r < 2; ++r) { m[x][r] = NEG_INF; l[x][r] = 0.f; }

#if STATE
    const i64 srow = (i64)pair * a.sq;
#pragma unroll
    for (int x = 0; x < WM; ++x)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            int row = row0 + x * 16 + r * 8;
            if (row >= a.sq) continue;
            m[x][r] = ((const float*)a.m)[srow + row];
            l[x][r] = (lane & 3) == 0 ? ((const float*)a.l)[srow + row] : 0.f;
            const float* from = (const float*)a.acc + (srow + row) * a.d;
#pragma unroll
            for (int n = 0; n < DP / 8; ++n)
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    int col = n * 8 + 2 * (lane & 3) + e;
                    if (col < a.d) acc[x][n][2 * r + e] = from[col];
                }
        }
#endif

#if QREG
    u32 qf[DP / 16][WM][4];
#endif
    const float c = SCORE ? LOG2E : a.scale * LOG2E;
    u32 stage = 0;

    for (int j = jmax; j >= jmin; --j) {
        const int key0 = j * BN;
        const u32 k_at = kv_at + stage, v_at = k_at + TILE_BYTES;
        cp_wait<0>();
#if MASK >= 1
        // Some row of the block cannot see some key of this tile.
        const bool edge = key0 + BN - 1 > min(a.sk - 1, i0 + a.hi_off) || (MASK == 2 && key0 < i1 - 1 + a.lo_off);
#else
        const bool edge = key0 + BN > a.sk;
#endif
#if STAGES == 2
        [[maybe_unused]] const bool poison = NONFINITE(v_at);
#else
        __syncthreads();
        load_tile<BN, DP, NT>(v_at, a.v, vp, key0, a.sk, a.d, tid);
        cp_commit();
#endif
#if QREG
        if (j == jmax) {
            u32 at = sq_at + (warp * WM * 16 + (lane & 15)) * PITCH + (lane >> 4) * 16;
#pragma unroll
            for (int kk = 0; kk < DP / 16; ++kk)
#pragma unroll
                for (int x = 0; x < WM; ++x) ldsm4(qf[kk][x], at + x * 16 * PITCH + kk * 32);
        }
#endif
#if STAGES == 2
        if (j > jmin) {
            const u32 next = kv_at + (stage ^ (2 * TILE_BYTES));
            load_tile<BN, DP, NT>(next, a.k, kp, key0 - BN, a.sk, a.d, tid);
            load_tile<BN, DP, NT>(next + TILE_BYTES, a.v, vp, key0 - BN, a.sk, a.d, tid);
            cp_commit();
        }
        stage ^= 2 * TILE_BYTES;
#endif
        // A tile whose keys no row of this warp sees costs it nothing but the barriers.
        const bool idle = MASK >= 1 && (key0 > w_hi || (MASK == 2 && key0 + BN - 1 < w_lo));
#if STAGES == 2
        POISON(v_at)
        if (idle) continue;
#else
        // V has arrived, and nobody reads K any more.
#define TURN                                                                                                                 \
        cp_wait<0>();                                                                                                        \
        [[maybe_unused]] const bool poison = NONFINITE(v_at);                                                                \
        if (j > jmin) {                                                                                                      \
            load_tile<BN, DP, NT>(k_at, a.k, kp, key0 - BN, a.sk, a.d, tid);                                                 \
            cp_commit();                                                                                                     \
        }                                                                                                                    \
        POISON(v_at)
        if (idle) {
            TURN
            continue;
        }
#endif

        float s[WM][BN / 8][4];
#pragma unroll
        for (int x = 0; x < WM; ++x)
#pragma unroll
            for (int n = 0; n < BN / 8; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) s[x][n][e] = 0.f;
#if QREG
        product_nt<WM, BN / 8, DP, true>(s, 0, PITCH, qf, k_at, PITCH, lane);
#else
        product_nt<WM, BN / 8, DP, false>(s, sq_at + warp * WM * 16 * PITCH, PITCH, nullptr, k_at, PITCH, lane);
#endif
#if STAGES == 1
        TURN
#endif

#if SCORE
#pragma unroll
        for (int x = 0; x < WM; ++x)
#pragma unroll
            for (int n = 0; n < BN / 8; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) s[x][n][e] = score_of(s[x][n][e], a);
#endif
        if (edge) {
#pragma unroll
            for (int x = 0; x < WM; ++x)
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    int row = row0 + x * 16 + r * 8;
                    int hi = last_key(a, row) - key0 - 2 * (lane & 3), lo = first_key(a, row) - key0 - 2 * (lane & 3);
#pragma unroll
                    for (int n = 0; n < BN / 8; ++n)
#pragma unroll
                        for (int e = 0; e < 2; ++e)
                            if (n * 8 + e > hi || (MASK == 2 && n * 8 + e < lo)) s[x][n][2 * r + e] = NEG_INF;
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
                for (int n = 0; n < BN / 8; ++n) top = fmaxf(fmaxf(top, s[x][n][2 * r]), s[x][n][2 * r + 1]);
                float now = fmaxf(m[x][r], quad_max(top));
                // A row with nothing live yet keeps m = -inf; any finite reference gives it p = 0.
                float ref = now == NEG_INF ? 0.f : now;
                // Nothing to rescale before the first live key.
                alpha[x][r] = m[x][r] == NEG_INF ? 1.f : ex2((m[x][r] - ref) * c);
                m[x][r] = now;
                mc[x][r] = ref * c;
                l[x][r] *= alpha[x][r];
                moved |= alpha[x][r] != 1.f;
            }
        // Only where no row of the warp moved its maximum is the rescale left out: every alpha is exactly 1 then.
        if (__any_sync(0xffffffffu, moved)) {
#pragma unroll
            for (int x = 0; x < WM; ++x)
#pragma unroll
                for (int n = 0; n < DP / 8; ++n)
#pragma unroll
                    for (int e = 0; e < 4; ++e) acc[x][n][e] *= alpha[x][e >> 1];
        }

#if !F32
        // P of sixteen keys at a time becomes the A operand in place, so its exponentials overlap the products before it.
        const u32 vat = v_at + (lane & 15) * PITCH + (lane >> 4) * 16;
#pragma unroll
        for (int kk = 0; kk < BN / 16; ++kk) {
            u32 pf[WM][4];
#pragma unroll
            for (int x = 0; x < WM; ++x) {
#pragma unroll
                for (int half = 0; half < 2; ++half)
#pragma unroll
                    for (int r = 0; r < 2; ++r) {
                        float p0 = ex2(fmaf(s[x][2 * kk + half][2 * r], c, -mc[x][r]));
                        float p1 = ex2(fmaf(s[x][2 * kk + half][2 * r + 1], c, -mc[x][r]));
                        l[x][r] += p0 + p1;
                        pf[x][half * 2 + r] = pack2(p0, p1);
                    }
            }
#pragma unroll
            for (int n = 0; n < DP / 16; ++n) {
                u32 vf[4];
                ldsm4t(vf, vat + kk * 16 * PITCH + n * 32);
#pragma unroll
                for (int x = 0; x < WM; ++x) {
                    mma(acc[x][2 * n], pf[x], vf[0], vf[1]);
                    mma(acc[x][2 * n + 1], pf[x], vf[2], vf[3]);
                }
            }
        }
#else
        // Keys 2t and 2t+1 of a group of eight stand where the operand wants t and t+4: the sum over keys has no order.
        u32 ph[WM][BN / 8][4], pl[WM][BN / 8][4];
#pragma unroll
        for (int x = 0; x < WM; ++x)
#pragma unroll
            for (int kk = 0; kk < BN / 8; ++kk) {
                float p[4];
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    p[e] = ex2(fmaf(s[x][kk][e], c, -mc[x][e >> 1]));
                    l[x][e >> 1] += p[e];
                }
                u32 w[4] = {__float_as_uint(p[0]), __float_as_uint(p[2]), __float_as_uint(p[1]), __float_as_uint(p[3])};
                split_all(w, ph[x][kk], pl[x][kk]);
            }
        // A tile's part of the output is summed apart and added once: the tensor core truncates as it accumulates, and over
        // thousands of keys that would show.
        const u32 vat = v_at + 2 * (lane & 3) * PITCH + (lane >> 2) * 4;
#pragma unroll
        for (int n = 0; n < DP / 8; ++n) {
            float part[WM][4];
#pragma unroll
            for (int x = 0; x < WM; ++x)
#pragma unroll
                for (int e = 0; e < 4; ++e) part[x][e] = 0.f;
#pragma unroll
            for (int kk = 0; kk < BN / 8; ++kk) {
                u32 v[2] = {lds32(vat + kk * 8 * PITCH + n * 32), lds32(vat + (kk * 8 + 1) * PITCH + n * 32)}, vh[2], vl[2];
                split_all(v, vh, vl);
#pragma unroll
                for (int x = 0; x < WM; ++x) mma3(part[x], ph[x][kk], pl[x][kk], vh[0], vl[0], vh[1], vl[1]);
            }
#pragma unroll
            for (int x = 0; x < WM; ++x)
#pragma unroll
                for (int e = 0; e < 4; ++e) acc[x][n][e] += part[x][e];
        }
#endif
    }
    cp_wait<0>();

#pragma unroll
    for (int x = 0; x < WM; ++x)
#pragma unroll
        for (int r = 0; r < 2; ++r) l[x][r] = quad_sum(l[x][r]);

#if STATE
#pragma unroll
    for (int x = 0; x < WM; ++x)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            int row = row0 + x * 16 + r * 8;
            if (row >= a.sq) continue;
            if ((lane & 3) == 0) {
                ((float*)a.m)[srow + row] = m[x][r];
                ((float*)a.l)[srow + row] = l[x][r];
            }
            float* to = (float*)a.acc + (srow + row) * a.d;
#pragma unroll
            for (int n = 0; n < DP / 8; ++n)
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    int col = n * 8 + 2 * (lane & 3) + e;
                    if (col < a.d) to[col] = acc[x][n][2 * r + e];
                }
        }
#else
    // A warp's own Q rows are its staging area: nobody else reads them, so whole 16-byte chunks go out without a barrier.
    elem* op = (elem*)a.o.ptr + b * a.o.sb + h * a.o.sh;
    __syncwarp();
#pragma unroll
    for (int x = 0; x < WM; ++x)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float inv = l[x][r] == 0.f ? 0.f : 1.f / l[x][r];
            int row = row0 + x * 16 + r * 8;
            if (a.lse && (lane & 3) == 0 && row < a.sq)
                ((float*)a.lse)[(i64)pair * a.sq + row] = l[x][r] == 0.f ? NEG_INF : m[x][r] * (SCORE ? 1.f : a.scale) + logf(l[x][r]);
            char* to = smem + (row - i0) * PITCH + 2 * (lane & 3) * ESZ;
#pragma unroll
            for (int n = 0; n < DP / 8; ++n) {
                float v0 = acc[x][n][2 * r] * inv, v1 = acc[x][n][2 * r + 1] * inv;
#if F32
                *(float2*)(to + n * 32) = make_float2(v0, v1);
#else
                *(u32*)(to + n * 16) = pack2(v0, v1);
#endif
            }
        }
    __syncwarp();
    constexpr int CH = DP / EPC;
#pragma unroll 4
    for (int idx = lane; idx < WM * 16 * CH; idx += 32) {
        int r = idx / CH, ch = idx % CH, row = w0 + r;
        if (row >= a.sq || ch * EPC >= a.d) continue;
        const char* from = smem + (row - i0) * PITCH + ch * 16;
        elem* to = op + (i64)row * a.o.ss + ch * EPC;
#if VEC
        *(uint4*)to = *(const uint4*)from;
#else
        for (int e = 0; e < EPC && ch * EPC + e < a.d; ++e) to[e] = ((const elem*)from)[e];
#endif
    }
#endif
}
