// FlashAttention-2's backward on Hopper: the mathematics of fa2.cu with the hands of wgmma.cu, as FlashAttention-3's backward pass
// shares the work out (Shah et al. 2024, Section 3 and Appendix B).
//
// A block owns BN keys of one KV head. The first warpgroup only brings tiles of BM rows of Q, dO, L and delta; the two others
// multiply. S^T = K Q^T and dP^T = V dO^T have keys as rows, so that P^T and dS^T are first operands of dV += P^T dO and
// dK += dS^T Q as they are; dQ = dS K is added to f32 sums in device memory. A tile's last products run beside the next tile's first,
// and every product beside the exponentials of the other warpgroup.
//   WIDE 0: each warpgroup owns 64 keys. P^T and dS^T stay in its registers; dS goes through shared memory too, where each takes
//   the other's keys from for its half of dQ.
//   WIDE 1 (head_dims above 128): each owns half the rows of S^T and dP^T of 64 keys, and half the columns of dK, dV and dQ. P^T and
//   dS^T go through shared memory.
//
//   BM rows a step     QST tiles of Q and DST of dO in shared memory
//   EARLY 1 = dV is begun before dP is awaited     GIVE, TAKE registers of the producer and of the consumers
//   TURNS 1 = blocks add to dQ in a fixed order, see Turns
//   CARE 1 = the kernel for blocks in which the other found what is not finite, and which it left out: see common.cu

#define GROUPS 2
#define NT ((GROUPS + 1) * 128)
// Tiles come in panels of 64 columns, and a warpgroup's share of them is whole panels.
#define PANELS(columns) (((columns) + (WIDE ? 127 : 63)) / (WIDE ? 128 : 64) * (WIDE ? 2 : 1))
#define TP (PANELS(DP) * 64)
#define TV (PANELS(DV) * 64)
#define TILE_K (BN * TP * 2)
#define TILE_V (BN * TV * 2)
#define TILE_Q (BM * TP * 2)
#define TILE_GO (BM * TV * 2)
#define TILE_DS (BN * BM * 2)
#define TILE_STAT (BM * 4)
// Rows of S and dP that a warpgroup makes, of 64 keys; columns of dK and dV; columns of dQ, of 64 rows.
#define SN (WIDE ? BM / GROUPS : BM)
#define KN (WIDE ? TP / GROUPS : TP)
#define VN (WIDE ? TV / GROUPS : TV)
#define QN (TP / GROUPS)
// What passes through shared memory of a tile: dS, or P and dS.
#define STRIPS (WIDE ? 2 : 1)

struct BackwardHopperArgs {
    TensorMap q, k, v, go;
    Grads g;
};

static_assert(QST == DST, "tiles of Q and dO go round together");

// Where everything stands in shared memory.
struct Room {
    u32 k, v, q, go, ds, lse, delta, bars, turns, odd_keys, zero;
    __device__ __forceinline__ explicit Room(u32 base) {
        k = base;
        v = k + TILE_K;
        q = v + TILE_V;
        go = q + QST * TILE_Q;
        ds = go + DST * TILE_GO;
        lse = ds + 2 * STRIPS * TILE_DS;
        delta = lse + QST * TILE_STAT;
        bars = delta + DST * TILE_STAT;
        turns = bars + 16 + (QST + DST) * 16;
        odd_keys = turns + TURNS * 32;
        zero = odd_keys + BN / 8;
    }
    __device__ __forceinline__ u32 kv_full() const { return bars; }
    __device__ __forceinline__ u32 q_full(int s) const { return bars + 16 + s * 16; }
    __device__ __forceinline__ u32 q_empty(int s) const { return bars + 24 + s * 16; }
    __device__ __forceinline__ u32 go_full(int s) const { return bars + 16 + (QST + s) * 16; }
    __device__ __forceinline__ u32 go_empty(int s) const { return bars + 24 + (QST + s) * 16; }
    // Of this block's turns to add to dQ: it has come; all warps have added; that was seen. And the block's number.
    __device__ __forceinline__ u32 turn() const { return turns; }
    __device__ __forceinline__ u32 added() const { return turns + 8; }
    __device__ __forceinline__ u32 seen() const { return turns + 16; }
    __device__ __forceinline__ u32 number() const { return turns + 24; }
};

// A stage of a ring and the parity of its current round.
template <int STAGES> struct Ring {
    u32 stage = 0, parity = 0;
    __device__ __forceinline__ void step() {
        if (++stage == STAGES) { stage = 0; parity ^= 1; }
    }
};

