// f32 as pairs of f16: x = (hi + lo / 2048) factor, factor a power of two for a whole row, set so that the row's largest element
// stands at 2^14. Three f16 products of such pairs keep 22 bits of each factor, as three tf32 products of split f32 would, at the
// rate of f16; what a pair loses at its lower end is below 2^-50 of the largest element of its row. `tw_split` makes the pairs of
// K and V once, for all row blocks; those of Q are made by the block that takes its rows, those of P in registers.
//
//   PAIRS 1 = rows of tiles are hi (DP or DV columns), then lo; products of hi and of hi x lo are summed apart

#define LO_SCALE 2048.f

// A pair of f16 pairs from two values at 2^15 at most.
DEV void split2(float x, float y, u32& hi, u32& lo) {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(hi) : "f"(y), "f"(x));
    float hx, hy;
    asm("{.reg .f16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b;}" : "=f"(hx), "=f"(hy) : "r"(hi));
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(lo) : "f"((y - hy) * LO_SCALE), "f"((x - hx) * LO_SCALE));
}

// Eight lanes share a row, each with four columns of every 32.
#define PAIR_LANES 8

// Whether rows of f32 may be read in 16-byte pieces.
DEV bool whole_rows(const Tensor& t, int d) { return t.sd == 1 && ((t.ptr | (u64)((t.sb | t.sh | t.ss | d) * 4)) & 15) == 0; }

// This lane's part of a row of d columns, zero beyond.
template <int N> DEV void read_row(float (&v)[N][4], const float* x, const Tensor& t, int d, bool whole, bool live, int lane) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
        const int c = i * 32 + lane * 4;
        if (whole) *(float4*)v[i] = live && c < d ? *(const float4*)(x + c) : make_float4(0.f, 0.f, 0.f, 0.f);
        else
#pragma unroll
            for (int e = 0; e < 4; ++e) v[i][e] = live && c + e < d ? x[(c + e) * t.sd] : 0.f;
    }
}

// The pairs of a row, given to `store` for each four columns, and their factor: negative where the row has NaN or infinite values.
// The whole warp must take part.
template <int N, class F> DEV float pair_row(const float (&v)[N][4], F store) {
    float top = 0.f;
    bool odd = false;
#pragma unroll
    for (int i = 0; i < N; ++i)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const float size = fabsf(v[i][e]);
            if (size < __int_as_float(0x7f800000)) top = fmaxf(top, size);
            else odd = true;
        }
#pragma unroll
    for (int w = PAIR_LANES / 2; w; w >>= 1) {
        top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, w));
        odd |= __shfl_xor_sync(0xffffffffu, (int)odd, w) != 0;
    }
    // Powers of two: below 2^-100 rows keep a smaller place in f16.
    const u32 power = max(__float_as_uint(top) & 0x7f800000u, 27u << 23);
    const float scale = __uint_as_float(((254u + 14u) << 23) - power), factor = __uint_as_float(power - (14u << 23));
#pragma unroll
    for (int i = 0; i < N; ++i) {
        u32 hi[2], lo[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            split2(v[i][2 * e] * scale, v[i][2 * e + 1] * scale, hi[e], lo[e]);
            // inf - inf: what is not finite stands in hi alone.
            if ((hi[e] & 0x7c00u) == 0x7c00u) lo[e] &= 0xffff0000u;
            if ((hi[e] & 0x7c000000u) == 0x7c000000u) lo[e] &= 0x0000ffffu;
        }
        store(i, hi, lo);
    }
    return odd ? -factor : factor;
}

