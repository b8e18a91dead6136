// Standard attention (Dao et al. 2022, Algorithm 0): S = Q K^T, P = softmax(S), O = P V as separate kernels, with S (f32) and
// P (the input's dtype) in device memory. The baseline the other two are measured against.
//
//   WM_ x WN_ warps; a warp owns MT x 16 rows (and NTW x 8 columns of S).   BK keys a step of P V.   RT threads a softmax row
//   DP: columns of Q and K that are in shared memory at a time (scores); columns of V and O a block makes (out)

#define NT (WARPS_M * WARPS_N * 32)
#define BM (WARPS_M * MT * 16)
#define COLS_S (WARPS_N * NTW * 8)

// Row and head of a launch: the grid's y counts (batch, head) pairs of this chunk.
DEV void pair_of(const Args& a, int& pair, int& b, int& h, int& hk) {
    pair = a.pair0 + blockIdx.y;
    b = pair / a.heads;
    h = pair - b * a.heads;
    hk = h / a.group_size;
}

#if PART == 0
// S[i, j] = q_i . k_j, unscaled, for the rows this chunk holds.
extern "C" __global__ void __launch_bounds__(NT) tw_standard_scores(const __grid_constant__ Args a) {
    extern __shared__ __align__(128) char smem[];
    const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, wm = warp / WARPS_N, wn = warp % WARPS_N;
    const u32 q_at = smem_u32(smem), k_at = q_at + BM * PITCH;
    int pair, b, h, hk;
    pair_of(a, pair, b, h, hk);
    const int tiles_n = (a.sk + COLS_S - 1) / COLS_S;
    const int i0 = (blockIdx.x / tiles_n) * BM, j0 = (blockIdx.x % tiles_n) * COLS_S;
    float s[MT][NTW][4];
#pragma unroll
    for (int x = 0; x < MT; ++x)
#pragma unroll
        for (int n = 0; n < NTW; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) s[x][n][e] = 0.f;
    for (int d0 = 0; d0 < a.d; d0 += DP) {
        if (d0) __syncthreads(); // nobody reads the columns before any more
        load_tile<BM, DP, NT>(q_at, a.q, rows_of(a.q, b, h, 0) + d0 * a.q.sd, a.row0 + i0, min(a.sq, a.row0 + a.rows), a.d - d0, tid);
        load_tile<COLS_S, DP, NT>(k_at, a.k, rows_of(a.k, b, hk, 0) + d0 * a.k.sd, j0, a.sk, a.d - d0, tid);
        cp_commit();
        cp_wait<0>();
        __syncthreads();
        product_nt<MT, NTW, DP, false>(s, q_at + wm * MT * 16 * PITCH, PITCH, nullptr, k_at + wn * NTW * 8 * PITCH, PITCH, lane);
    }
#pragma unroll
    for (int x = 0; x < MT; ++x)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            int row = i0 + (wm * MT + x) * 16 + (lane >> 2) + r * 8;
            if (row >= a.rows) continue;
            float* to = (float*)a.s + ((i64)blockIdx.y * a.rows + row) * a.ld_s;
#pragma unroll
            for (int n = 0; n < NTW; ++n) {
                int col = j0 + (wn * NTW + n) * 8 + 2 * (lane & 3);
                // ld_s is even and at least sk, so the pair fits in the row.
                if (col < a.sk) *(float2*)(to + col) = make_float2(s[x][n][2 * r], s[x][n][2 * r + 1]);
            }
        }
}
#endif

