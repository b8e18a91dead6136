// What is done row by row.
// PART 0, prepare: L in base 2, delta, the marks of rows (see common.cu), and dQ's sums set to 0.
// PART 4, sinks: the gradients of the sinks, -sum of e^(sink - L) delta over the rows of a head.
// PART 5, zero: rows that belong to no sequence.

#if PART == 0
// out of a row that keeps no key is 0 whatever dO is, so that dO is in no gradient: delta has no terms there, where dO O would have
// been NaN. Whether there is such a row is asked only where delta is NaN and L is not; the call comes last, so that it costs others no register.
static __device__ __noinline__ void mend_delta(const Grads& g) {
    const Args& a = g.f;
    const int lane = threadIdx.x % LANES;
    const i64 at = ((i64)blockIdx.x * 256 + threadIdx.x) / LANES;
    const int pair = (int)(at / g.rows_padded), row = (int)(at % g.rows_padded), b = pair / a.heads, h = pair - b * a.heads;
    // Lane 0 wrote them.
    const bool asked = lane == 0 && row < a.sq && is_nan(((const float*)g.delta)[at]) && !is_nan(((const float*)g.lse2)[at]);
    bool keeps = false;
    if (__shfl_sync(0xffffffffu, (int)asked, 0, LANES)) {
        // This kernel is made for no mask, score or dropout: what the call has is seen in its arguments.
        const Span span = span_of(a);
        const Score sc = score_head(a, a.seq0 + b, b, h, 0, 0);
        const elem* q = (const elem*)a.q.ptr + b * a.q.sb + h * a.q.sh + (i64)row * a.q.ss;
        const elem* k = (const elem*)a.k.ptr + b * a.k.sb + h / a.group_size * a.k.sh;
        const int last = min(a.sk - 1, row + a.hi_off);
        for (int j = max(0, row + a.lo_off) + lane; j <= last && !keeps; j += LANES) {
            if (hidden_at(sc, a, span, row, j) || !kept_at(sc, a, span, row, j)) continue;
            float s = 0.f;
            for (int e = 0; e < a.d; ++e) s += to_float(q[e * a.q.sd]) * to_float(k[j * a.k.ss + e * a.k.sd]);
            keeps = score_at(s, sc, a, span, row, j) != NEG_INF;
        }
    }
#pragma unroll
    for (int x = LANES / 2; x; x >>= 1) keeps |= __shfl_xor_sync(0xffffffffu, (int)keeps, x) != 0;
    if (!asked || keeps) return;
    const float dlse = g.dlse.ptr ? *((const float*)g.dlse.ptr + b * g.dlse.sb + h * g.dlse.sh + (i64)row * g.dlse.ss) : 0.f;
    ((float*)g.delta)[at] = is_finite(dlse) ? -dlse : QUIET_NAN;
}

