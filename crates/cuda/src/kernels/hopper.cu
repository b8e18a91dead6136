// FlashAttention-2's forward on Hopper, as FlashAttention-3 schedules it (Shah et al. 2024, Sections 3.1 and 3.2): the mathematics
// of fa2.cu with other hands.
//
// The first warpgroup only brings tiles: one thread of it keeps the copy engine STAGES tiles of K and V ahead. Each of the other
// GROUPS warpgroups owns 64 query rows and all their keys: S = Q K^T from shared memory, P stays in registers as the operand of
// P V, and so do m, l and the unnormalised output; one division in the end. Two things hide the exponentials: the product of the
// next tile's scores runs beside that of this tile's values, and warpgroups take turns in issuing products, so that one works out
// its softmax while another multiplies.
//
// The other warps of the first warpgroup look through tiles of V for what no product may meet.
//
//   GROUPS consumers, 64 rows each     BN keys a tile     STAGES of K and of V     GIVE, TAKE registers of producer and consumers
//   OWN 1 = the output is staged in memory of its own, so that Q of the next rows may come meanwhile

#define BM (GROUPS * 64)
#define NT ((GROUPS + 1) * 128)
// Columns that tiles hold: whole panels, zero beyond the tensors' own. Products take no more than DP and DV of them.
#define WIDE(columns) (((columns) + 63) / 64 * 64)
#define Q_BYTES (BM * WIDE(DP) * 2)
#define O_BYTES (BM * WIDE(DV) * 2)
#define K_BYTES (BN * WIDE(DP) * 2)
#define V_BYTES (BN * WIDE(DV) * 2)
// Q's place, and the output's where that has none of its own.
#define QO_BYTES (OWN || Q_BYTES > O_BYTES ? Q_BYTES : O_BYTES)

struct HopperArgs {
    TensorMap q, k, v, bias, mask;
    Args a;
    u64 turns; // two words, 0 before and after: row blocks given out beyond each block's first, and blocks that got none; or 0
    int units; // row blocks
    int tiled; // 1 = bias, 2 = mask come as tiles by the copy engine, in place of element by element
};

// Whether tiles of V may hold keys that some row does not see.
#define LOOKS (MASK >= 1 || SEQS || SCORE == 2 || DROPOUT)
// Warps that look through them.
#define LOOKERS 3

// Tiles of bias and mask in shared memory: two of the one, or one of each, and of one row where all rows have the same.
struct Tiled {
    bool bias, mask, hides; // whether there is anything that may hide a key
    __device__ __forceinline__ Tiled(const HopperArgs& g) : bias(SCORE == 2 && g.tiled & 1), mask(SCORE == 2 && g.tiled & 2), hides(SCORE == 2 && (g.a.bias.ptr || g.a.mask.ptr)) {}
    __device__ __forceinline__ bool any() const { return bias || mask; }
    __device__ __forceinline__ u32 stages() const { return bias && mask ? 1 : 2; }
    // From the start of their place, of the rows of warpgroup `group`.
    __device__ __forceinline__ u32 bias_at(int group, u32 stage) const { return (stage * BM + group * 64) * (BN * 2); }
    __device__ __forceinline__ u32 mask_at(int group, u32 stage) const { return (bias ? BM * BN * 2 : 0) + (stage * BM + group * 64) * BN; }
};
#define PIECES_BYTES (SCORE == 2 ? BM * BN * 4 : 0)

// Where everything stands in shared memory.
struct Room {
    u32 q, k, v, o, pieces, bars;
    __device__ __forceinline__ u32 q_full() const { return bars; }
    __device__ __forceinline__ u32 spare() const { return bars + 16 + STAGES * 32; }
    __device__ __forceinline__ u32 q_empty() const { return bars + 8; }
    __device__ __forceinline__ u32 k_full(int s) const { return bars + 16 + s * 32; }
    __device__ __forceinline__ u32 k_empty(int s) const { return bars + 24 + s * 32; }
    __device__ __forceinline__ u32 v_full(int s) const { return bars + 32 + s * 32; }
    __device__ __forceinline__ u32 v_empty(int s) const { return bars + 40 + s * 32; }
    // A tile of V has been looked through; what each warp found there.
    __device__ __forceinline__ u32 looked(int s) const { return bars + 32 + STAGES * 48 + s * 8; }
    __device__ __forceinline__ u32 found(int s) const { return bars + 32 + STAGES * 32 + s * 16; }
    __device__ __forceinline__ u32 turn_full(int s) const { return bars + 32 + STAGES * 56 + GROUPS * 32 + s * 8; }
    __device__ __forceinline__ u32 turn_empty(int s) const { return bars + 48 + STAGES * 56 + GROUPS * 32 + s * 8; }
    __device__ __forceinline__ u32 turn(int s) const { return bars + 64 + STAGES * 56 + GROUPS * 32 + s * 4; }
    __device__ __forceinline__ u32 pieces_full(int group, int s) const { return bars + 32 + STAGES * 56 + group * 32 + s * 8; }
    __device__ __forceinline__ u32 pieces_empty(int group, int s) const { return bars + 48 + STAGES * 56 + group * 32 + s * 8; }
};

