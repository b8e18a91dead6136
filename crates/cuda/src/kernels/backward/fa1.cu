// FlashAttention-1 backward (Dao et al. 2022, Algorithm 4): outer loop over K and V blocks, inner loop over Q blocks, one thread
// block per (batch, KV head), which takes the group's query heads one after another.
//
// P comes from both statistics, exp(S - m) / l, and delta from dO and O in every tile, so O is read as often as dO. dQ is read
// from device memory, added to and written back at every step. A forward call leaves L alone, so `statistics` makes m and l first.
//
//   PART 0, statistics      PART 1, the gradients      tiles as in fa2.cu, one stage of each

#define NT (WARPS * 32)
#define KT (BN / SK / 16)
#define RT (BM / SR / 8)
#define GT (BN / GK / 16)
#define GN (DP / GD / 8)
#define VN (DV / GD / 8)
#define QT (BM / QR / 16)
#define QN (DP / QD / 8)
#define PP PITCH_OF(BM)
#define PITCH_V PITCH_OF(DV)

#if PART == 0
// m in base 2 and 1/l of BM rows, one warp for sixteen.
extern "C" __global__ void __launch_bounds__(BM * 2) tw_bwd_fa1_statistics(const __grid_constant__ Grads g) {
    extern __shared__ __align__(128) char smem[];
    const Args& a = g.f;
    const Span span = span_of(a);
    const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
    const u32 q_at = smem_u32(smem), k_at = q_at + BM * PITCH;
    const int blocks = g.rows_padded / BM, pair = blockIdx.x / blocks, i0 = (blockIdx.x - pair * blocks) * BM;
    const int b = pair / a.heads, h = pair - b * a.heads, hk = h / a.group_size, row = i0 + warp * 16 + (lane >> 2);
    const int key_hi = last_key(span, min(i0 + BM, a.sq) - 1), key_lo = first_key(span, i0);
    load_tile<BM, DP, BM * 2>(q_at, a.q, (const elem*)a.q.ptr + b * a.q.sb + h * a.q.sh, i0, a.sq, a.d, tid);
    const Score sc = score_head(a, a.seq0 + b, b, h, 0, 0);
    float m[2] = {NEG_INF, NEG_INF}, l[2] = {0.f, 0.f};
    for (int key0 = i0 < a.sq ? key_lo / BN * BN : key_hi + 1; key0 <= key_hi; key0 += BN) {
        __syncthreads();
        load_tile<BN, DP, BM * 2>(k_at, a.k, (const elem*)a.k.ptr + b * a.k.sb + hk * a.k.sh, key0, a.sk, a.d, tid);
        cp_commit();
        cp_wait<0>();
        __syncthreads();
        float s[1][BN / 8][4];
        clear(s);
        product_nt<1, BN / 8, DP, false>(s, q_at + warp * 16 * PITCH, PITCH, nullptr, k_at, PITCH, lane);
        const int key = key0 + 2 * (lane & 3);
#if SCORE == 2
        score_tile<false>(s, sc, a, span, row, key);
#endif
#pragma unroll
        for (int n = 0; n < BN / 8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int r = e >> 1, i = row + r * 8, j = key + n * 8 + (e & 1);
                float x = (SCORE == 2 ? s[0][n][e] : score_of(s[0][n][e], a)) * LOG2E;
                // As if infinite: fmaxf would lose it, and the row with it.
                if (is_nan(x)) x = -NEG_INF;
                if (j > last_key(span, i) || j < first_key(span, i) || x == NEG_INF) continue;
                const float now = fmaxf(m[r], x);
                l[r] = l[r] * ex2(m[r] - now) + ex2(x - now);
                m[r] = now;
            }
    }
    cp_wait<0>();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        float now = quad_max(m[r]);
        if (a.sinks) now = fmaxf(now, ((const float*)a.sinks)[h] * LOG2E);
        float all = quad_sum(now == NEG_INF ? 0.f : l[r] * ex2(m[r] - now));
        if (a.sinks && now != NEG_INF) all += ex2(((const float*)a.sinks)[h] * LOG2E - now);
        if ((lane & 3) != 0) continue;
        const i64 at = (i64)pair * g.rows_padded + row + r * 8;
        // Nothing live, or no such row: P = 2^(s - inf) * 0.
        ((float*)a.m)[at] = now == NEG_INF || row + r * 8 >= a.sq ? -NEG_INF : now;
        ((float*)a.l)[at] = all == 0.f || row + r * 8 >= a.sq ? 0.f : 1.f / all;
    }
}
#endif

