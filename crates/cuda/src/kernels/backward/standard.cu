// Standard attention's backward pass (Dao et al. 2022, Algorithm 3): S, P, dP and dS as whole matrices in device memory, S and dP
// in f32, P and dS in the input's dtype, each product a kernel of its own. The baseline the other two are measured against.
//
//   PART 0, scores: S = Q K^T (row0 = 0) or dP = dO V^T (row0 = 1), unscaled; row0 + 2: added to what is there
//   PART 1, weights: P o D and dX from S and dP
//   PART 2, rows: dQ = dX K            PART 3, keys: dK = dX^T Q (row0 = 0) or dV = (P o D)^T dO (row0 = 1), over the group's heads
//   PART 4 and 5, bias: its gradient from S and dP, for every algorithm
//
//   2 x 2 warps     BM x BN tile of a matrix     WIDE columns of a product's other operand
//   Rows wider than 256 come in slices: q, k and dq, or v, dO and dv, then begin at a slice, and d or dv is its width.
//
// Matrices are of pairs [pair0, pair0 + pairs), all rows of each, ld_s elements a row: a.s and g.dq_acc hold S and dP, a.p and a.acc
// hold P and dX.

#define NT 128
#define PITCH_C PITCH_OF(WIDE)

#if PART == 0
extern "C" __global__ void __launch_bounds__(NT) tw_bwd_standard_scores(const __grid_constant__ Grads g) {
    extern __shared__ __align__(128) char smem[];
    const Args& a = g.f;
    const int tid = threadIdx.x, lane = tid & 31, wm = tid >> 6, wn = tid >> 5 & 1;
    const u32 x_at = smem_u32(smem), y_at = x_at + BM * PITCH_C;
    const int pair = a.pair0 + blockIdx.y, b = pair / a.heads, h = pair - b * a.heads, hk = h / a.group_size;
    const int tiles = (a.sk + BN - 1) / BN, i0 = blockIdx.x / tiles * BM, j0 = blockIdx.x % tiles * BN;
    const bool is_s = (a.row0 & 1) == 0, adds = a.row0 & 2;
    const Tensor &x = is_s ? a.q : g.go, &y = is_s ? a.k : a.v;
    const int width = is_s ? a.d : a.dv;
    load_tile<BM, WIDE, NT>(x_at, x, (const elem*)x.ptr + b * x.sb + h * x.sh, i0, a.sq, width, tid);
    load_tile<BN, WIDE, NT>(y_at, y, (const elem*)y.ptr + b * y.sb + hk * y.sh, j0, a.sk, width, tid);
    cp_commit();
    cp_wait<0>();
    __syncthreads();
    float s[BM / 32][BN / 16][4];
    clear(s);
    product_nt<BM / 32, BN / 16, WIDE, false>(s, x_at + wm * (BM / 2) * PITCH_C, PITCH_C, nullptr, y_at + wn * (BN / 2) * PITCH_C, PITCH_C, lane);
    float* to = (float*)(is_s ? a.s : g.dq_acc) + (i64)blockIdx.y * a.sq * a.ld_s;
#pragma unroll
    for (int m = 0; m < BM / 32; ++m)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int row = i0 + wm * (BM / 2) + m * 16 + (lane >> 2) + r * 8;
            if (row >= a.sq) continue;
#pragma unroll
            for (int n = 0; n < BN / 16; ++n) {
                const int col = j0 + wn * (BN / 2) + n * 8 + 2 * (lane & 3);
                // ld_s is even and at least sk, so the pair fits in the row.
                if (col >= a.sk) continue;
                float2* const cell = (float2*)(to + (i64)row * a.ld_s + col);
                const float2 before = adds ? *cell : make_float2(0.f, 0.f);
                *cell = make_float2(before.x + s[m][n][2 * r], before.y + s[m][n][2 * r + 1]);
            }
        }
}
#endif

#if PART == 1
// The smallest number above 0.
#if F32
#define SMALLEST __int_as_float(1)
#else
#define SMALLEST ((elem)1)
#endif

