// Shared by the backward kernels: their argument block, and the products whose operands lie across in shared memory.
//
//   dV = (P o D)^T dO     dP = D o (dO V^T)     delta = rowsum(dO o O) - dlse     dS = P o (dP - delta)
//   dQ = scale dX K       dK = scale dX^T Q     dX = dS times the slope of the softcap
//
// P is made again from L, in base 2: P = 2^(s c - L log2 e). Where nothing is live (L = -inf) and beyond the last row, `prepare`
// leaves +inf in L's place, so that P is 0 there whatever stands in Q.

// Mirrored by `launch::BackwardArgs` (repr(C)).
struct Grads {
    Args f; // the forward call's; o = its output, lse not used
    Tensor lse, dlse, go, dq, dk, dv; // go = dO; dlse.ptr may be 0
    Tensor dbias;     // of PART 4 and 5 in standard.cu
    u64 lse2, delta;  // f32 [pairs, rows_padded]
    u64 dq_acc;       // f32 sums of dQ, see dq_block; 0 = tw_bwd_dq makes dQ
    u64 dsinks;       // f32 [heads]
    u64 odd_rows;     // u32 [pairs, rows_padded / PREPARED]: whether a row is marked
    u64 odd_keys;     // u32 [kv_pairs, key_words]: whether one of sixteen keys has a K or V that is not finite
    u64 turns;        // u32 [TURN_WORDS + pairs * rows_padded / TURN_ROWS], see Turns in hopper.cu; or 0
    int rows_padded;  // a multiple of every BM
    int key_blocks, kv_pairs, kv_heads;
};

// The first words of `turns`, and rows that each of the others is for.
#define TURN_NEXT 0 // blocks that have begun
#define TURN_CARE 1 // and of the kernel for those that were left out
#define TURN_LEFT 2 // whether there are any
#define TURN_WORDS 32
#define TURN_ROWS 64

#if F32
// Operands word by word, for either order of A: `a` is this lane's place, am and ak its strides in bytes along m and k. Each
// product is summed apart and added with rounding, because the tensor core truncates as it accumulates.
template <int MT, int NTL, int K> DEV void product_words(float (&c)[MT][NTL][4], u32 a, int am, int ak, u32 b, int bpitch, int lane) {
    const u32 bat = b + (lane & 3) * bpitch + (lane >> 2) * 4;
    constexpr int AT_ONCE = NTL % 4 == 0 ? 4 : NTL % 2 == 0 ? 2 : 1;
#pragma unroll
    for (int n0 = 0; n0 < NTL; n0 += AT_ONCE) {
        float part[MT][AT_ONCE][4];
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int n = 0; n < AT_ONCE; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) part[m][n][e] = 0.f;
#pragma unroll 2
        for (int kk = 0; kk < K / 8; ++kk) {
            u32 ah[MT][4], al[MT][4];
#pragma unroll
            for (int m = 0; m < MT; ++m) {
                const u32 at = a + m * 16 * am + kk * 8 * ak;
                u32 af[4] = {lds32(at), lds32(at + 8 * am), lds32(at + 4 * ak), lds32(at + 8 * am + 4 * ak)};
                split_all(af, ah[m], al[m]);
            }
#pragma unroll
            for (int n = 0; n < AT_ONCE; ++n) {
                const u32 at = bat + kk * 8 * bpitch + (n0 + n) * 32;
                u32 bf[2] = {lds32(at), lds32(at + 4 * bpitch)}, bh[2], bl[2];
                split_all(bf, bh, bl);
#pragma unroll
                for (int m = 0; m < MT; ++m) mma3(part[m][n], ah[m], al[m], bh[0], bl[0], bh[1], bl[1]);
            }
        }
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int n = 0; n < AT_ONCE; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) c[m][n0 + n][e] += part[m][n][e];
    }
}
#endif