#if PART == 1
// Of the block of keys at key0; as in fa2.cu, `odd`: some row is marked.
template <bool CAREFUL> DEV bool gradients_of_keys(const Grads& g, char* smem, int key0, bool odd) {
    const Args& a = g.f;
    const Span span = span_of(a);
    const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
    const u32 k_at = smem_u32(smem), v_at = k_at + BN * PITCH, q_at = v_at + BN * PITCH_V, go_at = q_at + BM * PITCH, o_at = go_at + BM * PITCH_V;
    const u32 p_at = o_at + BM * PITCH_V, ds_at = p_at + BN * PP;
    float* delta = (float*)(smem + (ds_at - k_at) + BN * PP);
    [[maybe_unused]] u32* const odd_keys = (u32*)(delta + BM); // a bit each
    const int b = blockIdx.x / g.kv_heads, hk = blockIdx.x - b * g.kv_heads;
    const int sk_ = warp / SR, sr_ = warp % SR, gk_ = warp / GD, gd_ = warp % GD, qr_ = warp / QD, qd_ = warp % QD;
    const bool does_s = warp < SK * SR, does_g = warp < GK * GD, does_q = warp < QR * QD;

    const int key1 = min(key0 + BN, a.sk);
    __syncthreads();
    load_tile<BN, DP, NT>(k_at, a.k, (const elem*)a.k.ptr + b * a.k.sb + hk * a.k.sh, key0, a.sk, a.d, tid);
    load_tile<BN, DV, NT>(v_at, a.v, (const elem*)a.v.ptr + b * a.v.sb + hk * a.v.sh, key0, a.sk, a.dv, tid);
    cp_commit();
#if FENCED
    if (tid < (BN + 31) / 32) odd_keys[tid] = 0;
    cp_wait<0>();
    __syncthreads();
    odd |= mend_tile<BN, DV, NT>(v_at, tid, nullptr);
    odd |= mend_tile<BN, DP, NT>(k_at, tid, odd_keys);
    if (__syncthreads_or(odd) && !CAREFUL) return true;
#endif
    float dk[GT][GN][4], dv[GT][VN][4];
    clear(dk);
    clear(dv);
    // Row blocks that see some key of this block.
    int first = 0, last = (a.sq + BM - 1) / BM - 1;
    if (MASK >= 1) first = max(0, key0 - a.hi_off) / BM;
    if (MASK == 2) last = key1 - 1 - a.lo_off < 0 ? -1 : min(last, (key1 - 1 - a.lo_off) / BM);
    for (int h = hk * a.group_size; h < (hk + 1) * a.group_size; ++h)
        for (int i0 = first * BM; i0 <= last * BM; i0 += BM) {
            const i64 pair = (i64)b * a.heads + h;
            __syncthreads();
            load_tile<BM, DP, NT>(q_at, a.q, (const elem*)a.q.ptr + b * a.q.sb + h * a.q.sh, i0, a.sq, a.d, tid);
            load_tile<BM, DV, NT>(go_at, g.go, (const elem*)g.go.ptr + b * g.go.sb + h * g.go.sh, i0, a.sq, a.dv, tid);
            load_tile<BM, DV, NT>(o_at, a.o, (const elem*)a.o.ptr + b * a.o.sb + h * a.o.sh, i0, a.sq, a.dv, tid);
            cp_commit();
            cp_wait<0>();
            __syncthreads();
            for (int r = warp; r < BM; r += WARPS) {
                float sum = 0.f;
                for (int x = lane; x < DV; x += 32) {
                    const float arrived = to_float(*(const elem*)(smem + (go_at - k_at) + r * PITCH_V + x * ESZ));
                    sum += arrived * to_float(*(const elem*)(smem + (o_at - k_at) + r * PITCH_V + x * ESZ));
                    if (CAREFUL) sum += arrived * 0.f;
                }
#pragma unroll
                for (int x = 16; x; x >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, x);
                const int i = i0 + r;
                // `prepare` knows whether dO is in any gradient of the row.
                if (CAREFUL && lane == 0 && !is_finite(sum)) delta[r] = ((const float*)g.delta)[pair * g.rows_padded + i];
                else if (lane == 0) delta[r] = i < a.sq && g.dlse.ptr && ((const float*)a.l)[pair * g.rows_padded + i] != 0.f ? sum - *((const float*)g.dlse.ptr + b * g.dlse.sb + h * g.dlse.sh + (i64)i * g.dlse.ss) : sum;
            }
            __syncthreads();
            if (does_s) {
                float s[KT][RT][4], dp[KT][RT][4];
                clear(s);
                clear(dp);
                product_nt<KT, RT, DP, false>(s, k_at + sk_ * KT * 16 * PITCH, PITCH, nullptr, q_at + sr_ * RT * 8 * PITCH, PITCH, lane);
                product_nt<KT, RT, DV, false>(dp, v_at + sk_ * KT * 16 * PITCH_V, PITCH_V, nullptr, go_at + sr_ * RT * 8 * PITCH_V, PITCH_V, lane);
                const int key = key0 + sk_ * KT * 16 + (lane >> 2), row = i0 + sr_ * RT * 8 + 2 * (lane & 3);
                const Score sc = score_head(a, a.seq0 + b, b, h, 0, 0);
                const float *m = (const float*)a.m + pair * g.rows_padded + row, *l = (const float*)a.l + pair * g.rows_padded + row;
                float slope[SCORE ? KT : 1][SCORE ? RT : 1][4];
                weights<true, CAREFUL>(s, slope, sc, a, span, key, row, [&](int, int n, int e) { return m[n * 8 + (e & 1)]; });
#if DROPOUT
                Kept<true, KT, RT> kept;
                kept.find(sc, a, span, key, row, lane);
#endif
#pragma unroll
                for (int x = 0; x < KT; ++x)
#pragma unroll
                    for (int n = 0; n < RT; ++n)
#pragma unroll
                        for (int r = 0; r < 2; ++r) {
                            float p[2], ds[2];
#pragma unroll
                            for (int e = 0; e < 2; ++e) {
                                const int i = row + n * 8 + e, j = key + x * 16 + r * 8;
                                bool live = i < a.sq && j <= last_key(span, i) && j >= first_key(span, i);
                                if (CAREFUL) live &= !is_hidden(s[x][n][2 * r + e]);
                                float w = live ? s[x][n][2 * r + e] * l[n * 8 + e] : 0.f;
                                // As in fa2.cu.
                                if (CAREFUL && live && odd_keys[(j - key0) / 32] >> (j - key0) % 32 & 1) {
                                    live = is_nan(l[n * 8 + e]) || a.softcap != 0.f;
                                    w = live ? QUIET_NAN : 0.f;
                                }
                                p[e] = w, ds[e] = dp[x][n][2 * r + e];
#if DROPOUT
                                p[e] = kept.of(p[e], x, n, 2 * r + e, a);
                                ds[e] = kept.of(ds[e], x, n, 2 * r + e, a);
#endif
                                ds[e] = w * (ds[e] - delta[sr_ * RT * 8 + 2 * (lane & 3) + n * 8 + e]);
#if SCORE
                                ds[e] *= slope[x][n][2 * r + e];
#endif
                                if (CAREFUL && !live) ds[e] = 0.f;
                            }
                            const u32 cell = (sk_ * KT * 16 + (lane >> 2) + x * 16 + r * 8) * PP + (sr_ * RT * 8 + 2 * (lane & 3) + n * 8) * ESZ;
                            store_pair(p_at + cell, p[0], p[1]);
                            store_pair(ds_at + cell, ds[0], ds[1]);
                        }
            }
            __syncthreads();
            if constexpr (CAREFUL) {
                clear_tile<BM, DP, NT>(q_at, tid);
                clear_tile<BM, DV, NT>(go_at, tid);
                __syncthreads();
                const Score sc = score_head(a, a.seq0 + b, b, h, 0, 0);
                const elem* go = (const elem*)g.go.ptr + b * g.go.sb + h * g.go.sh + (i64)i0 * g.go.ss;
#pragma unroll 1
                for (int i = 0; i < BM && does_g; ++i)
                    if (is_nan(delta[i]) && i0 + i < a.sq && ((const float*)a.l)[pair * g.rows_padded + i0 + i] != 0.f)
                        add_odd_row(dv, go + i * g.go.ss, g.go.sd, a.dv, sc, a, span, i0 + i, key0 + gk_ * GT * 16 + (lane >> 2), gd_ * VN * 8 + 2 * (lane & 3));
            }
            if (does_g) {
                product_nn<GT, VN, BM, false>(dv, p_at + gk_ * GT * 16 * PP, PP, nullptr, go_at + gd_ * VN * 8 * ESZ, PITCH_V, lane);
                product_nn<GT, GN, BM, false>(dk, ds_at + gk_ * GT * 16 * PP, PP, nullptr, q_at + gd_ * GN * 8 * ESZ, PITCH, lane);
            }
            if (does_q) {
                float dq[QT][QN][4];
                clear(dq);
                product_tn<QT, QN, BN>(dq, ds_at + qr_ * QT * 16 * ESZ, PP, k_at + qd_ * QN * 8 * ESZ, PITCH, lane);
                float4* to = (float4*)((float*)g.dq_acc + (pair * (g.rows_padded / BM) + i0 / BM) * (BM * DP)) + warp * QT * QN * 32 + lane;
#pragma unroll
                for (int x = 0; x < QT; ++x)
#pragma unroll
                    for (int n = 0; n < QN; ++n) {
                        float4 y = to[(x * QN + n) * 32];
                        to[(x * QN + n) * 32] = make_float4(y.x + dq[x][n][0], y.y + dq[x][n][1], y.z + dq[x][n][2], y.w + dq[x][n][3]);
                    }
            }
        }
    cp_wait<0>();
    __syncthreads();
    if (does_g) {
#pragma unroll
        for (int x = 0; x < GT; ++x)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const u32 row = (gk_ * GT + x) * 16 + (lane >> 2) + r * 8, col = 2 * (lane & 3) * ESZ;
#pragma unroll
                for (int n = 0; n < GN; ++n) store_pair(k_at + row * PITCH + col + (gd_ * GN + n) * 8 * ESZ, dk[x][n][2 * r] * a.scale, dk[x][n][2 * r + 1] * a.scale);
#pragma unroll
                for (int n = 0; n < VN; ++n) store_pair(v_at + row * PITCH_V + col + (gd_ * VN + n) * 8 * ESZ, dv[x][n][2 * r], dv[x][n][2 * r + 1]);
            }
    }
    __syncthreads();
    store_tile<BN, DP, NT>(smem, g.dk, (elem*)g.dk.ptr + b * g.dk.sb + hk * g.dk.sh, key0, a.sk, a.d, tid);
    store_tile<BN, DV, NT>(smem + BN * PITCH, g.dv, (elem*)g.dv.ptr + b * g.dv.sb + hk * g.dv.sh, key0, a.sk, a.dv, tid);
    return false;
}

extern "C" __global__ void __launch_bounds__(NT) tw_bwd_fa1(const __grid_constant__ Grads g) {
    extern __shared__ __align__(128) char smem[];
    bool odd = false;
#if FENCED
    const int pair = blockIdx.x * g.f.group_size;
    for (int n = 0; n < g.f.group_size; ++n) odd |= odd_rows(g, pair + n, 0, g.f.sq, threadIdx.x, NT);
#endif
    for (int key0 = 0; key0 < g.f.sk; key0 += BN) {
        if (!gradients_of_keys<false>(g, smem, key0, odd)) continue;
#if FENCED
        apart(g, smem, [key0](const Grads& g, char* smem) { gradients_of_keys<true>(g, smem, key0, true); });
#endif
    }
}
#endif