#if PAIRS
// Rows [row, row + ROWS) of f32 as pairs in shared memory, zero beyond `limit` rows and d columns; COLS columns of hi, then of lo, and
// the row's factor in the sixteen bytes between rows.
template <int ROWS, int COLS, int NT, int P> DEV void load_pairs(u32 dst, const Tensor& t, const float* base, int row, int limit, int d, int tid) {
    constexpr int DOWN = NT / PAIR_LANES, N = (COLS + 31) / 32;
    static_assert(ROWS % DOWN == 0, "every lane of a warp takes as many turns");
    const int lane = tid % PAIR_LANES;
    const bool whole = whole_rows(t, d);
#pragma unroll 2
    for (int r = tid / PAIR_LANES; r < ROWS; r += DOWN) {
        float v[N][4];
        read_row(v, base + (i64)(row + r) * t.ss, t, d, whole, row + r < limit, lane);
        const u32 to = dst + r * P + lane * 8;
        const float factor = pair_row(v, [&](int i, const u32 (&hi)[2], const u32 (&lo)[2]) {
            if (COLS % 32 != 0 && i * 32 + lane * 4 >= COLS) return;
            asm volatile("st.shared.v2.u32 [%0], {%1,%2};" ::"r"(to + i * 64), "r"(hi[0]), "r"(hi[1]) : "memory");
            asm volatile("st.shared.v2.u32 [%0], {%1,%2};" ::"r"(to + i * 64 + COLS * 2), "r"(lo[0]), "r"(lo[1]) : "memory");
        });
        if (lane == 0) asm volatile("st.shared.f32 [%0], %1;" ::"r"(dst + r * P + P - 16), "f"(fabsf(factor)) : "memory");
    }
}

// s = (A B^T) in the rows' own units: factors are still to come.
template <int WMT, int NTL, int K, bool DENSE> DEV void product_pairs(float (&s)[WMT][NTL][4], u32 a, int apitch, u32 b, int bpitch, int lane) {
    const u32 aat = a + (lane & 15) * apitch + (lane >> 4) * 16;
    const u32 bat = b + ((lane & 7) + ((lane >> 4) << 3)) * bpitch, half = lane >> 3 & 1;
    const u32 column = (DENSE ? half ^ (lane & 7) : half) * 16;
    float low[WMT][NTL][4];
#pragma unroll
    for (int m = 0; m < WMT; ++m)
#pragma unroll
        for (int n = 0; n < NTL; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) s[m][n][e] = low[m][n][e] = 0.f;
#pragma unroll 2
    for (int kk = 0; kk < K / 16; ++kk) {
        u32 ah[WMT][4], al[WMT][4];
#pragma unroll
        for (int m = 0; m < WMT; ++m) {
            ldsm4(ah[m], aat + m * 16 * apitch + kk * 32);
            ldsm4(al[m], aat + m * 16 * apitch + kk * 32 + K * 2);
        }
#pragma unroll
        for (int n = 0; n < NTL / 2; ++n) {
            u32 bh[4], bl[4];
            ldsm4(bh, bat + n * 16 * bpitch + along<DENSE>(column, kk));
            ldsm4(bl, bat + n * 16 * bpitch + along<DENSE>(column, kk + K / 16));
#pragma unroll
            for (int half = 0; half < 2; ++half) {
#pragma unroll
                for (int m = 0; m < WMT; ++m) mma(s[m][2 * n + half], ah[m], bh[2 * half], bh[2 * half + 1]);
#pragma unroll
                for (int m = 0; m < WMT; ++m) mma(low[m][2 * n + half], al[m], bh[2 * half], bh[2 * half + 1]);
#pragma unroll
                for (int m = 0; m < WMT; ++m) mma(low[m][2 * n + half], ah[m], bl[2 * half], bl[2 * half + 1]);
            }
        }
    }
#pragma unroll
    for (int m = 0; m < WMT; ++m)
#pragma unroll
        for (int n = 0; n < NTL; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) s[m][n][e] = fmaf(low[m][n][e], 1.f / LO_SCALE, s[m][n][e]);
}

// Factors of the keys of a tile: those of this lane's columns. A negative one marks a row with NaN or infinite values.
template <int NTL> DEV void key_factors(float (&f)[NTL][2], const float* of, i64 step, int key0, int last, int lane) {
#pragma unroll
    for (int n = 0; n < NTL; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) f[n][e] = of[min(key0 + n * 8 + 2 * (lane & 3) + e, last) * step];
}

