// FlashAttention-2 backward (Dao 2023, Algorithm 2).
//
// PART 1, the gradients: a block owns BN keys of one KV head. Their K and V stay in shared memory, their dK and dV in registers,
//   while all row blocks of the group's query heads pass by: five products a tile. S and dP are made with keys as rows, so that
//   P^T and dS^T are first operands as they are; they go through shared memory (PREG 1: only dS, each warp has all rows of its
//   keys). dQ is added to device memory. Q and dO arrive by cp.async under the products.
// PART 2, store_dq: dQ's sums, scaled, as the dtype.
// dq.cu has PART 3, dQ without adding in memory; rows.cu what is done row by row.
//
//   WARPS     SK x (BM/SR) warps over keys and rows of S^T     GK x GD warps over keys and columns of dK, dV     QR x QD over rows
//   and columns of dQ     QST, DST stages of Q and dO     KVREG 1 = K and V fragments stay in registers     RED4 1 = adds of four
//   floats (sm_90)     DQ 0 = dQ is another kernel's     MINB blocks a multiprocessor
//   DEFER 1 = a tile's dQ is made under the next tile's exponentials: dS has two places then
//   OWN 1 = the part of P^T and dS^T that a warp made itself it takes from its registers (SR = GD = 2)

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

// dQ's sums lie as the accumulators do: block of BM rows, warp, fragment, lane, four floats. The adds of a warp are then whole
// lines whatever head_dim is.
DEV i64 dq_block(const Grads& g, int pair, int block) { return ((i64)pair * (g.rows_padded / BM) + block) * (BM * DP); }

#if DROPOUT
#define WEIGHT(m, n, e) kept.of(s[m][n][e], m, n, e, a)
#define ARRIVED(m, n, e) kept.of(dp[m][n][e], m, n, e, a)
#else
#define WEIGHT(m, n, e) s[m][n][e]
#define ARRIVED(m, n, e) dp[m][n][e]
#endif

#if PART == 1
#define TILE_Q (BM * PITCH)
#define TILE_GO (BM * PITCH_V)
#define TILE_K (BN * PITCH)
#define TILE_V (BN * PITCH_V)
#define TILE_P (BN * PP)
#define STATS (2 * BM * 4)

