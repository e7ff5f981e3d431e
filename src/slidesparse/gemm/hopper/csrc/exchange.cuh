// With few tokens there are fewer tiles than multiprocessors. Then the SPLIT blocks of a cluster share the steps of a tile and add
// their sums through distributed shared memory; each block completes and stores a share of the tile's tokens. The sums of a tile
// of 256 channels need the memory of the ring, so its blocks wait until all of them have read theirs.

#pragma once

#include "ring.cuh"

__device__ __forceinline__ u32 cluster_rank() {
    u32 rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// When every thread of every block of the cluster has arrived, all blocks have started and made their barriers. The fence
// after making them has released them; a release here would be a fence of the whole GPU. Threads that have exited count.
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

__device__ __forceinline__ u32 in_block(u32 rank, u32 address) {
    u32 there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    return there;
}

// Send four sums to another block's memory, whose barrier counts the bytes. The registers of wgmma are passed as they are: a
// conversion of their type would be an instruction that the compiler moves before the wait for them.
#if defined(TYPE_S8)
#define SUM "r"
#else
#define SUM "f"
#endif
__device__ __forceinline__ void send_four(u32 to, const acc_t* d, u32 bar) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to),
                 SUM(d[0]), SUM(d[1]), SUM(d[2]), SUM(d[3]), "r"(bar) : "memory");
}

// Adds the sums of a cluster's blocks, each over its own steps. Every block keeps the share of the tile's tokens that it
// completes, and sends every other share to the block that completes that. A block adds to its own sums those of the others in
// the order of their ranks, with the same bits every time. It does so once in its life, so it never waits to send again.
struct Exchange {
    enum {
        SHARES = TOKENS / SHARE,               // with few tokens, fewer than there are blocks
        VECTORS = ROW_BLOCKS * SHARE / 2 / 4,  // of four sums, a thread
    };
    const u8* const sums;  // [SPLIT - 1][VECTORS][consumer threads][4], in shared memory
    const u32 received;    // barrier, completed by SPLIT - 1 shares
    const int rank;

    // The offset of a vector from another block; the other blocks are numbered in the order of their ranks.
    __device__ __forceinline__ static int place(int other, int vector) {
        return ((other * VECTORS + vector) * (128 * WARPGROUPS) + threadIdx.x) * 16;
    }

    // The four sums of a vector of a share.
    template <class Sums>
    __device__ __forceinline__ static Sums* four(Sums (*d)[TOKENS / 2], int share, int vector) {
        return d[vector / (SHARE / 8)] + share * (SHARE / 2) + vector % (SHARE / 8) * 4;
    }

    __device__ __forceinline__ void send(const acc_t (*d)[TOKENS / 2]) const {
        cluster_wait();
        if (SUMS_IN_RING) {  // Then all consumers have read their last stage. They release nothing: what they read is in
            cluster_arrive();  // registers, since wgmma has ended, and every copy was awaited.
            cluster_wait();
        }
#pragma unroll
        for (int share = 0; share < SHARES; share++) {
            if (share == rank) continue;
            const u32 to = in_block(share, shared_address(sums) + place(rank - (rank > share), 0)), bar = in_block(share, received);
#pragma unroll
            for (int v = 0; v < VECTORS; v++) send_four(to + v * (128 * WARPGROUPS * 16), four(d, share, v), bar);
        }
    }

    __device__ __forceinline__ void receive(const acc_t (*d)[TOKENS / 2], acc_t (*sum)[SHARE / 2]) const {
        struct alignas(16) Vector { acc_t of[4]; };
        barrier_wait_cluster(received, 0);
#pragma unroll
        for (int v = 0; v < VECTORS; v++) {
            acc_t* own = sum[v / (SHARE / 8)] + v % (SHARE / 8) * 4;
#pragma unroll
            for (int share = 0; share < SHARES; share++)  // whose number only the device knows, and no register has an address
#pragma unroll
                for (int i = 0; i < 4; i++)
                    if (share == 0 || share == rank) own[i] = four(d, share, v)[i];
#pragma unroll
            for (int other = 0; other < SPLIT - 1; other++) {
                const Vector theirs = *(const Vector*)(sums + place(other, v));
#pragma unroll
                for (int i = 0; i < 4; i++) own[i] += theirs.of[i];
            }
        }
    }
};
