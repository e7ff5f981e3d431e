// Integer types, and what the types of operands and results decide.

#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#if defined(TYPE_S8)
typedef int acc_t;
#define MMA_TYPES "s32.s8.s8"
#define MMA_TAIL ""
#elif defined(TYPE_E4M3)
typedef float acc_t;
#define MMA_TYPES "f32.e4m3.e4m3"
#define MMA_TAIL ", 1, 1"
#elif defined(TYPE_BF16)
typedef float acc_t;
#define MMA_TYPES "f32.bf16.bf16"
#define MMA_TAIL ", 1, 1, 0, 0"
#elif defined(TYPE_F16)
typedef float acc_t;
#define MMA_TYPES "f32.f16.f16"
#define MMA_TAIL ", 1, 1, 0, 0"
#endif

#if defined(TYPE_S8) || defined(TYPE_E4M3)
#define K_SPARSE "k64"
#define K_DENSE "k32"
constexpr int META_WORDS = 2;  // metadata registers of a thread a step: one for each of its two instructions
#else
#define K_SPARSE "k32"
#define K_DENSE "k16"
constexpr int META_WORDS = 1;  // the two instructions of a step share one and select their half of the lanes
#endif

#define OPERAND(n) OPERAND_##n
#define TEXT_(x) #x
#define TEXT(x) TEXT_(x)

#if defined(OUT_F32)
typedef float out_t;
#else
typedef u16 out_t;
#endif
