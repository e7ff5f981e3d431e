// Barriers, bulk copies, and the ring of stages that joins producer and consumers.

#pragma once

#include "geometry.cuh"

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void barrier_init(u32 bar, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count));
}

__device__ __forceinline__ void barrier_wait(u32 bar, u32 phase) {
    asm volatile(
        "{ .reg .pred done;\n"
        "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again; }" ::"r"(bar), "r"(phase) : "memory");
}

// As barrier_wait, but also acquires what other blocks of the cluster have written.
__device__ __forceinline__ void barrier_wait_cluster(u32 bar, u32 phase) {
    asm volatile(
        "{ .reg .pred done;\n"
        "again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again; }" ::"r"(bar), "r"(phase) : "memory");
}

__device__ __forceinline__ void barrier_arrive(u32 bar) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}

__device__ __forceinline__ void barrier_expect(u32 bar, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}

__device__ __forceinline__ void copy(u32 to, const u8* from, u32 bytes, u32 bar) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(bar) : "memory");
}

// As copy, of what L2 need not keep if it is read once: by one tile of tokens. The policies are CUTLASS's numbers for evict
// first and normal (cute/arch/copy_sm90_desc.hpp).
__device__ __forceinline__ void copy_weights(u32 to, const u8* from, u32 bytes, u32 bar, int tokens) {
    asm volatile(
        "{ .reg .pred once; .reg .b64 policy;\n"
        "setp.le.s32 once, %4, %5;\n"
        "selp.b64 policy, 0x12F0000000000000, 0x1000000000000000, once;\n"
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], policy; }"
        ::"r"(to), "l"(from), "r"(bytes), "r"(bar), "r"(tokens), "n"(TOKENS) : "memory");
}

// A place in the ring: a stage, and the parity of its current use.
struct Place {
    u32 stage = 0, phase = 0;
    __device__ __forceinline__ void next() {
        if (++stage == STAGES) { stage = 0; phase ^= 1; }
    }
};

struct Ring {
    u32 stages, full, empty, slots;  // shared addresses; only counts have slots
    __device__ __forceinline__ u32 stage(const Place& p) const { return stages + p.stage * STAGE_BYTES; }
    __device__ __forceinline__ u32 full_of(const Place& p) const { return full + p.stage * 8; }
    __device__ __forceinline__ u32 empty_of(const Place& p) const { return empty + p.stage * 8; }
};
