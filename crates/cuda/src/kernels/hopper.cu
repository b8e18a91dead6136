// FlashAttention-2's forward on Hopper, as FlashAttention-3 schedules it (Shah et al. 2024, Sections 3.1 and 3.2): the mathematics
// of fa2.cu with other hands.
//
// The first warpgroup only brings tiles: one thread of it keeps the copy engine STAGES tiles of K and V ahead. Each of the other
// GROUPS warpgroups owns 64 query rows and all their keys: S = Q K^T from shared memory, P stays in registers as the operand of
// P V, and so do m, l and the unnormalised output; one division in the end. Two things hide the exponentials: the product of the
// next tile's scores runs beside that of this tile's values, and warpgroups take turns in issuing products, so that one works out
// its softmax while another multiplies.
//
//   GROUPS consumers, 64 rows each     BN keys a tile     STAGES of K and of V     GIVE, TAKE registers of producer and consumers
//   OWN 1 = the output is staged in memory of its own, so that Q of the next rows may come meanwhile

#define BM (GROUPS * 64)
#define NT ((GROUPS + 1) * 128)
#define Q_BYTES (BM * DP * 2)
#define O_BYTES (BM * DV * 2)
#define K_BYTES (BN * DP * 2)
#define V_BYTES (BN * DV * 2)

struct HopperArgs {
    TensorMap q, k, v;
    Args a;
    int units;  // what blocks take one after another: row blocks, or
    int folded; // 1 = two of them, one from either end, so that all units have as many keys where a diagonal bounds them
};

// Where everything stands in shared memory.
struct Room {
    u32 q, k, v, o, bars;
    __device__ __forceinline__ u32 q_full() const { return bars; }
    __device__ __forceinline__ u32 spare() const { return bars + 16 + STAGES * 32; }
    __device__ __forceinline__ u32 q_empty() const { return bars + 8; }
    __device__ __forceinline__ u32 k_full(int s) const { return bars + 16 + s * 32; }
    __device__ __forceinline__ u32 k_empty(int s) const { return bars + 24 + s * 32; }
    __device__ __forceinline__ u32 v_full(int s) const { return bars + 32 + s * 32; }
    __device__ __forceinline__ u32 v_empty(int s) const { return bars + 40 + s * 32; }
};

// A stage of a ring and the parity of its current round.
struct Ring {
    u32 stage = 0, parity = 0;
    __device__ __forceinline__ void step() {
        if (++stage == STAGES) { stage = 0; parity ^= 1; }
    }
};

// Row blocks by number as place_of counts them, in the order in which this block takes them.
struct Walk {
    const HopperArgs& g;
    int unit = blockIdx.x, half = 0;
    __device__ __forceinline__ bool more() const { return unit < g.units; }
    __device__ __forceinline__ int number() const {
        if (!g.folded) return unit;
        const Args& a = g.a;
        const int per = (a.row_blocks + 1) / 2 * a.pairs_per_group, group = unit / per, r = unit - group * per;
        const int width = min(a.pairs_per_group, a.pairs - group * a.pairs_per_group), item = r / width;
        return (group * a.pairs_per_group * a.row_blocks) + (half ? a.row_blocks - 1 - item : item) * width + r - item * width;
    }
    __device__ __forceinline__ void step() {
        if (g.folded && half == 0) {
            const int number0 = number();
            half = 1;
            // The middle one of an odd number is its own counterpart.
            if (number() != number0) return;
        }
        half = 0;
        unit += gridDim.x;
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
};

DEV void produce(const HopperArgs& g, const Room& room) {
    Ring ring; // K and V go round together
    u32 q_parity = 0;
    for (Walk walk{g}; walk.more(); walk.step()) {
        const Block block(g.a, walk.number());
        const int q_row = block.at.q_row + block.i0, k_row = block.at.k_row, h = block.at.h, hk = block.at.hk;
        auto bring_k = [&](int j) {
            bar_wait(room.k_empty(ring.stage), ring.parity ^ 1);
            copy_tile<BN, DP>(room.k + ring.stage * K_BYTES, g.k, room.k_full(ring.stage), k_row + j * BN, hk, block.at.k_batch);
        };
        const bool any = block.jmax >= block.jmin;
        if (any) bring_k(block.jmax);
        bar_wait(room.q_empty(), q_parity ^ 1);
        q_parity ^= 1;
        // Rows that see no key still take their turn with Q's place.
        if (any) copy_tile<BM, DP>(room.q, g.q, room.q_full(), q_row, h, block.at.q_batch);
        else bar_arrive(room.q_full());
        for (int j = block.jmax; j >= block.jmin; --j) {
            // K of the next tile before V of this one: it is needed first.
            const Ring here = ring;
            ring.step();
            if (j > block.jmin) bring_k(j - 1);
            bar_wait(room.v_empty(here.stage), here.parity ^ 1);
            copy_tile<BN, DV>(room.v + here.stage * V_BYTES, g.v, room.v_full(here.stage), k_row + j * BN, hk, block.at.k_batch);
        }
    }
}

// ---- values that are not finite --------------------------------------------------------------------------------------------

// As scan_tile, take_nonfinite and clear_tile do it; the order of chunks does not matter to the first and the last.
DEV bool scan_values(u32 v, int tid) {
    u32 found = 0;
#pragma unroll 4
    for (int at = tid * 16; at < V_BYTES; at += 128 * 16) {
        u32 w[4];
        asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3]) : "r"(v + at) : "memory");
