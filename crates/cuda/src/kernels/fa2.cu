// FlashAttention-2 forward (Dao 2023, Algorithm 1): outer loop over row blocks (the grid), inner loop over key blocks.
//
// Each warp owns WM x 16 query rows and all their keys, so m, l and the unnormalised output never leave its registers and warps
// exchange nothing; the division by l happens once. K and V tiles arrive by cp.async: double-buffered with one barrier a tile, or
// (STAGES 1, where shared memory is short or a second block fits instead) K under the softmax and V under the scores.
// Keys run from the last live tile to the first, so that the tiles an edge crosses come first.
//
//   BM = WARPS * WM * 16 rows a block     BN keys a tile     STAGES of K and V     QREG 1 = Q fragments stay in registers     MINB blocks a multiprocessor
//   PEEL 1 = tiles that no edge crosses have a loop of their own (larger code, and registers that may not be there)
//   STATE 1 = absorb keys into a running (m, l, O~) in device memory in place of writing O (scores in natural units)

#define NT (WARPS * 32)
#define BM (WARPS * WM * 16)
// Columns in shared memory: pairs stand beside each other.
#define COLS_K (DP << PAIRS)
#define COLS_V (DV << PAIRS)
#define DENSE (!F32)
#define PITCH_K (DENSE ? DENSE_PITCH(COLS_K) : PITCH_OF(COLS_K))
#define PITCH_V (DENSE ? DENSE_PITCH(COLS_V) : PITCH_OF(COLS_V))
#define PITCH_Q PITCH_OF(COLS_K > COLS_V ? COLS_K : COLS_V) // Q's rows carry the output in the end
#define K_BYTES (BN * PITCH_K)
#define STAGE_BYTES (K_BYTES + BN * PITCH_V)

// Bias and mask of a tile (EXTRAS 2: STAGES 1, elements of 16 bits).
#define PITCH_B PITCH_OF(BN)
#define PITCH_M (BN + 16)

// The barrier after a tile of V arrived, and whether it holds NaN or infinite values. Factors of pairs say so by their sign.
#if PAIRS
#define LOOK_THROUGH(tile) (__syncthreads(), marked(v_factor))
#else
#define LOOK_THROUGH(tile) arrived_nonfinite<BN, DV, NT, PITCH_V, DENSE>(tile, edge || F32 || hides, tid)
#endif

// Q comes as it lies: f32 is made pairs of here.
#if PAIRS
typedef io q_elem;
#else
typedef elem q_elem;
#endif

template <bool B> struct Known {
    __device__ constexpr operator bool() const { return B; }
};

extern "C" __global__ void __launch_bounds__(NT, MINB) tw_fa2(const __grid_constant__ Args a) {
    extern __shared__ __align__(128) char smem[];
    const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
    const u32 q_at = smem_u32(smem), kv_at = q_at + BM * PITCH_Q;

    const Place at = place_of(a);
    const Span span = at.span;
    const auto* qp = rows_of<q_elem>(a.q, at.q_batch, at.h, at.q_row);
    const elem* kp = rows_of(a.k, at.k_batch, at.hk, at.k_row);
    const elem* vp = rows_of(a.v, at.k_batch, at.hk, at.k_row);
    Score score = {};
    if (SCORE == 2 || DROPOUT) score = score_head(a, at.seq, at.q_batch, at.h, at.q_row, at.k_row);
    // Whether a key inside the bounds may still bring nothing.
    [[maybe_unused]] const bool hides = DROPOUT || score.mask || score.bias;

    const int i0 = at.rb * BM, i1 = min(i0 + BM, span.sq);
    const int key_hi = last_key(span, i1 - 1), key_lo = first_key(span, i0);
    const bool any = key_hi >= key_lo;
    const int jmax = any ? key_hi / BN : -1, jmin = any ? key_lo / BN : 0;
    const int w0 = i0 + warp * WM * 16;                 // first row of this warp
    const int row0 = w0 + (lane >> 2);                  // first row of this lane
    // Live range of the warp's rows: tiles outside it hold nothing for this warp.
    const int w_hi = last_key(span, min(w0 + WM * 16, span.sq) - 1), w_lo = first_key(span, w0);

    // Pairs of K and V are padded already.
    const int d = PAIRS ? COLS_K : a.d, dv = PAIRS ? COLS_V : a.dv;
#if PAIRS
    // One factor a row, where the row would stand were it one element.
    auto factors = [&](u64 of, const elem* rows, const Tensor& t, int cols) { return (const float*)of + (rows - (const elem*)t.ptr) / cols; };
    const float *kf = factors(a.l, kp, a.k, COLS_K), *vf = factors(a.acc, vp, a.v, COLS_V);
    const u32 q_factor_at = q_at + (warp * WM * 16 + (lane >> 2)) * PITCH_Q + PITCH_Q - 16;
#else
    load_tile<BM, COLS_K, NT, PITCH_Q>(q_at, a.q, qp, i0, span.sq, d, tid);
#endif
#if PAIRS
    // The pairs of K and V may still be in the making: this head's are there when all a.p of its pieces are (split.cu).
    if (a.s && any) {
        if (tid == 0) {
            const u32* const made = (const u32*)a.s + (at.k_batch * (a.heads / a.group_size) + at.hk);
            u32 n;
            do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(n) : "l"(made) : "memory");
            while (n < (u32)a.p);
        }
        __syncthreads();
    }
