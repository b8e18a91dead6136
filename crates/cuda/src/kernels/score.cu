// What becomes of q . k before the softmax, and which weights dropout keeps: one place for every kernel, forward and backward.
//
//   score = softcap(q . k x scale) + bias - slope |i + diag - j|,  hidden where the mask holds 0
//
// Rows i and keys j count within the sequence. Causality, window and length are bounds on j - i (`Span`); kernels apply them to
// whole tiles.
//   SCORE 0 = scale folded into the exponent, nothing else    1 = scale and softcap applied to each score
//         2 = also bias, ALiBi and mask, whichever the call has           DROPOUT 1 = weights are dropped

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
    s.bias = a.bias.ptr ? (const io*)a.bias.ptr + at(a.bias) : nullptr;
    s.mask = a.mask.ptr ? (const unsigned char*)a.mask.ptr + at(a.mask) : nullptr;
    s.keep = a.keep.ptr ? (const unsigned char*)a.keep.ptr + at(a.keep) : nullptr;
    s.slope = a.alibi ? ((const float*)a.alibi)[h] : 0.f;
    s.head = (u32)seq * (u32)a.heads + (u32)h;
    return s;
}

// The scaled and capped score, in natural units.
DEV float score_of(float raw, const Args& a) {
    float x = raw * a.scale;
    return a.softcap > 0.f ? a.softcap * tanhf(x / a.softcap) : x;
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

// score_at for accumulator fragments (m16n8): element e of lane t stands at row `row` + 8 (e / 2) and column `col` + e % 2, where
// row and col are the lane's own, 16 and 8 further for the next fragment. KEYROWS: rows are keys and columns queries.
template <bool KEYROWS, int WMT, int NTL> DEV void score_tile(float (&x)[WMT][NTL][4], const Score& s, const Args& a, const Span& span, int row, int col) {
#define EACH(BODY)                                                                                                           \
    _Pragma("unroll") for (int m = 0; m < WMT; ++m) _Pragma("unroll") for (int n = 0; n < NTL; ++n)                          \
        _Pragma("unroll") for (int e = 0; e < 4; ++e) {                                                                      \
        const int r = row + m * 16 + (e >> 1) * 8, c = col + n * 8 + (e & 1);                                                \
        [[maybe_unused]] const int i = KEYROWS ? c : r, j = KEYROWS ? r : c;                                                 \
        float& y = x[m][n][e];                                                                                               \
        BODY;                                                                                                                \
    }
    EACH(y = score_of(y, a))
    if (s.bias) { EACH(y += bias_at(s, a, span, i, j)) }
    if (s.slope != 0.f) { EACH(y -= s.slope * fabsf((float)(i + span.diag - j))) }
    if (s.mask) { EACH(if (masked_at(s, a, span, i, j)) y = NEG_INF) }
#undef EACH
}

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