// CAREFUL: where something that is not finite was found. Without it: whether to begin anew with care; nothing has left the block then.
template <bool CAREFUL> DEV bool gradients_of_keys(const Grads& g, char* smem) {
    const Args& a = g.f;
    const Span span = span_of(a);
    const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
    const u32 k_at = smem_u32(smem), v_at = k_at + TILE_K, q_at = v_at + TILE_V, go_at = q_at + QST * TILE_Q;
    const u32 ds_at = go_at + DST * TILE_GO, p_at = ds_at + (DEFER ? 2 : 1) * TILE_P, stats_at = p_at + (PREG ? 0 : TILE_P);
    // Marks of a step's rows, and a bit for each key of the block whose K is not finite.
    [[maybe_unused]] unsigned char* const marks = (unsigned char*)smem + (stats_at + QST * STATS - k_at);
    [[maybe_unused]] u32* const odd_keys = (u32*)(marks + BM);

    // Key blocks of one group of (batch, KV head) pairs run together, so that their Q and dO stay in L2; under causality the
    // first keys have the most rows and go first.
    int pair, jb;
    {
        int per = g.key_blocks * a.pairs_per_group;
        int grp = blockIdx.x / per, r = blockIdx.x - grp * per;
        int width = min(a.pairs_per_group, g.kv_pairs - grp * a.pairs_per_group);
        jb = r / width;
        pair = grp * a.pairs_per_group + (r - jb * width);
    }
    const int b = pair / g.kv_heads, hk = pair - b * g.kv_heads;
    const elem* kp = (const elem*)a.k.ptr + b * a.k.sb + hk * a.k.sh;
    const elem* vp = (const elem*)a.v.ptr + b * a.v.sb + hk * a.v.sh;
    const int key0 = jb * BN, key1 = min(key0 + BN, a.sk);

    // Row blocks that see some key of this block.
    int first = 0, last = (a.sq + BM - 1) / BM - 1;
    if (MASK >= 1) first = max(0, key0 - a.hi_off) / BM;
    if (MASK == 2) last = key1 - 1 - a.lo_off < 0 ? -1 : min(last, (key1 - 1 - a.lo_off) / BM);
    const int count = max(0, last - first + 1), steps = count * a.group_size;
    // Without a mask blocks would meet at the same rows: each begins elsewhere.
    const int turn = MASK == 0 && count > 0 ? jb % count : 0;

    // (head, row block) of a step.
    auto place = [&](int step, int& h, int& i0) {
        int n = step / count, x = step - n * count + turn;
        if (MASK == 0 && x >= count) x -= count;
        h = hk * a.group_size + n;
        i0 = (first + x) * BM;
    };
    auto load_q = [&](int step) {
        int h, i0;
        place(step, h, i0);
        const u32 stage = QST == 2 ? step & 1 : 0;
        load_tile<BM, DP, NT>(q_at + stage * TILE_Q, a.q, (const elem*)a.q.ptr + b * a.q.sb + h * a.q.sh, i0, a.sq, a.d, tid);
        const i64 at = (i64)(b * a.heads + h) * g.rows_padded + i0;
        for (int x = tid; x < BM / 2; x += NT) {
            const bool is_lse = x < BM / 4;
            const float* from = (const float*)(is_lse ? g.lse2 : g.delta) + at + (is_lse ? x : x - BM / 4) * 4;
            cp_async16(stats_at + stage * STATS + x * 16, from, 16);
        }
    };
    auto load_go = [&](int step) {
        int h, i0;
        place(step, h, i0);
        load_tile<BM, DV, NT>(go_at + (DST == 2 ? step & 1 : 0) * TILE_GO, g.go, (const elem*)g.go.ptr + b * g.go.sb + h * g.go.sh, i0, a.sq, a.dv, tid);
    };

    load_tile<BN, DP, NT>(k_at, a.k, kp, key0, a.sk, a.d, tid);
    load_tile<BN, DV, NT>(v_at, a.v, vp, key0, a.sk, a.dv, tid);
    if (steps > 0) {
        if (QST == 2) load_q(0);
        if (DST == 2) load_go(0);
    }
    cp_commit();
    if constexpr (CAREFUL) {
        if (tid < (BN + 31) / 32) odd_keys[tid] = 0;
        cp_wait<0>();
        __syncthreads();
        mend_tile<BN, DV, NT>(v_at, tid, nullptr);
        mend_tile<BN, DP, NT>(k_at, tid, odd_keys);
        __syncthreads();
    } else if (FENCED && steps > 0) {
        bool odd = false;
        for (int n = 0; n < a.group_size; ++n) odd |= odd_rows(g, b * a.heads + hk * a.group_size + n, first * BM, (last + 1) * BM, tid, NT);
        cp_wait<0>();
        odd |= (scan_tile<BN, DP, NT>(k_at, tid) | scan_tile<BN, DV, NT>(v_at, tid)) != 0;
        if (__syncthreads_or(odd)) return true;
    }

    float dk[GT][GN][4], dv[GT][VN][4];
    clear(dk);
    clear(dv);
    const int sk_ = warp / SR, sr_ = warp % SR, gk_ = warp / GD, gd_ = warp % GD, qr_ = warp / QD, qd_ = warp % QD;
    const bool does_s = SK * SR == WARPS || warp < SK * SR, does_g = GK * GD == WARPS || warp < GK * GD, does_q = QR * QD == WARPS || warp < QR * QD;
    const u32 k_mine = k_at + sk_ * KT * 16 * PITCH, v_mine = v_at + sk_ * KT * 16 * PITCH_V;
    // This lane's first element of P^T and dS^T.
    const u32 cell = (sk_ * KT * 16 + (lane >> 2)) * PP + (sr_ * RT * 8 + 2 * (lane & 3)) * ESZ;
#if KVREG
    u32 kf[DP / 16][KT][4], vf[DV / 16][KT][4];
#endif

    // dQ += dS K of one tile, in device memory.
    auto add_dq = [&](int h, int i0, u32 ds_s) {
        if (!DQ || !does_q) return;
        float dq[QT][QN][4];
        clear(dq);
        product_tn<QT, QN, BN>(dq, ds_s + qr_ * QT * 16 * ESZ, PP, k_at + qd_ * QN * 8 * ESZ, PITCH, lane);
        float* to = (float*)g.dq_acc + dq_block(g, b * a.heads + h, i0 / BM) + (warp * QT * QN * 32 + lane) * 4;
#pragma unroll
        for (int m = 0; m < QT; ++m)
#pragma unroll
            for (int n = 0; n < QN; ++n) {
                float *at = to + (m * QN + n) * 128, *x = dq[m][n];
// sm_90 has it since PTX ISA 8.1; an older compiler, or one that compiles for an older chip, does without.
#if RED4 && __CUDA_ARCH__ >= 900 && __CUDACC_VER_MAJOR__ * 100 + __CUDACC_VER_MINOR__ >= 1201
                asm volatile("red.global.add.v4.f32 [%0], {%1,%2,%3,%4};" ::"l"(at), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]) : "memory");
#else
#pragma unroll
                for (int e = 0; e < 4; ++e) asm volatile("red.global.add.f32 [%0], %1;" ::"l"(at + e), "f"(x[e]) : "memory");
#endif
            }
    };
    [[maybe_unused]] auto add_dq_of = [&](int step) {
        int h, i0;
        place(step, h, i0);
        add_dq(h, i0, ds_at + (step & 1) * TILE_P);
    };

    for (int step = 0; step < steps; ++step) {
        int h, i0;
        place(step, h, i0);
        const u32 q_s = q_at + (QST == 2 ? step & 1 : 0) * TILE_Q, go_s = go_at + (DST == 2 ? step & 1 : 0) * TILE_GO;
        const u32 stats = stats_at + (QST == 2 ? step & 1 : 0) * STATS + (sr_ * RT * 8 + 2 * (lane & 3)) * 4;
        const u32 ds_s = ds_at + (DEFER ? step & 1 : 0) * TILE_P;
        cp_wait<0>();
        __syncthreads();
        if (QST == 1) {
            load_q(step);
            if (DST == 1) load_go(step);
            cp_commit();
            cp_wait<0>();
            __syncthreads();
        } else if (DST == 1) {
            load_go(step);
            cp_commit();
        }
        if (step + 1 < steps) {
            if (QST == 2) load_q(step + 1);
            if (DST == 2) load_go(step + 1);
        }
        cp_commit();
        if constexpr (CAREFUL) {
            if (tid < BM) {
                float* const stat = (float*)(smem + (stats_at + (QST == 2 ? step & 1 : 0) * STATS - k_at)) + tid;
                const float lse2 = stat[0], delta = stat[BM];
                const bool unseen = __float_as_uint(lse2) == UNSEEN;
                marks[tid] = unseen ? MARK_UNSEEN : (is_nan(lse2) ? MARK_L : 0) | (is_nan(delta) ? MARK_DELTA : 0);
                if (is_nan(lse2)) stat[0] = -NEG_INF;
                if (unseen || is_nan(delta)) stat[BM] = 0.f;
            }
            clear_tile<BM, DP, NT>(q_s, tid);
            if (DST == 2 || QST == 1) clear_tile<BM, DV, NT>(go_s, tid);
            __syncthreads();
        }
        // Where dO arrives later than Q.
        auto dout_arrived = [&] {
            if (DST != 1 || QST != 2) return;
            cp_wait<1>();
            __syncthreads();
            if constexpr (CAREFUL) {
                clear_tile<BM, DV, NT>(go_s, tid);
                __syncthreads();
            }
        };
#if KVREG
        if (step == 0) {
#pragma unroll
            for (int m = 0; m < KT; ++m) {
                const u32 row = m * 16 + (lane & 15), half = (lane >> 4) * 16;
#pragma unroll
                for (int kk = 0; kk < DP / 16; ++kk) ldsm4(kf[kk][m], k_mine + row * PITCH + half + kk * 32);
#pragma unroll
                for (int kk = 0; kk < DV / 16; ++kk) ldsm4(vf[kk][m], v_mine + row * PITCH_V + half + kk * 32);
            }
        }
#define FRAGMENTS(x) true
#define K_REGS kf
#define V_REGS vf
#else
#define FRAGMENTS(x) false
#define K_REGS nullptr
#define V_REGS nullptr
#endif
        const int i1 = min(i0 + BM, a.sq);
        const bool edge = key0 + BN > (MASK >= 1 ? min(a.sk, i0 + a.hi_off + 1) : a.sk) || (MASK == 2 && key0 < i1 - 1 + a.lo_off);

#if PREG || OWN
        u32 pf[RT / 2][KT][4], df[RT / 2][KT][4];
#endif
        if (does_s) {
            float s[KT][RT][4], dp[KT][RT][4];
            clear(s);
            product_nt<KT, RT, DP, FRAGMENTS(0)>(s, k_mine, PITCH, K_REGS, q_s + sr_ * RT * 8 * PITCH, PITCH, lane);
            if (DEFER == 1 && step > 0) add_dq_of(step - 1);
            // This lane's first key and row.
            const int key = key0 + sk_ * KT * 16 + (lane >> 2), row = i0 + sr_ * RT * 8 + 2 * (lane & 3);
            [[maybe_unused]] const Score sc = score_head(a, a.seq0 + b, b, h, 0, 0);
            float slope[SCORE ? KT : 1][SCORE ? RT : 1][4];
            float2 lse2[RT];
#pragma unroll
            for (int n = 0; n < RT; ++n) lse2[n] = lds_pair(stats + n * 32);
            weights<true, CAREFUL>(s, slope, sc, a, span, key, row, [&](int, int n, int e) { return e & 1 ? lse2[n].y : lse2[n].x; });
#if DROPOUT
            Kept<true, KT, RT> kept;
            kept.find(sc, a, span, key, row, lane);
#endif
            if (edge) {
#pragma unroll
                for (int m = 0; m < KT; ++m)
#pragma unroll
                    for (int r = 0; r < 2; ++r) {
                        // Rows that see the key, relative to this lane's first.
                        const int j = key + m * 16 + r * 8;
                        const int from = j >= a.sk ? BM : MASK >= 1 ? j - a.hi_off - row : 0, to = MASK == 2 ? j - a.lo_off - row : BM;
#pragma unroll
                        for (int n = 0; n < RT; ++n)
#pragma unroll
                            for (int e = 0; e < 2; ++e)
                                if (n * 8 + e < from || n * 8 + e > to) s[m][n][2 * r + e] = 0.f;
                    }
            }
            dout_arrived();
            clear(dp);
            product_nt<KT, RT, DV, FRAGMENTS(0)>(dp, v_mine, PITCH_V, V_REGS, go_s + sr_ * RT * 8 * PITCH_V, PITCH_V, lane);
            if constexpr (CAREFUL) {
#pragma unroll
                for (int m = 0; m < KT; ++m)
#pragma unroll
                    for (int n = 0; n < RT; ++n)
#pragma unroll
                        for (int e = 0; e < 4; ++e) {
                            const int j = key + m * 16 + (e >> 1) * 8, i = row + n * 8 + (e & 1), mark = marks[i - i0];
                            const bool odd = odd_keys[(j - key0) / 32] >> (j - key0) % 32 & 1;
                            if (mark == 0 && !odd) continue;
                            const bool outside = i >= a.sq || j < first_key(span, i) || j > last_key(span, i);
                            // A key that is not finite has a score that is not: the row has L = NaN or the pair is hidden. A softcap
                            // may have made it finite again, what is not known of this pair.
                            const bool hidden = mark == MARK_UNSEEN || (odd && !(mark & MARK_L) && a.softcap == 0.f) || outside || is_hidden(s[m][n][e]);
                            bool lost = odd || (mark & MARK_L);
#if DROPOUT
                            // The weight itself is good, but dS has nothing else to become NaN by.
                            lost |= !kept.at(m, n, e);
#endif
                            dp[m][n][e] = hidden ? 0.f : QUIET_NAN;
                            if (hidden || lost) s[m][n][e] = hidden ? 0.f : QUIET_NAN;
                        }
            }
#pragma unroll
            for (int m = 0; m < KT; ++m)
#pragma unroll
                for (int n = 0; n < RT; ++n)
#pragma unroll
                    for (int r = 0; r < 2; ++r) {
#if PREG || OWN
                        pf[n / 2][m][(n & 1) * 2 + r] = pack2(WEIGHT(m, n, 2 * r), WEIGHT(m, n, 2 * r + 1));
                        if (!PREG) store_word(p_at + cell + (m * 16 + r * 8) * PP + n * 8 * ESZ, pf[n / 2][m][(n & 1) * 2 + r]);
#else
                        store_pair(p_at + cell + (m * 16 + r * 8) * PP + n * 8 * ESZ, WEIGHT(m, n, 2 * r), WEIGHT(m, n, 2 * r + 1));
#endif
                    }
#pragma unroll
            for (int n = 0; n < RT; ++n) {
                const float2 delta = lds_pair(stats + BM * 4 + n * 32);
#pragma unroll
                for (int m = 0; m < KT; ++m)
#pragma unroll
                    for (int r = 0; r < 2; ++r) {
                        float x = s[m][n][2 * r] * (ARRIVED(m, n, 2 * r) - delta.x), y = s[m][n][2 * r + 1] * (ARRIVED(m, n, 2 * r + 1) - delta.y);
#if SCORE
                        x *= slope[m][n][2 * r];
                        y *= slope[m][n][2 * r + 1];
#endif
#if PREG || OWN
                        df[n / 2][m][(n & 1) * 2 + r] = pack2(x, y);
                        if (DQ || !PREG) store_word(ds_s + cell + (m * 16 + r * 8) * PP + n * 8 * ESZ, df[n / 2][m][(n & 1) * 2 + r]);
#else
                        store_pair(ds_s + cell + (m * 16 + r * 8) * PP + n * 8 * ESZ, x, y);
#endif
                    }
            }
        } else {
            dout_arrived();
        }
#if PREG
        // P^T never leaves the warp, so dV does not wait for the others.
        product_nn<GT, VN, BM, true>(dv, 0, PP, pf, go_s, PITCH_V, lane);
        if (!DEFER) {
            if (DQ) __syncthreads();
            add_dq(h, i0, ds_s);
        }
        product_nn<GT, GN, BM, true>(dk, 0, PP, df, q_s, PITCH, lane);
#elif OWN
        // What this warp made of P^T and dS^T it has in registers; the rest of its keys' rows comes from its neighbour.
        const u32 own = sr_ * RT * 8, other = RT * 8 - own;
        const u32 go_c = go_s + gd_ * VN * 8 * ESZ, q_c = q_s + gd_ * GN * 8 * ESZ;
        __syncthreads();
        product_nn<GT, VN, RT * 8, true>(dv, 0, PP, pf, go_c + own * PITCH_V, PITCH_V, lane);
        product_nn<GT, GN, RT * 8, true>(dk, 0, PP, df, q_c + own * PITCH, PITCH, lane);
        product_nn<GT, VN, RT * 8, false>(dv, p_at + gk_ * GT * 16 * PP + other * ESZ, PP, nullptr, go_c + other * PITCH_V, PITCH_V, lane);
        if (!DEFER) add_dq(h, i0, ds_s);
        product_nn<GT, GN, RT * 8, false>(dk, ds_s + gk_ * GT * 16 * PP + other * ESZ, PP, nullptr, q_c + other * PITCH, PITCH, lane);
#else
        __syncthreads();
        if (does_g) product_nn<GT, VN, BM, false>(dv, p_at + gk_ * GT * 16 * PP, PP, nullptr, go_s + gd_ * VN * 8 * ESZ, PITCH_V, lane);
        if (!DEFER) add_dq(h, i0, ds_s);
        if (does_g) product_nn<GT, GN, BM, false>(dk, ds_s + gk_ * GT * 16 * PP, PP, nullptr, q_s + gd_ * GN * 8 * ESZ, PITCH, lane);
#endif
        if (CAREFUL && does_g) {
            const Score sc = score_head(a, a.seq0 + b, b, h, 0, 0);
            const elem* go = (const elem*)g.go.ptr + b * g.go.sb + h * g.go.sh + (i64)i0 * g.go.ss;
#pragma unroll 1
            for (int i = 0; i < BM; ++i)
                if (marks[i] & MARK_DELTA) add_odd_row(dv, go + i * g.go.ss, g.go.sd, a.dv, sc, a, span, i0 + i, key0 + gk_ * GT * 16 + (lane >> 2), gd_ * VN * 8 + 2 * (lane & 3));
        }
    }
    cp_wait<0>();
    __syncthreads();
    // For `tw_bwd_dq`.
    if (CAREFUL && !DQ && tid < BN / 16) odd_keys_of(g, pair)[key0 / 16 + tid] = 1;
    if (DEFER && steps > 0) {
        add_dq_of(steps - 1);
        __syncthreads();
    }

    // K's and V's places hold dK and dV on their way out.
    if (does_g) {
#pragma unroll
        for (int m = 0; m < GT; ++m)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const u32 row = (gk_ * GT + m) * 16 + (lane >> 2) + r * 8, col = 2 * (lane & 3) * ESZ;
#pragma unroll
                for (int n = 0; n < GN; ++n) store_pair(k_at + row * PITCH + col + (gd_ * GN + n) * 8 * ESZ, dk[m][n][2 * r] * a.scale, dk[m][n][2 * r + 1] * a.scale);
#pragma unroll
                for (int n = 0; n < VN; ++n) store_pair(v_at + row * PITCH_V + col + (gd_ * VN + n) * 8 * ESZ, dv[m][n][2 * r], dv[m][n][2 * r + 1]);
            }
    }
    __syncthreads();
    store_tile<BN, DP, NT>(smem, g.dk, (elem*)g.dk.ptr + b * g.dk.sb + hk * g.dk.sh, key0, a.sk, a.d, tid);
    store_tile<BN, DV, NT>(smem + TILE_K, g.dv, (elem*)g.dv.ptr + b * g.dv.sb + hk * g.dv.sh, key0, a.sk, a.dv, tid);
    return false;
}