// c += A B with A [m][k] at `a` (or in registers) and B [k][n] at `b`, both by rows.
template <int MT, int NTL, int K, bool AREG> DEV void product_nn(float (&c)[MT][NTL][4], u32 a, int apitch, const u32 (*areg)[MT][4], u32 b, int bpitch, int lane) {
#if !F32
    const u32 aat = a + (lane & 15) * apitch + (lane >> 4) * 16;
    const u32 bat = b + (lane & 15) * bpitch + (lane >> 4) * 16;
#pragma unroll
    for (int kk = 0; kk < K / 16; ++kk) {
        u32 af[MT][4];
#pragma unroll
        for (int m = 0; m < MT; ++m) {
            if constexpr (AREG) {
#pragma unroll
                for (int x = 0; x < 4; ++x) af[m][x] = areg[kk][m][x];
            } else {
                ldsm4(af[m], aat + m * 16 * apitch + kk * 32);
            }
        }
#pragma unroll
        for (int n = 0; n < NTL / 2; ++n) {
            u32 bf[4];
            ldsm4t(bf, bat + kk * 16 * bpitch + n * 32);
#pragma unroll
            for (int m = 0; m < MT; ++m) {
                mma(c[m][2 * n], af[m], bf[0], bf[1]);
                mma(c[m][2 * n + 1], af[m], bf[2], bf[3]);
            }
        }
    }
#else
    product_words<MT, NTL, K>(c, a + (lane >> 2) * apitch + (lane & 3) * 4, apitch, 4, b, bpitch, lane);
#endif
}

// c += A B with A stored as [k][m] at `a` and B [k][n] at `b`.
template <int MT, int NTL, int K> DEV void product_tn(float (&c)[MT][NTL][4], u32 a, int apitch, u32 b, int bpitch, int lane) {
#if !F32
    const u32 aat = a + ((lane & 7) + ((lane >> 4) << 3)) * apitch + ((lane >> 3) & 1) * 16;
    const u32 bat = b + (lane & 15) * bpitch + (lane >> 4) * 16;
#pragma unroll
    for (int kk = 0; kk < K / 16; ++kk) {
        u32 af[MT][4];
#pragma unroll
        for (int m = 0; m < MT; ++m) ldsm4t(af[m], aat + kk * 16 * apitch + m * 32);
#pragma unroll
        for (int n = 0; n < NTL / 2; ++n) {
            u32 bf[4];
            ldsm4t(bf, bat + kk * 16 * bpitch + n * 32);
#pragma unroll
            for (int m = 0; m < MT; ++m) {
                mma(c[m][2 * n], af[m], bf[0], bf[1]);
                mma(c[m][2 * n + 1], af[m], bf[2], bf[3]);
            }
        }
    }
#else
    product_words<MT, NTL, K>(c, a + (lane >> 2) * 4 + (lane & 3) * apitch, 4, apitch, b, bpitch, lane);
#endif
}

template <int MT, int NTL> DEV void clear(float (&c)[MT][NTL][4]) {
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int n = 0; n < NTL; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) c[m][n][e] = 0.f;
}

