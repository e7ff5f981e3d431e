// The kernel's only argument; the host's is `Arguments` of gemm/kernel.py.

#pragma once

#include "types.cuh"

struct Arguments {
    const u8* x;          // [slabs][tokens padded to 8][SLAB], 128-byte swizzle
    const u8* dense;      // always null; of dense steps: [row tiles][2 * dense slabs][W_TILE][64][HALF], 64-byte swizzle
    const u8* sparse;     // [row tiles][sparse slabs][W_TILE]{[64][HALF] values, 64-byte swizzle; metadata}
                          // six bits: [row tiles][sparse slabs][W_TILE][2 instructions][128 threads]{3 words of values; metadata}
                          // dense:  [row tiles][slabs][W_TILE][4 instructions]{[128 threads][2 words]; [128 threads][word]} of six bits
                          // counts: [row tiles][bundles]{[W_TILE][FIELD][128] words; [windows][W_TILE][64][HALF] values}
                          // both:   values [2 instructions]{[128 threads][2 words]; [128 threads][word]}
    const float* scale_x; // [tokens] or null
    const float* scale_w; // [channels] or null
    const void* bias;     // [channels] of bias_type
    out_t* y;             // [tokens, row]
    int tokens;
    int channels;
    int dense_slabs;      // always 0: no weight has dense steps
    int sparse_slabs;
    int bias_type;        // 0 none, 1 float32, 2 bfloat16, 3 float16
    int group;            // row tiles that neighbouring tiles cycle through, so that they share them in L2
    const int* experts;   // experts: [token tiles] the expert of each
    const int* used;      // experts: [1] token tiles with work, the first ones
    int windows;          // counts: slabs of a bundle
    int row;              // channels of a row of y: with two bands, those of both
    int band;             // WHOLE, LEADING or FOLLOWING
};

enum Band { WHOLE, LEADING, FOLLOWING };
