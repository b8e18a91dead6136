// Rows of f32 as pairs of f16 (see pairs.cu), those of Q, K and V in one launch.
//   a.o, a.bias, a.mask: the pairs of q, k and v, rows of 2 x ld_s or (v) 2 x ld_p elements; strides count elements, 0 where one row
//   serves many; a.m, a.l, a.acc: their factors, one a row


// Eight lanes a row, each with four columns of every 32.
#define LANES 8

// Rows [0, n) of `from`, whose axes of stride 0 in `to` count once; `first` and `step` count rows.
template <bool WHOLE> DEV void split_rows(const Tensor& from, const Tensor& to, float* factors, int batch, int heads, int rows, int d, int padded, i64 first, i64 step) {
    const int lane = threadIdx.x % LANES;
    const int bs = to.sb ? batch : 1, hs = to.sh ? heads : 1, ss = to.ss ? rows : 1;
    const i64 all = (i64)bs * hs * ss;
    // Every lane of a warp takes as many turns, so that all can exchange.
    for (i64 base = 0; base < all; base += step) {
        const i64 row = base + first;
        const bool live = row < all;
        const i64 pair = live ? row / ss : 0, s = live ? row - pair * ss : 0, b = pair / hs, h = pair - b * hs;
        const float* x = (const float*)from.ptr + b * from.sb + h * from.sh + s * from.ss;
        const i64 at = b * to.sb + h * to.sh + s * to.ss;
        float v[8][4], top = 0.f;
        bool odd = false;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const int c = i * 32 + lane * 4;
            if (WHOLE && live && c < d) *(float4*)v[i] = *(const float4*)(x + c);
            else
#pragma unroll
                for (int e = 0; e < 4; ++e) v[i][e] = live && c + e < d ? x[(c + e) * from.sd] : 0.f;
        }
#pragma unroll
        for (int i = 0; i < 8; ++i)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const float size = fabsf(v[i][e]);
                if (size < __int_as_float(0x7f800000)) top = fmaxf(top, size);
                else odd = true;
            }
#pragma unroll
        for (int w = LANES / 2; w; w >>= 1) {
            top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, w));
            odd |= __shfl_xor_sync(0xffffffffu, (int)odd, w) != 0;
        }
        if (!live) continue;
        // Powers of two: below 2^-100 rows keep a smaller place in f16.
        const u32 power = max(__float_as_uint(top) & 0x7f800000u, 27u << 23);
        const float scale = __uint_as_float(((254u + 14u) << 23) - power), factor = __uint_as_float(power - (14u << 23));
        if (lane == 0) factors[at / (2 * padded)] = odd ? -factor : factor;
        u16* y = (u16*)to.ptr + at;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const int c = i * 32 + lane * 4;
            if (c >= padded) break;
            u32 hi[2], lo[2];
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                split2(v[i][2 * e] * scale, v[i][2 * e + 1] * scale, hi[e], lo[e]);
                // inf - inf: what is not finite stands in hi alone.
                if ((hi[e] & 0x7c00u) == 0x7c00u) lo[e] &= 0xffff0000u;
                if ((hi[e] & 0x7c000000u) == 0x7c000000u) lo[e] &= 0x0000ffffu;
            }
            *(uint2*)(y + c) = make_uint2(hi[0], hi[1]);
            *(uint2*)(y + padded + c) = make_uint2(lo[0], lo[1]);
        }
    }
}

DEV void split_any(const Tensor& from, const Tensor& to, u64 factors, int batch, int heads, int rows, int d, i64 padded) {
    const i64 first = (blockIdx.x * (i64)blockDim.x + threadIdx.x) / LANES, step = (i64)gridDim.x * blockDim.x / LANES;
    const bool whole = from.sd == 1 && ((from.ptr | (u64)((from.sb | from.sh | from.ss | d) * 4)) & 15) == 0;
    if (whole) split_rows<true>(from, to, (float*)factors, batch, heads, rows, d, (int)padded, first, step);
    else split_rows<false>(from, to, (float*)factors, batch, heads, rows, d, (int)padded, first, step);
}

// The grid's y counts tensors.
extern "C" __global__ void __launch_bounds__(256) tw_split(const __grid_constant__ Args a) {
    const int kv_heads = a.heads / a.group_size;
    if (blockIdx.y == 0) split_any(a.q, a.o, a.m, a.batch, a.heads, a.sq, a.d, a.ld_s);
    else if (blockIdx.y == 1) split_any(a.k, a.bias, a.l, a.batch, kv_heads, a.sk, a.d, a.ld_s);
    else split_any(a.v, a.mask, a.acc, a.batch, kv_heads, a.sk, a.dv, a.ld_p);
}
