// How do states fold? Splits by sections, and two states by what they are multiplied by: see merge.cu, whose fold this is.
#pragma once
#include "ptx.cuh"

constexpr u32 SECTION = 4;  // splits whose states fold first: `SECTION` of src/attention/mod.rs

struct Factors {
    float m, mine, theirs;
    __device__ __forceinline__ Factors(float a, float b) {
        m = fmaxf(a, b);
        mine = power_of_two(__fsub_rn(a, m));
        theirs = power_of_two(__fsub_rn(b, m));
    }
    __device__ __forceinline__ float operator()(float a, float b) const {
        return __fmaf_rn(a, mine, __fmul_rn(b, theirs));
    }
};
