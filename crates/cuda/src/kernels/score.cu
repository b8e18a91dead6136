// What becomes of q . k before the softmax, and which weights dropout keeps: one place for every kernel, forward and backward.
//
//   score = softcap(q . k x scale) + bias - slope |i + diag - j|,  hidden where the mask holds 0
//
// Rows i and keys j count within the sequence. Causality, window and length are bounds on j - i (`Span`); kernels apply them to
// whole tiles.
//   SCORE 0 = scale folded into the exponent, nothing else    1 = scale and softcap applied to each score
//         2 = also bias, ALiBi and mask, whichever the call has           DROPOUT 1 = weights are dropped
//   EXTRAS of SCORE 2: 0 = neither bias nor mask    1 = read where they lie    2 = brought into shared memory tile by tile

#ifndef EXTRAS
#define EXTRAS 1
#endif

// Rows and keys of one sequence, and its bounds: key j is live for row i iff i + lo_off <= j <= i + hi_off.
struct Span {
    int sq, sk, lo_off, hi_off;
    int diag; // row i stands at key i + diag
};

DEV Span span_of(const Args& a) { return {a.sq, a.sk, a.lo_off, a.hi_off, a.diag}; }

// Live keys of row i, as absolute bounds.
DEV int last_key(const Span& a, int i) { return MASK >= 1 ? min(a.sk - 1, i + a.hi_off) : a.sk - 1; }
DEV int first_key(const Span& a, int i) { return MASK == 2 ? max(0, i + a.lo_off) : 0; }

// Where the pieces of the score of one head of one sequence lie.
struct Score {
    const io* bias;
    const unsigned char *mask, *keep; // 0 = none
    float slope;                      // 0 = no ALiBi
    u32 head;                         // sequence x heads + head: the stream of random numbers
};

// Of query head h of sequence number `seq`, whose rows start at q_row of batch entry b and whose keys at k_row.
DEV Score score_head(const Args& a, int seq, int b, int h, int q_row, int k_row) {
    auto at = [&](const Tensor& t) { return b * t.sb + h * t.sh + q_row * t.ss + k_row * t.sd; };
    Score s;
    s.bias = EXTRAS && a.bias.ptr ? (const io*)a.bias.ptr + at(a.bias) : nullptr;
    s.mask = EXTRAS && a.mask.ptr ? (const unsigned char*)a.mask.ptr + at(a.mask) : nullptr;
    s.keep = a.keep.ptr ? (const unsigned char*)a.keep.ptr + at(a.keep) : nullptr;
    s.slope = a.alibi ? ((const float*)a.alibi)[h] : 0.f;
    s.head = (u32)seq * (u32)a.heads + (u32)h;
    return s;
}

// tanh, accurate to f32: below TANH_SMALL an odd polynomial of least largest relative error (4e-8), above it 1 - 2 / (e^2y + 1).
#define TANH_SMALL 0.55f
#define TANH_0 0.99999994f
#define TANH_2 -0.3333278f
#define TANH_4 0.133185878f
#define TANH_6 -0.0525715873f
#define TANH_8 0.016282158f
DEV float tanh_small(float y) {
    const float z = __fmul_rn(y, y);
    return __fmul_rn(y, fmaf(z, fmaf(z, fmaf(z, fmaf(z, TANH_8, TANH_6), TANH_4), TANH_2), TANH_0));
}
DEV float tanh_any(float y) {
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(ex2(__fmul_rn(fabsf(y), 2.f * LOG2E)) + 1.f));
    const float large = copysignf(fmaf(-2.f, r, 1.f), y);
    return fabsf(y) < TANH_SMALL ? tanh_small(y) : large;
}

// What a raw score is multiplied by before tanh takes it; finite also where the softcap is tiny.
DEV float cap_scale(const Args& a) { return fminf(fmaxf(a.scale / a.softcap, -3e38f), 3e38f); }

// The scaled and capped score, in natural units.
DEV float score_of(float raw, const Args& a) { return a.softcap > 0.f ? __fmul_rn(a.softcap, tanh_any(__fmul_rn(raw, cap_scale(a)))) : raw * a.scale; }