// One block a row.
extern "C" __global__ void __launch_bounds__(256) tw_bwd_standard_weights(const __grid_constant__ Grads g) {
    const Args& a = g.f;
    const Span span = span_of(a);
    const int i = blockIdx.x, pair = a.pair0 + blockIdx.y, b = pair / a.heads, h = pair - b * a.heads;
    const i64 at = ((i64)blockIdx.y * a.sq + i) * a.ld_s;
    const float *s = (const float*)a.s + at, *dp = (const float*)g.dq_acc + at;
    elem *p = (elem*)a.p + at, *dx = (elem*)a.acc + at;
    const float lse2 = ((const float*)g.lse2)[(i64)pair * g.rows_padded + i], delta = ((const float*)g.delta)[(i64)pair * g.rows_padded + i];
    const Score sc = score_head(a, a.seq0 + b, b, h, 0, 0);
    const int lo = first_key(span, i), hi = last_key(span, i);
    for (int j = threadIdx.x; j < a.ld_s; j += 256) {
        float w = 0.f, x = 0.f;
        bool least = false;
        if (j >= lo && j <= hi) {
            const float t = a.softcap > 0.f ? tanhf(s[j] * a.scale / a.softcap) : 0.f;
            const float score = SCORE == 2 ? score_at(s[j], sc, a, span, i, j) : score_of(s[j], a);
            // A score that hides the pair does so whatever the row is.
            const bool hidden = score == NEG_INF || __float_as_uint(lse2) == UNSEEN;
            w = hidden ? 0.f : ex2(fmaf(score, LOG2E, -lse2));
            const bool kept = !DROPOUT || kept_at(sc, a, span, i, j);
            const float factor = DROPOUT ? a.drop_scale : 1.f;
            x = hidden ? 0.f : w * ((kept ? dp[j] * factor : 0.f) - delta) * (1.f - t * t);
            w = kept ? w * factor : 0.f;
            // `keys` knows a pair that sees what is not finite of dO by a weight above 0.
            least = !hidden && kept && is_nan(delta);
        }
        p[j] = to_elem(w);
        if (least && to_float(p[j]) == 0.f) p[j] = SMALLEST;
        dx[j] = to_elem(x);
    }
}
#endif

// A tile of a matrix: rows [i0, i0 + BM), keys [j0, j0 + BN).
DEV void load_matrix(u32 to, const elem* from, const Args& a, int i0, int j0, int tid) {
    constexpr int CH = BN / EPC;
    for (int x = tid; x < BM * CH; x += NT) {
        const int r = x / CH, c = x % CH, col = j0 + c * EPC;
        const bool live = i0 + r < a.sq && col < a.ld_s;
        cp_async16(to + r * PITCH_OF(BN) + c * 16, from + (live ? (i64)(i0 + r) * a.ld_s + col : 0), live ? 16 : 0);
    }
}

// A product of 2 x 2 warps, WIDE columns, to rows [row, limit) of a tensor through shared memory.
template <int MT, int NTL> DEV void store_product(const float (&c)[MT][NTL][4], float scale, const char* smem, const Tensor& t, elem* base, int row, int limit, int width, int wm, int wn, int lane, int tid) {
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int r = 0; r < 2; ++r)
#pragma unroll
            for (int n = 0; n < NTL; ++n)
                store_pair(smem_u32(smem) + ((wm * MT + m) * 16 + (lane >> 2) + r * 8) * PITCH_C + ((wn * NTL + n) * 8 + 2 * (lane & 3)) * ESZ, c[m][n][2 * r] * scale, c[m][n][2 * r + 1] * scale);
    __syncthreads();
    store_tile<MT * 32, WIDE, NT>(smem, t, base, row, limit, width, tid);
}