// The keys of a block, and the steps over query heads and row blocks that see some of them. Blocks that add in a fixed order are
// numbered from the last keys to the first.
struct Block {
    int b, hk, key0, first, count, turn;
    __device__ __forceinline__ Block(const Grads& g, int number) {
        const Args& a = g.f;
        // As in fa2.cu: key blocks of one group of pairs run together, under causality the longest first.
        const int per = g.key_blocks * a.pairs_per_group;
        const int grp = number / per, r = number - grp * per;
        const int width = min(a.pairs_per_group, g.kv_pairs - grp * a.pairs_per_group);
        const int at = r / width, pair = grp * a.pairs_per_group + (r - at * width), jb = TURNS ? g.key_blocks - 1 - at : at;
        b = pair / g.kv_heads;
        hk = pair - b * g.kv_heads;
        key0 = jb * BN;
        const int key1 = min(key0 + BN, a.sk);
        int last = (a.sq + BM - 1) / BM - 1;
        first = 0;
        if (MASK >= 1) first = max(0, key0 - a.hi_off) / BM;
        if (MASK == 2) last = key1 - 1 - a.lo_off < 0 ? -1 : min(last, (key1 - 1 - a.lo_off) / BM);
        count = max(0, last - first + 1);
        // Without a mask blocks would meet at the same rows: each begins elsewhere.
        turn = MASK == 0 && !TURNS && count > 0 ? jb % count : 0;
    }
};

// Steps in their order.
struct Walk {
    const Block& block;
    int h, h1, x = 0;
    __device__ __forceinline__ Walk(const Block& block, const Args& a) : block(block), h(block.hk * a.group_size), h1(h + (block.count ? a.group_size : 0)) {}
    __device__ __forceinline__ bool more() const { return h < h1; }
    __device__ __forceinline__ int i0() const {
        int at = x + block.turn;
        if (MASK == 0 && at >= block.count) at -= block.count;
        return (block.first + at) * BM;
    }
    __device__ __forceinline__ void step() {
        if (++x == block.count) { x = 0; ++h; }
    }
};

DEV void copy_row(u32 dst, const float* from, u32 bar) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(dst), "l"(from), "n"(TILE_STAT), "r"(bar) : "memory");
}

DEV void bring_keys(const BackwardHopperArgs& g, const Room& room, const Block& block) {
    bar_expect(room.kv_full(), TILE_K + TILE_V);
#pragma unroll
    for (int p = 0; p < PANELS(DP); ++p) copy_box(room.k + p * BN * 128, g.k, room.kv_full(), p * 64, block.key0, block.hk, block.b);
#pragma unroll
    for (int p = 0; p < PANELS(DV); ++p) copy_box(room.v + p * BN * 128, g.v, room.kv_full(), p * 64, block.key0, block.hk, block.b);
}

// Q and L of rows [i0, i0 + BM) of query head h.
DEV void bring_q(const BackwardHopperArgs& g, const Room& room, const Block& block, int h, int i0, int stage) {
    const u32 full = room.q_full(stage);
    bar_expect(full, TILE_Q + TILE_STAT);
#pragma unroll
    for (int p = 0; p < PANELS(DP); ++p) copy_box(room.q + stage * TILE_Q + p * BM * 128, g.q, full, p * 64, i0, h, block.b);
    copy_row(room.lse + stage * TILE_STAT, (const float*)g.g.lse2 + (i64)(block.b * g.g.f.heads + h) * g.g.rows_padded + i0, full);
}
// dO and delta.
DEV void bring_go(const BackwardHopperArgs& g, const Room& room, const Block& block, int h, int i0, int stage) {
    const u32 full = room.go_full(stage);
    bar_expect(full, TILE_GO + TILE_STAT);
#pragma unroll
    for (int p = 0; p < PANELS(DV); ++p) copy_box(room.go + stage * TILE_GO + p * BM * 128, g.go, full, p * 64, i0, h, block.b);
    copy_row(room.delta + stage * TILE_STAT, (const float*)g.g.delta + (i64)(block.b * g.g.f.heads + h) * g.g.rows_padded + i0, full);
}

// The first tiles, of which there is a place for each.
DEV void bring_first(const BackwardHopperArgs& g, const Room& room, const Block& block) {
    bring_keys(g, room, block);
    Walk walk(block, g.g.f);
    for (int s = 0; s < QST && walk.more(); ++s, walk.step()) {
        bring_q(g, room, block, walk.h, walk.i0(), s);
        bring_go(g, room, block, walk.h, walk.i0(), s);
    }
}

// All others, as places become free.
DEV void produce(const BackwardHopperArgs& g, const Room& room, const Block& block) {
    Ring<QST> ring;
    Walk walk(block, g.g.f);
    for (int s = 0; s < QST && walk.more(); ++s, walk.step()) ring.step();
    for (; walk.more(); walk.step(), ring.step()) {
        bar_wait(room.q_empty(ring.stage), ring.parity ^ 1);
        bring_q(g, room, block, walk.h, walk.i0(), ring.stage);
        bar_wait(room.go_empty(ring.stage), ring.parity ^ 1);
        bring_go(g, room, block, walk.h, walk.i0(), ring.stage);
    }
}