// A stage of a ring and the parity of its current round.
struct Ring {
    u32 stage = 0, parity = 0;
    __device__ __forceinline__ void step(u32 stages = STAGES) {
        if (++stage == stages) { stage = 0; parity ^= 1; }
    }
};

// Row blocks by number as place_of counts them. Where some take longer than others, a block asks for its next one when it has room
// for it: the thread that brings tiles does, two ahead of the last reader at most, and tells all other warps.
#define TURNS (MASK >= 1 || SEQS)

struct Giver {
    const HopperArgs& g;
    const Room& room;
    u32 unit = blockIdx.x, after = 0;
    Ring ring;
    __device__ __forceinline__ bool next() {
        if (!TURNS) {
            unit = after ? unit + gridDim.x : unit;
            after = 1;
            return unit < g.units;
        }
        if (after) unit = after;
        const bool more = unit < g.units;
        bar_wait(room.turn_empty(ring.stage), ring.parity ^ 1);
        asm volatile("st.shared.u32 [%0], %1;" ::"r"(room.turn(ring.stage)), "r"(more ? unit : ~0u) : "memory");
        bar_arrive(room.turn_full(ring.stage));
        ring.step(2);
        u32* turns = (u32*)g.turns;
        // Asked for long before it is needed.
        if (more) after = turns ? gridDim.x + atomicAdd(turns, 1) : unit + gridDim.x;
        // The last block that gets none leaves the words as it found them.
        else if (turns && atomicAdd(turns + 1, 1) == gridDim.x - 1) turns[0] = turns[1] = 0;
        return more;
    }
};

struct Walk {
    const HopperArgs& g;
    const Room& room;
    u32 unit = blockIdx.x - gridDim.x;
    Ring ring;
    __device__ __forceinline__ bool next() {
        if (!TURNS) {
            unit += gridDim.x;
            return unit < g.units;
        }
        bar_wait(room.turn_full(ring.stage), ring.parity);
        // One lane reads and says that it did, so that no other lane's reading is left to be waited for.
        u32 word = 0;
        if ((threadIdx.x & 31) == 0) {
            word = lds32(room.turn(ring.stage));
            bar_arrive(room.turn_empty(ring.stage));
        }
        unit = __shfl_sync(0xffffffffu, word, 0);
        ring.step(2);
        return unit != ~0u;
    }
};

// Rows and tiles of keys of one row block.
struct Block {
    Place at;
    int i0, i1, jmin, jmax; // jmax < jmin: no live key
    __device__ __forceinline__ Block(const Args& a, int number) : at(place_of(a, number)) {
        i0 = at.rb * BM;
        i1 = min(i0 + BM, at.span.sq);
        const int hi = last_key(at.span, i1 - 1), lo = first_key(at.span, i0);
        jmax = hi >= lo ? hi / BN : -1;
        jmin = hi >= lo ? lo / BN : 0;
    }
    // Whether some row cannot see some key of tile j.
    __device__ __forceinline__ bool edge(int j) const {
        const int last = (j + 1) * BN - 1;
        return last > (MASK >= 1 ? min(at.span.sk - 1, i0 + at.span.hi_off) : at.span.sk - 1) || (MASK == 2 && j * BN < i1 - 1 + at.span.lo_off);
    }
    // Whether tile j of V must be looked through.
    __device__ __forceinline__ bool looks(int j, const Tiled& pieces) const { return ((MASK >= 1 || SEQS) && edge(j)) || (SCORE == 2 && pieces.hides) || DROPOUT; }
};

