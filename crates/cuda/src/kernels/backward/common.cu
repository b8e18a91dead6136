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
    u64 dq_acc;       // f32 sums of dQ, see dq_block; 0 = another kernel makes dQ
    u64 dsinks;       // f32 [heads]
    int rows_padded;  // a multiple of every BM
    int key_blocks, kv_pairs, kv_heads;
};

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
// score.cu; L of a column (KEYROWS) or of a row comes from `lse2`, called with fragment and element.
template <bool KEYROWS, int MT, int NTL, class L> DEV void weights(float (&s)[MT][NTL][4], float (&slope)[SCORE ? MT : 1][SCORE ? NTL : 1][4], const Score& sc, const Args& a, const Span& span, int row, int col, L lse2) {
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
            for (int e = 0; e < 4; ++e) s[m][n][e] = ex2(fmaf(s[m][n][e], c, -lse2(m, n, e)));
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
    __device__ __forceinline__ float factor(int m, int n, int e, const Args& a) const { return word[(m * NTL + n) / 8] >> ((m * NTL + n) % 8 * 4 + e) & 1 ? a.drop_scale : 0.f; }
};