#if TURNS
// The order in which blocks add to dQ: from the last keys to the first, which under causality is the order in which blocks that
// begin at a time come to a row, each with its first one. So bits depend neither on what else runs nor on how many blocks run at a
// time. Each row block of a head has a word in memory that counts the blocks of keys up to the one that has added last. A block
// waits only for blocks of lower numbers, and takes its number as it begins: those it waits for have begun.
//
// Two threads of the producer's warpgroup keep the turns, so that no thread that multiplies waits for memory: one waits for the
// block before, the other for this one's sums to be in memory.
struct Turns {
    const Grads& g;
    const Block& block;
    __device__ __forceinline__ u32* of(int h, int i0) const { return (u32*)g.turns + TURN_WORDS + (i64)(block.b * g.f.heads + h) * (g.rows_padded / BM) + i0 / BM; }
    __device__ __forceinline__ u32 last_of(int jb) const { return g.key_blocks - jb; }
    __device__ __forceinline__ u32 own() const { return last_of(block.key0 / BN); }
    // Whether the keys from key0 on are seen by rows from i0 on, if earlier keys are.
    __device__ __forceinline__ bool reaches(int key0, int i0) const { return key0 < g.f.sk && !(MASK >= 1 && key0 - g.f.hi_off >= i0 + BM); }
    __device__ __forceinline__ void await(int h, int i0, u32 count) const {
        u32 now;
        do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(of(h, i0)) : "memory");
        while (now != count);
    }
    __device__ __forceinline__ void await(int h, int i0) const {
        if (reaches(block.key0 + BN, i0)) await(h, i0, own() - 1);
    }
    __device__ __forceinline__ void pass(int h, int i0, u32 count) const { asm volatile("fence.acq_rel.gpu;\nst.relaxed.gpu.global.u32 [%0], %1;" ::"l"(of(h, i0)), "r"(count) : "memory"); }

    __device__ __forceinline__ void await_all(const Room& room) const {
        u32 parity = 0;
        for (Walk walk(block, g.f); walk.more(); walk.step(), parity ^= 1) {
            const int h = walk.h, i0 = walk.i0();
            await(h, i0);
            // Every phase of a barrier is seen before the next one ends.
            if (h != block.hk * g.f.group_size || walk.x) bar_wait(room.seen(), parity ^ 1);
            bar_arrive(room.turn());
        }
    }
    __device__ __forceinline__ void pass_all(const Room& room) const {
        u32 parity = 0;
        for (Walk walk(block, g.f); walk.more(); walk.step(), parity ^= 1) {
            bar_wait(room.added(), parity);
            bar_arrive(room.seen());
            pass(walk.h, walk.i0(), own());
        }
    }
};
#endif

#if FENCED
// This thread's share of whether something of the block is not finite: a row that is marked, or in K or V.
DEV bool is_odd(const BackwardHopperArgs& g, const Room& room, const Block& block) {
    const Grads& all = g.g;
    bool odd = false;
    for (int h = 0; h < all.f.group_size && block.count; ++h)
        odd |= odd_rows(all, block.b * all.f.heads + block.hk * all.f.group_size + h, block.first * BM, (block.first + block.count) * BM, threadIdx.x, NT);
    bar_wait(room.kv_full(), 0);
    u32 found = 0;
#pragma unroll 4
    for (int at = threadIdx.x * 16; at < TILE_K + TILE_V; at += NT * 16) {
        u32 w[4];
        asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3]) : "r"(room.k + at) : "memory");
#pragma unroll
        for (int x = 0; x < 4; ++x) found |= (w[x] & EXP_BITS) + EXP_ONE;
    }
    return odd || (found & EXP_TOP);
}

// Another kernel makes the gradients of this block; also for `tw_bwd_dq`. What was asked for must arrive before the block ends.
DEV void leave_out(const BackwardHopperArgs& g, const Room& room, const Block& block) {
    if (threadIdx.x < BN / 16) odd_keys_of(g.g, block.b * g.g.kv_heads + block.hk)[block.key0 / 16 + threadIdx.x] = 1;
#if TURNS
    if (threadIdx.x == 0) {
        ((u32*)g.g.turns)[TURN_LEFT] = 1;
        const Turns turns{g.g, block};
        for (Walk walk(block, g.g.f); walk.more(); walk.step()) {
            turns.await(walk.h, walk.i0());
            turns.pass(walk.h, walk.i0(), turns.own());
        }
    }
#endif
    const int steps = block.count * g.g.f.group_size;
    for (int s = 0; s < min(QST, steps); ++s) {
        bar_wait(room.q_full(s), 0);
        bar_wait(room.go_full(s), 0);
    }
}
#endif

// Number of the named barrier of both consumers.
#define ALL_BAR 1

#define WG_N32 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"