#if PART == 2
extern "C" __global__ void __launch_bounds__(NT) tw_bwd_standard_rows(const __grid_constant__ Grads g) {
    extern __shared__ __align__(128) char smem[];
    const Args& a = g.f;
    const int tid = threadIdx.x, lane = tid & 31, wm = tid >> 6, wn = tid >> 5 & 1;
    const u32 x_at = smem_u32(smem), y_at = x_at + BM * PITCH_OF(BN);
    const int pair = a.pair0 + blockIdx.y, b = pair / a.heads, h = pair - b * a.heads, hk = h / a.group_size, i0 = blockIdx.x * BM;
    const elem* dx = (const elem*)a.acc + (i64)blockIdx.y * a.sq * a.ld_s;
    float dq[BM / 32][WIDE / 16][4];
    clear(dq);
    for (int j0 = 0; j0 < a.sk; j0 += BN) {
        __syncthreads();
        load_matrix(x_at, dx, a, i0, j0, tid);
        load_tile<BN, WIDE, NT>(y_at, a.k, (const elem*)a.k.ptr + b * a.k.sb + hk * a.k.sh, j0, a.sk, a.d, tid);
        cp_commit();
        cp_wait<0>();
        __syncthreads();
        mend_tile<BN, WIDE, NT>(y_at, tid, nullptr);
        __syncthreads();
        product_nn<BM / 32, WIDE / 16, BN, false>(dq, x_at + wm * (BM / 2) * PITCH_OF(BN), PITCH_OF(BN), nullptr, y_at + wn * (WIDE / 2) * ESZ, PITCH_C, lane);
    }
    __syncthreads();
    store_product<BM / 32, WIDE / 16>(dq, a.scale, smem, g.dq, (elem*)g.dq.ptr + b * g.dq.sb + h * g.dq.sh, i0, a.sq, a.d, wm, wn, lane, tid);
}
#endif

#if PART == 3
extern "C" __global__ void __launch_bounds__(NT) tw_bwd_standard_keys(const __grid_constant__ Grads g) {
    extern __shared__ __align__(128) char smem[];
    const Args& a = g.f;
    const int tid = threadIdx.x, lane = tid & 31, wm = tid >> 6, wn = tid >> 5 & 1;
    const u32 x_at = smem_u32(smem), y_at = x_at + BM * PITCH_OF(BN);
    const int kv = a.pair0 / a.group_size + blockIdx.y, b = kv / g.kv_heads, hk = kv - b * g.kv_heads, j0 = blockIdx.x * BN;
    const bool is_k = a.row0 == 0;
    const Tensor &y = is_k ? a.q : g.go, &to = is_k ? g.dk : g.dv;
    const int width = is_k ? a.d : a.dv;
    __shared__ u32 odd_rows[(BM + 31) / 32];
    float sum[BN / 32][WIDE / 16][4];
    clear(sum);
    for (int n = 0; n < a.group_size; ++n) {
        const int h = hk * a.group_size + n;
        const elem* x = (const elem*)(is_k ? a.acc : a.p) + ((i64)blockIdx.y * a.group_size + n) * a.sq * a.ld_s;
        for (int i0 = 0; i0 < a.sq; i0 += BM) {
            __syncthreads();
            load_matrix(x_at, x, a, i0, j0, tid);
            const elem* rows = (const elem*)y.ptr + b * y.sb + h * y.sh;
            load_tile<BM, WIDE, NT>(y_at, y, rows, i0, a.sq, width, tid);
            cp_commit();
            if (tid < (BM + 31) / 32) odd_rows[tid] = 0;
            cp_wait<0>();
            __syncthreads();
            const bool odd = __syncthreads_or(mend_tile<BM, WIDE, NT>(y_at, tid, odd_rows));
            product_tn<BN / 32, WIDE / 16, BM>(sum, x_at + wm * (BN / 2) * ESZ, PITCH_OF(BN), y_at + wn * (WIDE / 2) * ESZ, PITCH_C, lane);
            if (is_k || !odd) continue;
            // What is not finite of dO, for the keys that have a weight.
            const elem* const p = (const elem*)(smem + wm * (BN / 2) * ESZ);
            for (int i = 0; i < BM; ++i) {
                if (!(odd_rows[i / 32] >> i % 32 & 1)) continue;
#pragma unroll
                for (int n2 = 0; n2 < WIDE / 16; ++n2)
#pragma unroll
                    for (int e = 0; e < 4; ++e) {
                        const int col = wn * (WIDE / 2) + n2 * 8 + 2 * (lane & 3) + (e & 1);
                        const float v = col < width ? to_float(rows[(i0 + i) * y.ss + col * y.sd]) : 0.f;
                        if (is_finite(v)) continue;
#pragma unroll
                        for (int m = 0; m < BN / 32; ++m) {
                            const int key = m * 16 + (lane >> 2) + (e >> 1) * 8;
                            if (to_float(p[i * (PITCH_OF(BN) / ESZ) + key]) != 0.f) sum[m][n2][e] += v;
                        }
                    }
            }
        }
    }
    __syncthreads();
    store_product<BN / 32, WIDE / 16>(sum, is_k ? a.scale : 1.f, smem, to, (elem*)to.ptr + b * to.sb + hk * to.sh, j0, a.sk, width, wm, wn, lane, tid);
}
#endif