#endif
    if (any) {
        load_tile<BN, COLS_K, NT, PITCH_K, DENSE>(kv_at, a.k, kp, jmax * BN, span.sk, d, tid);
        if (STAGES == 2) load_tile<BN, COLS_V, NT, PITCH_V, DENSE>(kv_at + K_BYTES, a.v, vp, jmax * BN, span.sk, dv, tid);
    }
    cp_commit();
#if PAIRS
    float q_factor[WM][2] = {};
    if (any) {
        load_pairs<BM, DP, NT, PITCH_Q>(q_at, a.q, qp, i0, span.sq, a.d, tid);
        __syncthreads();
#pragma unroll
        for (int x = 0; x < WM; ++x)
#pragma unroll
            for (int r = 0; r < 2; ++r) q_factor[x][r] = __uint_as_float(lds32(q_factor_at + (x * 16 + r * 8) * PITCH_Q));
    }
#endif

    float acc[WM][DV / 8][4], m[WM][2], l[WM][2];
#pragma unroll
    for (int x = 0; x < WM; ++x)
#pragma unroll
        for (int n = 0; n < DV / 8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) acc[x][n][e] = 0.f;
#pragma unroll
    for (int x = 0; x < WM; ++x)
#pragma unroll
        for (int r = 0; r < 2; ++r) { m[x][r] = NEG_INF; l[x][r] = 0.f; }

#if STATE
    const i64 srow = ((i64)at.q_batch * a.heads + at.h) * span.sq;
#pragma unroll
    for (int x = 0; x < WM; ++x)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            int row = row0 + x * 16 + r * 8;
            if (row >= span.sq) continue;
            m[x][r] = ((const float*)a.m)[srow + row];
            l[x][r] = (lane & 3) == 0 ? ((const float*)a.l)[srow + row] : 0.f;
            const float* from = (const float*)a.acc + (srow + row) * a.dv;
#pragma unroll
            for (int n = 0; n < DV / 8; ++n)
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    int col = n * 8 + 2 * (lane & 3) + e;
                    if (col < a.dv) acc[x][n][2 * r + e] = from[col];
                }
        }
#endif

#if EXTRAS == 2
    const u32 b_at = kv_at + STAGES * STAGE_BYTES, m_at = b_at + BM * PITCH_B;
#endif
#if QREG
    u32 qf[DP / 16][WM][4];
