// The online softmax of one tile of scores in registers, and the finished rows: what `fa2` and `fa2_wide` share.
//
// A warp holds WMT x 16 rows of scores s and of the unnormalised output acc as accumulator fragments (m16n8): lane t has rows
// t/4 and t/4 + 8, columns 2(t%4) and 2(t%4) + 1 of each. m and l are those rows'; l is summed over the quad in the end.

// Hides what lies outside the bounds of each row.
template <int WMT, int NTL> DEV void hide_edge(float (&s)[WMT][NTL][4], const Span& span, int row0, int key0, int lane) {
#pragma unroll
    for (int x = 0; x < WMT; ++x)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            int row = row0 + x * 16 + r * 8;
            int hi = last_key(span, row) - key0 - 2 * (lane & 3), lo = first_key(span, row) - key0 - 2 * (lane & 3);
#pragma unroll
            for (int n = 0; n < NTL; ++n)
#pragma unroll
                for (int e = 0; e < 2; ++e)
                    if (n * 8 + e > hi || (MASK == 2 && n * 8 + e < lo)) s[x][n][2 * r + e] = NEG_INF;
        }
}

// By how many powers of two scores may exceed m before m follows (FlashAttention-4, Zadouri et al. 2026, conditional rescaling): the
// exponents of a row need a reference near its maximum, not the maximum, and weights of up to 2^8 are as exact as those up to 1. Few
// tiles then rescale acc. Each row goes by its own scores alone. Running states show their m.
#if IO32 || STATE
#define RISE 0
#else
#define RISE 8
#endif

// m takes in the tile's maxima, l and acc follow; mc is what exponents of this tile subtract, after the change to base 2, or before
// it where a bias may be so large that the change would overflow.
template <int WMT, int NTL, int NO> DEV void raise_max(const float (&s)[WMT][NTL][4], float (&m)[WMT][2], float (&l)[WMT][2], float (&acc)[WMT][NO][4], float (&mc)[WMT][2], float c) {
    float alpha[WMT][2];
    bool moved = false;
#pragma unroll
    for (int x = 0; x < WMT; ++x)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float top = s[x][0][2 * r];
#pragma unroll
            for (int n = 0; n < NTL; ++n) top = fmaxf(fmaxf(top, s[x][n][2 * r]), s[x][n][2 * r + 1]);
            top = quad_max(top);
            float now = RISE == 0 ? fmaxf(m[x][r], top) : (top - m[x][r]) * c > RISE ? top : m[x][r];
            // A row with nothing live yet keeps m = -inf; any finite reference gives it p = 0.
            float ref = now == NEG_INF ? 0.f : now;
            // Nothing to rescale before the first live key.
            alpha[x][r] = m[x][r] == NEG_INF ? 1.f : ex2((m[x][r] - ref) * c);
            m[x][r] = now;
            mc[x][r] = SCORE == 2 ? ref : ref * c;
            // Rounded apart in every variant, so that a row's bits do not depend on which of them runs.
            l[x][r] = __fmul_rn(l[x][r], alpha[x][r]);
            moved |= alpha[x][r] != 1.f;
        }
    // Only where no row of the warp moved its maximum is the rescale left out: every alpha is exactly 1 then.
    if (__any_sync(0xffffffffu, moved)) {
#pragma unroll
        for (int x = 0; x < WMT; ++x)
#pragma unroll
            for (int n = 0; n < NO; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) acc[x][n][e] *= alpha[x][e >> 1];
    }
}

// P of one fragment of scores: l takes it in whole, dropout takes some of it away from the product.
struct Weights {
    const Score& score;
    const Args& a;
    const Span& span;
    int row0, key0, lane; // the lane's first row, the tile's first key
    float c;
    __device__ __forceinline__ void of(const float (&s)[4], const float (&mc)[2], float (&l)[2], int x, int n, float (&p)[4]) const {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            p[2 * r] = ex2(SCORE == 2 ? (s[2 * r] - mc[r]) * c : fmaf(s[2 * r], c, -mc[r]));
            p[2 * r + 1] = ex2(SCORE == 2 ? (s[2 * r + 1] - mc[r]) * c : fmaf(s[2 * r + 1], c, -mc[r]));
            l[r] += p[2 * r] + p[2 * r + 1];
        }
#if DROPOUT
        const u32 kept = keep_fragment<false>(score, a, span, row0 + x * 16, key0 + n * 8 + 2 * (lane & 3), lane);
#pragma unroll
        for (int e = 0; e < 4; ++e) p[e] = kept >> e & 1 ? p[e] : 0.f;
#endif
    }
};

