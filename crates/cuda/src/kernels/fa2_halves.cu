// FlashAttention-2 forward for 16-bit head_dims above 128, where the output of 32 rows fits no warp's registers: as fa2.cu, but two
// warps share 32 rows. Each makes the scores of half of a tile's keys, both see the maxima, P passes through shared memory, and
// each makes half of the output's columns. A fragment of K or V then feeds two products where with 16 rows a warp it fed one, and
// shared memory, which bounded that kernel, is read a third less.
//
//   BM = WARPS * 16 rows a block     BN keys a tile, K under the softmax and V under the scores as with STAGES 1 of fa2.cu

#define NT (WARPS * 32)
#define BM (WARPS * 16)
#define PITCH_V PITCH_OF(DV)
#define PITCH_Q PITCH_OF(DP > DV ? DP : DV) // Q's rows carry the output in the end
#define PITCH_P PITCH_OF(BN)
#define HK (BN / 2)
#define HV (DV / 2)
#ifndef PIECE
#define PIECE (DP % 64 == 0 ? 64 : 32)
#endif

// The two warps of a group of rows.
DEV void pair_sync(int group) { asm volatile("bar.sync %0, 64;" ::"r"(group + 1) : "memory"); }

extern "C" __global__ void __launch_bounds__(NT, MINB) tw_fa2_halves(const __grid_constant__ Args a) {
    extern __shared__ __align__(128) char smem[];
    __shared__ float shared_row[2][BM]; // what each half knows of a row
    const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, group = warp >> 1, half = warp & 1;
    const u32 q_at = smem_u32(smem), k_at = q_at + BM * PITCH_Q, v_at = k_at + BN * PITCH, p_at = v_at + BN * PITCH_V + group * 32 * PITCH_P;

    const Place at = place_of(a);
    const Span span = at.span;
    const elem* qp = rows_of(a.q, at.q_batch, at.h, at.q_row);
    const elem* kp = rows_of(a.k, at.k_batch, at.hk, at.k_row);
    const elem* vp = rows_of(a.v, at.k_batch, at.hk, at.k_row);
    Score score = {};
    if (SCORE == 2 || DROPOUT) score = score_head(a, at.seq, at.q_batch, at.h, at.q_row, at.k_row);
    [[maybe_unused]] const bool hides = DROPOUT || score.mask || score.bias;

    const int i0 = at.rb * BM, i1 = min(i0 + BM, span.sq);
    const int key_hi = last_key(span, i1 - 1), key_lo = first_key(span, i0);
    const bool any = key_hi >= key_lo;
    const int jmax = any ? key_hi / BN : -1, jmin = any ? key_lo / BN : 0;
    const int w0 = i0 + group * 32, row0 = w0 + (lane >> 2), in0 = group * 32 + (lane >> 2);
    const int w_hi = last_key(span, min(w0 + 32, span.sq) - 1), w_lo = first_key(span, w0);

    load_tile<BM, DP, NT, PITCH_Q>(q_at, a.q, qp, i0, span.sq, a.d, tid);
    if (any) load_tile<BN, DP, NT>(k_at, a.k, kp, jmax * BN, span.sk, a.d, tid);
    cp_commit();

    float acc[2][HV / 8][4], m[2][2], l[2][2];
#pragma unroll
    for (int x = 0; x < 2; ++x)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            m[x][r] = NEG_INF;
            l[x][r] = 0.f;
#pragma unroll
            for (int n = 0; n < HV / 8; ++n) acc[x][n][2 * r] = acc[x][n][2 * r + 1] = 0.f;
        }
    // Exchanges one number a row between the two warps.
    auto others = [&](float (&x)[2][2]) {
        if ((lane & 3) == 0)
#pragma unroll
            for (int i = 0; i < 4; ++i) shared_row[half][in0 + i * 8] = x[i >> 1][i & 1];
        pair_sync(group);
#pragma unroll
        for (int i = 0; i < 4; ++i) x[i >> 1][i & 1] = shared_row[half ^ 1][in0 + i * 8];
    };
    const float c = SCORE ? LOG2E : a.scale * LOG2E;

    for (int j = jmax; j >= jmin; --j) {
        const int key0 = j * BN;
        const Weights whole = {score, a, span, row0, key0, lane, c}, mine = {score, a, span, row0, key0 + half * HK, lane, c};
        cp_wait<0>();
        __syncthreads();
        load_tile<BN, DV, NT>(v_at, a.v, vp, key0, span.sk, a.dv, tid);
        cp_commit();
        const bool idle = MASK >= 1 && (key0 > w_hi || (MASK == 2 && key0 + BN - 1 < w_lo));
        float s[2][HK / 8][4];
#pragma unroll
        for (int x = 0; x < 2; ++x)
#pragma unroll
            for (int n = 0; n < HK / 8; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) s[x][n][e] = 0.f;
        if (!idle) {
            // In pieces, so that the compiler does not fetch more of Q ahead than there are registers for.
#pragma unroll 1
            for (int t = 0; t < DP; t += PIECE)
                product_nt<2, HK / 8, PIECE, false>(s, q_at + group * 32 * PITCH_Q + t * ESZ, PITCH_Q, nullptr, k_at + half * HK * PITCH + t * ESZ, PITCH, lane);
        }
#if MASK >= 1
        const bool edge = key0 + BN - 1 > min(span.sk - 1, i0 + span.hi_off) || (MASK == 2 && key0 < i1 - 1 + span.lo_off);
#else
        const bool edge = key0 + BN > span.sk;
#endif
        // V has arrived, and nobody reads K any more, nor what passed between warps before.
        cp_wait<0>();
        const bool poison = arrived_nonfinite<BN, DV, NT>(v_at, edge || hides, tid);
        if (j > jmin) {
            load_tile<BN, DP, NT>(k_at, a.k, kp, key0 - BN, span.sk, a.d, tid);
            cp_commit();
        }
        if (poison) take_nonfinite<BN, DV, NT>(acc, v_at, whole, tid, half * HV);
        if (idle) continue;
#if SCORE == 2
        score_tile<false>(s, score, a, span, row0, mine.key0 + 2 * (lane & 3));
#elif SCORE == 1
#pragma unroll
        for (int x = 0; x < 2; ++x)
#pragma unroll
            for (int n = 0; n < HK / 8; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) s[x][n][e] = score_of(s[x][n][e], a);
#endif
        if (edge) hide_edge(s, span, row0, mine.key0, lane);
        float top[2][2], other[2][2], mc[2][2];
        row_tops(s, top);
#pragma unroll
        for (int i = 0; i < 4; ++i) other[i >> 1][i & 1] = top[i >> 1][i & 1];
        others(other);
#pragma unroll
        for (int i = 0; i < 4; ++i) top[i >> 1][i & 1] = fmaxf(top[i >> 1][i & 1], other[i >> 1][i & 1]);
        raise_to(top, m, l, acc, mc, c);
        const u32 pto = p_at + (lane >> 2) * PITCH_P + (half * HK + 2 * (lane & 3)) * ESZ;
#pragma unroll
        for (int x = 0; x < 2; ++x)
#pragma unroll
            for (int n = 0; n < HK / 8; ++n) {
                float p[4];
                mine.of(s[x][n], mc[x], l[x], x, n, p);
                sts32(pto + x * 16 * PITCH_P + n * 16, pack2(p[0], p[1]));
                sts32(pto + (x * 16 + 8) * PITCH_P + n * 16, pack2(p[2], p[3]));
            }
        pair_sync(group);
        const u32 pat = p_at + (lane & 15) * PITCH_P + (lane >> 4) * 16, vat = v_at + (lane & 15) * PITCH_V + (lane >> 4) * 16 + half * HV * ESZ;
#pragma unroll
        for (int kk = 0; kk < BN / 16; ++kk) {
            u32 pf[2][4];
#pragma unroll
            for (int x = 0; x < 2; ++x) ldsm4(pf[x], pat + x * 16 * PITCH_P + kk * 32);
#pragma unroll
            for (int n = 0; n < HV / 16; ++n) {
                u32 vf[4];
                ldsm4t(vf, vat + kk * 16 * PITCH_V + n * 32);
#pragma unroll
                for (int x = 0; x < 2; ++x) {
                    mma(acc[x][2 * n], pf[x], vf[0], vf[1]);
                    mma(acc[x][2 * n + 1], pf[x], vf[2], vf[3]);
                }
            }
        }
    }
    cp_wait<0>();
    // Each half has summed its own keys. The barrier inside also ends all reading of Q's rows, where the output now passes.
    __syncthreads();
    float sum[2][2];
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[i >> 1][i & 1] = l[i >> 1][i & 1] = quad_sum(l[i >> 1][i & 1]);
    others(sum);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        // In the order of the keys, whichever half adds.
        float mine = l[i >> 1][i & 1], other = sum[i >> 1][i & 1];
        l[i >> 1][i & 1] = half ? other + mine : mine + other;
    }
    write_rows(acc, m, l, at, a, smem + group * 32 * PITCH_Q + half * HV * ESZ, PITCH_Q, w0, half * HV, lane);
}