#if PART == 1
// One row of P and lse, RT threads a row.
extern "C" __global__ void __launch_bounds__(256) tw_standard_softmax(const __grid_constant__ Args a) {
    __shared__ float red[2][256 / 32];
    constexpr int ROWS = 256 / RT;
    const int tid = threadIdx.x, t = tid % RT, row = blockIdx.x * ROWS + tid / RT;
    int pair, b, h, hk;
    pair_of(a, pair, b, h, hk);
    if (RT < 256 && row >= a.rows) return;
    const int i = a.row0 + row;
    const Span span = span_of(a);
    const int lo = first_key(span, i), hi = last_key(span, i);
    Score score = {};
    if (SCORE == 2 || DROPOUT) score = score_head(a, a.seq0 + b, b, h, 0, 0);
    auto final = [&](float raw, int j) { return SCORE == 2 ? score_at(raw, score, a, span, i, j) : SCORE ? score_of(raw, a) : raw; };
    const float* s = (const float*)a.s + ((i64)blockIdx.y * a.rows + row) * a.ld_s;
    elem* p = (elem*)a.p + ((i64)blockIdx.y * a.rows + row) * a.ld_p;
    const float c = SCORE ? LOG2E : a.scale * LOG2E;

    float m = NEG_INF, l = 0.f;
    auto take = [&](int j, float raw) {
        float x = final(raw, j);
        if (x > m) { // NaN is never greater: it goes into l below and stays there
            l *= ex2((m - x) * c);
            m = x;
        }
        l += m == NEG_INF ? (x == NEG_INF ? 0.f : ex2(x * c)) : ex2((x - m) * c);
    };
    // Four at a time where the row's live range allows it.
    int j4 = (lo + 3) & ~3, e4 = (hi + 1) & ~3;
    if (j4 < e4) {
        for (int j = lo + t; j < j4; j += RT) take(j, s[j]);
        for (int j = j4 + 4 * t; j < e4; j += 4 * RT) {
            float4 x = *(const float4*)(s + j);
            take(j, x.x); take(j + 1, x.y); take(j + 2, x.z); take(j + 3, x.w);
        }
        for (int j = e4 + t; j <= hi; j += RT) take(j, s[j]);
    } else {
        for (int j = lo + t; j <= hi; j += RT) take(j, s[j]);
    }
    auto join = [&](float m2, float l2) {
        float now = fmaxf(m, m2), ref = now == NEG_INF ? 0.f : now;
        l = l * ex2((m - ref) * c) + l2 * ex2((m2 - ref) * c);
        m = now;
    };
#pragma unroll
    for (int x = 16; x; x >>= 1) join(__shfl_xor_sync(0xffffffffu, m, x), __shfl_xor_sync(0xffffffffu, l, x));
    if (RT > 32) {
        if ((tid & 31) == 0) { red[0][tid >> 5] = m; red[1][tid >> 5] = l; }
        __syncthreads();
        m = NEG_INF; l = 0.f;
#pragma unroll
        for (int w = 0; w < RT / 32; ++w) join(red[0][w], red[1][w]);
    }
    float lse, factor;
    finish_row(m, l, h, a, lse, factor);
    const float ref = m == NEG_INF ? 0.f : m;
    if (t == 0 && a.lse) ((float*)a.lse)[(i64)pair * a.lse_ld + i] = lse;
    auto prob = [&](int j, float raw) { return j < lo || j > hi ? 0.f : ex2((final(raw, j) - ref) * c) * factor; };
    // The whole padded row is written: zero where a key is hidden or does not exist.
    for (int j = 4 * t; j < a.ld_p; j += 4 * RT) {
        float4 x = j < a.ld_s ? *(const float4*)(s + j) : make_float4(0.f, 0.f, 0.f, 0.f);
        float p0 = prob(j, x.x), p1 = prob(j + 1, x.y), p2 = prob(j + 2, x.z), p3 = prob(j + 3, x.w);
#if DROPOUT
        if (!kept_at(score, a, span, i, j)) p0 = 0.f;
        if (!kept_at(score, a, span, i, j + 1)) p1 = 0.f;
        if (!kept_at(score, a, span, i, j + 2)) p2 = 0.f;
        if (!kept_at(score, a, span, i, j + 3)) p3 = 0.f;
#endif
#if F32
        *(float4*)(p + j) = make_float4(p0, p1, p2, p3);
#else
        *(uint2*)(p + j) = make_uint2(pack2(p0, p1), pack2(p2, p3));
#endif
    }
}
#endif

