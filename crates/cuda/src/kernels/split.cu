// Rows of f32 as pairs of f16 (see pairs.cu), those of K and V in one launch.
//   a.bias, a.mask: the pairs of k and v, rows of 2 x ld_s or (v) 2 x ld_p elements; strides count elements, 0 where one row serves
//   many; a.l, a.acc: their factors, one a row     DP = columns of the wider one

// Rows [0, n) of `from`, whose axes of stride 0 in `to` count once; `first` and `step` count rows.
DEV void split_rows(const Tensor& from, const Tensor& to, float* factors, int batch, int heads, int rows, int d, int padded) {
    const i64 first = (blockIdx.x * (i64)blockDim.x + threadIdx.x) / PAIR_LANES, step = (i64)gridDim.x * blockDim.x / PAIR_LANES;
    const int lane = threadIdx.x % PAIR_LANES;
    const int bs = to.sb ? batch : 1, hs = to.sh ? heads : 1, ss = to.ss ? rows : 1;
    const i64 all = (i64)bs * hs * ss;
    const bool whole = whole_rows(from, d);
    // Every lane of a warp takes as many turns, so that all can exchange.
    for (i64 base = 0; base < all; base += step) {
        const i64 row = base + first;
        const bool live = row < all;
        const i64 pair = live ? row / ss : 0, s = live ? row - pair * ss : 0, b = pair / hs, h = pair - b * hs;
        const i64 at = b * to.sb + h * to.sh + s * to.ss;
        float v[(DP + 31) / 32][4];
        read_row(v, (const float*)from.ptr + b * from.sb + h * from.sh + s * from.ss, from, d, whole, live, lane);
        u16* const y = (u16*)to.ptr + at + lane * 4;
        const float factor = pair_row(v, [&](int i, const u32 (&hi)[2], const u32 (&lo)[2]) {
            if (!live || i * 32 + lane * 4 >= padded) return;
            *(uint2*)(y + i * 32) = make_uint2(hi[0], hi[1]);
            *(uint2*)(y + i * 32 + padded) = make_uint2(lo[0], lo[1]);
        });
        if (live && lane == 0) factors[at / (2 * padded)] = factor;
    }
}

// The grid's y counts tensors.
extern "C" __global__ void __launch_bounds__(256) tw_split(const __grid_constant__ Args a) {
    const int heads = a.heads / a.group_size;
    if (blockIdx.y == 0) split_rows(a.k, a.bias, (float*)a.l, a.batch, heads, a.sk, a.d, (int)a.ld_s);
    else split_rows(a.v, a.mask, (float*)a.acc, a.batch, heads, a.sk, a.dv, (int)a.ld_p);
}
