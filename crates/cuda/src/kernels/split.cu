// Rows of f32 as pairs of f16 (see pairs.cu), those of Q, K and V in one launch.
//   a.o, a.bias, a.mask: the pairs of q, k and v, rows of 2 x ld_s or (v) 2 x ld_p elements; strides count elements, 0 where one row
//   serves many; a.m, a.l, a.acc: their factors, one a row

// One warp a row: rows [0, n) of `from`, whose axes of stride 0 in `to` count once.
DEV void split_rows(const Tensor& from, const Tensor& to, float* factors, int batch, int heads, int rows, int d, int padded, i64 first, i64 step) {
    const int lane = threadIdx.x & 31;
    const int bs = to.sb ? batch : 1, hs = to.sh ? heads : 1, ss = to.ss ? rows : 1;
    for (i64 row = first; row < (i64)bs * hs * ss; row += step) {
        const i64 pair = row / ss, s = row - pair * ss, b = pair / hs, h = pair - b * hs;
        const float* x = (const float*)from.ptr + b * from.sb + h * from.sh + s * from.ss;
        const i64 at = b * to.sb + h * to.sh + s * to.ss;
        u16* y = (u16*)to.ptr + at;
        float top = 0.f;
        bool odd = false;
        for (int c = lane; c < d; c += 32) {
            const float size = fabsf(x[c * from.sd]);
            if (size < __int_as_float(0x7f800000)) top = fmaxf(top, size);
            else odd = true;
        }
#pragma unroll
        for (int w = 16; w; w >>= 1) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, w));
        odd = __any_sync(0xffffffffu, odd);
        // Powers of two: below 2^-100 rows keep a smaller place in f16.
        const u32 power = max(__float_as_uint(top) & 0x7f800000u, 27u << 23);
        const float scale = __uint_as_float(((254u + 14u) << 23) - power), factor = __uint_as_float(power - (14u << 23));
        if (lane == 0) factors[at / (2 * padded)] = odd ? -factor : factor;
        for (int c = 2 * lane; c < padded; c += 64) {
            const float v0 = c < d ? x[c * from.sd] : 0.f, v1 = c + 1 < d ? x[(c + 1) * from.sd] : 0.f;
            u32 hi, lo;
            split2(v0 * scale, v1 * scale, hi, lo);
            // inf - inf: what is not finite stands in hi alone.
            if ((hi & 0x7c00u) == 0x7c00u) lo &= 0xffff0000u;
            if ((hi & 0x7c000000u) == 0x7c000000u) lo &= 0x0000ffffu;
            *(u32*)(y + c) = hi;
            *(u32*)(y + padded + c) = lo;
        }
    }
}

extern "C" __global__ void tw_split(const __grid_constant__ Args a) {
    const i64 first = (blockIdx.x * (i64)blockDim.x + threadIdx.x) >> 5, step = ((i64)gridDim.x * blockDim.x) >> 5;
    split_rows(a.q, a.o, (float*)a.m, a.batch, a.heads, a.sq, a.d, (int)a.ld_s, first, step);
    split_rows(a.k, a.bias, (float*)a.l, a.batch, a.heads / a.group_size, a.sk, a.d, (int)a.ld_s, first, step);
    split_rows(a.v, a.mask, (float*)a.acc, a.batch, a.heads / a.group_size, a.sk, a.dv, (int)a.ld_p, first, step);
}
