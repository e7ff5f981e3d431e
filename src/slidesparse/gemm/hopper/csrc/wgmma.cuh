// The matrix instructions (PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions").

#pragma once

#include "types.cuh"

// Matrix descriptors (PTX ISA, "Matrix Descriptor Format"): rows of 128 or 64 bytes, swizzled over their whole length,
// groups of 8 rows one after another.
__device__ __forceinline__ u64 describe(u32 address, u32 row_bytes) {
    const u64 swizzle = row_bytes == 128 ? 1 : 2;
    return (u64)((address >> 4) & 0x3FFF) | 1ull << 16 | (u64)(8 * row_bytes >> 4) << 32 | swizzle << 62;
}

// SELECTOR: the half of the lanes that holds the metadata (for 16-bit types; 0 for 8-bit ones, where all lanes do).
template <int SELECTOR>
__device__ __forceinline__ void mma_sparse(acc_t* d, u64 a, u64 b, u32 meta, int accumulate) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, " OPERAND(3) ", 0;\n"
        "wgmma.mma_async.sp.sync.aligned.m64n" TEXT(TOKENS) K_SPARSE "." MMA_TYPES " {" ACC_NAMES "}, " OPERAND(0) ", "
        OPERAND(1) ", " OPERAND(2) ", " OPERAND(4) ", p" MMA_TAIL "; }"
        : ACC(d) : "l"(a), "l"(b), "r"(meta), "r"(accumulate), "n"(SELECTOR));
}

__device__ __forceinline__ void mma_dense(acc_t* d, u64 a, u64 b, int accumulate) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, " OPERAND(2) ", 0;\n"
        "wgmma.mma_async.sync.aligned.m64n" TEXT(TOKENS) K_DENSE "." MMA_TYPES " {" ACC_NAMES "}, " OPERAND(0) ", "
        OPERAND(1) ", p" MMA_TAIL "; }"
        : ACC(d) : "l"(a), "l"(b), "r"(accumulate));
}

__device__ __forceinline__ void mma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void mma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void mma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