DEV void store_pair(u32 at, float lo, float hi) {
#if F32
    asm volatile("st.shared.v2.f32 [%0], {%1,%2};" ::"r"(at), "f"(lo), "f"(hi) : "memory");
#else
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(pack2(lo, hi)) : "memory");
#endif
}
DEV void store_word(u32 at, u32 x) { asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(x) : "memory"); }
DEV float2 lds_pair(u32 at) {
    float2 x;
    asm volatile("ld.shared.v2.f32 {%0,%1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(at) : "memory");
    return x;
}

// Rows [row, row + ROWS) of a tile in shared memory to a [seqlen, d] tensor, in whole chunks.
template <int ROWS, int COLS, int NTH> DEV void store_tile(const char* from, const Tensor& t, elem* base, int row, int limit, int d, int tid) {
    constexpr int CH = COLS / EPC;
#pragma unroll 4
    for (int idx = tid; idx < ROWS * CH; idx += NTH) {
        int r = idx / CH, ch = idx % CH;
        if (row + r >= limit || ch * EPC >= d) continue;
        const char* at = from + r * PITCH_OF(COLS) + ch * 16;
        elem* to = base + (i64)(row + r) * t.ss + ch * EPC;
#if VEC
        *(uint4*)to = *(const uint4*)at;
#else
        for (int e = 0; e < EPC && ch * EPC + e < d; ++e) to[e] = ((const elem*)at)[e];
#endif
    }
}

// From raw products to weights, in place; `slope` gets what dS is still to be multiplied by under a softcap. KEYROWS as in
// score.cu; L of a column (KEYROWS) or of a row comes from `lse2`, called with fragment and element. CAREFUL: what its score hides
// has a weight of -0 then, whatever the rest of the row is.
template <bool KEYROWS, bool CAREFUL, int MT, int NTL, class L> DEV void weights(float (&s)[MT][NTL][4], float (&slope)[SCORE ? MT : 1][SCORE ? NTL : 1][4], const Score& sc, const Args& a, const Span& span, int row, int col, L lse2) {
#if SCORE
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int n = 0; n < NTL; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                float t = a.softcap > 0.f ? tanhf(s[m][n][e] * a.scale / a.softcap) : 0.f;
                slope[m][n][e] = 1.f - t * t;
#if SCORE == 1
                s[m][n][e] = score_of(s[m][n][e], a);
#endif
            }
#if SCORE == 2
    score_tile<KEYROWS>(s, sc, a, span, row, col);
#endif
    const float c = LOG2E;
#else
    const float c = a.scale * LOG2E;
#endif
#pragma unroll
    for (int n = 0; n < NTL; ++n)
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const float w = ex2(fmaf(s[m][n][e], c, -lse2(m, n, e)));
                s[m][n][e] = CAREFUL && s[m][n][e] * c == NEG_INF ? -0.f : w;
            }
}

// Which weights of a warp's fragments dropout keeps, four bits a fragment.
template <bool KEYROWS, int MT, int NTL> struct Kept {
    u32 word[(MT * NTL + 7) / 8];
    __device__ __forceinline__ void find(const Score& sc, const Args& a, const Span& span, int row, int col, int lane) {
#pragma unroll
        for (int x = 0; x < (MT * NTL + 7) / 8; ++x) word[x] = 0;
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int n = 0; n < NTL; ++n) word[(m * NTL + n) / 8] |= keep_fragment<KEYROWS>(sc, a, span, row + m * 16, col + n * 8, lane) << (m * NTL + n) % 8 * 4;
    }
    __device__ __forceinline__ bool at(int m, int n, int e) const { return word[(m * NTL + n) / 8] >> ((m * NTL + n) % 8 * 4 + e) & 1; }
    // x as dropout leaves it: 0 where it takes it, whatever it was.
    __device__ __forceinline__ float of(float x, int m, int n, int e, const Args& a) const { return at(m, n, e) ? x * a.drop_scale : 0.f; }
};

// ---- what is hidden --------------------------------------------------------------------------------------------------------

// A pair that is hidden or dropped brings a weight of 0, and 0 times NaN or infinity is NaN. Between the two factors of a pair it
// is enough to choose 0. Tiles that are summed over, Q for dK, dO for dV and K for dQ, are mended: such values become 0 in them.
// Nothing is lost with those of Q and K, for a row that sees one has L = NaN, so that all of its dS are NaN (without a softcap: an
// infinite score is hidden if it is negative). Those of dO go to the dV of the keys that see them by addition.
//
// `prepare` leaves marks for the rows: L = NaN; delta = NaN if the row keeps a key (sees it, and dropout leaves it) and dO or such a
// key's V is not finite; L = UNSEEN if a row sees nothing but q or, without a sink, dO is not finite. A row that keeps no key has
// no part of dO in any gradient: delta is -dlse then, and only `odd_rows` says that its dO is not finite. Blocks that meet no mark
// and no such K or V run loops that know nothing of all this.
#define FENCED (MASK >= 1 || SCORE == 2 || DROPOUT)
#define UNSEEN 0x7fc00001u
#define QUIET_NAN __int_as_float(0x7fffffff)
#define LANES (DV / EPC > 16 ? 32 : DV / EPC > 8 ? 16 : DV / EPC > 4 ? 8 : 4) // of `prepare`, a row
#define PREPARED (256 / LANES)                                                // its rows a block
#define MARK_UNSEEN 1
#define MARK_L 2
#define MARK_DELTA 4