#if PART == 2
// O = P V. A warp owns MT x 16 rows and DP / WARPS_N columns.
#define DW (DP / WARPS_N)
#define PP PITCH_OF(BK)
#define STAGE_BYTES (BM * PP + BK * PITCH)
extern "C" __global__ void __launch_bounds__(NT) tw_standard_out(const __grid_constant__ Args a) {
    extern __shared__ __align__(128) char smem[];
    const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, wm = warp / WARPS_N, wn = warp % WARPS_N;
    int pair, b, h, hk;
    pair_of(a, pair, b, h, hk);
    const int parts = max(1, (a.dv + DP - 1) / DP);
    const int i0 = blockIdx.x / parts * BM, col0 = blockIdx.x % parts * DP;
    const elem* vp = rows_of(a.v, b, hk, 0) + col0 * a.v.sd;
    const Span span = span_of(a);
    Score score = {};
    if (SCORE == 2 || DROPOUT) score = score_head(a, a.seq0 + b, b, h, 0, 0);
    const char* pp = (const char*)((const elem*)a.p + ((i64)blockIdx.y * a.rows + i0) * a.ld_p);
    const u32 base = smem_u32(smem);

    auto load = [&](int step, int stage) {
        const u32 at = base + stage * STAGE_BYTES;
        constexpr int CH = BK / EPC;
        for (int idx = tid; idx < BM * CH; idx += NT) {
            int r = idx / CH, c = idx % CH, col = step * BK + c * EPC;
            cp_async16(at + r * PP + c * 16, pp + (r * a.ld_p + col) * ESZ, (i0 + r < a.rows && col < a.ld_p) ? 16 : 0);
        }
        load_tile<BK, DP, NT>(at + BM * PP, a.v, vp, step * BK, a.sk, a.dv - col0, tid);
        cp_commit();
    };

    float acc[MT][DW / 8][4];
#pragma unroll
    for (int x = 0; x < MT; ++x)
#pragma unroll
        for (int n = 0; n < DW / 8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) acc[x][n][e] = 0.f;
    const int steps = (a.sk + BK - 1) / BK;
    load(0, 0);
    for (int j = 0; j < steps; ++j) {
        const u32 p_at = base + (j & 1) * STAGE_BYTES, v_at = p_at + BM * PP;
        cp_wait<0>();
#if GUARD_V
        if (__syncthreads_or(scan_tile<BK, DP, NT>(v_at, tid))) {
#pragma unroll 1
            for (int k = 0; k < BK; ++k)
#pragma unroll
                for (int x = 0; x < MT; ++x)
#pragma unroll
                    for (int r = 0; r < 2; ++r) {
                        int row = a.row0 + i0 + (wm * MT + x) * 16 + (lane >> 2) + r * 8, key = j * BK + k;
                        if (key > last_key(span, row) || key < first_key(span, row) || hidden_at(score, a, span, row, key)) continue;
                        if (DROPOUT && !kept_at(score, a, span, row, key)) continue;
#pragma unroll
                        for (int n = 0; n < DW / 8; ++n)
#pragma unroll
                            for (int e = 0; e < 2; ++e) acc[x][n][2 * r + e] += nonfinite_at(v_at, PITCH, k, wn * DW + n * 8 + 2 * (lane & 3) + e);
                    }
            __syncthreads();
            clear_tile<BK, DP, NT>(v_at, tid);
            __syncthreads();
        }
#else
        __syncthreads();
#endif
        if (j + 1 < steps) load(j + 1, (j + 1) & 1);
#if !F32
        const u32 pat = p_at + (wm * MT * 16 + (lane & 15)) * PP + (lane >> 4) * 16;
        const u32 vat = v_at + (lane & 15) * PITCH + (lane >> 4) * 16 + wn * DW * 2;
#pragma unroll
        for (int kk = 0; kk < BK / 16; ++kk) {
            u32 pf[MT][4];
#pragma unroll
            for (int x = 0; x < MT; ++x) ldsm4(pf[x], pat + x * 16 * PP + kk * 32);
#pragma unroll
            for (int n = 0; n < DW / 16; ++n) {
                u32 vf[4];
                ldsm4t(vf, vat + kk * 16 * PITCH + n * 32);
#pragma unroll
                for (int x = 0; x < MT; ++x) {
                    mma(acc[x][2 * n], pf[x], vf[0], vf[1]);
                    mma(acc[x][2 * n + 1], pf[x], vf[2], vf[3]);
                }
            }
        }
#else
        const u32 pat = p_at + (wm * MT * 16 + (lane >> 2)) * PP + 8 * (lane & 3);
        const u32 vat = v_at + 2 * (lane & 3) * PITCH + (lane >> 2) * 4 + wn * DW * 4;
#pragma unroll
        for (int n = 0; n < DW / 8; ++n) {
            float part[MT][4];
#pragma unroll
            for (int x = 0; x < MT; ++x)
#pragma unroll
                for (int e = 0; e < 4; ++e) part[x][e] = 0.f;
#pragma unroll 2
            for (int kk = 0; kk < BK / 8; ++kk) {
                u32 v[2] = {lds32(vat + kk * 8 * PITCH + n * 32), lds32(vat + (kk * 8 + 1) * PITCH + n * 32)}, vh[2], vl[2];
                split_all(v, vh, vl);
#pragma unroll
                for (int x = 0; x < MT; ++x) {
                    const u32 at = pat + x * 16 * PP + kk * 32;
                    u32 pf[4] = {lds32(at), lds32(at + 8 * PP), lds32(at + 4), lds32(at + 8 * PP + 4)}, ph[4], pl[4];
                    split_all(pf, ph, pl);
                    mma3(part[x], ph, pl, vh[0], vl[0], vh[1], vl[1]);
                }
            }
#pragma unroll
            for (int x = 0; x < MT; ++x)
#pragma unroll
                for (int e = 0; e < 4; ++e) acc[x][n][e] += part[x][e];
        }
#endif
    }
    elem* op = (elem*)rows_of(a.o, b, h, 0);
#pragma unroll
    for (int x = 0; x < MT; ++x)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            int row = i0 + (wm * MT + x) * 16 + (lane >> 2) + r * 8;
            if (row >= a.rows) continue;
            elem* to = op + (i64)(a.row0 + row) * a.o.ss;
#pragma unroll
            for (int n = 0; n < DW / 8; ++n) {
                int col = col0 + wn * DW + n * 8 + 2 * (lane & 3);
                if (col < a.dv) to[col] = to_elem(acc[x][n][2 * r]);
                if (col + 1 < a.dv) to[col + 1] = to_elem(acc[x][n][2 * r + 1]);
            }
        }
}
#endif