// c (+)= A B for 64 rows and N columns, sixteen steps of the sum, both at descriptors. TA 1: A lies with steps as lines, in panels
// of 64 rows; TB 0: B lies with columns as lines, 1: with steps as lines, in panels of 64 columns. MORE 0: c is overwritten.
template <int N, int MORE, int TA, int TB, int NTL> DEV void product(float (&c)[NTL][4], u64 a, u64 b) {
    static_assert(NTL * 8 == N && (N == 32 || N == 64 || N == 128), "one accumulator for all columns");
#define PRODUCT(n, regs, A, B, M, X, Y) "{\n.reg .pred p;\nsetp.ne.b32 p, " M ", 0;\nwgmma.mma_async.sync.aligned.m64n" n "k16" WG_TYPES "{" regs "}, " A ", " B ", p, 1, 1, " X ", " Y ";\n}"
    if constexpr (N == 32) asm volatile(PRODUCT("32", WG_N32, "%16", "%17", "%18", "%19", "%20") : ACC2(c, 0), ACC2(c, 2) : "l"(a), "l"(b), "n"(MORE), "n"(TA), "n"(TB));
    else if constexpr (N == 64) asm volatile(PRODUCT("64", WG_0, "%32", "%33", "%34", "%35", "%36") : ACC8(c, 0) : "l"(a), "l"(b), "n"(MORE), "n"(TA), "n"(TB));
    else asm volatile(PRODUCT("128", WG_0 WG_32 WG_40, "%64", "%65", "%66", "%67", "%68") : ACC8(c, 0), ACC8(c, 8) : "l"(a), "l"(b), "n"(MORE), "n"(TA), "n"(TB));
#undef PRODUCT
}

DEV void lds2(float (&x)[2], u32 at) { asm volatile("ld.shared.v2.f32 {%0,%1}, [%2];" : "=f"(x[0]), "=f"(x[1]) : "r"(at) : "memory"); }

struct Consumer {
    const Grads& g;
    const Room& room;
    const Block& block;
    const int group; // warpgroup
    int tid, lane;   // thread in it
    const float c;

    float dk[KN / 8][4], dv[VN / 8][4];
    Ring<QST> qr;
    Ring<DST> gr;
    int place = 0; // of the strips
#if TURNS && !CARE
    u32 turn = 0; // parity
#endif

    template <int N> static __device__ __forceinline__ void clear(float (&x)[N][4]) {
#pragma unroll
        for (int n = 0; n < N; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) x[n][e] = 0.f;
    }

    // The stage before `stage`.
    template <int STAGES> static __device__ __forceinline__ u32 before(u32 stage) { return stage == 0 ? STAGES - 1 : stage - 1; }

    // This lane's first row of a tile, and its first key.
    __device__ __forceinline__ int own_row() const { return (WIDE ? group * SN : 0) + 2 * (lane & 3); }
    __device__ __forceinline__ int own_key() const { return block.key0 + (WIDE ? 0 : group * 64) + (tid >> 5) * 16 + (lane >> 2); }

    // x = A B^T for this warpgroup's keys and rows: A is K or V, B is Q or dO.
    template <int COLS> __device__ __forceinline__ void across(float (&x)[SN / 8][4], u32 keys, u32 rows) {
        keys += WIDE ? 0 : group * (64 * 128);
        rows += WIDE ? group * (SN * 128) : 0;
        products_begin();
#pragma unroll
        for (int kk = 0; kk < COLS / 16; ++kk) {
            const u64 a = operand(keys + (kk / 4) * (BN * 128) + (kk % 4) * 32, 16), b = operand(rows + (kk / 4) * (BM * 128) + (kk % 4) * 32, 16);
            if (kk == 0) product<SN, 0, 0, 0>(x, a, b);
            else product<SN, 1, 0, 0>(x, a, b);
        }
        products_commit();
    }

    // x += A B for this warpgroup's keys or columns: A is P^T or dS^T in registers or in a strip, B is dO or Q.
    template <int COLS> __device__ __forceinline__ void along(float (&x)[COLS / 8][4], const u32 (&p)[SN / 16][4], u32 strip, u32 rows) {
        products_begin();
#pragma unroll
        for (int kk = 0; kk < BM / 16; ++kk) {
            if constexpr (WIDE) product<COLS, 1, 0, 1>(x, operand(strip + kk * 32, 16), operand(rows + group * (COLS / 64) * (BM * 128) + kk * 2048, BM * 128));
            else product_rs<COLS, 0>(x, p[kk], operand(rows + kk * 2048, BM * 128));
        }
        products_commit();
    }

    static __device__ __forceinline__ void pack(u32 (&p)[SN / 16][4], const float (&x)[SN / 8][4]) {
#pragma unroll
        for (int kk = 0; kk < SN / 16; ++kk)
#pragma unroll
            for (int w = 0; w < 4; ++w) p[kk][w] = pack2(x[2 * kk + w / 2][2 * (w & 1)], x[2 * kk + w / 2][2 * (w & 1) + 1]);
    }

    // A strip has panels of 64 rows, a line for each key.
    __device__ __forceinline__ void leave(u32 strip, const u32 (&p)[SN / 16][4]) {
        const int line = (WIDE ? 0 : group * 64) + (tid >> 5) * 16 + (lane >> 2), n0 = WIDE ? group * (SN / 8) : 0;
#pragma unroll
        for (int n = 0; n < SN / 8; ++n)
#pragma unroll
            for (int r = 0; r < 2; ++r)
                store_word(strip + (n / 8) * (BN * 128) + (line + r * 8) * 128 + ((n0 + n ^ line) & 7) * 16 + (lane & 3) * 4, p[n / 2][(n & 1) * 2 + r]);
    }

