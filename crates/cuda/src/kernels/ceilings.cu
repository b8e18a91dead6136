// What the device could do at most: loops of one instruction on registers, and streams through device memory.
//
// a.ld_s: rounds of a loop, or 16-byte words of a stream. Each kernel's result depends on all it did, or the compiler would
// leave it out; it is stored only if it is a number that no run gives, and a.acc has room for one.
//   WGMMA  1 = the kernel of Hopper's own matrix instruction, which only sm_90a has

// Chains of accumulators a warp keeps in flight, each with another start, lest equal ones be made once.
#define CHAINS 8

DEV void keep(const Args& a, float x) {
    if (x == -12345.678f) *(float*)a.acc = x;
}

// Factors that vary over threads and are near 1 in bf16 and tf32: the power they take is part of the rate.
template <int N> DEV void factors(u32 (&r)[N]) {
#pragma unroll
    for (int x = 0; x < N; ++x) r[x] = 0x3f803f80u + threadIdx.x * x;
}

#if !WGMMA
// 16 x 8 x 16 multiply-adds a warp and instruction, of tf32 16 x 8 x 8.
extern "C" __global__ void __launch_bounds__(256) tw_ceiling_mma(const __grid_constant__ Args a) {
    float c[CHAINS][4] = {}, sum = 0.f;
    u32 f[6];
    factors(f);
    const u32 af[4] = {f[0], f[1], f[2], f[3]};
#pragma unroll
    for (int n = 0; n < CHAINS; ++n) c[n][0] = n;
    for (i64 r = 0; r < a.ld_s; ++r) {
#pragma unroll
        for (int n = 0; n < CHAINS; ++n) mma(c[n], af, f[4], f[5]);
    }
#pragma unroll
    for (int n = 0; n < CHAINS; ++n) sum += c[n][0] + c[n][1] + c[n][2] + c[n][3];
    keep(a, sum);
}

// 2 x CHAINS fused multiply-adds in f32 a thread and round.
extern "C" __global__ void __launch_bounds__(256) tw_ceiling_fma(const __grid_constant__ Args a) {
    float c[2 * CHAINS], sum = 0.f;
    const float x = a.scale, y = a.softcap;
#pragma unroll
    for (int n = 0; n < 2 * CHAINS; ++n) c[n] = threadIdx.x + n;
    for (i64 r = 0; r < a.ld_s; ++r) {
#pragma unroll
        for (int n = 0; n < 2 * CHAINS; ++n) c[n] = __fmaf_rn(c[n], x, y);
    }
#pragma unroll
    for (int n = 0; n < 2 * CHAINS; ++n) sum += c[n];
    keep(a, sum);
}

// Streams: every thread has STREAM 16-byte words on their way at once, those of a block side by side.
#define STREAM 8

DEV uint4 stream_load(const uint4* from) {
    uint4 x;
    asm volatile("ld.global.cs.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(from));
    return x;
}

// Calls `take` with each place of this thread, STREAM at a time.
template <class Take> DEV void stream(const Args& a, Take take) {
    const i64 block = (i64)blockDim.x * STREAM;
    for (i64 x = blockIdx.x * block + threadIdx.x; x + block - blockDim.x <= a.ld_s - 1; x += gridDim.x * block) take(x);
}

extern "C" __global__ void __launch_bounds__(256) tw_ceiling_read(const __grid_constant__ Args a) {
    u32 sum = 0;
    stream(a, [&](i64 at) {
        uint4 x[STREAM];
#pragma unroll
        for (int n = 0; n < STREAM; ++n) x[n] = stream_load((const uint4*)a.q.ptr + at + n * blockDim.x);
#pragma unroll
        for (int n = 0; n < STREAM; ++n) sum += x[n].x ^ x[n].y ^ x[n].z ^ x[n].w;
    });
    keep(a, __uint_as_float(sum));
}

extern "C" __global__ void __launch_bounds__(256) tw_ceiling_copy(const __grid_constant__ Args a) {
    stream(a, [&](i64 at) {
        uint4 x[STREAM];
#pragma unroll
        for (int n = 0; n < STREAM; ++n) x[n] = stream_load((const uint4*)a.q.ptr + at + n * blockDim.x);
#pragma unroll
        for (int n = 0; n < STREAM; ++n) {
            asm volatile("st.global.cs.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"((uint4*)a.o.ptr + at + n * blockDim.x), "r"(x[n].x), "r"(x[n].y), "r"(x[n].z), "r"(x[n].w) : "memory");
        }
    });
}

#else

// Operands of an instruction: 16 accumulators from c[i] on.
#define ACC4(i) "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3])
#define ACC16(i) ACC4(i), ACC4(i + 4), ACC4(i + 8), ACC4(i + 12)
#define WGMMA_INSTRUCTION(shape, types, transposed)                                                      \
    "wgmma.mma_async.sync.aligned." shape ".f32." types                                                  \
    " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,"   \
    "%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,"   \
    "%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}, {%64,%65,%66,%67}, %68, 1, 1, 1" transposed ";"

// 64 x 128 x 16 multiply-adds a warpgroup and instruction, of tf32 64 x 128 x 8: A in registers, B in shared memory.
extern "C" __global__ void __launch_bounds__(256) tw_ceiling_wgmma(const __grid_constant__ Args a) {
    __shared__ __align__(128) u32 tile[1024];
    float c[64] = {}, sum = 0.f;
    u32 f[4];
    factors(f);
    for (int x = threadIdx.x; x < 1024; x += blockDim.x) tile[x] = 0x3f803f80u + x;
    asm volatile("fence.proxy.async;" ::: "memory");
    __syncthreads();
    // 128 columns in groups of 8, 128 bytes between the halves of k and 256 between groups, no swizzle.
    const u64 b = (u64)(smem_u32(tile) >> 4 & 0x3fffu) | 8ull << 16 | 16ull << 32;
#pragma unroll 1
    for (i64 r = 0; r < a.ld_s; ++r) {
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int n = 0; n < CHAINS; ++n) {
#if DTYPE == 0
            asm volatile(WGMMA_INSTRUCTION("m64n128k16", "f16.f16", ", 0")
#elif DTYPE == 1
            asm volatile(WGMMA_INSTRUCTION("m64n128k16", "bf16.bf16", ", 0")
#else
            asm volatile(WGMMA_INSTRUCTION("m64n128k8", "tf32.tf32", "")
#endif
                         : ACC16(0), ACC16(16), ACC16(32), ACC16(48)
                         : "r"(f[0]), "r"(f[1]), "r"(f[2]), "r"(f[3]), "l"(b));
        }
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    }
    asm volatile("wgmma.wait_group.sync.aligned 0;" : ACC16(0), ACC16(16), ACC16(32), ACC16(48)::"memory");
#pragma unroll
    for (int n = 0; n < 64; ++n) sum += c[n];
    keep(a, sum);
}
#endif