// Every element y of fragments x[m][n][e].
#define EACH(BODY)                                                                                                           \
    _Pragma("unroll") for (int m = 0; m < WMT; ++m) _Pragma("unroll") for (int n = 0; n < NTL; ++n)                          \
        _Pragma("unroll") for (int e = 0; e < 4; ++e) {                                                                      \
        float& y = x[m][n][e];                                                                                               \
        BODY;                                                                                                                \
    }

// score_of for all fragments of a warp, which must be whole. Most capped scores are small, and their tanh needs no exponential: a
// tile without others is spared the rest, bit for bit the same.
template <int WMT, int NTL> DEV void cap_tile(float (&x)[WMT][NTL][4], const Args& a) {
    const float k = cap_scale(a);
    float top = 0.f;
    EACH(y = __fmul_rn(y, k); top = fmaxf(top, fabsf(y)))
    if (__any_sync(0xffffffffu, top >= TANH_SMALL)) { EACH(y = __fmul_rn(a.softcap, tanh_any(y))) }
    else { EACH(y = __fmul_rn(a.softcap, tanh_small(y))) }
}
template <int WMT, int NTL> DEV void scale_tile(float (&x)[WMT][NTL][4], const Args& a) {
    if (a.softcap > 0.f) cap_tile(x, a);
    else { EACH(y *= a.scale) }
}

// d score_of / d raw, from what score_of gave.
DEV float score_slope(float capped, const Args& a) {
    float t = a.softcap > 0.f ? capped / a.softcap : 0.f;
    return a.scale * (1.f - t * t);
}

// Rows and keys beyond the sequence read its last ones: nothing outside is touched, and what comes of it is hidden anyway.
DEV i64 element(const Tensor& t, const Span& span, int i, int j) {
    return (i64)min(i, span.sq - 1) * t.ss + (i64)min(j, span.sk - 1) * t.sd;
}
DEV float bias_at(const Score& s, const Args& a, const Span& span, int i, int j) { return io_float(s.bias[element(a.bias, span, i, j)]); }
DEV bool masked_at(const Score& s, const Args& a, const Span& span, int i, int j) { return s.mask[element(a.mask, span, i, j)] == 0; }
// Whether mask or bias hide a key that the bounds leave live.
DEV bool hidden_at(const Score& s, const Args& a, const Span& span, int i, int j) {
    return (s.mask && masked_at(s, a, span, i, j)) || (s.bias && bias_at(s, a, span, i, j) == NEG_INF);
}

// The final score of one pair, from its raw product.
DEV float score_at(float raw, const Score& s, const Args& a, const Span& span, int i, int j) {
    float x = score_of(raw, a);
    if (s.bias) x += bias_at(s, a, span, i, j);
    if (s.slope != 0.f) x -= s.slope * fabsf((float)(i + span.diag - j));
    return s.mask && masked_at(s, a, span, i, j) ? NEG_INF : x;
}

// Rows [i0, i0 + ROWS) and keys [j0, j0 + COLS) of bias or mask into shared memory, rows of COLS elements and sixteen bytes; zero beyond
// the sequence. By cp.async where rows allow.
template <int ROWS, int COLS, int NT, class T> DEV void load_piece(u32 dst, const Tensor& t, const T* from, int i0, int j0, const Span& span, int tid) {
    constexpr int SIZE = sizeof(T), IN = 16 / SIZE, CH = COLS / IN, DOWN = NT / CH, PITCH_T = COLS * SIZE + 16;
    static_assert(COLS % IN == 0 && NT % CH == 0 && ROWS % DOWN == 0 && SIZE <= 2, "a thread keeps its column");
    if (t.sd == 1 && (((u64)from | (u64)(t.ss * SIZE)) & 15) == 0) {
        const int r0 = tid / CH, c0 = tid % CH * IN, rows = span.sq - i0 - r0;
        const int bytes = min(max(span.sk - j0 - c0, 0) * SIZE, 16);
        const char* at = (const char*)(from + (i64)(i0 + r0) * t.ss + j0 + c0);
        const i64 step = t.ss * (DOWN * SIZE);
#pragma unroll 2
        for (int r = 0; r < ROWS; r += DOWN) {
            cp_async16(dst + (r0 + r) * PITCH_T + c0 * SIZE, at, r < rows ? bytes : 0);
            at += step;
        }
        return;
    }
    // Neighbours read neighbours.
#pragma unroll 1
    for (int idx = tid; idx < ROWS * COLS; idx += NT) {
        const int r = idx / COLS, c = idx % COLS;
        const T value = i0 + r < span.sq && j0 + c < span.sk ? from[(i64)(i0 + r) * t.ss + (i64)(j0 + c) * t.sd] : (T)0;
        const u32 to = dst + r * PITCH_T + c * SIZE;
        if constexpr (SIZE == 1) asm volatile("st.shared.u8 [%0], %1;" ::"r"(to), "h"((u16)value) : "memory");
        else asm volatile("st.shared.u16 [%0], %1;" ::"r"(to), "h"((u16)value) : "memory");
    }
}