DEV void produce(const HopperArgs& g, const Room& room) {
    Ring ring; // K and V go round together
    u32 q_parity = 0;
    const Tiled pieces(g);
    Ring pr;
    for (Giver walk{g, room}; walk.next();) {
        const Block block(g.a, walk.unit);
        const int q_row = block.at.q_row + block.i0, k_row = block.at.k_row, h = block.at.h, hk = block.at.hk;
        auto bring_k = [&](int j) {
            bar_wait(room.k_empty(ring.stage), ring.parity ^ 1);
            copy_tile<BN, WIDE(DP)>(room.k + ring.stage * K_BYTES, g.k, room.k_full(ring.stage), k_row + j * BN, hk, block.at.k_batch);
        };
        auto bring_pieces = [&](int j) {
            if (SCORE != 2 || !pieces.any()) return;
            const Tensor &bias = g.a.bias, &mask = g.a.mask;
            const int b = block.at.q_batch, bias_rows = bias.ss ? 64 : 1, mask_rows = mask.ss ? 64 : 1;
#pragma unroll 1
            for (int group = 0; group < GROUPS; ++group) {
                const u32 full = room.pieces_full(group, pr.stage), to = room.pieces;
                bar_wait(room.pieces_empty(group, pr.stage), pr.parity ^ 1);
                bar_expect(full, (pieces.bias ? bias_rows * BN * 2 : 0) + (pieces.mask ? mask_rows * BN : 0));
                const int row = q_row + group * 64, key = k_row + j * BN;
                if (pieces.bias)
#pragma unroll
                    for (int panel = 0; panel < BN / 64; ++panel)
                        copy_box(to + pieces.bias_at(group, pr.stage) + panel * (64 * 128), g.bias, full, key + panel * 64, bias.ss ? row : 0, bias.sh ? h : 0, bias.sb ? b : 0);
                if (pieces.mask) copy_box(to + pieces.mask_at(group, pr.stage), g.mask, full, key, mask.ss ? row : 0, mask.sh ? h : 0, mask.sb ? b : 0);
            }
            pr.step(pieces.stages());
        };
        const bool any = block.jmax >= block.jmin;
        if (any) bring_k(block.jmax);
        bar_wait(room.q_empty(), q_parity ^ 1);
        q_parity ^= 1;
        // Rows that see no key still take their turn with Q's place.
        if (any) copy_tile<BM, WIDE(DP)>(room.q, g.q, room.q_full(), q_row, h, block.at.q_batch);
        else bar_arrive(room.q_full());
        if (any) bring_pieces(block.jmax);
        for (int j = block.jmax; j >= block.jmin; --j) {
            // K of the next tile before V of this one: it is needed first.
            const Ring here = ring;
            ring.step();
            if (j > block.jmin) bring_k(j - 1);
            bar_wait(room.v_empty(here.stage), here.parity ^ 1);
            copy_tile<BN, WIDE(DV)>(room.v + here.stage * V_BYTES, g.v, room.v_full(here.stage), k_row + j * BN, hk, block.at.k_batch);
            // Last, for its room may be that of this one's.
            if (j > block.jmin) bring_pieces(j - 1);
        }
    }
}

// ---- values that are not finite --------------------------------------------------------------------------------------------

// As scan_tile, take_nonfinite and clear_tile do it; the order of chunks does not matter to the first and the last.
DEV bool scan_values(u32 v, int tid) {
    u32 found = 0;
#pragma unroll(SCORE == 2 ? 4 : 1)
    for (int at = tid * 16; at < V_BYTES; at += LOOKERS * 32 * 16) {
        u32 w[4];
        asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3]) : "r"(v + at) : "memory");
#pragma unroll
        for (int x = 0; x < 4; ++x) found |= (w[x] & EXP_BITS) + EXP_ONE;
    }
    return found & EXP_TOP;
}

