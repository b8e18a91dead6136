// Rows of f32 as pairs of f16 (see pairs.cu), those of K and V in one launch.
//   a.bias, a.mask: the pairs of k and v, rows of 2 x ld_s or (v) 2 x ld_p elements; strides count elements, 0 where one row serves
//   many; a.l, a.acc: their factors, one a row     DP = columns of the wider one     THREADS a block
//   a.s: for each head how many of its pieces are made, u32, 0 before, or 0: fa2.cu waits for its head's, and runs beside this
//   a.row0: pieces that all blocks share; a.rows: blocks that make the rest
//
// A warp makes pieces of PIECE rows, those of K and then of V, head by head: the order in which row blocks ask for them. Each thread
// brings its own columns by cp.async, two turns ahead, to a place that nobody else reads: no barrier stands anywhere.

#define SLOTS 3
#define TURNS 8
// Rows that eight lanes have in a turn: as many as 32 values a lane are.
#define AT_ONCE (DP > 128 ? 1 : DP > 64 ? 2 : 4)
#define TURN (4 * AT_ONCE)
#define PIECE (TURN * TURNS)
#define QUADS ((DP + 31) / 32)
#define SLOT_BYTES (AT_ONCE * QUADS * THREADS * 16)

// Axes of stride 0 in `to` count once.
struct Extent {
    int heads, rows; // heads a batch entry, rows a head
    i64 all;         // heads of all
};
DEV Extent extent(const Tensor& to, const Args& a) {
    const int hs = to.sh ? a.heads / a.group_size : 1;
    return {hs, to.ss ? a.sk : 1, (i64)(to.sb ? a.batch : 1) * hs};
}

// Rows [s0, s0 + PIECE) of a head of k or v; none where that one has no such head.
struct Piece {
    const float* from;
    u16* to;
    float* factors;
    i64 step, to_step;
    int s0, rows, head, columns, padded;
    bool whole, of_v;
};
DEV void lay(Piece& x, const Tensor& from, const Tensor& to, u64 factors, const Extent& e, int d, int padded) {
    const int b = x.head / e.heads, h = x.head - b * e.heads;
    const i64 at = b * to.sb + h * to.sh;
    x.from = (const float*)from.ptr + b * from.sb + h * from.sh;
    x.to = (u16*)to.ptr + at;
    x.factors = (float*)factors + at / (2 * padded);
    x.step = from.ss;
    x.to_step = to.ss;
    x.rows = x.head < e.all ? e.rows : 0;
    x.columns = d;
    x.padded = padded;
    x.whole = whole_rows(from, d);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) tw_split(const __grid_constant__ Args a) {
    extern __shared__ __align__(128) char smem[];
    // Row blocks may start once every block here runs: none of those waits for one that has no room.
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
    const int lane = threadIdx.x % PAIR_LANES, own = (threadIdx.x & 31) / PAIR_LANES, warp = threadIdx.x / 32;
    const Extent k = extent(a.bias, a), v = extent(a.mask, a);
    const int of_k = (k.rows + PIECE - 1) / PIECE, of_head = of_k + (v.rows + PIECE - 1) / PIECE;
    const int all = (int)(k.all > v.all ? k.all : v.all) * of_head, shared = min(all, a.row0);
    // This warp's pieces: of the shared ones, then of the rest. Neighbours in order go to different multiprocessors.
    const int first = warp * gridDim.x + blockIdx.x, step = gridDim.x * (THREADS / 32);
    const int before = first < shared ? (shared - first + step - 1) / step : 0;
    const int then = shared + warp * a.rows + blockIdx.x, stride = a.rows * (THREADS / 32);
    const int after = (int)blockIdx.x < a.rows && then < all ? (all - then + stride - 1) / stride : 0;
    const int turns = (before + after) * TURNS;

    auto piece_of = [&](int turn) {
        const int n = turn / TURNS, at = n < before ? first + n * step : then + (n - before) * stride;
        Piece x;
        x.head = at / of_head;
        const int i = at - x.head * of_head;
        x.of_v = i >= of_k;
        x.s0 = (x.of_v ? i - of_k : i) * PIECE;
        if (x.of_v) lay(x, a.v, a.mask, a.acc, v, a.dv, (int)a.ld_p);
        else lay(x, a.k, a.bias, a.l, k, a.d, (int)a.ld_s);
        return x;
    };
    const u32 mine = smem_u32(smem) + threadIdx.x * 16;
    Piece coming = {}, here = {};
    auto bring = [&](int turn) {
        if (turn < turns) {
            if (turn % TURNS == 0) coming = piece_of(turn);
            const int row = coming.s0 + turn % TURNS * TURN + own;
            const float* from = coming.from + row * coming.step + lane * 4;
            u32 to = mine + turn % SLOTS * SLOT_BYTES;
            // Rows that do not lie on 16 bytes are read when their turn comes.
            if (coming.whole)
#pragma unroll
                for (int r = 0; r < AT_ONCE; ++r) {
#pragma unroll
                    for (int i = 0; i < QUADS; ++i) {
                        cp_async16(to, from + i * 32, row + 4 * r < coming.rows && i * 32 + lane * 4 < coming.columns ? 16 : 0);
                        to += THREADS * 16;
                    }
                    from += 4 * coming.step;
                }
        }
        cp_commit();
    };
#pragma unroll
    for (int turn = 0; turn < SLOTS - 1; ++turn) bring(turn);
    // Every lane of a warp takes as many turns, so that all can exchange.
#pragma unroll 1
    for (int turn = 0; turn < turns; ++turn) {
        cp_wait<SLOTS - 2>();
        if (turn % TURNS == 0) here = piece_of(turn);
        const int row0 = here.s0 + turn % TURNS * TURN + own;
        const u32 at = mine + turn % SLOTS * SLOT_BYTES;
        float x[AT_ONCE][QUADS][4];
#pragma unroll
        for (int r = 0; r < AT_ONCE; ++r)
#pragma unroll
            for (int i = 0; i < QUADS; ++i) {
                float(&y)[4] = x[r][i];
                asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(y[0]), "=f"(y[1]), "=f"(y[2]), "=f"(y[3]) : "r"(at + (r * QUADS + i) * (THREADS * 16)) : "memory");
            }
        bring(turn + SLOTS - 1);
#pragma unroll
        for (int r = 0; r < AT_ONCE; ++r) {
            const int row = row0 + 4 * r;
            const bool live = row < here.rows;
            if (!here.whole) read_row(x[r], here.from + row * here.step, here.of_v ? a.v : a.k, here.columns, false, live, lane);
            u16* const y = here.to + row * here.to_step + lane * 4;
            const float factor = pair_row(x[r], [&](int i, const u32 (&hi)[2], const u32 (&lo)[2]) {
                if (!live || i * 32 + lane * 4 >= here.padded) return;
                *(uint2*)(y + i * 32) = make_uint2(hi[0], hi[1]);
                *(uint2*)(y + i * 32 + here.padded) = make_uint2(lo[0], lo[1]);
            });
            if (live && lane == 0) here.factors[row] = factor;
        }
        if (a.s && turn % TURNS == TURNS - 1) {
            __syncwarp();
            if ((threadIdx.x & 31) == 0) {
                __threadfence();
                atomicAdd((u32*)a.s + here.head, 1u);
            }
        }
    }
    cp_wait<0>();
}
