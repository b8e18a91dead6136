// Tensors that kernels cannot take as they lie, laid out anew: rows of neighbouring elements, padded to 16 bytes with zeros.
// And rows that belong to no sequence.

// a.o[b, h, s, 0..ld_s) = a.q[b, h, s, 0..d), zero from d on.
extern "C" __global__ void tw_pack(const __grid_constant__ Args a) {
    const i64 all = (i64)a.batch * a.heads * a.sq * a.ld_s;
    for (i64 x = blockIdx.x * (i64)blockDim.x + threadIdx.x; x < all; x += (i64)gridDim.x * blockDim.x) {
        const i64 row = x / a.ld_s, col = x - row * a.ld_s, pair = row / a.sq, s = row - pair * a.sq, b = pair / a.heads, h = pair - b * a.heads;
        ((elem*)a.o.ptr)[x] = col < a.d ? ((const elem*)a.q.ptr)[b * a.q.sb + h * a.q.sh + s * a.q.ss + col * a.q.sd] : (elem)0;
    }
}

// O = 0 and lse = -inf for rows row0 .. row0 + rows of every batch entry and head.
extern "C" __global__ void tw_clear_rows(const __grid_constant__ Args a) {
    const i64 width = max(a.dv, 1), all = (i64)a.batch * a.heads * a.rows * width;
    for (i64 x = blockIdx.x * (i64)blockDim.x + threadIdx.x; x < all; x += (i64)gridDim.x * blockDim.x) {
        const i64 row = x / width, col = x - row * width, pair = row / a.rows, i = a.row0 + row - pair * a.rows, b = pair / a.heads, h = pair - b * a.heads;
        if (col < a.dv) ((elem*)a.o.ptr)[b * a.o.sb + h * a.o.sh + i * a.o.ss + col] = (elem)0;
        if (col == 0 && a.lse) ((float*)a.lse)[pair * a.lse_ld + i] = NEG_INF;
    }
}