DEV void take_values(float (&acc)[DV / 8][4], u32 v, const Place& at, const Args& a, int row0, int key0, int lane) {
    Score score = {};
    if (SCORE == 2 || DROPOUT) score = score_head(a, at.seq, at.q_batch, at.h, at.q_row, at.k_row);
#pragma unroll 1
    for (int k = 0; k < BN; ++k) {
        bool live[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int row = row0 + r * 8, key = key0 + k;
            live[r] = key <= last_key(at.span, row) && key >= first_key(at.span, row) && !(SCORE == 2 && hidden_at(score, a, at.span, row, key)) && (!DROPOUT || kept_at(score, a, at.span, row, key));
        }
#pragma unroll
        for (int n = 0; n < DV / 8; ++n) {
            const u32 w = lds32(v + (n / 8) * (BN * 128) + k * 128 + ((n ^ k) & 7) * 16 + (lane & 3) * 4);
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const u16 h = (u16)(e ? w >> 16 : w);
                const float x = (h & EXP_BITS & 0xffffu) == (EXP_BITS & 0xffffu) ? to_float(h) : 0.f;
#pragma unroll
                for (int r = 0; r < 2; ++r)
                    if (live[r]) acc[n][2 * r + e] += x;
            }
        }
    }
}

DEV void clear_values(u32 v, int tid) {
#pragma unroll 1
    for (int at = tid * 4; at < V_BYTES; at += GROUPS * 128 * 4) {
        u32 w = lds32(v + at), bad = ((w & EXP_BITS) + EXP_ONE) & EXP_TOP;
        if (bad & 0x8000u) w &= 0xffff0000u;
        if (bad & 0x80000000u) w &= 0x0000ffffu;
        if (bad) asm volatile("st.shared.u32 [%0], %1;" ::"r"(v + at), "r"(w) : "memory");
    }
    async_fence();
}