extern "C" __global__ void __launch_bounds__(NT, MINB) tw_bwd_fa2(const __grid_constant__ Grads g) {
    extern __shared__ __align__(128) char smem[];
    if (!gradients_of_keys<false>(g, smem)) return;
#if FENCED
    apart(g, smem, [](const Grads& g, char* smem) { gradients_of_keys<true>(g, smem); });
#endif
}
#endif

#if PART == 2
// One block of BM rows of a (batch, head) pair.
extern "C" __global__ void __launch_bounds__(256) tw_bwd_store_dq(const __grid_constant__ Grads g) {
    extern __shared__ __align__(128) char smem[];
    const Args& a = g.f;
    const int tid = threadIdx.x, blocks = (a.sq + BM - 1) / BM;
    const int pair = blockIdx.x / blocks, block = blockIdx.x - pair * blocks;
    const int b = pair / a.heads, h = pair - b * a.heads;
    const float4* from = (const float4*)((const float*)g.dq_acc + dq_block(g, pair, block));
    const u32 base = smem_u32(smem);
#pragma unroll 4
    for (int x = tid; x < BM * DP / 4; x += 256) {
        const int lane = x & 31, n = x / 32 % QN, m = x / 32 / QN % QT, w = x / 32 / QN / QT;
        const float4 y = from[x];
        const u32 to = base + ((w / QD * QT + m) * 16 + (lane >> 2)) * PITCH + ((w % QD * QN + n) * 8 + 2 * (lane & 3)) * ESZ;
        store_pair(to, y.x * a.scale, y.y * a.scale);
        store_pair(to + 8 * PITCH, y.z * a.scale, y.w * a.scale);
    }
    __syncthreads();
    store_tile<BM, DP, 256>(smem, g.dq, (elem*)g.dq.ptr + b * g.dq.sb + h * g.dq.sh, block * BM, a.sq, a.d, tid);
}
#endif
