// PART 3: dQ of a block of rows, added up in registers over the keys in their order, so that its bits never change: S and dP are
// made once more than `tw_bwd_fa2` alone would make them, seven products in place of five, and nothing is added in memory.
//
//   WARPS x 16 = BM rows a block     BN keys a tile     QST stages of K and V     MINB blocks a multiprocessor

#if PART == 3
#define TILE_KV (BN * (PITCH + PITCH_V))

// As `gradients_of_keys`.
template <bool CAREFUL> DEV bool gradients_of_rows(const Grads& g, char* smem) {
    const Args& a = g.f;
    const Span span = span_of(a);
    const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
    const u32 q_at = smem_u32(smem), go_at = q_at + BM * PITCH, kv_at = go_at + BM * PITCH_V;
    // As in fa2.cu: groups of pairs share K and V in L2; the rows with the most keys go first.
    int pair, rb;
    {
        int per = a.row_blocks * a.pairs_per_group;
        int grp = blockIdx.x / per, r = blockIdx.x - grp * per;
        int width = min(a.pairs_per_group, a.pairs - grp * a.pairs_per_group);
        rb = r / width;
        pair = grp * a.pairs_per_group + (r - rb * width);
        if (MASK >= 1) rb = a.row_blocks - 1 - rb;
    }
    const int b = pair / a.heads, h = pair - b * a.heads, hk = h / a.group_size;
    const elem* kp = (const elem*)a.k.ptr + b * a.k.sb + hk * a.k.sh;
    const elem* vp = (const elem*)a.v.ptr + b * a.v.sb + hk * a.v.sh;
    const int i0 = rb * BM, i1 = min(i0 + BM, a.sq), row = i0 + warp * 16 + (lane >> 2);
    const int key_hi = last_key(span, i1 - 1), key_lo = first_key(span, i0);
    const int jmax = key_hi >= key_lo ? key_hi / BN : -1, jmin = key_hi >= key_lo ? key_lo / BN : 0;

    auto load_kv = [&](int j) {
        const u32 at = kv_at + (QST == 2 ? j & 1 : 0) * TILE_KV;
        load_tile<BN, DP, NT>(at, a.k, kp, j * BN, a.sk, a.d, tid);
        load_tile<BN, DV, NT>(at + BN * PITCH, a.v, vp, j * BN, a.sk, a.dv, tid);
    };
    load_tile<BM, DP, NT>(q_at, a.q, (const elem*)a.q.ptr + b * a.q.sb + h * a.q.sh, i0, a.sq, a.d, tid);
    load_tile<BM, DV, NT>(go_at, g.go, (const elem*)g.go.ptr + b * g.go.sb + h * g.go.sh, i0, a.sq, a.dv, tid);
    if (QST == 2 && jmax >= jmin) load_kv(jmin);
    cp_commit();
    float lse2[2], delta[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const i64 at = (i64)pair * g.rows_padded + row + r * 8;
        lse2[r] = ((const float*)g.lse2)[at];
        delta[r] = ((const float*)g.delta)[at];
    }
    if constexpr (CAREFUL) {
        cp_wait<0>();
        __syncthreads();
        mend_tile<BM, DP, NT>(q_at, tid, nullptr);
        mend_tile<BM, DV, NT>(go_at, tid, nullptr);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            // Of the marks, this one alone is not seen in what it leads to.
            if (__float_as_uint(lse2[r]) != UNSEEN) continue;
            lse2[r] = -NEG_INF;
            delta[r] = 0.f;
        }
    }
    bool odd = false;
    if (FENCED && !CAREFUL) {
        odd = odd_rows(g, pair, i0, i0 + BM, tid, NT);
        if (jmax >= jmin)
            for (int x = jmin * BN / 16 + tid; x <= key_hi / 16; x += NT) odd |= odd_keys_of(g, b * g.kv_heads + hk)[x] != 0;
    }
    [[maybe_unused]] const Score sc = score_head(a, a.seq0 + b, b, h, 0, 0);
    float dq[1][DP / 8][4];
    clear(dq);

    for (int j = jmin; j <= jmax; ++j) {
        const int key0 = j * BN;
        const u32 k_s = kv_at + (QST == 2 ? j & 1 : 0) * TILE_KV, v_s = k_s + BN * PITCH;
        if (QST == 1) {
            __syncthreads();
            load_kv(j);
            cp_commit();
        }
        cp_wait<0>();
        if (FENCED && !CAREFUL && j == jmin) {
            if (__syncthreads_or(odd)) return true;
        } else {
            __syncthreads();
        }
        if (QST == 2 && j < jmax) {
            load_kv(j + 1);
            cp_commit();
        }
        const bool edge = CAREFUL || key0 + BN > (MASK >= 1 ? min(a.sk, i0 + a.hi_off + 1) : a.sk) || (MASK == 2 && key0 < i1 - 1 + a.lo_off);
        float s[1][BN / 8][4], dp[1][BN / 8][4];
        clear(s);
        clear(dp);
        product_nt<1, BN / 8, DP, false>(s, q_at + warp * 16 * PITCH, PITCH, nullptr, k_s, PITCH, lane);
        product_nt<1, BN / 8, DV, false>(dp, go_at + warp * 16 * PITCH_V, PITCH_V, nullptr, v_s, PITCH_V, lane);
        const int key = key0 + 2 * (lane & 3);
        float slope[1][SCORE ? BN / 8 : 1][4];
        weights<false, CAREFUL>(s, slope, sc, a, span, row, key, [&](int, int, int e) { return lse2[e >> 1]; });
#if DROPOUT
        Kept<false, 1, BN / 8> kept;
        kept.find(sc, a, span, row, key, lane);
#endif
#pragma unroll
        for (int n = 0; n < BN / 8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int i = row + (e >> 1) * 8, at = key + n * 8 + (e & 1);
                float ds = s[0][n][e] * (ARRIVED(0, n, e) - delta[e >> 1]);
#if SCORE
                ds *= slope[0][n][e];
#endif
                if (edge && (at > last_key(span, i) || at < first_key(span, i))) ds = 0.f;
                if (CAREFUL && is_hidden(s[0][n][e])) ds = 0.f;
                s[0][n][e] = ds;
            }
        if constexpr (CAREFUL) {
            __syncthreads();
            clear_tile<BN, DP, NT>(k_s, tid);
            __syncthreads();
        }
#if !F32
        u32 df[BN / 16][1][4];
#pragma unroll
        for (int kk = 0; kk < BN / 16; ++kk)
#pragma unroll
            for (int x = 0; x < 4; ++x) df[kk][0][x] = pack2(s[0][2 * kk + (x >> 1)][2 * (x & 1)], s[0][2 * kk + (x >> 1)][2 * (x & 1) + 1]);
        product_nn<1, DP / 8, BN, true>(dq, 0, 0, df, k_s, PITCH, lane);
#else
        // Keys 2t and 2t+1 of a group of eight stand where the operand wants t and t+4: the sum over keys has no order.
        u32 dh[BN / 8][4], dl[BN / 8][4];
#pragma unroll
        for (int kk = 0; kk < BN / 8; ++kk) {
            u32 w[4] = {__float_as_uint(s[0][kk][0]), __float_as_uint(s[0][kk][2]), __float_as_uint(s[0][kk][1]), __float_as_uint(s[0][kk][3])};
            split_all(w, dh[kk], dl[kk]);
        }
        const u32 kat = k_s + 2 * (lane & 3) * PITCH + (lane >> 2) * 4;
#pragma unroll
        for (int n = 0; n < DP / 8; ++n) {
            float part[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
            for (int kk = 0; kk < BN / 8; ++kk) {
                u32 w[2] = {lds32(kat + kk * 8 * PITCH + n * 32), lds32(kat + (kk * 8 + 1) * PITCH + n * 32)}, wh[2], wl[2];
                split_all(w, wh, wl);
                mma3(part, dh[kk], dl[kk], wh[0], wl[0], wh[1], wl[1]);
            }
#pragma unroll
            for (int e = 0; e < 4; ++e) dq[0][n][e] += part[e];
        }
#endif
    }
    cp_wait<0>();
    // A warp's own rows of Q hold its dQ on the way out.
    __syncthreads();
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
        for (int n = 0; n < DP / 8; ++n)
            store_pair(q_at + (warp * 16 + (lane >> 2) + r * 8) * PITCH + (n * 8 + 2 * (lane & 3)) * ESZ, dq[0][n][2 * r] * a.scale, dq[0][n][2 * r + 1] * a.scale);
    __syncthreads();
    store_tile<BM, DP, NT>(smem, g.dq, (elem*)g.dq.ptr + b * g.dq.sb + h * g.dq.sh, i0, a.sq, a.d, tid);
    return false;
}

extern "C" __global__ void __launch_bounds__(NT, MINB) tw_bwd_dq(const __grid_constant__ Grads g) {
    extern __shared__ __align__(128) char smem[];
    if (!gradients_of_rows<false>(g, smem)) return;
#if FENCED
    apart(g, smem, [](const Grads& g, char* smem) { gradients_of_rows<true>(g, smem); });
#endif
}
#endif