DEV float rcp(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// By all threads of the lookers, tile after tile as the consumers take them.
DEV void look(const HopperArgs& g, const Room& room, int tid) {
    const Tiled pieces(g);
    Ring ring;
    for (Walk walk{g, room}; walk.next();) {
        const Block block(g.a, walk.unit);
        for (int j = block.jmax; j >= block.jmin; --j) {
            bar_wait(room.v_full(ring.stage), ring.parity);
            bool found = false;
            if (block.looks(j, pieces)) found = scan_values(room.v + ring.stage * V_BYTES, tid);
            found = __any_sync(0xffffffffu, found);
            if ((tid & 31) == 0) {
                // What was found a round ago has been read: over since before this tile was copied.
                bar_wait(room.v_empty(ring.stage), ring.parity ^ 1);
                asm volatile("st.shared.u32 [%0], %1;" ::"r"(room.found(ring.stage) + (tid >> 5) * 4), "r"((u32)found) : "memory");
                bar_arrive(room.looked(ring.stage));
            }
            ring.step();
        }
    }
}

// ---- the consumers ---------------------------------------------------------------------------------------------------------

// Numbers of named barriers: one of each warpgroup's own, one of its turn, one of all consumers.
#define OWN_BAR(group) (1 + (group))
#define TURN_BAR(group) (1 + GROUPS + (group))
#define ALL_BAR (1 + 2 * GROUPS)

struct Consumer {
    const Args& a;
    const Room& room;
    const int group, tid, lane; // warpgroup, thread in it
    const float c;
    const Tiled pieces;
    Ring pr;     // of bias and mask
    float slope; // of ALiBi, 0 = none

    float s[BN / 8][4];       // scores of a tile, then their exponentials
    u32 p[BN / 16][4];        // those as the operand of P V
    float acc[DV / 8][4], m[2], l[2];

    __device__ __forceinline__ void scores(u32 k) {
        const u32 q = room.q + group * (64 * 128);
        products_begin();
#pragma unroll
        for (int kk = 0; kk < DP / 16; ++kk) {
            const u64 qd = operand(q + (kk / 4) * (BM * 128) + (kk % 4) * 32, 16), kd = operand(k + (kk / 4) * (BN * 128) + (kk % 4) * 32, 16);
            if (kk == 0) product_ss<BN, 0>(s, qd, kd);
            else product_ss<BN, 1>(s, qd, kd);
        }
        products_commit();
    }

    __device__ __forceinline__ void values(u32 v) {
        products_begin();
#pragma unroll
        for (int kk = 0; kk < BN / 16; ++kk) {
            if constexpr (DV < 256) product_rs<DV, 0>(acc, p[kk], operand(v + kk * 2048, BN * 128));
            else {
                product_rs<128, 0>(acc, p[kk], operand(v + kk * 2048, BN * 128));
                product_rs<128, 16>(acc, p[kk], operand(v + kk * 2048 + 2 * BN * 128, BN * 128));
            }
        }
        products_commit();
    }

    // m takes in the tile's maxima, s becomes its exponentials, l follows; alpha is what the output so far is multiplied by.
    template <bool EDGE> __device__ __forceinline__ void softmax(const Place& at, int row0, int key0, float (&alpha)[2]) {
#if SCORE >= 1
        cap();
#endif
#if SCORE == 2
        modify(at, row0, key0);
#endif
        if (EDGE) hide(at.span, row0, key0);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float top[2] = {s[0][2 * r], s[0][2 * r + 1]};
#pragma unroll
            for (int n = 1; n < BN / 8; ++n)
#pragma unroll
                for (int e = 0; e < 2; ++e) top[e] = fmaxf(top[e], s[n][2 * r + e]);
            const float now = fmaxf(m[r], quad_max(fmaxf(top[0], top[1])));
            // A row with nothing live yet keeps m = -inf; any finite reference gives it p = 0.
            const float ref = now == NEG_INF ? 0.f : now;
            alpha[r] = m[r] == NEG_INF ? 1.f : ex2((m[r] - ref) * c);
            m[r] = now;
            // Where a bias may be so large that the change to base 2 would overflow, the reference goes off before it.
            const float mc = SCORE == 2 ? ref : ref * c;
            float sum[2] = {0.f, 0.f};
#pragma unroll
            for (int n = 0; n < BN / 8; ++n)
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    s[n][2 * r + e] = ex2(SCORE == 2 ? (s[n][2 * r + e] - mc) * c : fmaf(s[n][2 * r + e], c, -mc));
                    sum[e] += s[n][2 * r + e];
                }
            // Rounded apart in every variant, so that a row's bits do not depend on which of them runs.
            l[r] = __fadd_rn(__fmul_rn(l[r], alpha[r]), sum[0] + sum[1]);
        }
#if DROPOUT
        const Score score = score_head(a, at.seq, at.q_batch, at.h, at.q_row, at.k_row);
#pragma unroll
        for (int n = 0; n < BN / 8; ++n) {
            const u32 kept = keep_fragment<false>(score, a, at.span, row0, key0 + n * 8 + 2 * (lane & 3), lane);
#pragma unroll
            for (int e = 0; e < 4; ++e) s[n][e] = kept >> e & 1 ? s[n][e] : 0.f;
        }
#endif
    }

    // The scaled and capped scores, in natural units, rounded apart from what is added to them, wherever that comes from. tanh y = 1 - 2 / (1 + exp 2y), but near 0, where that cancels, its series; most
    // capped scores are near it, and a warp's tile of no others is spared the exponentials, bit for bit the same.
    __device__ __forceinline__ void cap() {
        if (a.softcap > 0.f) {
            // Finite also where the softcap is tiny.
            const float scale = fminf(fmaxf(a.scale / a.softcap, -3e38f), 3e38f), cap = a.softcap;
            auto near = [](float y) {
                const float z = __fmul_rn(y, y);
                return __fmul_rn(y, fmaf(z, fmaf(z, fmaf(z, fmaf(z, 62.f / 2835, -17.f / 315), 2.f / 15), -1.f / 3), 1.f));
            };
            float top = 0.f;
#pragma unroll
            for (int n = 0; n < BN / 8; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    s[n][e] = __fmul_rn(s[n][e], scale);
                    top = fmaxf(top, fabsf(s[n][e]));
                }
            if (__any_sync(0xffffffffu, top >= 0.3f)) {
#pragma unroll
                for (int n = 0; n < BN / 8; ++n)
#pragma unroll
                    for (int e = 0; e < 4; ++e) {
                        const float y = s[n][e], far = fmaf(rcp(1.f + ex2(y * (2.f * LOG2E))), -2.f, 1.f);
                        s[n][e] = __fmul_rn(cap, fabsf(y) >= 0.3f ? far : near(y));
                    }
            } else {
#pragma unroll
                for (int n = 0; n < BN / 8; ++n)
#pragma unroll
                    for (int e = 0; e < 4; ++e) s[n][e] = __fmul_rn(cap, near(s[n][e]));
            }
        } else {
#pragma unroll
            for (int n = 0; n < BN / 8; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) s[n][e] = __fmul_rn(s[n][e], a.scale);
        }
    }

    // bias, ALiBi and mask, whichever the call has.
    __device__ __forceinline__ void modify(const Place& place, int row0, int key0) {
        const Span& span = place.span;
        const int in = (tid >> 5) * 16 + (lane >> 2), t = lane & 3;
        // What the copy engine cannot bring is read where it lies.
        Score score = {};
        if (pieces.hides && !(pieces.bias && pieces.mask)) score = score_head(a, place.seq, place.q_batch, place.h, place.q_row, place.k_row);
#define EACH(BODY)                                                                                                                     \
    _Pragma("unroll") for (int n = 0; n < BN / 8; ++n) _Pragma("unroll") for (int e = 0; e < 4; ++e) {                                 \
        const int i = row0 + (e >> 1) * 8, j = key0 + 2 * t + n * 8 + (e & 1);                                                         \
        BODY;                                                                                                                          \
    }
        if (pieces.any()) bar_wait(room.pieces_full(group, pr.stage), pr.parity);
        if (pieces.bias) {
            // As the copy engine swizzles: panels of 64 columns, or the one row of all.
            const int row = a.bias.ss ? in : 0;
            const u32 at = room.pieces + pieces.bias_at(group, pr.stage) + row * 128 + 4 * t, down = a.bias.ss ? 8 * 128 : 0;
#pragma unroll
            for (int n = 0; n < BN / 8; ++n)
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    const u32 w = lds32(at + (n / 8) * (64 * 128) + ((n ^ row) & 7) * 16 + r * down);
                    s[n][2 * r] = __fadd_rn(s[n][2 * r], to_float((u16)w));
                    s[n][2 * r + 1] = __fadd_rn(s[n][2 * r + 1], to_float((u16)(w >> 16)));
                }
        } else if (a.bias.ptr) {
            EACH(s[n][e] = __fadd_rn(s[n][e], bias_at(score, a, span, i, j)))
        }
        if (slope != 0.f) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const float from = (float)(row0 + r * 8 + span.diag - key0 - 2 * t);