// Bias and mask of a tile in shared memory (EXTRAS 2): addresses of the lane's own row and column, pitches in bytes.
struct Pieces {
    u32 bias, bias_pitch, mask, mask_pitch;
};

// score_at for accumulator fragments (m16n8) of a whole warp: element e of lane t stands at row `row` + 8 (e / 2) and column
// `col` + e % 2, where row and col are the lane's own, 16 and 8 further for the next fragment. KEYROWS: rows are keys and columns
// queries.
template <bool KEYROWS, int WMT, int NTL> DEV void score_tile(float (&x)[WMT][NTL][4], const Score& s, const Args& a, const Span& span, int row, int col, [[maybe_unused]] const Pieces& pieces = {}) {
#define DOWN (m * 16 + (e >> 1) * 8)
#define ALONG (n * 8 + (e & 1))
    // What lies in memory: along a row at the distance of neighbours where nothing of it is beyond the sequence.
    [[maybe_unused]] auto element_at = [&](const auto* from, const Tensor& t, int m, int n, int e) {
        const int r = row + DOWN, c = col + ALONG;
        if (!KEYROWS && t.sd == 1 && col - col % 8 + NTL * 8 <= span.sk) return (from + (i64)min(r, span.sq - 1) * t.ss + col)[ALONG];
        return from[element(t, span, KEYROWS ? c : r, KEYROWS ? r : c)];
    };
    // The scale, until something has taken it in.
    float f = a.scale;
    if (a.softcap > 0.f) {
        cap_tile(x, a);
        f = 1.f;
    }
    if (s.bias) {
#if EXTRAS == 2
#pragma unroll
            for (int m = 0; m < WMT; ++m)
#pragma unroll
                for (int h = 0; h < 2; ++h)
#pragma unroll
                    for (int n = 0; n < NTL; ++n) {
                        const u32 two = lds32(pieces.bias + (m * 16 + h * 8) * pieces.bias_pitch + n * 16);
                        x[m][n][2 * h] = fmaf(x[m][n][2 * h], f, io_float((io)two));
                        x[m][n][2 * h + 1] = fmaf(x[m][n][2 * h + 1], f, io_float((io)(two >> 16)));
                    }
#else
        EACH(y = fmaf(y, f, io_float(element_at(s.bias, a.bias, m, n, e))))
#endif
        f = 1.f;
    }
    if (s.slope != 0.f) {
        // Distances are whole numbers, exact to 2^24.
        const float from = (float)(KEYROWS ? col + span.diag - row : row + span.diag - col);
        EACH(y = fmaf(y, f, -__fmul_rn(fabsf(from + (float)(KEYROWS ? ALONG - DOWN : DOWN - ALONG)), s.slope)))
        f = 1.f;
    }
    if (f != 1.f) { EACH(y *= f) }
    if (s.mask) {
#if EXTRAS == 2
#pragma unroll
            for (int m = 0; m < WMT; ++m)
#pragma unroll
                for (int h = 0; h < 2; ++h)
#pragma unroll
                    for (int n = 0; n < NTL; ++n) {
                        u16 two;
                        asm volatile("ld.shared.u16 %0, [%1];" : "=h"(two) : "r"(pieces.mask + (m * 16 + h * 8) * pieces.mask_pitch + n * 8) : "memory");
                        if ((two & 0xff) == 0) x[m][n][2 * h] = NEG_INF;
                        if ((two & 0xff00) == 0) x[m][n][2 * h + 1] = NEG_INF;
                    }
#else
        EACH(if (element_at(s.mask, a.mask, m, n, e) == 0) y = NEG_INF)
#endif
    }
#undef DOWN
#undef ALONG
}
#undef EACH

