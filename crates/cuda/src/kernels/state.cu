// The running state (m, l, O~) of query rows in device memory: f32 [batch, heads, sq], [batch, heads, sq] and
// [batch, heads, sq, dv], m in natural-log units of the final score. `tw_fa2` with STATE = 1 absorbs keys into it.

extern "C" __global__ void tw_state_begin(const __grid_constant__ Args a) {
    const i64 rows = (i64)a.pairs * a.sq, all = rows * a.dv;
    for (i64 x = blockIdx.x * (i64)blockDim.x + threadIdx.x; x < all; x += (i64)gridDim.x * blockDim.x) {
        ((float*)a.acc)[x] = 0.f;
        if (x < rows) {
            ((float*)a.m)[x] = NEG_INF;
            ((float*)a.l)[x] = 0.f;
        }
    }
}

// (a.m, a.l, a.acc) takes in the state at (s, p, lse): the same rule as between two blocks. One warp a row.
extern "C" __global__ void tw_state_merge(const __grid_constant__ Args a) {
    const i64 rows = (i64)a.pairs * a.sq;
    for (i64 row = (blockIdx.x * (i64)blockDim.x + threadIdx.x) >> 5; row < rows; row += ((i64)gridDim.x * blockDim.x) >> 5) {
        const int lane = threadIdx.x & 31;
        float m1 = ((const float*)a.m)[row], l1 = ((const float*)a.l)[row];
        float m2 = ((const float*)a.s)[row], l2 = ((const float*)a.p)[row];
        float now = fmaxf(m1, m2), ref = now == NEG_INF ? 0.f : now;
        float f1 = expf(m1 - ref), f2 = expf(m2 - ref);
        for (int x = lane; x < a.dv; x += 32) {
            float* o = (float*)a.acc + row * a.dv + x;
            *o = f1 * *o + f2 * ((const float*)a.lse)[row * a.dv + x];
        }
        __syncwarp();
        if (lane == 0) {
            ((float*)a.m)[row] = now;
            ((float*)a.l)[row] = f1 * l1 + f2 * l2;
        }
    }
}

// O = O~ / l, L = m + ln l, sinks joined; nothing seen: 0 and -inf. One warp a row.
extern "C" __global__ void tw_state_finish(const __grid_constant__ Args a) {
    const i64 rows = (i64)a.pairs * a.sq;
    for (i64 row = (blockIdx.x * (i64)blockDim.x + threadIdx.x) >> 5; row < rows; row += ((i64)gridDim.x * blockDim.x) >> 5) {
        const int lane = threadIdx.x & 31;
        const i64 pair = row / a.sq, i = row - pair * a.sq, b = pair / a.heads, h = pair - b * a.heads;
        float lse, factor;
        finish_row(((const float*)a.m)[row], ((const float*)a.l)[row], (int)h, a, lse, factor);
        elem* to = (elem*)a.o.ptr + b * a.o.sb + h * a.o.sh + i * a.o.ss;
        for (int x = lane; x < a.dv; x += 32) to[x] = to_elem(((const float*)a.acc)[row * a.dv + x] * factor);
        if (lane == 0 && a.lse) ((float*)a.lse)[row] = lse;
    }
}

// Standard normal values for benchmarks, a.ld_s of them from seed a.row0 at a.o: a counter through SplitMix64, then Box-Muller.
extern "C" __global__ void tw_fill_normal(const __grid_constant__ Args a) {
    for (i64 x = blockIdx.x * (i64)blockDim.x + threadIdx.x; x < a.ld_s; x += (i64)gridDim.x * blockDim.x) {
        u64 z = ((u64)(u32)a.row0 << 40) + (u64)(x + 1) * 0x9E3779B97F4A7C15ull;
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
        z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
        z ^= z >> 31;
        float u = ((float)(u32)(z >> 40) + 0.5f) * (1.f / 16777216.f), w = (float)(u32)(z & 0xffffffu) * (1.f / 16777216.f);
        ((elem*)a.o.ptr)[x] = to_elem(sqrtf(-2.f * logf(u)) * cospif(2.f * w));
    }
}
