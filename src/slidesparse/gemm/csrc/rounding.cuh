// Scales, bias and rounding of a result, as vLLM's epilogue has them.

#pragma once

#include "arguments.cuh"

__device__ __forceinline__ float bias_of(const Arguments& p, int channel) {
    float value = 0;
    if (p.bias_type == 1) value = ((const float*)p.bias)[channel];
    if (p.bias_type == 2) value = __int_as_float((u32)((const u16*)p.bias)[channel] << 16);
    if (p.bias_type == 3) asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(((const u16*)p.bias)[channel]));
    return value;
}

__device__ __forceinline__ u32 round_pair(float low, float high) {
    u32 both;
#if defined(OUT_F16)
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
#else
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
#endif
    return both;
}

struct Channel { float scale, bias; };

// Round after the channel's scale, then after token scale and bias together.
__device__ __forceinline__ float finish(acc_t value, float token_scale, const Channel& c) {
    return fmaf(token_scale, __fmul_rn(c.scale, (float)value), c.bias);
}