// lse of a finished row, and what its unnormalised output is multiplied by. m as the kernels keep it: in natural units where
// SCORE, else before the scale. A sink is one more score that no value belongs to.
DEV void finish_row(float m, float l, int h, const Args& a, float& lse, float& factor) {
    float natural = l == 0.f ? NEG_INF : m * (SCORE ? 1.f : a.scale);
    factor = l == 0.f ? 0.f : 1.f / l;
    lse = l == 0.f ? NEG_INF : natural + logf(l);
    if (a.sinks) {
        const float sink = ((const float*)a.sinks)[h];
        // One of the two exponents is 0.
        const float top = fmaxf(natural, sink), ref = top == NEG_INF ? 0.f : top;
        const float keep = expf(natural - ref), all = l * keep + expf(sink - ref);
        factor = all == 0.f ? 0.f : keep / all;
        lse = all == 0.f ? NEG_INF : ref + logf(all);
    }
    if (DROPOUT) factor *= a.drop_scale;
}

// ---- dropout ---------------------------------------------------------------------------------------------------------------

// Philox4x32-10 (Salmon et al. 2011) of the position, as tilewise-core's `dropout` words it: bit x says whether key
// 4 group + x of row i is kept.
DEV u32 keeps_four(const Score& s, const Args& a, int i, int group) {
    u32 c[4] = {(u32)group, (u32)i, s.head, a.drop_offset}, k0 = a.drop_key0, k1 = a.drop_key1;
#pragma unroll
    for (int round = 0; round < 10; ++round) {
        u32 h0 = __umulhi(0xD2511F53u, c[0]), l0 = 0xD2511F53u * c[0], h1 = __umulhi(0xCD9E8D57u, c[2]), l1 = 0xCD9E8D57u * c[2];
        c[0] = h1 ^ c[1] ^ k0;
        c[1] = l1;
        c[2] = h0 ^ c[3] ^ k1;
        c[3] = l0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    u32 kept = 0;
#pragma unroll
    for (int x = 0; x < 4; ++x) kept |= (u32)((u64)c[x] >= a.drop_threshold) << x;
    return kept;
}

DEV bool kept_at(const Score& s, const Args& a, const Span& span, int i, int j) {
    return s.keep ? s.keep[element(a.keep, span, i, j)] != 0 : keeps_four(s, a, i, j >> 2) >> (j & 3) & 1;
}

// Which elements of one accumulator fragment are kept, bit e for element e; row and col as in score_tile, key tiles at multiples
// of four. The lanes that share a group of four keys share the work. The whole warp must take part.
template <bool KEYROWS> DEV u32 keep_fragment(const Score& s, const Args& a, const Span& span, int row, int col, int lane) {
    u32 kept = 0;
    if (s.keep) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const int r = row + (e >> 1) * 8, c = col + (e & 1);
            kept |= (u32)(s.keep[element(a.keep, span, KEYROWS ? c : r, KEYROWS ? r : c)] != 0) << e;
        }
        return kept;
    }
    if (KEYROWS) {
        // Four lanes hold four keys of a group for two queries in two groups: one of these four to each.
        const int mine = lane >> 2 & 3;
        u32 four = keeps_four(s, a, col + (mine & 1), (row + (mine >> 1) * 8) >> 2);
#pragma unroll
        for (int e = 0; e < 4; ++e) kept |= (__shfl_sync(0xffffffffu, four, (lane & ~12) | e << 2) >> (row & 3) & 1) << e;
    } else {
        // Two lanes hold a group's keys in two rows: one row to each.
        const int odd = lane & 1;
        u32 mine = keeps_four(s, a, row + odd * 8, col >> 2), other = __shfl_xor_sync(0xffffffffu, mine, 1);
        u32 top = odd ? other : mine, bottom = odd ? mine : other;
        kept = (top >> (col & 2) & 3) | (bottom >> (col & 2) & 3) << 2;
    }
    return kept;
}