// As many blocks as without that call, whose registers would be the kernel's otherwise.
extern "C" __global__ void __launch_bounds__(256, 6) tw_bwd_prepare(const __grid_constant__ Grads g) {
    const Args& a = g.f;
    const int lane = threadIdx.x % LANES;
    const i64 at = ((i64)blockIdx.x * 256 + threadIdx.x) / LANES;
    const int pair = (int)(at / g.rows_padded), row = (int)(at % g.rows_padded);
    if (pair >= a.pairs) return;
    const int b = pair / a.heads, h = pair - b * a.heads;
    float sum = 0.f, lse = NEG_INF, odd = 0.f; // odd: 0, or NaN if dO is not finite
    bool unseen = false;                       // and q is not finite, though the row sees nothing
    if (row < a.sq) {
        lse = *((const float*)g.lse.ptr + b * g.lse.sb + h * g.lse.sh + (i64)row * g.lse.ss);
        const elem* o = (const elem*)a.o.ptr + b * a.o.sb + h * a.o.sh + (i64)row * a.o.ss;
        const elem* go = (const elem*)g.go.ptr + b * g.go.sb + h * g.go.sh + (i64)row * g.go.ss;
        for (int c = lane; c * EPC < a.dv; c += LANES) {
#if VEC
            uint4 x = *(const uint4*)(o + c * EPC), y = *(const uint4*)(go + c * EPC);
            const elem *xs = (const elem*)&x, *ys = (const elem*)&y;
#pragma unroll
            for (int e = 0; e < EPC; ++e) {
                sum += to_float(xs[e]) * to_float(ys[e]);
                odd += to_float(ys[e]) * 0.f;
            }
#else
            for (int e = c * EPC; e < min(a.dv, c * EPC + EPC); ++e) {
                sum += to_float(o[e * a.o.sd]) * to_float(go[e * g.go.sd]);
                odd += to_float(go[e * g.go.sd]) * 0.f;
            }
#endif
        }
        // A row that sees a key has L = NaN if q is not finite.
        if (lse == NEG_INF || (a.sinks && lse == ((const float*)a.sinks)[h])) {
            const elem* q = (const elem*)a.q.ptr + b * a.q.sb + h * a.q.sh + (i64)row * a.q.ss;
            for (int e = lane; e < a.d; e += LANES) unseen |= !is_finite(to_float(q[e * a.q.sd]));
            unseen |= lse == NEG_INF && is_nan(odd);
        }
    }
#pragma unroll
    for (int x = LANES / 2; x; x >>= 1) {
        sum += __shfl_xor_sync(0xffffffffu, sum, x);
        odd += __shfl_xor_sync(0xffffffffu, odd, x);
        unseen |= __shfl_xor_sync(0xffffffffu, (int)unseen, x) != 0;
    }
    bool marked = false;
    if (lane == 0) {
        float dlse = 0.f;
        if (row < a.sq && g.dlse.ptr) dlse = *((const float*)g.dlse.ptr + b * g.dlse.sb + h * g.dlse.sh + (i64)row * g.dlse.ss);
        const bool empty = lse == NEG_INF;
        // An infinite L is that of a row with an infinite or undefined score: all of the row is undefined.
        const float lse2 = unseen ? __uint_as_float(UNSEEN) : empty ? -NEG_INF : lse == -NEG_INF || is_nan(lse) ? QUIET_NAN : lse * LOG2E;
        float delta = empty ? 0.f : unseen ? -dlse : sum + odd - dlse;
        // As the row is that sees an infinite V.
        if (!is_finite(delta)) delta = QUIET_NAN;
        ((float*)g.lse2)[at] = lse2;
        ((float*)g.delta)[at] = delta;
        marked = is_nan(lse2) || is_nan(delta);
    }
    // Rows are padded so that every block is full.
    marked = __syncthreads_or(marked);
    if (threadIdx.x == 0) ((u32*)g.odd_rows)[blockIdx.x] = marked;
    // Kernels that make dK and dV mark keys.
    const i64 words = odd_keys_of(g, g.kv_pairs) - odd_keys_of(g, 0);
    for (i64 x = (i64)blockIdx.x * 256 + threadIdx.x; x < words; x += (i64)gridDim.x * 256) odd_keys_of(g, 0)[x] = 0;
    if (g.turns) {
        const i64 turns = TURN_WORDS + (i64)a.pairs * (g.rows_padded / TURN_ROWS);
        for (i64 x = (i64)blockIdx.x * 256 + threadIdx.x; x < turns; x += (i64)gridDim.x * 256) ((u32*)g.turns)[x] = 0;
    }
    if (g.dq_acc) {
        float4* to = (float4*)g.dq_acc + at * (DP / 4);
#pragma unroll
        for (int x = lane; x < DP / 4; x += LANES) to[x] = make_float4(0.f, 0.f, 0.f, 0.f);
    }
    // The marks stay: dO is not finite.
    if (marked) mend_delta(g);
}
#endif

#if PART == 4
// One block a head; the order of its sums is fixed. Adds to what is there: sequences come one after another.
extern "C" __global__ void __launch_bounds__(256) tw_bwd_sinks(const __grid_constant__ Grads g) {
    __shared__ double part[256];
    const Args& a = g.f;
    const int h = blockIdx.x, tid = threadIdx.x;
    const float sink = ((const float*)a.sinks)[h] * LOG2E;
    double sum = 0.;
    for (int b = 0; b < a.batch; ++b) {
        const i64 at = (i64)(b * a.heads + h) * g.rows_padded;
        for (int i = tid; i < a.sq; i += 256) {
            const float lse2 = ((const float*)g.lse2)[at + i];
            // A row that sees nothing but the sink, or not even that.
            const bool unseen = __float_as_uint(lse2) == UNSEEN;
            const float p = unseen ? (sink == NEG_INF ? 0.f : 1.f) : exp2f(sink - lse2);
            if (p != 0.f) sum -= (double)p * (double)((const float*)g.delta)[at + i];
        }
    }
    part[tid] = sum;
    __syncthreads();
    for (int x = 128; x; x >>= 1) {
        if (tid < x) part[tid] += part[tid + x];
        __syncthreads();
    }
    float* to = (float*)g.dsinks + h;
    if (tid == 0) *to += (float)part[0];
}
#endif

#if PART == 5
// Rows [row0, row0 + rows) of every head of g.dq.
extern "C" __global__ void __launch_bounds__(256) tw_bwd_zero(const __grid_constant__ Grads g) {
    const Args& a = g.f;
    const i64 all = (i64)a.batch * a.heads * a.rows;
    for (i64 at = blockIdx.x * (i64)blockDim.x + threadIdx.x; at < all; at += (i64)gridDim.x * blockDim.x) {
        const i64 pair = at / a.rows, b = pair / a.heads, h = pair - b * a.heads, row = a.row0 + at - pair * a.rows;
        elem* to = (elem*)g.dq.ptr + b * g.dq.sb + h * g.dq.sh + row * g.dq.ss;
        for (int x = 0; x < a.d; ++x) to[x] = (elem)0;
    }
}
#endif