// Whether some key of the tile is marked; the same for the whole block, since every quad holds all of them.
template <int NTL> DEV bool marked(const float (&f)[NTL][2]) {
    bool found = false;
#pragma unroll
    for (int n = 0; n < NTL; ++n) found |= f[n][0] < 0.f || f[n][1] < 0.f;
    return __any_sync(0xffffffffu, found);
}

// acc += P V as add_values does. Weights take in the factors of their keys; each row of them gets a factor of its own, so that what
// a hidden key holds never matters to another.
template <bool DENSE, int WMT, int NTL, int NO> DEV void add_values_pairs(float (&acc)[WMT][NO][4], float (&l)[WMT][2], const float (&s)[WMT][NTL][4], const float (&mc)[WMT][2], const Weights& weights, const float (&factors)[NTL][2], u32 v_at, int pitch) {
    const int lane = weights.lane;
    u32 ph[WMT][NTL / 2][4], pl[WMT][NTL / 2][4];
    float unit[WMT][2];
#pragma unroll
    for (int x = 0; x < WMT; ++x) {
        float w[NTL][4], top[2] = {0.f, 0.f};
#pragma unroll
        for (int n = 0; n < NTL; ++n) {
            weights.of(s[x][n], mc[x], l[x], x, n, w[n]);
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                w[n][e] *= fabsf(factors[n][e & 1]);
                top[e >> 1] = fmaxf(top[e >> 1], w[n][e]);
            }
        }
        float to[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            // The power of two below the largest; 2^-112 at least, so that its inverse is one too.
            const u32 power = max(__float_as_uint(quad_max(top[r])) & 0x7f800000u, 15u << 23);
            unit[x][r] = __uint_as_float(power - (14u << 23));
            to[r] = __uint_as_float(((254u + 14u) << 23) - power);
        }
#pragma unroll
        for (int kk = 0; kk < NTL / 2; ++kk)
#pragma unroll
            for (int half = 0; half < 2; ++half)
#pragma unroll
                for (int r = 0; r < 2; ++r)
                    split2(w[2 * kk + half][2 * r] * to[r], w[2 * kk + half][2 * r + 1] * to[r], ph[x][kk][half * 2 + r], pl[x][kk][half * 2 + r]);
    }
    const u32 vat = v_at + (lane & 15) * pitch, column = (DENSE ? (lane >> 4) ^ (lane & 7) : lane >> 4) * 16;
#pragma unroll
    for (int n = 0; n < NO / 2; ++n) {
        float high[WMT][2][4], low[WMT][2][4];
#pragma unroll
        for (int x = 0; x < WMT; ++x)
#pragma unroll
            for (int e = 0; e < 4; ++e) high[x][0][e] = high[x][1][e] = low[x][0][e] = low[x][1][e] = 0.f;
#pragma unroll
        for (int kk = 0; kk < NTL / 2; ++kk) {
            u32 vh[4], vl[4];
            ldsm4t(vh, vat + kk * 16 * pitch + along<DENSE>(column, n));
            ldsm4t(vl, vat + kk * 16 * pitch + along<DENSE>(column, n + NO / 2));
#pragma unroll
            for (int half = 0; half < 2; ++half) {
#pragma unroll
                for (int x = 0; x < WMT; ++x) mma(high[x][half], ph[x][kk], vh[2 * half], vh[2 * half + 1]);
#pragma unroll
                for (int x = 0; x < WMT; ++x) mma(low[x][half], pl[x][kk], vh[2 * half], vh[2 * half + 1]);
#pragma unroll
                for (int x = 0; x < WMT; ++x) mma(low[x][half], ph[x][kk], vl[2 * half], vl[2 * half + 1]);
            }
        }
#pragma unroll
        for (int x = 0; x < WMT; ++x)
#pragma unroll
            for (int half = 0; half < 2; ++half)
#pragma unroll
                for (int e = 0; e < 4; ++e)
                    acc[x][2 * n + half][e] = fmaf(fmaf(low[x][half][e], 1.f / LO_SCALE, high[x][half][e]), unit[x][e >> 1], acc[x][2 * n + half][e]);
    }
}
#endif
