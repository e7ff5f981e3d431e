// Kept values of an INT8 weight that are all multiples of 4 have six bits in memory. Those that a thread gives to an instruction, in
// four registers, are three words. Byte i of the registers has its upper four bits in the nibbles of byte i of the first two
// words, and the next two in byte i of the third:
//
//     byte of    word 0: register 0 | register 1    word 1: register 2 | register 3    word 2: of registers 3 | 2 | 0 | 1
//     its bits           7654       | 3210                  7654       | 3210                              76  54  32  10
//
// The lowest two bits of every value are zeros.

#pragma once

#include "types.cuh"

__device__ __forceinline__ u32 join_six_bits(u32 high, u32 low) { return high & 0xF0F0F0F0 | low & 0x0C0C0C0C; }

__device__ __forceinline__ void unpack_six_bits(u32 (&values)[4], u32 high0, u32 high1, u32 low) {
    values[0] = join_six_bits(high0, low);
    values[1] = join_six_bits(high0 << 4, low << 2);
    values[2] = join_six_bits(high1, low >> 2);
    values[3] = join_six_bits(high1 << 4, low >> 4);
}