// acc += P V for the tile of V at v_at.
template <bool DENSE = false, int WMT, int NTL, int NO> DEV void add_values(float (&acc)[WMT][NO][4], float (&l)[WMT][2], const float (&s)[WMT][NTL][4], const float (&mc)[WMT][2], const Weights& weights, u32 v_at, int pitch) {
    const int lane = weights.lane;
#if !F32
    // P of sixteen keys at a time becomes the A operand in place, so its exponentials overlap the products before it.
    const u32 vat = v_at + (lane & 15) * pitch, column = (DENSE ? (lane >> 4) ^ (lane & 7) : lane >> 4) * 16;
#pragma unroll
    for (int kk = 0; kk < NTL / 2; ++kk) {
        u32 pf[WMT][4];
#pragma unroll
        for (int x = 0; x < WMT; ++x)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float p[4];
                weights.of(s[x][2 * kk + half], mc[x], l[x], x, 2 * kk + half, p);
                pf[x][half * 2] = pack2(p[0], p[1]);
                pf[x][half * 2 + 1] = pack2(p[2], p[3]);
            }
#pragma unroll
        for (int n = 0; n < NO / 2; ++n) {
            u32 vf[4];
            ldsm4t(vf, vat + kk * 16 * pitch + along<DENSE>(column, n));
#pragma unroll
            for (int x = 0; x < WMT; ++x) {
                mma(acc[x][2 * n], pf[x], vf[0], vf[1]);
                mma(acc[x][2 * n + 1], pf[x], vf[2], vf[3]);
            }
        }
    }
#else
    // Keys 2t and 2t+1 of a group of eight stand where the operand wants t and t+4: the sum over keys has no order.
    u32 ph[WMT][NTL][4], pl[WMT][NTL][4];
#pragma unroll
    for (int x = 0; x < WMT; ++x)
#pragma unroll
        for (int kk = 0; kk < NTL; ++kk) {
            float p[4];
            weights.of(s[x][kk], mc[x], l[x], x, kk, p);
            u32 w[4] = {__float_as_uint(p[0]), __float_as_uint(p[2]), __float_as_uint(p[1]), __float_as_uint(p[3])};
            split_all(w, ph[x][kk], pl[x][kk]);
        }
    // A tile's part of the output is summed apart and added once: the tensor core truncates as it accumulates, and over
    // thousands of keys that would show.
    const u32 vat = v_at + 2 * (lane & 3) * pitch + (lane >> 2) * 4;
#pragma unroll
    for (int n = 0; n < NO; ++n) {
        float part[WMT][4];
#pragma unroll
        for (int x = 0; x < WMT; ++x)
#pragma unroll
            for (int e = 0; e < 4; ++e) part[x][e] = 0.f;
#pragma unroll
        for (int kk = 0; kk < NTL; ++kk) {
            u32 v[2] = {lds32(vat + kk * 8 * pitch + n * 32), lds32(vat + (kk * 8 + 1) * pitch + n * 32)}, vh[2], vl[2];
            split_all(v, vh, vl);
#pragma unroll
            for (int x = 0; x < WMT; ++x) mma3(part[x], ph[x][kk], pl[x][kk], vh[0], vl[0], vh[1], vl[1]);
        }
#pragma unroll
        for (int x = 0; x < WMT; ++x)
#pragma unroll
            for (int e = 0; e < 4; ++e) acc[x][n][e] += part[x][e];
    }
#endif
}

