// Matrix instructions, and asynchronous copies (PTX ISA, "mma", "mma.sp", "ldmatrix" and "cp.async").

#pragma once

#include "geometry.cuh"

#if defined(TYPE_S8)
#define SUM_TYPE ".s32"
#define SUM "+r"
#else
#define SUM_TYPE ".f32"
#define SUM "+f"
#endif

// What a thread gives to an instruction of the weights of 16 channels: kept values of rows lane / 4 and lane / 4 + 8, and metadata.
struct Fragment { u32 values[4], meta; };

// SELECTOR: the half of the lanes that holds the metadata (for 16-bit types; 0 for 8-bit ones, where all lanes do).
template <int SELECTOR>
__device__ __forceinline__ void mma(acc_t* d, const Fragment& a, const u32* b) {
#if DENSE
    asm volatile("mma.sync.aligned.m16n8" K_DENSE ".row.col." MMA_TYPES SUM_TYPE
                 " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : SUM(d[0]), SUM(d[1]), SUM(d[2]), SUM(d[3])
                 : "r"(a.values[0]), "r"(a.values[1]), "r"(a.values[2]), "r"(a.values[3]), "r"(b[0]), "r"(b[1]));
#else
    asm volatile("mma.sp::ordered_metadata.sync.aligned.m16n8" K_SPARSE ".row.col." MMA_TYPES SUM_TYPE
                 " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9, %10, %11}, {%0, %1, %2, %3}, %12, %13;"
                 : SUM(d[0]), SUM(d[1]), SUM(d[2]), SUM(d[3])
                 : "r"(a.values[0]), "r"(a.values[1]), "r"(a.values[2]), "r"(a.values[3]), "r"(b[0]), "r"(b[1]), "r"(b[2]),
                   "r"(b[3]), "r"(a.meta), "n"(SELECTOR));
#endif
}

__device__ __forceinline__ u32 shared_address(const void* pointer) { return (u32)__cvta_generic_to_shared(pointer); }

// Load four matrices of 8 rows of 16 bytes, whose rows are at the addresses of the lanes.
__device__ __forceinline__ void load_matrices(u32* to, u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(address));
}

// Copy 16 bytes if they start before `left`. Without a branch, the compiler issues copies between matrix instructions.
template <int TO, int FROM, int START>
__device__ __forceinline__ void copy_16(u32 to, const u8* from, int left) {
    asm volatile("{.reg .pred p; setp.gt.s32 p, %4, %5; @p cp.async.cg.shared.global [%0 + %2], [%1 + %3], 16;}"
                 ::"r"(to), "l"(from), "n"(TO), "n"(FROM), "r"(left), "n"(START) : "memory");
}

__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Wait until all but the last PENDING groups of this thread's copies have ended.
template <int PENDING>
__device__ __forceinline__ void await_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory"); }

// Wait for all threads of a team.
__device__ __forceinline__ void sync_team(int team) {
    if (TEAM == 32)
        __syncwarp();
    else
        asm volatile("bar.sync %0, %1;" ::"r"(team + 1), "n"(TEAM) : "memory");
}