    // P^T of a tile from its scores.
    __device__ __forceinline__ void weights(float (&s)[SN / 8][4], u32 lse) {
#pragma unroll
        for (int n = 0; n < SN / 8; ++n) {
            float l[2];
            lds2(l, lse + n * 32);
#pragma unroll
            for (int e = 0; e < 4; ++e) s[n][e] = ex2(fmaf(s[n][e], c, -l[e & 1]));
        }
    }

    // dS^T from P^T and dP^T, in dP's place.
    __device__ __forceinline__ void slopes(float (&dp)[SN / 8][4], const float (&s)[SN / 8][4], u32 delta) {
#pragma unroll
        for (int n = 0; n < SN / 8; ++n) {
            float d[2];
            lds2(d, delta + n * 32);
#pragma unroll
            for (int e = 0; e < 4; ++e) dp[n][e] = s[n][e] * (dp[n][e] - d[e & 1]);
        }
    }

    // dQ of the tile for this warpgroup's columns.
    __device__ __forceinline__ void product_dq(float (&dq)[QN / 8][4], u32 strip, u32 keys) {
        const u32 k = keys + (QN < 64 ? group * (QN * 2) : group * (QN / 64) * (BN * 128));
        products_begin();
#pragma unroll
        for (int kk = 0; kk < BN / 16; ++kk) {
            const u64 x = operand(strip + kk * 2048, BN * 128), y = operand(k + kk * 2048, BN * 128);
            if (kk == 0) product<QN, 0, 1, 1>(dq, x, y);
            else product<QN, 1, 1, 1>(dq, x, y);
        }
        products_commit();
    }

    // The sums lie as the accumulators do: see dq_block in fa2.cu and `store_dq` in hopper.rs.
    __device__ __forceinline__ void add_dq(const float (&dq)[QN / 8][4], int h, int i0) {
        const int warp = (tid >> 5) * GROUPS + group;
#if TURNS && !CARE
        bar_wait(room.turn(), turn);
        turn ^= 1;
#endif
        float* to = (float*)g.dq_acc + ((i64)(block.b * g.f.heads + h) * g.rows_padded + i0) * TP + (warp * (QN / 8) * 32 + lane) * 4;
#pragma unroll
        for (int n = 0; n < QN / 8; ++n)
            asm volatile("red.global.add.v4.f32 [%0], {%1,%2,%3,%4};" ::"l"(to + n * 128), "f"(dq[n][0]), "f"(dq[n][1]), "f"(dq[n][2]), "f"(dq[n][3]) : "memory");
#if TURNS && !CARE
        __syncwarp();
        if (lane == 0) bar_arrive(room.added());
#endif
    }

    // One step: rows [i0, i0 + BM) of query head h. `later`: not the first one.
    __device__ __forceinline__ void step(bool later, int h, int i0) {
        const Args& a = g.f;
        const u32 q = room.q + qr.stage * TILE_Q, go = room.go + gr.stage * TILE_GO;
        [[maybe_unused]] const u32 strip_ds = room.ds + place * (STRIPS * TILE_DS), strip_p = strip_ds + TILE_DS;
        place ^= 1;
        float s[SN / 8][4], dp[SN / 8][4];
        u32 p[SN / 16][4], ds[SN / 16][4];
        bar_wait(room.q_full(qr.stage), qr.parity);
        across<DP>(s, room.k, q);
        bar_wait(room.go_full(gr.stage), gr.parity);
        across<DV>(dp, room.v, go);
        products_wait<1>();
        settle(s);
        // The products of the step before are done.
        if (later) bar_arrive(room.q_empty(before<QST>(qr.stage)));
        if (later && WIDE) bar_arrive(room.go_empty(before<DST>(gr.stage)));
        const int in = own_row(), key = own_key(), row = i0 + in;
        weights(s, room.lse + qr.stage * TILE_STAT + in * 4);
        const int i1 = min(i0 + BM, a.sq);
        const bool edge = block.key0 + BN > (MASK >= 1 ? min(a.sk, i0 + a.hi_off + 1) : a.sk) || (MASK == 2 && block.key0 < i1 - 1 + a.lo_off);
        if (edge) hide(s, key, row);
        if (EARLY || WIDE) pack(p, s);
        if (WIDE) leave(strip_p, p);
        if (EARLY && !WIDE) {
            along<VN>(dv, p, 0, go);
            products_wait<1>();
        } else products_wait<0>();
        settle(dp);
        slopes(dp, s, room.delta + gr.stage * TILE_STAT + in * 4);
        if (edge) hide(dp, key, row);
        pack(ds, dp);
        if (!EARLY && !WIDE) {
            pack(p, s);
            along<VN>(dv, p, 0, go);
        }
        if (EARLY && !WIDE) {
            products_wait<0>();
            settle(dv);
            bar_arrive(room.go_empty(gr.stage));
        }
        leave(strip_ds, ds);
        async_fence();
        group_sync<GROUPS * 128>(ALL_BAR);
        float dq[QN / 8][4];
        product_dq(dq, strip_ds, room.k);
        if (WIDE) along<VN>(dv, p, strip_p, go);
        along<KN>(dk, ds, strip_ds, q);
        // dK, and in wide tiles dV, run on.
        products_wait<(WIDE ? 2 : 1)>();
        settle(dq);
        if (!EARLY && !WIDE) {
            settle(dv);
            bar_arrive(room.go_empty(gr.stage));
        }
        add_dq(dq, h, i0);
        qr.step();
        gr.step();
    }

#if CARE
    // Makes what is not finite in a tile of `lines` lines 0. Those lines are added to `odd`, a bit each, unless that is 0.
    __device__ __forceinline__ void mend(u32 tile, int bytes, int lines, u32 odd) const {
#pragma unroll 1
        for (int at = (group * 128 + tid) * 4; at < bytes; at += GROUPS * 128 * 4) {
            u32 w = lds32(tile + at);
            const u32 bad = ((w & EXP_BITS) + EXP_ONE) & EXP_TOP;
            if (!bad) continue;
            if (bad & 0x8000u) w &= 0xffff0000u;
            if (bad & 0x80000000u) w &= 0x0000ffffu;
            store_word(tile + at, w);
            const int line = at / 128 % lines;
            if (odd) asm volatile("red.shared.or.b32 [%0], %1;" ::"r"(odd + line / 32 * 4), "r"(1u << line % 32) : "memory");
        }
    }