// The block's barrier after a tile of V arrived; whether it must be looked through, and holds NaN or infinite values.
template <int ROWS, int COLS, int NT, int P = PITCH_OF(COLS), bool DENSE = false> DEV bool arrived_nonfinite(u32 tile, [[maybe_unused]] bool look, int tid) {
#if GUARD_V
    if (look) return __syncthreads_or(scan_tile<ROWS, COLS, NT, P, DENSE>(tile, tid));
#endif
    __syncthreads();
    return false;
}

// Rare: this tile of V has NaN or infinite values. Rows that see one get it at once; the products get zero instead.
template <int ROWS, int COLS, int NT, int P = PITCH_OF(COLS), bool DENSE = false, int WMT, int NO> DEV void take_nonfinite(float (&acc)[WMT][NO][4], u32 tile, const Weights& w, int tid) {
#pragma unroll 1
    for (int k = 0; k < ROWS; ++k) {
#pragma unroll
        for (int x = 0; x < WMT; ++x)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int row = w.row0 + x * 16 + r * 8, key = w.key0 + k;
                if (key > last_key(w.span, row) || key < first_key(w.span, row) || hidden_at(w.score, w.a, w.span, row, key)) continue;
                if (DROPOUT && !kept_at(w.score, w.a, w.span, row, key)) continue;
#pragma unroll
                for (int n = 0; n < NO; ++n)
#pragma unroll
                    for (int e = 0; e < 2; ++e) acc[x][n][2 * r + e] += nonfinite_at<DENSE>(tile, P, k, n * 8 + 2 * (w.lane & 3) + e);
            }
    }
    __syncthreads();
    clear_tile<ROWS, DENSE ? P / ESZ : COLS, NT, P>(tile, tid);
    __syncthreads();
}

// O and lse of a warp's rows, from row w0 of the sequence on; columns from col0 of the output. `stage` is the warp's own shared
// memory, WMT x 16 rows of `pitch` bytes, so whole 16-byte chunks go out without a barrier.
template <int WMT, int NO> DEV void write_rows(const float (&acc)[WMT][NO][4], const float (&m)[WMT][2], const float (&l)[WMT][2], const Place& at, const Args& a, char* stage, int pitch, int w0, int col0, int lane) {
    io* op = (io*)rows_of<io>(a.o, at.q_batch, at.h, at.q_row) + col0;
    const i64 lse0 = ((i64)at.q_batch * a.heads + at.h) * a.lse_ld + at.q_row;
    constexpr int IOSZ = sizeof(io), IOPC = 16 / IOSZ;
    const int width = a.dv - col0;
    __syncwarp();
#pragma unroll
    for (int x = 0; x < WMT; ++x)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int in = x * 16 + r * 8 + (lane >> 2), row = w0 + in;
            float lse, factor;
            finish_row(m[x][r], l[x][r], at.h, a, lse, factor);
            if (a.lse && col0 == 0 && (lane & 3) == 0 && row < at.span.sq) ((float*)a.lse)[lse0 + row] = lse;
            char* to = stage + in * pitch + 2 * (lane & 3) * IOSZ;
#pragma unroll
            for (int n = 0; n < NO; ++n) {
                float v0 = acc[x][n][2 * r] * factor, v1 = acc[x][n][2 * r + 1] * factor;
#if IO32
                *(float2*)(to + n * 32) = make_float2(v0, v1);
#else
                *(u32*)(to + n * 16) = pack2(v0, v1);
#endif
            }
        }
    __syncwarp();
    const bool whole = ((a.o.ptr | (u64)((a.o.sb | a.o.sh | a.o.ss | (i64)a.dv) * IOSZ)) & 15) == 0;
    constexpr int CH = NO * 8 / IOPC;
#pragma unroll 4
    for (int idx = lane; idx < WMT * 16 * CH; idx += 32) {
        int r = idx / CH, ch = idx % CH, row = w0 + r;
        if (row >= at.span.sq || ch * IOPC >= width) continue;
        const char* from = stage + r * pitch + ch * 16;
        io* to = op + (i64)row * a.o.ss + ch * IOPC;
        if (whole) *(uint4*)to = *(const uint4*)from;
        else for (int e = 0; e < IOPC && ch * IOPC + e < width; ++e) to[e] = ((const io*)from)[e];
    }
}
