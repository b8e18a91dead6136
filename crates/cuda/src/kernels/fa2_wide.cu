// FlashAttention-2 forward for head_dim or head_dim_v above 256: as fa2.cu, but neither Q nor K lies in shared memory whole, and no
// warp holds a whole row of the output.
//
// Scores are sums over slices of DP columns of Q and K that stream through shared memory side by side. A block makes DV columns
// of the output; blocks of other columns (the grid's y) compute the same scores again, so they share nothing and need no order.
//
//   BM = WARPS * WM * 16 rows a block     BN keys a tile     DP columns of Q and K a slice     DV columns of V and O a block

#define NT (WARPS * 32)
#define BM (WARPS * WM * 16)
#define DENSE (!F32)
#define PITCH_K (DENSE ? DENSE_PITCH(DP) : PITCH)
#define PITCH_V (DENSE ? DENSE_PITCH(DV) : PITCH_OF(DV))
#define SLICE_BYTES (BM * PITCH + BN * PITCH_K)

extern "C" __global__ void __launch_bounds__(NT, MINB) tw_fa2_wide(const __grid_constant__ Args a) {
    extern __shared__ __align__(128) char smem[];
    const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
    const u32 base = smem_u32(smem), v_at = base + 2 * SLICE_BYTES;
    const int col0 = blockIdx.y * DV, slices = (a.d + DP - 1) / DP;

    const Place at = place_of(a);
    const Span span = at.span;
    const elem* qp = rows_of(a.q, at.q_batch, at.h, at.q_row);
    const elem* kp = rows_of(a.k, at.k_batch, at.hk, at.k_row);
    const elem* vp = rows_of(a.v, at.k_batch, at.hk, at.k_row) + col0 * a.v.sd;
    Score score = {};
    if (SCORE == 2 || DROPOUT) score = score_head(a, at.seq, at.q_batch, at.h, at.q_row, at.k_row);
    [[maybe_unused]] const bool hides = DROPOUT || score.mask || score.bias;

    const int i0 = at.rb * BM, i1 = min(i0 + BM, span.sq);
    const int key_hi = last_key(span, i1 - 1), key_lo = first_key(span, i0);
    const bool any = key_hi >= key_lo;
    const int jmax = any ? key_hi / BN : -1, jmin = any ? key_lo / BN : 0;
    const int w0 = i0 + warp * WM * 16, row0 = w0 + (lane >> 2);

    // Slice t of tile j into the stage of its parity; what comes after the last slice of a tile is the first of the next.
    auto load = [&](int j, int t, u32 stage) {
        load_tile<BM, DP, NT>(stage, a.q, qp + t * DP * a.q.sd, i0, span.sq, a.d - t * DP, tid);
        load_tile<BN, DP, NT, PITCH_K, DENSE>(stage + BM * PITCH, a.k, kp + t * DP * a.k.sd, j * BN, span.sk, a.d - t * DP, tid);
    };
    if (any) load(jmax, 0, base);
    cp_commit();

    float acc[WM][DV / 8][4], m[WM][2], l[WM][2];
#pragma unroll
    for (int x = 0; x < WM; ++x)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            m[x][r] = NEG_INF;
            l[x][r] = 0.f;
#pragma unroll
            for (int n = 0; n < DV / 8; ++n) acc[x][n][2 * r] = acc[x][n][2 * r + 1] = 0.f;
        }
    const float c = SCORE ? LOG2E : a.scale * LOG2E;
    u32 stage = base;

    for (int j = jmax; j >= jmin; --j) {
        const int key0 = j * BN;
        const Weights weights = {score, a, span, row0, key0, lane, c};
#if MASK >= 1
        const bool edge = key0 + BN - 1 > min(span.sk - 1, i0 + span.hi_off) || (MASK == 2 && key0 < i1 - 1 + span.lo_off);
#else
        const bool edge = key0 + BN > span.sk;
#endif
        float s[WM][BN / 8][4];
#pragma unroll
        for (int x = 0; x < WM; ++x)
#pragma unroll
            for (int n = 0; n < BN / 8; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) s[x][n][e] = 0.f;
#pragma unroll 1
        for (int t = 0; t < slices; ++t) {
            // The slice has arrived, and nobody reads the other stage any more, nor (before the first slice) V.
            cp_wait<0>();
            __syncthreads();
            const u32 q_at = stage, k_at = stage + BM * PITCH;
            stage = base + SLICE_BYTES - (stage - base);
            if (t == 0) load_tile<BN, DV, NT, PITCH_V, DENSE>(v_at, a.v, vp, key0, span.sk, a.dv - col0, tid);
            if (t + 1 < slices) load(j, t + 1, stage);
            else if (j > jmin) load(j - 1, 0, stage);
            cp_commit();
            product_nt<WM, BN / 8, DP, false, DENSE>(s, q_at + warp * WM * 16 * PITCH, PITCH, nullptr, k_at, PITCH_K, lane);
        }
#if SCORE == 2
        score_tile<false>(s, score, a, span, row0, key0 + 2 * (lane & 3));
#elif SCORE == 1
        scale_tile(s, a);
#endif
        if (edge) hide_edge(s, span, row0, key0, lane);
        float mc[WM][2];
        raise_max(s, m, l, acc, mc, c);
        cp_wait<0>();
        if (arrived_nonfinite<BN, DV, NT, PITCH_V, DENSE>(v_at, edge || F32 || hides, tid)) take_nonfinite<BN, DV, NT, PITCH_V, DENSE>(acc, v_at, weights, tid);
        add_values<DENSE>(acc, l, s, mc, weights, v_at, PITCH_V);
    }
    cp_wait<0>();
    // The staging rows of one warp lie where others read slices and V.
    __syncthreads();
#pragma unroll
    for (int x = 0; x < WM; ++x)
#pragma unroll
        for (int r = 0; r < 2; ++r) l[x][r] = quad_sum(l[x][r]);
    write_rows(acc, m, l, at, a, smem + warp * WM * 16 * PITCH_OF(DV), PITCH_OF(DV), w0, col0, lane);
}
