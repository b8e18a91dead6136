// FlashAttention-1 forward (Dao et al. 2022, Algorithm 1): outer loop over K and V blocks, inner loop over Q blocks, one thread
// block per (batch, head).
//
// O stays normalised: every step reads O, l and m of the row block from device memory, folds the key block in and writes all
// three back (O in an f32 workspace, as the published kernel keeps it while several key blocks contribute). K and V are split
// over the warps by keys, so each warp holds a partial P V of all BM rows, and the partial results are joined in shared memory.
//
//   BM = MT x 16 query rows a step    BK = WARPS x KW keys a block    KW keys a warp    KVREG 1 = a warp keeps its K and V fragments
//   in registers while Q passes by

#define NT (WARPS * 32)
#define BM (MT * 16)
#define BK (WARPS * KW)
#define OP (DP + 4) // row length of the partial outputs, in floats
#define ITEMS ((BM * (DP / 4) + NT - 1) / NT) // float4 pieces of O_i a thread joins

extern "C" __global__ void __launch_bounds__(NT) tw_fa1(const __grid_constant__ Args a) {
    extern __shared__ __align__(128) char smem[];
    __shared__ float red_m[WARPS][BM], red_l[WARPS][BM];
    const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
    const u32 k_at = smem_u32(smem), v_at = k_at + BK * PITCH, q_at = v_at + BK * PITCH;
    float* part = (float*)(smem + 2 * BK * PITCH + 2 * BM * PITCH);
    const int pair = a.pair0 + blockIdx.x;
    const int b = pair / a.heads, h = pair - b * a.heads, hk = h / a.group_size;
    const elem* qp = (const elem*)a.q.ptr + b * a.q.sb + h * a.q.sh;
    const elem* kp = (const elem*)a.k.ptr + b * a.k.sb + hk * a.k.sh;
    const elem* vp = (const elem*)a.v.ptr + b * a.v.sb + hk * a.v.sh;
    elem* op = (elem*)a.o.ptr + b * a.o.sb + h * a.o.sh;
    float* acc = (float*)a.acc + (i64)pair * a.sq * DP; // rows padded to DP, so that every piece is a float4
    float* gm = (float*)a.m + (i64)pair * a.sq;
    float* gl = (float*)a.l + (i64)pair * a.sq;
    float* lse = a.lse ? (float*)a.lse + (i64)pair * a.sq : nullptr;
    const float c = SCORE ? LOG2E : a.scale * LOG2E;
    const int row_blocks = (a.sq + BM - 1) / BM;

    // Line 2: O = 0, l = 0, m = -inf in device memory.
    for (i64 x = tid; x < (i64)a.sq * (DP / 4); x += NT) ((float4*)acc)[x] = make_float4(0.f, 0.f, 0.f, 0.f);
    for (int x = tid; x < a.sq; x += NT) { gm[x] = NEG_INF; gl[x] = 0.f; }
    __syncthreads();

    for (int j = 0; j * BK < a.sk; ++j) {
        const int key0 = j * BK, key1 = min(key0 + BK, a.sk);
        __syncthreads();
        load_tile<BK, DP, NT>(k_at, a.k, kp, key0, a.sk, a.d, tid);
        load_tile<BK, DP, NT>(v_at, a.v, vp, key0, a.sk, a.d, tid);
        cp_commit();
        // Row blocks that see some key of this block are contiguous.
        int first = 0, last = row_blocks - 1;
        if (MASK >= 1) first = max(0, key0 - a.hi_off) / BM;
        if (MASK == 2) last = min((i64)last, ((i64)key1 - 1 - a.lo_off < 0 ? (i64)-1 : ((i64)key1 - 1 - a.lo_off) / BM));
        if (first <= last) load_tile<BM, DP, NT>(q_at, a.q, qp, first * BM, a.sq, a.d, tid);
        cp_commit();
        cp_wait<0>();
        bool poison = GUARD_V ? __syncthreads_or(scan_tile<BK, DP, NT>(v_at, tid)) : (__syncthreads(), false);
        if (GUARD_V && poison && first <= last) {
            // Rare: hidden keys may stand beside NaN or infinite values. Rows that see one get it at once; 0 enters the products.
            for (i64 x = tid; x < (i64)a.sq * a.d; x += NT) {
                int row = (int)(x / a.d), col = (int)(x % a.d);
                float add = 0.f;
                for (int k = max(key0, first_key(a, row)); k <= min(key1 - 1, last_key(a, row)); ++k) add += nonfinite_at(v_at, PITCH, k - key0, col);
                if (add != 0.f) acc[(i64)row * DP + col] += add;
            }
            __syncthreads();
            clear_tile<BK, DP, NT>(v_at, tid);
            __syncthreads();
        }
#if KVREG
        u32 kf[DP / 16][KW / 16][4], vf[KW / 16][DP / 16][4];
        {
            u32 kat = k_at + (warp * KW + (lane & 7) + ((lane >> 4) << 3)) * PITCH + ((lane >> 3) & 1) * 16;
            u32 vat = v_at + (warp * KW + (lane & 15)) * PITCH + (lane >> 4) * 16;
#pragma unroll
            for (int n = 0; n < KW / 16; ++n)
#pragma unroll
                for (int x = 0; x < DP / 16; ++x) {
                    ldsm4(kf[x][n], kat + n * 16 * PITCH + x * 32);
                    ldsm4t(vf[n][x], vat + n * 16 * PITCH + x * 32);
                }
        }
#endif
        for (int i = first; i <= last; ++i) {
            const int i0 = i * BM;
            const u32 qi = q_at + ((i - first) & 1) * BM * PITCH;
            cp_wait<0>();
            __syncthreads();
            if (i < last) {
                load_tile<BM, DP, NT>(q_at + ((i - first + 1) & 1) * BM * PITCH, a.q, qp, i0 + BM, a.sq, a.d, tid);
                cp_commit();
            }
            // Line 8: O_i, l_i and m_i come from device memory; asked for before the products, needed after them.
            float4 old[ITEMS];
            float m_old[ITEMS], l_old[ITEMS];
#pragma unroll
            for (int x = 0; x < ITEMS; ++x) {
                int idx = tid + x * NT, row = i0 + idx / (DP / 4);
                bool live = idx < BM * (DP / 4) && row < a.sq;
                old[x] = live ? ((const float4*)acc)[(i64)row * (DP / 4) + idx % (DP / 4)] : make_float4(0.f, 0.f, 0.f, 0.f);
                m_old[x] = live ? gm[row] : NEG_INF;
                l_old[x] = live ? gl[row] : 0.f;
            }
            float s[MT][KW / 8][4];
#pragma unroll
            for (int x = 0; x < MT; ++x)
#pragma unroll
                for (int n = 0; n < KW / 8; ++n)
#pragma unroll
                    for (int e = 0; e < 4; ++e) s[x][n][e] = 0.f;
#if KVREG
            u32 qat = qi + (lane & 15) * PITCH + (lane >> 4) * 16;
#pragma unroll
            for (int kk = 0; kk < DP / 16; ++kk)
#pragma unroll
                for (int x = 0; x < MT; ++x) {
                    u32 qf[4];
                    ldsm4(qf, qat + x * 16 * PITCH + kk * 32);
#pragma unroll
                    for (int n = 0; n < KW / 16; ++n) {
                        mma(s[x][2 * n], qf, kf[kk][n][0], kf[kk][n][1]);
                        mma(s[x][2 * n + 1], qf, kf[kk][n][2], kf[kk][n][3]);
                    }
                }
#else
            product_nt<MT, KW / 8, DP, false>(s, qi, PITCH, nullptr, k_at + warp * KW * PITCH, PITCH, lane);
#endif
            float top[MT][2], sum[MT][2];
#pragma unroll
            for (int x = 0; x < MT; ++x)
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    int row = i0 + x * 16 + (lane >> 2) + r * 8;
                    int hi = last_key(a, row) - key0 - warp * KW - 2 * (lane & 3), lo = first_key(a, row) - key0 - warp * KW - 2 * (lane & 3);
                    float t = NEG_INF;
#pragma unroll
                    for (int n = 0; n < KW / 8; ++n)
#pragma unroll
                        for (int e = 0; e < 2; ++e) {
                            float& y = s[x][n][2 * r + e];
                            if (SCORE) y = score_of(y, a);
                            if (n * 8 + e > hi || (MASK == 2 && n * 8 + e < lo)) y = NEG_INF;
                            t = fmaxf(t, y);
                        }
                    // This warp's own maximum is its reference: m~ of its slice of the key block.
                    t = quad_max(t);
                    top[x][r] = t;
                    float ref = (t == NEG_INF ? 0.f : t) * c, z = 0.f;
#pragma unroll
                    for (int n = 0; n < KW / 8; ++n)
#pragma unroll
                        for (int e = 0; e < 2; ++e) {
                            float& y = s[x][n][2 * r + e];
                            y = ex2(fmaf(y, c, -ref));
                            z += y;
                        }
                    sum[x][r] = quad_sum(z);
                    if ((lane & 3) == 0) {
                        red_m[warp][x * 16 + (lane >> 2) + r * 8] = top[x][r];
                        red_l[warp][x * 16 + (lane >> 2) + r * 8] = sum[x][r];
                    }
                }
            // Partial P V of this warp's keys.
#pragma unroll
            for (int x = 0; x < MT; ++x) {
                float o[DP / 8][4];
#pragma unroll
                for (int n = 0; n < DP / 8; ++n)
#pragma unroll
                    for (int e = 0; e < 4; ++e) o[n][e] = 0.f;
#if !F32
#pragma unroll
                for (int kk = 0; kk < KW / 16; ++kk) {
                    u32 pf[4] = {pack2(s[x][2 * kk][0], s[x][2 * kk][1]), pack2(s[x][2 * kk][2], s[x][2 * kk][3]),
                                 pack2(s[x][2 * kk + 1][0], s[x][2 * kk + 1][1]), pack2(s[x][2 * kk + 1][2], s[x][2 * kk + 1][3])};
#pragma unroll
                    for (int n = 0; n < DP / 16; ++n) {
#if KVREG
                        const u32 (&w)[4] = vf[kk][n];
#else
                        u32 w[4];
                        ldsm4t(w, v_at + (warp * KW + kk * 16 + (lane & 15)) * PITCH + (lane >> 4) * 16 + n * 32);
#endif
                        mma(o[2 * n], pf, w[0], w[1]);
                        mma(o[2 * n + 1], pf, w[2], w[3]);
                    }
                }
#else
                const u32 vat = v_at + (warp * KW + 2 * (lane & 3)) * PITCH + (lane >> 2) * 4;
#pragma unroll
                for (int kk = 0; kk < KW / 8; ++kk) {
                    u32 w[4] = {__float_as_uint(s[x][kk][0]), __float_as_uint(s[x][kk][2]), __float_as_uint(s[x][kk][1]), __float_as_uint(s[x][kk][3])}, ph[4], pl[4];
                    split_all(w, ph, pl);
#pragma unroll
                    for (int n = 0; n < DP / 8; ++n) {
                        u32 v[2] = {lds32(vat + kk * 8 * PITCH + n * 32), lds32(vat + (kk * 8 + 1) * PITCH + n * 32)}, vh[2], vl[2];
                        split_all(v, vh, vl);
                        mma3(o[n], ph, pl, vh[0], vl[0], vh[1], vl[1]);
                    }
                }
#endif
                float* to = part + ((i64)warp * BM + x * 16 + (lane >> 2)) * OP + 2 * (lane & 3);
#pragma unroll
                for (int n = 0; n < DP / 8; ++n) {
                    *(float2*)(to + n * 8) = make_float2(o[n][0], o[n][1]);
                    *(float2*)(to + 8 * OP + n * 8) = make_float2(o[n][2], o[n][3]);
                }
            }
            __syncthreads();
            // Lines 11 to 13: m_new and l_new, and O_i = (l_i e^(m_i - m_new) O_i + sum of e^(m~ - m_new) P~ V) / l_new.
#pragma unroll
            for (int x = 0; x < ITEMS; ++x) {
                int idx = tid + x * NT, r = idx / (DP / 4), piece = idx % (DP / 4), row = i0 + r;
                if (idx >= BM * (DP / 4) || row >= a.sq) continue;
                float m_new = m_old[x];
#pragma unroll
                for (int w = 0; w < WARPS; ++w) m_new = fmaxf(m_new, red_m[w][r]);
                const float ref = m_new == NEG_INF ? 0.f : m_new;
                const float keep = l_old[x] * ex2((m_old[x] - ref) * c);
                float l_new = keep;
                float4 y = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
                for (int w = 0; w < WARPS; ++w) {
                    float f = ex2((red_m[w][r] - ref) * c);
                    l_new += f * red_l[w][r];
                    float4 z = *(const float4*)(part + (w * BM + r) * OP + piece * 4);
                    y.x = fmaf(f, z.x, y.x);
                    y.y = fmaf(f, z.y, y.y);
                    y.z = fmaf(f, z.z, y.z);
                    y.w = fmaf(f, z.w, y.w);
                }
                const float inv = l_new == 0.f ? 0.f : 1.f / l_new, g = l_old[x] == 0.f ? 1.f : keep * inv;
                ((float4*)acc)[(i64)row * (DP / 4) + piece] =
                    make_float4(fmaf(g, old[x].x, y.x * inv), fmaf(g, old[x].y, y.y * inv), fmaf(g, old[x].z, y.z * inv), fmaf(g, old[x].w, y.w * inv));
                if (piece == 0) {
                    gm[row] = m_new;
                    gl[row] = l_new;
                }
            }
        }
    }
    __syncthreads();
    // Rounding to the output's dtype, once; rows that saw no key are the zeros of line 2. The state stays as (m, l) in device
    // memory, m in natural units; lse is m + ln l.
    for (i64 x = tid; x < (i64)a.sq * DP; x += NT) {
        i64 row = x / DP;
        int col = (int)(x - row * DP);
        if (col < a.d) op[row * a.o.ss + col] = to_elem(acc[x]);
    }
    for (int x = tid; x < a.sq; x += NT) {
        float m = gm[x] * (SCORE ? 1.f : a.scale), l = gl[x];
        if (l == 0.f) m = NEG_INF;
        gm[x] = m;
        if (lse) lse[x] = l == 0.f ? NEG_INF : m + logf(l);
    }
}