// This thread's share of whether rows [from, to) of a pair are marked.
DEV bool odd_rows(const Grads& g, int pair, int from, int to, int tid, int threads) {
    const u32* const at = (const u32*)g.odd_rows + (i64)pair * (g.rows_padded / PREPARED);
    bool odd = false;
    for (int x = from / PREPARED + tid; x < (to + PREPARED - 1) / PREPARED; x += threads) odd |= at[x] != 0;
    return odd;
}
DEV u32* odd_keys_of(const Grads& g, int kv_pair) { return (u32*)g.odd_keys + (i64)kv_pair * ((g.f.sk + 127) / 128 * 8); }

DEV bool is_nan(float x) { return x != x; }
DEV bool is_hidden(float weight) { return __float_as_uint(weight) == 0x80000000u; }
DEV bool is_finite(float x) { return (__float_as_uint(x) & 0x7f800000u) != 0x7f800000u; }

// A call that leaves the registers of the caller's loops alone. What was on its way to shared memory has arrived before it begins.
template <class F> static __device__ __noinline__ void apart(const Grads& g, char* smem, F body) {
    cp_wait<0>();
    __syncthreads();
    body(g, smem);
}

DEV bool live_at(const Score& s, const Args& a, const Span& span, int i, int j) {
    return i < a.sq && j >= first_key(span, i) && j <= last_key(span, i) && !(SCORE == 2 && hidden_at(s, a, span, i, j));
}

// Makes values of a tile that has arrived 0 where they are not finite. Whether this thread met any; their rows are added to `rows`,
// a bit each.
template <int ROWS, int COLS, int NTH> DEV bool mend_tile(u32 tile, int tid, u32* rows) {
    constexpr int CH = COLS / EPC;
    bool any = false;
#pragma unroll 4
    for (int idx = tid; idx < ROWS * CH; idx += NTH) {
        const u32 at = tile + (idx / CH) * PITCH_OF(COLS) + (idx % CH) * 16;
        u32 w[4], found = 0;
        asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3]) : "r"(at) : "memory");
#pragma unroll
        for (int x = 0; x < 4; ++x) found |= (w[x] & EXP_BITS) + EXP_ONE;
        if (!(found & EXP_TOP)) continue;
        any = true;
        if (rows) atomicOr(rows + idx / CH / 32, 1u << idx / CH % 32);
#pragma unroll
        for (int x = 0; x < 4; ++x) {
            const u32 bad = ((w[x] & EXP_BITS) + EXP_ONE) & EXP_TOP;
#if F32
            if (bad) w[x] = 0;
#else
            if (bad & 0x8000u) w[x] &= 0xffff0000u;
            if (bad & 0x80000000u) w[x] &= 0x0000ffffu;
#endif
        }
        asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(at), "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]) : "memory");
    }
    return any;
}

// dV of a warp's fragments gets what is not finite of row i of dO, where the key is live and kept; `go` = that row, `width` its length.
template <int MT, int NTL> DEV void add_odd_row(float (&dv)[MT][NTL][4], const elem* go, i64 step, int width, const Score& sc, const Args& a, const Span& span, int i, int key, int column) {
    u32 takes = 0;
#pragma unroll
    for (int x = 0; x < 2 * MT; ++x) {
        const int j = key + x * 8;
        takes |= (u32)(live_at(sc, a, span, i, j) && (!DROPOUT || kept_at(sc, a, span, i, j))) << x;
    }
    if (takes == 0) return;
#pragma unroll
    for (int n = 0; n < NTL; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const int c = column + n * 8 + e;
            const float value = c < width ? to_float(go[c * step]) : 0.f;
            if (is_finite(value)) continue;
#pragma unroll
            for (int x = 0; x < 2 * MT; ++x)
                if (takes >> x & 1) dv[x >> 1][n][2 * (x & 1) + e] += value;
        }
}
