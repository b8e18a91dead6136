// What only Hopper (sm_90a) has: products of a whole warpgroup that read shared memory, tiles that the copy engine brings, and the
// barriers in shared memory that say when they are there.
//
// A tile of R rows lies as panels of 64 columns: R rows of 128 bytes each, whose 16-byte chunks are permuted by the row's number
// mod 8, the copy engine's 128-byte swizzle. Panels start at multiples of 1024 bytes.

// cuda.h's CUtensorMap, filled in by the host.
struct __align__(128) TensorMap {
    u64 opaque[16];
};

// ---- barriers in shared memory ---------------------------------------------------------------------------------------------

DEV void bar_init(u32 bar, int arrivals) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(arrivals) : "memory"); }
DEV void bar_arrive(u32 bar) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory"); }
DEV void bar_expect(u32 bar, int bytes) { asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory"); }
DEV void bar_wait(u32 bar, u32 parity) {
    u32 done;
    do {
        asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                     : "=r"(done) : "r"(bar), "r"(parity) : "memory");
    } while (!done);
}
// Barriers among warpgroups, by number; 0 is __syncthreads.
template <int THREADS> DEV void group_sync(int id) { asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(THREADS) : "memory"); }
template <int THREADS> DEV void group_arrive(int id) { asm volatile("bar.arrive %0, %1;" ::"r"(id), "n"(THREADS) : "memory"); }
template <int THREADS> DEV bool group_any(int id, bool mine) {
    u32 any;
    asm volatile("{\n.reg .pred p, q;\nsetp.ne.u32 p, %1, 0;\nbar.red.or.pred q, %2, %3, p;\nselp.u32 %0, 1, 0, q;\n}"
                 : "=r"(any) : "r"((u32)mine), "r"(id), "n"(THREADS) : "memory");
    return any;
}
// Orders this thread's ordinary accesses to shared memory before those of products and of the copy engine.
DEV void async_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- the copy engine -------------------------------------------------------------------------------------------------------

DEV void copy_box(u32 dst, const TensorMap& map, u32 bar, int column, int row, int head, int batch) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];"
                 ::"r"(dst), "l"(&map), "r"(bar), "r"(column), "r"(row), "r"(head), "r"(batch) : "memory");
}
// ROWS rows of COLS columns, whole panels, from row `row` on, zero beyond the tensor; arrives at `bar` with all bytes. One thread.
template <int ROWS, int COLS> DEV void copy_tile(u32 dst, const TensorMap& map, u32 bar, int row, int head, int batch) {
    bar_expect(bar, ROWS * COLS * 2);
#pragma unroll
    for (int p = 0; p < COLS / 64; ++p) copy_box(dst + p * ROWS * 128, map, bar, p * 64, row, head, batch);
}

// ---- products of a warpgroup -----------------------------------------------------------------------------------------------

// Descriptor of an operand at shared address `at`: start and leading offset in 16-byte units below, groups of eight rows 1024
// bytes apart and the 128-byte swizzle above. `leading` is the distance of 64-column panels where columns are the operand's long
// side (V), and means nothing where they are the sum's (Q, K).
DEV u64 operand(u32 at, u32 leading) { return (u64)(0x40000000u | 1024 >> 4) << 32 | (leading >> 4 << 16 | (at & 0x3ffffu) >> 4); }

DEV void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEV void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LEFT> DEV void products_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory"); }
// What the program does with c before this stays before it, and what it does after stays after: a wait names no register.
template <int NTL> DEV void settle(float (&c)[NTL][4]) {
#pragma unroll
    for (int n = 0; n < NTL; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) asm volatile("" : "+f"(c[n][e])::"memory");
}
// The assembler moves a wait for products up as far as it may. What x, which is never negative, follows from stays before the next
// wait: the assembler does not know that this store to `spare` never happens.
DEV void before_wait(float x, u32 spare) {
    asm volatile("{\n.reg .pred p;\nsetp.lt.f32 p, %0, 0f00000000;\n@p st.shared.f32 [%1], %0;\n}" ::"f"(x), "r"(spare) : "memory");
}

#if DTYPE == 1
#define WG_TYPES ".f32.bf16.bf16 "
#else
#define WG_TYPES ".f32.f16.f16 "
#endif
#define WG_LOW "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define WG_16 ",%16,%17,%18,%19,%20,%21,%22,%23"
#define WG_24 ",%24,%25,%26,%27,%28,%29,%30,%31"
#define WG_0 WG_LOW WG_16 WG_24
#define WG_32 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define WG_40 WG_40_47 WG_48 WG_56
#define WG_40_47 ",%40,%41,%42,%43,%44,%45,%46,%47"
#define WG_48 ",%48,%49,%50,%51,%52,%53,%54,%55"
#define WG_56 ",%56,%57,%58,%59,%60,%61,%62,%63"
#define WG_64 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79"
#define WG_80 ",%80,%81,%82,%83,%84,%85,%86,%87"
#define WG_88 ",%88,%89,%90,%91,%92,%93,%94,%95"
#define WG_96 ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111"
#define ACC1(c, i) "+f"(c[i][0]), "+f"(c[i][1]), "+f"(c[i][2]), "+f"(c[i][3])
#define ACC2(c, i) ACC1(c, i), ACC1(c, i + 1)
#define ACC4(c, i) ACC2(c, i), ACC2(c, i + 2)
#define ACC8(c, i) ACC4(c, i), ACC4(c, i + 4)