#endif
    const float c = SCORE ? LOG2E : a.scale * LOG2E;
    u32 stage = 0;

    // Whether some row of the block cannot see some key of tile j.
    auto crossed = [&](int j) {
        const int key0 = j * BN;
        return MASK == 0 ? key0 + BN > span.sk : key0 + BN - 1 > min(span.sk - 1, i0 + span.hi_off) || (MASK == 2 && key0 < i1 - 1 + span.lo_off);
    };
    auto step = [&](int j, auto on_edge) __attribute__((always_inline)) {
        const bool edge = on_edge;
        const int key0 = j * BN;
        const u32 k_at = kv_at + stage, v_at = k_at + K_BYTES;
        const Weights weights = {score, a, span, row0, key0, lane, c};
#if PAIRS
        float k_factor[BN / 8][2], v_factor[BN / 8][2];
        key_factors(k_factor, kf, a.k.ss / COLS_K, key0, span.sk - 1, lane);
#if STAGES == 2
        key_factors(v_factor, vf, a.v.ss / COLS_V, key0, span.sk - 1, lane);
#endif
#endif
        cp_wait<0>();
#if STAGES == 2
        const bool poison = LOOK_THROUGH(v_at);
#else
        __syncthreads();
        load_tile<BN, COLS_V, NT, PITCH_V, DENSE>(v_at, a.v, vp, key0, span.sk, dv, tid);
#if EXTRAS == 2
        if (score.bias) load_piece<BM, BN, NT>(b_at, a.bias, score.bias, i0, key0, span, tid);
        if (score.mask) load_piece<BM, BN, NT>(m_at, a.mask, score.mask, i0, key0, span, tid);
#endif
        cp_commit();
#endif
#if QREG
        if (j == jmax) {
            u32 from = q_at + (warp * WM * 16 + (lane & 15)) * PITCH_Q + (lane >> 4) * 16;
#pragma unroll
            for (int kk = 0; kk < DP / 16; ++kk)
#pragma unroll
                for (int x = 0; x < WM; ++x) ldsm4(qf[kk][x], from + x * 16 * PITCH_Q + kk * 32);
        }
#endif
#if STAGES == 2
        if (j > jmin) {
            const u32 next = kv_at + (stage ^ STAGE_BYTES);
            load_tile<BN, COLS_K, NT, PITCH_K, DENSE>(next, a.k, kp, key0 - BN, span.sk, d, tid);
            load_tile<BN, COLS_V, NT, PITCH_V, DENSE>(next + K_BYTES, a.v, vp, key0 - BN, span.sk, dv, tid);
            cp_commit();
        }
        stage ^= STAGE_BYTES;
#endif
        // A tile whose keys no row of this warp sees costs it nothing but the barriers.
        const bool idle = edge && MASK >= 1 && (key0 > w_hi || (MASK == 2 && key0 + BN - 1 < w_lo));
#if STAGES == 2
        if (poison) take_nonfinite<BN, DV, NT, PITCH_V, DENSE>(acc, v_at, weights, tid);
        if (idle) return;
#else
        auto turn = [&] {
            // V has arrived, and nobody reads K any more.
#if PAIRS
            key_factors(v_factor, vf, a.v.ss / COLS_V, key0, span.sk - 1, lane);
#endif
            cp_wait<0>();
            const bool poison = LOOK_THROUGH(v_at);
            if (j > jmin) {
                load_tile<BN, COLS_K, NT, PITCH_K, DENSE>(k_at, a.k, kp, key0 - BN, span.sk, d, tid);
                cp_commit();
            }
            if (poison) take_nonfinite<BN, DV, NT, PITCH_V, DENSE>(acc, v_at, weights, tid);
        };
        if (idle) {
            turn();
            return;
        }
#endif

        float s[WM][BN / 8][4];
#pragma unroll
        for (int x = 0; x < WM; ++x)
#pragma unroll
            for (int n = 0; n < BN / 8; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) s[x][n][e] = 0.f;
#if PAIRS
        product_pairs<WM, BN / 8, DP, DENSE>(s, q_at + warp * WM * 16 * PITCH_Q, PITCH_Q, k_at, PITCH_K, lane);
#elif QREG
        product_nt<WM, BN / 8, DP, true, DENSE>(s, 0, PITCH_K, qf, k_at, PITCH_K, lane);
#else
        product_nt<WM, BN / 8, DP, false, DENSE>(s, q_at + warp * WM * 16 * PITCH_Q, PITCH_Q, nullptr, k_at, PITCH_K, lane);
#endif
#if STAGES == 1
        turn();
#endif

#if PAIRS
#pragma unroll
        for (int x = 0; x < WM; ++x)
#pragma unroll
            for (int n = 0; n < BN / 8; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) s[x][n][e] *= q_factor[x][e >> 1] * fabsf(k_factor[n][e & 1]);
#endif
#if SCORE == 2
#if EXTRAS == 2
        const u32 own = warp * WM * 16 + (lane >> 2);
        const Pieces pieces = {b_at + own * PITCH_B + (lane & 3) * 4, PITCH_B, m_at + own * PITCH_M + (lane & 3) * 2, PITCH_M};
#else
        const Pieces pieces = {};
#endif
        score_tile<false>(s, score, a, span, row0, key0 + 2 * (lane & 3), pieces);
#elif SCORE == 1
        scale_tile(s, a);
#endif
        if (edge) hide_edge(s, span, row0, key0, lane);
        float mc[WM][2];
        raise_max(s, m, l, acc, mc, c);
#if PAIRS
        add_values_pairs<DENSE>(acc, l, s, mc, weights, v_factor, v_at, PITCH_V);
#else
        add_values<DENSE>(acc, l, s, mc, weights, v_at, PITCH_V);
#endif
    };
    int j = jmax;
#if PEEL && SCORE < 2 && !DROPOUT && !STATE
    // Tiles that every row sees whole have a loop of their own, without a look at bounds or at what V holds.
    while (j >= jmin) {
        for (; j >= jmin && crossed(j); --j) step(j, Known<true>());
        for (; j >= jmin && !crossed(j); --j) step(j, Known<false>());
    }
#else
    for (; j >= jmin; --j) step(j, crossed(j));
#endif
    cp_wait<0>();
    // Where no tile was, no barrier was either: Q that other threads brought is on its way to rows that the output takes.
    __syncthreads();

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
            if (row >= span.sq) continue;
            if ((lane & 3) == 0) {
                ((float*)a.m)[srow + row] = m[x][r];
                ((float*)a.l)[srow + row] = l[x][r];
            }
            float* to = (float*)a.acc + (srow + row) * a.dv;
#pragma unroll
            for (int n = 0; n < DV / 8; ++n)
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    int col = n * 8 + 2 * (lane & 3) + e;
                    if (col < a.dv) to[col] = acc[x][n][2 * r + e];
                }
        }
#else
    // A warp's own Q rows are its staging area: nobody else reads them.
    write_rows(acc, m, l, at, a, smem + warp * WM * 16 * PITCH_Q, PITCH_Q, w0, 0, lane);
#if PAIRS && __CUDA_ARCH__ >= 900
    // Whatever comes next on the stream must find the pairs' kernel ended, also where no row asked for the last of them.
    if (a.s && blockIdx.x == gridDim.x - 1) asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
#endif
}