#pragma unroll
                for (int n = 0; n < BN / 8; ++n)
#pragma unroll
                    for (int e = 0; e < 2; ++e) s[n][2 * r + e] -= slope * fabsf(from - (n * 8.f + e));
            }
        }
        if (pieces.mask) {
            const int row = a.mask.ss ? in : 0;
            const u32 at = room.pieces + pieces.mask_at(group, pr.stage) + row * BN + 2 * t, down = a.mask.ss ? 8 * BN : 0;
#pragma unroll
            for (int n = 0; n < BN / 8; ++n)
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    u16 w;
                    const u32 chunk = BN == 128 ? (n / 2 ^ row) & 7 : (n / 2 ^ row >> 1) & 3;
                    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(w) : "r"(at + chunk * 16 + n % 2 * 8 + r * down) : "memory");
                    if (!(w & 0xffu)) s[n][2 * r] = NEG_INF;
                    if (!(w >> 8)) s[n][2 * r + 1] = NEG_INF;
                }
        } else if (a.mask.ptr) {
            EACH(if (masked_at(score, a, span, i, j)) s[n][e] = NEG_INF)
        }
        if (pieces.any()) {
            __syncwarp();
            release(room.pieces_empty(group, pr.stage));
            pr.step(pieces.stages());
        }
#undef EACH
    }

    __device__ __forceinline__ void hide(const Span& span, int row0, int key0) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int own = key0 + 2 * (lane & 3), hi = last_key(span, row0 + r * 8) - own, lo = first_key(span, row0 + r * 8) - own;
#pragma unroll
            for (int n = 0; n < BN / 8; ++n)