// c (+)= A B^T for 64 rows and N columns, sixteen steps of the sum; A and B at descriptors. MORE 0: c is overwritten.
template <int N, int MORE, int NTL> DEV void product_ss(float (&c)[NTL][4], u64 a, u64 b) {
    static_assert(NTL * 8 == N, "one accumulator for all columns");
#define SS(n, regs, A, B, M) "{\n.reg .pred p;\nsetp.ne.b32 p, " M ", 0;\nwgmma.mma_async.sync.aligned.m64n" n "k16" WG_TYPES "{" regs "}, " A ", " B ", p, 1, 1, 0, 0;\n}"
    if constexpr (N == 64) asm volatile(SS("64", WG_0, "%32", "%33", "%34") : ACC8(c, 0) : "l"(a), "l"(b), "n"(MORE));
    else if constexpr (N == 80) asm volatile(SS("80", WG_0 WG_32, "%40", "%41", "%42") : ACC8(c, 0), ACC2(c, 8) : "l"(a), "l"(b), "n"(MORE));
    else if constexpr (N == 112) asm volatile(SS("112", WG_0 WG_32 WG_40_47 WG_48, "%56", "%57", "%58") : ACC8(c, 0), ACC4(c, 8), ACC2(c, 12) : "l"(a), "l"(b), "n"(MORE));
    else if constexpr (N == 160) asm volatile(SS("160", WG_0 WG_32 WG_40 WG_64, "%80", "%81", "%82") : ACC8(c, 0), ACC8(c, 8), ACC2(c, 16), ACC2(c, 18) : "l"(a), "l"(b), "n"(MORE));
    else if constexpr (N == 176) asm volatile(SS("176", WG_0 WG_32 WG_40 WG_64 WG_80, "%88", "%89", "%90") : ACC8(c, 0), ACC8(c, 8), ACC2(c, 16), ACC2(c, 18), ACC2(c, 20) : "l"(a), "l"(b), "n"(MORE));
    else if constexpr (N == 192) asm volatile(SS("192", WG_0 WG_32 WG_40 WG_64 WG_80 WG_88, "%96", "%97", "%98") : ACC8(c, 0), ACC8(c, 8), ACC8(c, 16) : "l"(a), "l"(b), "n"(MORE));
    else asm volatile(SS("128", WG_0 WG_32 WG_40, "%64", "%65", "%66") : ACC8(c, 0), ACC8(c, 8) : "l"(a), "l"(b), "n"(MORE));
#undef SS
}

// c += A B for 64 rows and N columns, from fragment AT of c on: A in registers, B's rows along the sum.
template <int N, int AT, int NTL> DEV void product_rs(float (&c)[NTL][4], const u32 (&a)[4], u64 b) {
    static_assert(N == 128 || N == 32 || N == 48 || N == 64 || N == 80 || N == 96 || N == 112 || N == 160 || N == 192 || N == 224, "a number of columns there is a case for");
#define RS(n, regs, A, B) "wgmma.mma_async.sync.aligned.m64n" n "k16" WG_TYPES "{" regs "}, {" A "}, " B ", 1, 1, 1, 1;"
#define A_REGS "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)
    if constexpr (N == 32) asm volatile(RS("32", WG_LOW, "%16,%17,%18,%19", "%20") : ACC4(c, AT) : A_REGS);
    else if constexpr (N == 48) asm volatile(RS("48", WG_LOW WG_16, "%24,%25,%26,%27", "%28") : ACC4(c, AT), ACC2(c, AT + 4) : A_REGS);
    else if constexpr (N == 64) asm volatile(RS("64", WG_0, "%32,%33,%34,%35", "%36") : ACC8(c, AT) : A_REGS);
    else if constexpr (N == 80) asm volatile(RS("80", WG_0 WG_32, "%40,%41,%42,%43", "%44") : ACC8(c, AT), ACC2(c, AT + 8) : A_REGS);
    else if constexpr (N == 96) asm volatile(RS("96", WG_0 WG_32 WG_40_47, "%48,%49,%50,%51", "%52") : ACC8(c, AT), ACC4(c, AT + 8) : A_REGS);
    else if constexpr (N == 112) asm volatile(RS("112", WG_0 WG_32 WG_40_47 WG_48, "%56,%57,%58,%59", "%60") : ACC8(c, AT), ACC4(c, AT + 8), ACC2(c, AT + 12) : A_REGS);
    else if constexpr (N == 160) asm volatile(RS("160", WG_0 WG_32 WG_40 WG_64, "%80,%81,%82,%83", "%84") : ACC8(c, AT), ACC8(c, AT + 8), ACC4(c, AT + 16) : A_REGS);
    else if constexpr (N == 192) asm volatile(RS("192", WG_0 WG_32 WG_40 WG_64 WG_80 WG_88, "%96,%97,%98,%99", "%100") : ACC8(c, AT), ACC8(c, AT + 8), ACC8(c, AT + 16) : A_REGS);
    else if constexpr (N == 224) asm volatile(RS("224", WG_0 WG_32 WG_40 WG_64 WG_80 WG_88 WG_96, "%112,%113,%114,%115", "%116") : ACC8(c, AT), ACC8(c, AT + 8), ACC8(c, AT + 16), ACC4(c, AT + 24) : A_REGS);
    else asm volatile(RS("128", WG_0 WG_32 WG_40, "%64,%65,%66,%67", "%68") : ACC8(c, AT), ACC8(c, AT + 8) : A_REGS);
#undef A_REGS
#undef RS
}

template <int N> DEV void registers_give() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N)); }
template <int N> DEV void registers_take() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N)); }