#if PART == 4
// dS of a chunk's pairs, summed over the axes along which the bias was broadcast, to f32 sums. RT threads an element of the sums,
// whose order is fixed: pairs one after another, then rows and keys.
extern "C" __global__ void __launch_bounds__(256) tw_bwd_standard_bias(const __grid_constant__ Grads g) {
    __shared__ double part[256];
    const Args& a = g.f;
    const Span span = span_of(a);
    const Tensor& to = g.dbias;
    const int tid = threadIdx.x, t = tid % RT;
    const i64 ni = to.ss ? a.sq : 1, nj = to.sd ? a.sk : 1, nh = to.sh ? a.heads : 1, nb = to.sb ? a.batch : 1, all = nb * nh * ni * nj;
    const i64 rows = to.ss ? 1 : a.sq, keys = to.sd ? 1 : a.sk;
    for (i64 at = (i64)blockIdx.x * (256 / RT) + tid / RT; at < all; at += (i64)gridDim.x * (256 / RT)) {
        const i64 j0 = at % nj, i0 = at / nj % ni, h0 = at / nj / ni % nh, b0 = at / nj / ni / nh;
        double sum = 0.;
        for (int n = 0; n < a.pairs; ++n) {
            const int pair = a.pair0 + n, b = pair / a.heads, h = pair - b * a.heads;
            if ((to.sb && b != b0) || (to.sh && h != h0)) continue;
            const Score sc = score_head(a, a.seq0 + b, b, h, 0, 0);
            for (i64 x = t; x < rows * keys; x += RT) {
                const int i = (int)(i0 + x / keys), j = (int)(j0 + x % keys);
                if (j < first_key(span, i) || j > last_key(span, i)) continue;
                const i64 from = ((i64)n * a.sq + i) * a.ld_s + j;
                const i64 row = (i64)pair * g.rows_padded + i;
                const float score = score_at(((const float*)a.s)[from], sc, a, span, i, j), lse2 = ((const float*)g.lse2)[row];
                if (score == NEG_INF || __float_as_uint(lse2) == UNSEEN) continue;
                const float w = ex2(fmaf(score, LOG2E, -lse2));
                const bool kept = !DROPOUT || kept_at(sc, a, span, i, j);
                const float dp = kept ? ((const float*)g.dq_acc)[from] * (DROPOUT ? a.drop_scale : 1.f) : 0.f;
                sum += (double)(w * (dp - ((const float*)g.delta)[row]));
            }
        }
        if (RT > 1) {
            __syncthreads();
            part[tid] = sum;
            __syncthreads();
            for (int x = RT / 2; x; x >>= 1) {
                if (t < x) part[tid] += part[tid + x];
                __syncthreads();
            }
            sum = part[tid - t];
        }
        if (t == 0) ((float*)to.ptr)[b0 * to.sb + h0 * to.sh + i0 * to.ss + j0 * to.sd] += (float)sum;
    }
}
#endif

#if PART == 5
// Sums of f32 in row-major order (a.s) to dbias as the dtype; batch, heads, sq and sk are its sizes.
extern "C" __global__ void __launch_bounds__(256) tw_bwd_standard_store_bias(const __grid_constant__ Grads g) {
    const Args& a = g.f;
    const i64 all = (i64)a.batch * a.heads * a.sq * a.sk;
    for (i64 x = (i64)blockIdx.x * 256 + threadIdx.x; x < all; x += (i64)gridDim.x * 256) {
        const i64 j = x % a.sk, i = x / a.sk % a.sq, h = x / a.sk / a.sq % a.heads, b = x / a.sk / a.sq / a.heads;
        ((elem*)g.dbias.ptr)[b * g.dbias.sb + h * g.dbias.sh + i * g.dbias.ss + j * g.dbias.sd] = to_elem(((const float*)a.s)[x]);
    }
}
#endif