#pragma unroll
                for (int e = 0; e < 2; ++e)
                    if (n * 8 + e > hi || (MASK == 2 && n * 8 + e < lo)) s[n][2 * r + e] = NEG_INF;
        }
    }

    __device__ __forceinline__ void rescale(const float (&alpha)[2]) {
#pragma unroll
        for (int n = 0; n < DV / 8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) acc[n][e] *= alpha[e >> 1];
    }

    __device__ __forceinline__ void weights() {
#pragma unroll
        for (int kk = 0; kk < BN / 16; ++kk)
#pragma unroll
            for (int x = 0; x < 4; ++x) p[kk][x] = pack2(s[2 * kk + x / 2][2 * (x & 1)], s[2 * kk + x / 2][2 * (x & 1) + 1]);
    }

    // Waits for a tile of V. With keys that some row cannot see it must have no NaN and no infinity in a product, and no product may
    // be under way while they are taken out.
    __device__ __forceinline__ void arrive(const Block& block, const Ring& vr, int row0, int j) {
        bar_wait(room.v_full(vr.stage), vr.parity);
        if (!LOOKS) return;
        bar_wait(room.looked(vr.stage), vr.parity);
        if (!block.looks(j, pieces)) return;
        // The lane that reads it is the one that releases V.
        bool found = false;
        if (lane == 0) {
            u32 w[4];
            asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3]) : "r"(room.found(vr.stage)) : "memory");
            found = w[0] | w[1] | w[2];
        }
        if (!__any_sync(0xffffffffu, found)) return;
        // All consumers find the same.
        const u32 v = room.v + vr.stage * V_BYTES;
        take_values(acc, v, block.at, a, row0, j * BN, lane);
        group_sync<GROUPS * 128>(ALL_BAR);
        clear_values(v, group * 128 + tid);
        group_sync<GROUPS * 128>(ALL_BAR);
    }

    __device__ __forceinline__ void release(u32 bar) {
        if (lane == 0) bar_arrive(bar);
    }

    // O and lse of this warp's rows: through shared memory, as whole 16-byte chunks.
    __device__ __forceinline__ void write(const Place& at, int i0) {
        const int local = group * 64 + (tid >> 5) * 16, w0 = i0 + local;
        const i64 lse0 = ((i64)at.q_batch * a.heads + at.h) * a.lse_ld + at.q_row;
        auto chunk = [&](int row, int n) { return room.o + (n / 8) * (BM * 128) + (local + row) * 128 + ((n ^ row) & 7) * 16; };
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int in = r * 8 + (lane >> 2), row = w0 + in;
            float lse, factor;
            finish_row(m[r], quad_sum(l[r]), at.h, a, lse, factor);
            if (a.lse && (lane & 3) == 0 && row < at.span.sq) ((float*)a.lse)[lse0 + row] = lse;
#pragma unroll
            for (int n = 0; n < DV / 8; ++n)
                asm volatile("st.shared.u32 [%0], %1;" ::"r"(chunk(in, n) + 4 * (lane & 3)), "r"(pack2(acc[n][2 * r] * factor, acc[n][2 * r + 1] * factor)) : "memory");
        }
        __syncwarp();
        elem* out = (elem*)rows_of(a.o, at.q_batch, at.h, at.q_row);
        const bool whole = ((a.o.ptr | (u64)((a.o.sb | a.o.sh | a.o.ss | (i64)a.dv) * ESZ)) & 15) == 0;
        constexpr int CH = DV / 8;