#pragma unroll
        for (int x = 0; x < 4; ++x) found |= (w[x] & EXP_BITS) + EXP_ONE;
    }
    return found & EXP_TOP;
}

DEV void take_values(float (&acc)[DV / 8][4], u32 v, const Span& span, int row0, int key0, int lane) {
#pragma unroll 1
    for (int k = 0; k < BN; ++k) {
        bool live[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) live[r] = key0 + k <= last_key(span, row0 + r * 8) && key0 + k >= first_key(span, row0 + r * 8);
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
            if constexpr (DV <= 128) product_rs<DV, 0>(acc, p[kk], operand(v + kk * 2048, BN * 128));
            else {
                product_rs<128, 0>(acc, p[kk], operand(v + kk * 2048, BN * 128));
                product_rs<128, 16>(acc, p[kk], operand(v + kk * 2048 + 2 * BN * 128, BN * 128));
            }
        }
        products_commit();
    }

    // m takes in the tile's maxima, s becomes its exponentials, l follows; alpha is what the output so far is multiplied by.
    template <bool EDGE> __device__ __forceinline__ void softmax(const Span& span, int row0, int key0, float (&alpha)[2]) {
#if SCORE == 1
#pragma unroll
        for (int n = 0; n < BN / 8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) s[n][e] = score_of(s[n][e], a);
#endif
        if (EDGE) hide(span, row0, key0);
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
            const float mc = ref * c;
            float sum[2] = {0.f, 0.f};
#pragma unroll
            for (int n = 0; n < BN / 8; ++n)
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    s[n][2 * r + e] = ex2(fmaf(s[n][2 * r + e], c, -mc));
                    sum[e] += s[n][2 * r + e];
                }
            // Rounded apart in every variant, so that a row's bits do not depend on which of them runs.
            l[r] = __fadd_rn(__fmul_rn(l[r], alpha[r]), sum[0] + sum[1]);
        }
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

    // A tile of V with keys that some row cannot see must have no NaN and no infinity in a product. No product may be under way.
    __device__ __forceinline__ void purge(u32 v, const Span& span, int row0, int key0) {
        if (!group_any<128>(OWN_BAR(group), scan_values(v, tid))) return;
        // All consumers find the same.
        take_values(acc, v, span, row0, key0, lane);
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
        const bool look = (MASK >= 1 || SEQS) && block.edge(j + 1);
        if (look) {
            bar_wait(room.v_full(vr.stage), vr.parity);
            purge(v, block.at.span, row0, (j + 1) * BN);
        }
        bar_wait(room.k_full(kr.stage), kr.parity);
        group_sync<256>(TURN_BAR(group));
        scores(k);
        if (!look) bar_wait(room.v_full(vr.stage), vr.parity);
        values(v);
        group_arrive<256>(TURN_BAR(group + 1 == GROUPS ? 0 : group + 1));
        products_wait<1>();
        settle(s);
        release(room.k_empty(kr.stage));
        float alpha[2];
        softmax<EDGE>(block.at.span, row0, j * BN, alpha);
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
            softmax<true>(block.at.span, row0, block.jmax * BN, alpha);
            weights();
            for (int j = block.jmax - 1; j >= block.jmin; --j) {
                if (MASK >= 1 && block.edge(j)) step<true>(block, row0, j, kr, vr);
                else step<false>(block, row0, j, kr, vr);
            }
            if (OWN) release(room.q_empty());
            bar_wait(room.v_full(vr.stage), vr.parity);
            const u32 v = room.v + vr.stage * V_BYTES;
            if ((MASK >= 1 || SEQS) && block.edge(block.jmin)) purge(v, block.at.span, row0, block.jmin * BN);
            values(v);
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
    room.k = room.q + Q_BYTES;
    room.v = room.k + STAGES * K_BYTES;
    room.o = OWN ? room.v + STAGES * V_BYTES : room.q;
    room.bars = room.v + STAGES * V_BYTES + (OWN ? O_BYTES : 0);
    const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x >> 7, 0);
    if (threadIdx.x == 0) {
        bar_init(room.q_full(), 1);
        bar_init(room.q_empty(), GROUPS * 4);
        for (int s = 0; s < STAGES; ++s) {
            bar_init(room.k_full(s), 1);
            bar_init(room.k_empty(s), GROUPS * 4);
            bar_init(room.v_full(s), 1);
            bar_init(room.v_empty(s), GROUPS * 4);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        async_fence();
    }
    __syncthreads();
    if (warpgroup == 0) {
        registers_give<GIVE>();
        if (threadIdx.x == 0) produce(g, room);
    } else {
        registers_take<TAKE>();
        const int tid = threadIdx.x & 127;
        Consumer consumer{g.a, room, warpgroup - 1, tid, tid & 31, SCORE ? LOG2E : g.a.scale * LOG2E};
        // The last one gives the first its first turn.
        if (warpgroup == GROUPS) group_arrive<256>(TURN_BAR(0));
        Ring ring;
        u32 q_parity = 0;
        for (Walk walk{g}; walk.more(); walk.step()) consumer.rows(Block(g.a, walk.number()), ring, q_parity);
    }
}