    // The whole of a block, with tiles that may hold NaN and infinity: nothing runs beside anything, one place for each tile.
    __device__ __forceinline__ void careful(const BackwardHopperArgs& all, u32& keys, u32& rows) {
        const bool brings = group == 0 && tid == 0;
        if (brings) bring_keys(all, room, block);
        bar_wait(room.kv_full(), keys);
        keys ^= 1;
        if (group == 0 && tid < BN / 32) store_word(room.odd_keys + tid * 4, 0);
        if (group == 0 && tid == 0) store_word(room.zero, 0);
        group_sync<GROUPS * 128>(ALL_BAR);
        mend(room.k, TILE_K, BN, room.odd_keys);
        mend(room.v, TILE_V, BN, 0);
        clear(dk);
        clear(dv);
        settle(dk);
        settle(dv);
        for (Walk walk(block, g.f); walk.more(); walk.step(), rows ^= 1) {
            if (brings) {
                bring_q(all, room, block, walk.h, walk.i0(), 0);
                bring_go(all, room, block, walk.h, walk.i0(), 0);
            }
            bar_wait(room.q_full(0), rows);
            bar_wait(room.go_full(0), rows);
            careful_step(walk.h, walk.i0());
        }
        write_all();
        // The next block's keys come where this one's gradients were.
        async_fence();
        group_sync<GROUPS * 128>(ALL_BAR);
    }

