// y[13 tokens][32] += x[13][512] times a 2:4 weight of 32 rows: two warps of 16 rows, half of the eight steps a block.
extern __shared__ __align__(16) unsigned char smem[];

extern "C" __global__ void kernel(const char* kept, const unsigned* meta, const char* x, int* y) {
    const unsigned base = (unsigned)__cvta_generic_to_shared(smem), t = threadIdx.x, lane = t % 32, warp = t / 32;
    const int first = blockIdx.x * 4, last = first + 4;
    auto start = [&](int step) {
        const unsigned stage = base + step % 3 * 2048, token = t / 4;
        if (step < last) {
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(stage + 16 * t),
                         "l"(kept + t / 2 * 256 + step * 32 + t % 2 * 16));
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(stage + 1024 + 16 * t),
                         "l"(x + token * 512 + step * 64 + t % 4 * 16), "r"(token < 13 ? 16 : 0));
        }
        asm volatile("cp.async.commit_group;");
    };
    int d[2][4] = {};
    start(first);
    start(first + 1);
    for (int step = first; step < last; step++) {
        asm volatile("cp.async.wait_group 1;" ::: "memory");
        __syncthreads();  // landed
        start(step + 2);
        const unsigned stage = base + step % 3 * 2048, e = meta[(step * 2 + warp) * 32 + lane];
        unsigned a[4], b[4];
        const unsigned a_at = stage + (warp * 16 + lane % 16) * 32 + lane / 16 * 16;
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]) : "r"(a_at));
        for (int half = 0; half < 2; half++) {
            const unsigned b_at = stage + 1024 + half * 512 + lane % 8 * 64 + lane / 8 * 16;
            asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                         : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3]) : "r"(b_at));
            asm volatile("mma.sp::ordered_metadata.sync.aligned.m16n8k64.row.col.s32.s8.s8.s32 "
                         "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9,%10,%11}, {%0,%1,%2,%3}, %12, 0x0;"
                         : "+r"(d[half][0]), "+r"(d[half][1]), "+r"(d[half][2]), "+r"(d[half][3])
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(b[2]), "r"(b[3]), "r"(e));
        }
    }
    for (int half = 0; half < 2; half++)
        for (int i = 0; i < 4; i++) {
            const int token = half * 8 + lane % 4 * 2 + i % 2, row = warp * 16 + lane / 4 + i / 2 * 8;
            if (token < 13) asm volatile("red.global.add.s32 [%0], %1;" ::"l"(y + token * 32 + row), "r"(d[half][i]));
        }
}
