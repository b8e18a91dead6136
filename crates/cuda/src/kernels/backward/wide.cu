// Gradients for head_dim or head_dim_v above 256: the products of fa2.cu and dq.cu, cut by columns.
//
// Neither Q, K, V nor dO lies in shared memory whole: S and dP are sums over slices of DP columns, which stream through it side by
// side. A block makes DV columns of one gradient, in registers and in a fixed order: dK or dV of its keys, while the rows of the
// group's query heads pass by (KEYS 1), or dQ of its rows, while the keys do (KEYS 0). Blocks of other columns (the grid's y)
// make the same scores again, so that they share nothing.
//
// What is a block's own (its keys, or its rows) is called x here, what passes by y.
//
//   WARPS   half as many groups of sixteen x; the two warps of a group halve the tile's y, and the columns of the gradient
//   BY y a tile     DP columns a slice     DV columns a block

#define NT (WARPS * 32)
#define BX (WARPS * 8)
#define YT (BY / 16)
#define VN (DV / 16)
#define PP PITCH_OF(BY)
#define PITCH_V PITCH_OF(DV)
#define SLICES ((BX + BY) * PITCH)

extern "C" __global__ void __launch_bounds__(NT) tw_bwd_wide(const __grid_constant__ Grads g) {
    extern __shared__ __align__(128) char smem[];
    const Args& a = g.f;
    const Span span = span_of(a);
    const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, xw = warp >> 1, yw = warp & 1;
    // Columns of y that the gradient is a sum of; slices; P or dX.
    const u32 sum_at = smem_u32(smem), slices_at = sum_at + BY * PITCH_V, strip = slices_at + 2 * SLICES;
    [[maybe_unused]] u32* const odd_rows = (u32*)(smem + BY * PITCH_V + 2 * SLICES + BX * PP);

    // Under causality the first keys and the last rows have the most work and go first.
    const int xs = KEYS ? g.key_blocks : a.row_blocks, own_heads = KEYS ? g.kv_heads : a.heads, pairs = KEYS ? g.kv_pairs : a.pairs;
    const int block = blockIdx.x / pairs, pair = blockIdx.x - block * pairs, b = pair / own_heads, own_head = pair - b * own_heads;
    const int hk = KEYS ? own_head : own_head / a.group_size;
    const int x0 = (KEYS || MASK == 0 ? block : xs - 1 - block) * BX, xn = KEYS ? a.sk : a.sq, yn = KEYS ? a.sq : a.sk;
    const int k_slices = (a.d + DP - 1) / DP, v_slices = (a.dv + DP - 1) / DP;
    // Those of the grid's y that make dK come first.
    const int of_k = (a.d + DV - 1) / DV;
    const bool is_v = KEYS && (int)blockIdx.y >= of_k;
    const int col0 = ((int)blockIdx.y - (is_v ? of_k : 0)) * DV, width = (is_v ? a.dv : a.d) - col0;

    // Tiles of y that see some x of this block, or are seen.
    int first, last;
    if (KEYS) {
        first = MASK >= 1 ? max(0, x0 - a.hi_off) / BY : 0;
        last = (a.sq + BY - 1) / BY - 1;
        const int x1 = min(x0 + BX, a.sk);
        if (MASK == 2) last = x1 - 1 - a.lo_off < 0 ? -1 : min(last, (x1 - 1 - a.lo_off) / BY);
    } else {
        const int lo = first_key(span, x0), hi = last_key(span, min(x0 + BX, a.sq) - 1);
        first = hi >= lo ? lo / BY : 0;
        last = hi >= lo ? hi / BY : -1;
    }
    const int count = max(0, last - first + 1), steps = KEYS ? count * a.group_size : count;
    // Query head and first y of a step.
    auto place = [&](int step, int& h, int& y0) {
        const int n = KEYS ? step / count : 0;
        h = KEYS ? hk * a.group_size + n : own_head;
        y0 = (first + step - n * count) * BY;
    };
    auto base = [&](const Tensor& t, int head, int column) { return (const elem*)t.ptr + b * t.sb + head * t.sh + column * t.sd; };

    // A slice of the operands of S, or after those of dP. dV takes no dP.
    const int parts = k_slices + (is_v ? 0 : v_slices);
    auto load = [&](int step, int part, u32 to) {
        int h, y0;
        place(step, h, y0);
        const bool is_s = part < k_slices;
        const Tensor &x = is_s ? (KEYS ? a.k : a.q) : (KEYS ? a.v : g.go), &y = is_s ? (KEYS ? a.q : a.k) : (KEYS ? g.go : a.v);
        const int column = (is_s ? part : part - k_slices) * DP, rest = (is_s ? a.d : a.dv) - column;
        load_tile<BX, DP, NT>(to, x, base(x, own_head, column), x0, xn, rest, tid);
        load_tile<BY, DP, NT>(to + BX * PITCH, y, base(y, KEYS ? h : hk, column), y0, yn, rest, tid);
    };
    const Tensor& summed = KEYS ? (is_v ? g.go : a.q) : a.k;

    float sum[1][VN][4];
    clear(sum);
    u32 slices = slices_at;
    if (steps > 0) load(0, 0, slices);
    cp_commit();
    for (int step = 0; step < steps; ++step) {
        int h, y0;
        place(step, h, y0);
        const elem* const from = base(summed, KEYS ? h : hk, col0);
        float s[1][YT][4], dp[1][YT][4];
        clear(s);
        clear(dp);
#pragma unroll 1
        for (int part = 0; part < parts; ++part) {
            // The slice has arrived, and nobody reads the other place any more, nor (before the first) what the last step left.
            cp_wait<0>();
            __syncthreads();
            const u32 x_at = slices + xw * 16 * PITCH, y_at = slices + (BX + yw * (BY / 2)) * PITCH;
            slices = slices_at + SLICES - (slices - slices_at);
            if (part == 0) {
                load_tile<BY, DV, NT>(sum_at, summed, from, y0, yn, width, tid);
                if (FENCED && tid < (BY + 31) / 32) odd_rows[tid] = 0;
            }
            if (part + 1 < parts) load(step, part + 1, slices);
            else if (step + 1 < steps) load(step + 1, 0, slices);
            cp_commit();
            if (part < k_slices) product_nt<1, YT, DP, false>(s, x_at, PITCH, nullptr, y_at, PITCH, lane);
            else product_nt<1, YT, DP, false>(dp, x_at, PITCH, nullptr, y_at, PITCH, lane);
        }
        if (parts == 1) {
            cp_wait<0>();
            __syncthreads();
        }
#if FENCED
        bool odd = mend_tile<BY, DV, NT>(sum_at, tid, odd_rows);
#endif

        // This lane's first x and y.
        const int x = x0 + xw * 16 + (lane >> 2), y = y0 + yw * (BY / 2) + 2 * (lane & 3);
        const Score sc = score_head(a, a.seq0 + b, b, h, 0, 0);
        constexpr int STATS = KEYS ? 2 * YT : 2;
        float lse2[STATS], delta[STATS];
#pragma unroll
        for (int n = 0; n < STATS; ++n) {
            const i64 at = (i64)(b * a.heads + h) * g.rows_padded + (KEYS ? y + n / 2 * 8 + (n & 1) : x + n * 8);
            lse2[n] = ((const float*)g.lse2)[at];
            delta[n] = ((const float*)g.delta)[at];
        }
#define OF_ROW(n, e) (KEYS ? 2 * (n) + ((e) & 1) : (e) >> 1)
        float slope[1][SCORE ? YT : 1][4];
        weights<KEYS, true>(s, slope, sc, a, span, x, y, [&](int, int n, int e) { return lse2[OF_ROW(n, e)]; });
#if DROPOUT
        Kept<KEYS, 1, YT> kept;
        kept.find(sc, a, span, x, y, lane);
#endif
#pragma unroll
        for (int n = 0; n < YT; ++n)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                float out[2];
#pragma unroll
                for (int c = 0; c < 2; ++c) {
                    const int e = 2 * r + c, mine = x + r * 8, other = y + n * 8 + c, i = KEYS ? other : mine, j = KEYS ? mine : other;
                    const bool live = i < a.sq && j <= last_key(span, i) && j >= first_key(span, i) && __float_as_uint(lse2[OF_ROW(n, e)]) != UNSEEN && !is_hidden(s[0][n][e]);
                    float w = live ? s[0][n][e] : 0.f, arrived = dp[0][n][e];
#if DROPOUT
                    arrived = kept.of(arrived, 0, n, e, a);
#endif
                    float ds = w * (arrived - delta[OF_ROW(n, e)]);
#if SCORE
                    ds *= slope[0][n][e];
#endif
                    if (!live) ds = 0.f;
#if DROPOUT
                    w = kept.of(w, 0, n, e, a);
#endif
                    out[c] = is_v ? w : ds;
                }
                store_pair(strip + (xw * 16 + (lane >> 2) + r * 8) * PP + (yw * (BY / 2) + n * 8 + 2 * (lane & 3)) * ESZ, out[0], out[1]);
            }
#if FENCED
        odd = __syncthreads_or(odd);
#else
        __syncthreads();
#endif
        product_nn<1, VN, BY, false>(sum, strip + xw * 16 * PP, PP, nullptr, sum_at + yw * (DV / 2) * ESZ, PITCH_V, lane);
#if FENCED
        if (is_v && odd)
#pragma unroll 1
            for (int i = 0; i < BY; ++i)
                if (odd_rows[i / 32] >> i % 32 & 1) add_odd_row(sum, from + (i64)(y0 + i) * summed.ss, summed.sd, width, sc, a, span, y0 + i, x, yw * (DV / 2) + 2 * (lane & 3));
#endif
    }
    cp_wait<0>();
    // All of the shared memory is free for the gradient on its way out.
    __syncthreads();
#pragma unroll
    for (int n = 0; n < VN; ++n)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float scale = is_v ? 1.f : a.scale;
            store_pair(sum_at + (xw * 16 + (lane >> 2) + r * 8) * PITCH_V + (yw * (DV / 2) + n * 8 + 2 * (lane & 3)) * ESZ, sum[0][n][2 * r] * scale, sum[0][n][2 * r + 1] * scale);
        }
    __syncthreads();
    const Tensor& to = KEYS ? (is_v ? g.dv : g.dk) : g.dq;
    store_tile<BX, DV, NT>(smem, to, (elem*)to.ptr + b * to.sb + own_head * to.sh + col0, x0, xn, width, tid);
}