    // A step whose tiles may hold NaN and infinity: nothing of it runs beside anything.
    __device__ __forceinline__ void careful_step(int h, int i0) {
        // The assembler would keep every address of this loop in registers that there are not.
        const int zero = lds32(room.zero);
        tid += zero;
        lane += zero;
        const Args& a = g.f;
        const Span span = span_of(a);
        const u32 q = room.q, go = room.go, lse = room.lse, delta = room.delta, strip_ds = room.ds + zero, strip_p = strip_ds + TILE_DS;
        float s[SN / 8][4], dp[SN / 8][4];
        u32 p[SN / 16][4];
        // L and delta of marked rows are NaN, and so is what follows from them; a row that sees nothing has nothing.
        if (group == 0 && tid < BM && lds32(lse + tid * 4) == UNSEEN) {
            store_word(lse + tid * 4, 0x7f800000u);
            store_word(delta + tid * 4, 0);
        }
        mend(q, TILE_Q, BM, 0);
        mend(go, TILE_GO, BM, 0);
        async_fence();
        group_sync<GROUPS * 128>(ALL_BAR);
        across<DP>(s, room.k + zero, q);
        products_wait<0>();
        settle(s);
        const int in = own_row(), key = own_key();
        bool odd[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int line = key + r * 8 - block.key0;
            odd[r] = lds32(room.odd_keys + line / 32 * 4) >> line % 32 & 1;
        }
        // A key that is not finite gives a row L = NaN or a score of -inf, which hides it.
#pragma unroll
        for (int n = 0; n < SN / 8; ++n) {
            float l[2];
            lds2(l, lse + in * 4 + n * 32);
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const float w = ex2(fmaf(s[n][e], c, -l[e & 1]));
                s[n][e] = s[n][e] * c == NEG_INF || (odd[e >> 1] && !is_nan(w)) ? -0.f : w;
            }
        }
        hide(s, key, i0 + in);
        pack(p, s);
        if (WIDE) leave(strip_p, p);
        else along<VN>(dv, p, strip_p, go);
        across<DV>(dp, room.v + zero, go);
        products_wait<0>();
        settle(dp);
        settle(dv);
        slopes(dp, s, delta + in * 4);
#pragma unroll
        for (int n = 0; n < SN / 8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e)
                if (is_hidden(s[n][e])) dp[n][e] = 0.f;
        hide(dp, key, i0 + in);
        pack(p, dp);
        leave(strip_ds, p);
        async_fence();
        group_sync<GROUPS * 128>(ALL_BAR);
        float dq[QN / 8][4];
        product_dq(dq, strip_ds, room.k + zero);
        products_wait<0>();
        settle(dq);
#if TURNS
        // Blocks that were left out add after all others, in the same order.
        const Turns turns{g, block};
        const bool keeps = group == 0 && tid == 0;
        const u32* const left_out = odd_keys_of(g, block.b * g.kv_heads + block.hk);
        if (keeps)
            for (int key = block.key0 + BN; turns.reaches(key, i0); key += BN)
                if (left_out[key / 16]) {
                    turns.await(h, i0, g.key_blocks + turns.last_of(key / BN));
                    break;
                }
        group_sync<GROUPS * 128>(ALL_BAR);
#endif
        add_dq(dq, h, i0);
#if TURNS
        group_sync<GROUPS * 128>(ALL_BAR);
        if (keeps) turns.pass(h, i0, g.key_blocks + turns.own());
#endif
        if (WIDE) along<VN>(dv, p, strip_p, go);
        along<KN>(dk, p, strip_ds, q);
        products_wait<0>();
        settle(dv);
        const int column = (WIDE ? group * VN : 0) + 2 * (lane & 3);
        const elem* from = (const elem*)g.go.ptr + block.b * g.go.sb + h * g.go.sh + (i64)i0 * g.go.ss + column;
#pragma unroll 1
        for (int i = 0; i < BM && i0 + i < a.sq; ++i, from += g.go.ss) {
            if (!is_nan(__uint_as_float(lds32(delta + i * 4)))) continue;
            bool takes[2];
#pragma unroll
            for (int r = 0; r < 2; ++r) takes[r] = key + r * 8 <= last_key(span, i0 + i) && key + r * 8 >= first_key(span, i0 + i);
#pragma unroll
            for (int n = 0; n < VN / 8; ++n) {
                // Aligned rows are whole chunks.
                const u32 w = column + n * 8 < a.dv ? *(const u32*)(from + n * 8) : 0;
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const float x = to_float((u16)(e ? w >> 16 : w));
#pragma unroll
                    for (int r = 0; r < 2; ++r)
                        if (takes[r] && !is_finite(x)) dv[n][2 * r + e] += x;
                }
            }
        }
        settle(dk);
        // All places are the next step's.
        async_fence();
        group_sync<GROUPS * 128>(ALL_BAR);
    }
#endif

    // 0 for pairs of a row and a key that it does not see, whatever stood there.
    __device__ __forceinline__ void hide(float (&x)[SN / 8][4], int key, int row) {
        const Args& a = g.f;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            // Rows that see the key, relative to this lane's first.
            const int j = key + r * 8;
            const int from = j >= a.sk ? BM : MASK >= 1 ? j - a.hi_off - row : 0, to = MASK == 2 ? j - a.lo_off - row : BM;
#pragma unroll
            for (int n = 0; n < SN / 8; ++n)
#pragma unroll
                for (int e = 0; e < 2; ++e)
                    if (n * 8 + e < from || n * 8 + e > to) x[n][2 * r + e] = 0.f;
        }
    }

    __device__ __forceinline__ void rows() {
        Walk walk(block, g.f);
        bar_wait(room.kv_full(), 0);
        clear(dk);
        clear(dv);
        settle(dk);
        settle(dv);
        for (bool later = false; walk.more(); walk.step(), later = true) step(later, walk.h, walk.i0());
        products_wait<0>();
        settle(dk);
        settle(dv);
        // Both have taken their products from all of K and V, whose places are for the gradients on their way out.
        group_sync<GROUPS * 128>(ALL_BAR);
        write_all();
    }

    __device__ __forceinline__ void write_all() {
        write<KN>(dk, g.f.scale, room.k, g.dk, g.f.d);
        write<VN>(dv, 1.f, room.v, g.dv, g.f.dv);
    }

    // A warp's sixteen keys of dK or dV, in whole 16-byte chunks.
    template <int COLS> __device__ __forceinline__ void write(float (&x)[COLS / 8][4], float factor, u32 at, const Tensor& t, int d) {
        const int local = (WIDE ? 0 : group * 64) + (tid >> 5) * 16, col0 = WIDE ? group * COLS : 0;
        at += col0 / 64 * (BN * 128);
        auto chunk = [&](int line, int n) { return at + (n / 8) * (BN * 128) + (local + line) * 128 + ((n ^ line) & 7) * 16; };
#pragma unroll
        for (int r = 0; r < 2; ++r)
#pragma unroll
            for (int n = 0; n < COLS / 8; ++n) store_word(chunk(r * 8 + (lane >> 2), n) + 4 * (lane & 3), pack2(x[n][2 * r] * factor, x[n][2 * r + 1] * factor));
        __syncwarp();
        elem* to = (elem*)t.ptr + block.b * t.sb + block.hk * t.sh + (i64)(block.key0 + local) * t.ss + col0;
        const bool whole = ((t.ptr | (u64)((t.sb | t.sh | t.ss | (i64)d) * ESZ)) & 15) == 0;
        constexpr int CH = COLS / 8;
#pragma unroll 4
        for (int idx = lane; idx < 16 * CH; idx += 32) {
            const int line = idx / CH, n = idx % CH;
            if (block.key0 + local + line >= g.f.sk || col0 + n * 8 >= d) continue;
            uint4 w;
            asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(w.x), "=r"(w.y), "=r"(w.z), "=r"(w.w) : "r"(chunk(line, n)) : "memory");
            elem* const row = to + (i64)line * t.ss + n * 8;
            if (whole) *(uint4*)row = w;
            else {
                const u32 x[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
                for (int e = 0; e < 8; ++e)
                    if (col0 + n * 8 + e < d) row[e] = (elem)(x[e / 2] >> (e & 1) * 16);
            }
        }
    }
};