#pragma unroll 4
        for (int idx = lane; idx < 16 * CH; idx += 32) {
            const int r = idx / CH, n = idx % CH, row = w0 + r;
            if (row >= at.span.sq || n * 8 >= a.dv) continue;
            uint4 x;
            asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(chunk(r, n)) : "memory");
            elem* to = out + (i64)row * a.o.ss + n * 8;
            if (whole) *(uint4*)to = x;
            else {
                const u32 w[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
                for (int e = 0; e < 8; ++e)
                    if (n * 8 + e < a.dv) to[e] = (elem)(w[e / 2] >> (e & 1) * 16);
            }
        }
    }

    // The next tile's scores beside this tile's values.
    template <bool EDGE> __device__ __forceinline__ void step(const Block& block, int row0, int j, Ring& kr, Ring& vr) {
        const u32 k = room.k + kr.stage * K_BYTES, v = room.v + vr.stage * V_BYTES;
        // V is tile j + 1: at an upper edge if this one is, or the one before.
        const bool look = LOOKS && block.looks(j + 1, pieces);
        if (look) arrive(block, vr, row0, j + 1);
        bar_wait(room.k_full(kr.stage), kr.parity);
        group_sync<256>(TURN_BAR(group));
        scores(k);
        if (!look) arrive(block, vr, row0, j + 1);
        values(v);
        group_arrive<256>(TURN_BAR(group + 1 == GROUPS ? 0 : group + 1));
        products_wait<1>();
        settle(s);
        release(room.k_empty(kr.stage));
        float alpha[2];
        softmax<EDGE>(block.at, row0, j * BN, alpha);
        settle(s);
        before_wait(l[0] + l[1], room.spare());
        products_wait<0>();
        settle(acc);
        release(room.v_empty(vr.stage));
        rescale(alpha);
        weights();
        kr.step();
        vr.step();
    }

    __device__ __forceinline__ void rows(const Block& block, Ring& ring, u32& q_parity) {
        const int row0 = block.i0 + group * 64 + (tid >> 5) * 16 + (lane >> 2);
#pragma unroll
        for (int n = 0; n < DV / 8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) acc[n][e] = 0.f;
#pragma unroll
        for (int r = 0; r < 2; ++r) { m[r] = NEG_INF; l[r] = 0.f; }
        slope = SCORE == 2 && a.alibi ? ((const float*)a.alibi)[block.at.h] : 0.f;
        bar_wait(room.q_full(), q_parity);
        q_parity ^= 1;
        if (block.jmax >= block.jmin) {
            Ring kr = ring, vr = ring;
            bar_wait(room.k_full(kr.stage), kr.parity);
            scores(room.k + kr.stage * K_BYTES);
            products_wait<0>();
            settle(s);
            release(room.k_empty(kr.stage));
            kr.step();
            float alpha[2];
            softmax<true>(block.at, row0, block.jmax * BN, alpha);
            weights();
            for (int j = block.jmax - 1; j >= block.jmin; --j) {
                if (MASK >= 1 && block.edge(j)) step<true>(block, row0, j, kr, vr);
                else step<false>(block, row0, j, kr, vr);
            }
            if (OWN) release(room.q_empty());
            arrive(block, vr, row0, block.jmin);
            values(room.v + vr.stage * V_BYTES);
            products_wait<0>();
            settle(acc);
            release(room.v_empty(vr.stage));
            vr.step();
            ring = vr;
        } else if (OWN) release(room.q_empty());
        // Q's place is the output's, once no warp of the group multiplies by it any more.
        if (!OWN) group_sync<128>(OWN_BAR(group));
        write(block.at, block.i0);
        if (!OWN) {
            async_fence();
            __syncwarp();
            release(room.q_empty());
        }
        __syncwarp();
    }
};

extern "C" __global__ void __launch_bounds__(NT, 1) tw_hopper(const __grid_constant__ HopperArgs g) {
    extern __shared__ __align__(1024) char smem[];
    const u32 base = smem_u32(smem);
    Room room;
    room.q = base;
    room.k = room.q + QO_BYTES;
    room.v = room.k + STAGES * K_BYTES;
    room.o = OWN ? room.v + STAGES * V_BYTES : room.q;
    room.pieces = room.v + STAGES * V_BYTES + (OWN ? O_BYTES : 0);
    room.bars = room.pieces + PIECES_BYTES;
    const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x >> 7, 0);
    if (threadIdx.x == 0) {
        bar_init(room.q_full(), 1);
        bar_init(room.q_empty(), GROUPS * 4);
        for (int s = 0; s < STAGES; ++s) {
            bar_init(room.k_full(s), 1);
            bar_init(room.k_empty(s), GROUPS * 4);
            bar_init(room.v_full(s), 1);
            bar_init(room.v_empty(s), GROUPS * 4);
            bar_init(room.looked(s), LOOKERS);
        }
        for (int s = 0; s < 2; ++s) {
            bar_init(room.turn_full(s), 1);
            bar_init(room.turn_empty(s), GROUPS * 4 + (LOOKS ? LOOKERS : 0));
        }
        for (int group = 0; group < GROUPS; ++group)
            for (int s = 0; s < 2; ++s) {
                bar_init(room.pieces_full(group, s), 1);
                bar_init(room.pieces_empty(group, s), 4);
            }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        async_fence();
    }
    __syncthreads();
    if (warpgroup == 0) {
        registers_give<GIVE>();
        if (threadIdx.x == 0) produce(g, room);
        else if (LOOKS && threadIdx.x >= 32) look(g, room, threadIdx.x - 32);
    } else {
        registers_take<TAKE>();
        const int tid = threadIdx.x & 127;
        Consumer consumer{g.a, room, warpgroup - 1, tid, tid & 31, SCORE ? LOG2E : g.a.scale * LOG2E, Tiled(g)};
        // The last one gives the first its first turn.
        if (warpgroup == GROUPS) group_arrive<256>(TURN_BAR(0));
        Ring ring;
        u32 q_parity = 0;
        for (Walk walk{g, room}; walk.next();) consumer.rows(Block(g.a, walk.unit), ring, q_parity);
    }
}