DEV void begin_bars(const Room& room) {
    // Every thread says that it has read, L and delta above all: racecheck follows no warp's barrier to one thread's word.
    bar_init(room.kv_full(), 1);
    for (int s = 0; s < QST; ++s) {
        bar_init(room.q_full(s), 1);
        bar_init(room.q_empty(s), GROUPS * 128);
    }
    for (int s = 0; s < DST; ++s) {
        bar_init(room.go_full(s), 1);
        bar_init(room.go_empty(s), GROUPS * 128);
    }
#if TURNS
    bar_init(room.turn(), 1);
    bar_init(room.added(), GROUPS * 4);
    bar_init(room.seen(), 1);
#endif
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    async_fence();
}

extern "C" __global__ void __launch_bounds__(NT, 1) tw_bwd_hopper(const __grid_constant__ BackwardHopperArgs g) {
    extern __shared__ __align__(1024) char smem[];
    const Room room(smem_u32(smem));
    const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x >> 7, 0), tid = threadIdx.x & 127;
#if CARE
    const int blocks = g.g.key_blocks * g.g.kv_pairs;
    auto left_out = [&](int number) {
        const Block block(g.g, number);
        return odd_keys_of(g.g, block.b * g.g.kv_heads + block.hk)[block.key0 / 16] != 0;
    };
#if TURNS
    u32* const words = (u32*)g.g.turns;
    if (words[TURN_LEFT] == 0) return;
    if (threadIdx.x == 0) begin_bars(room);
    __syncthreads();
#else
    bool any = false;
    for (int x = blockIdx.x + (int)threadIdx.x * (int)gridDim.x; x < blocks; x += NT * (int)gridDim.x) any |= left_out(x);
    if (threadIdx.x == 0) begin_bars(room);
    if (!__syncthreads_or(any)) return;
#endif
    if (warpgroup == 0) {
        registers_give<GIVE>();
    } else {
        registers_take<TAKE>();
        u32 keys = 0, rows = 0;
#if TURNS
        for (;;) {
            if (warpgroup == 1 && tid == 0) store_word(room.number(), atomicAdd(words + TURN_CARE, 1));
            group_sync<GROUPS * 128>(ALL_BAR);
            const int x = lds32(room.number());
            group_sync<GROUPS * 128>(ALL_BAR);
            if (x >= blocks) break;
#else
        for (int x = blockIdx.x; x < blocks; x += gridDim.x) {
#endif
            if (!left_out(x)) continue;
            const Block block(g.g, x);
            Consumer consumer{g.g, room, block, warpgroup - 1, tid, tid & 31, g.g.f.scale * LOG2E};
            consumer.careful(g, keys, rows);
        }
    }
#else
#if TURNS
    if (threadIdx.x == 0) {
        store_word(room.number(), atomicAdd((u32*)g.g.turns + TURN_NEXT, 1));
        begin_bars(room);
    }
    __syncthreads();
    const Block block(g.g, lds32(room.number()));
    if (threadIdx.x == 0) bring_first(g, room, block);
#else
    const Block block(g.g, blockIdx.x);
    if (threadIdx.x == 0) {
        begin_bars(room);
        bring_first(g, room, block);
    }
    __syncthreads();
#endif
#if FENCED
    if (__syncthreads_or(is_odd(g, room, block))) {
        leave_out(g, room, block);
        return;
    }
#endif
    if (warpgroup == 0) {
        registers_give<GIVE>();
        if (threadIdx.x == 0) produce(g, room, block);
#if TURNS
        if (threadIdx.x == 32) Turns{g.g, block}.await_all(room);
        if (threadIdx.x == 64) Turns{g.g, block}.pass_all(room);
#endif
    } else {
        registers_take<TAKE>();
        Consumer consumer{g.g, room, block, warpgroup - 1, tid, tid & 31, g.g.f.scale * LOG2E};
        consumer.rows();
    }
#endif
}
