// What are two states multiplied by when they become one? Every fold of states is this one: see merge.cu.
#pragma once
#include "params.cuh"

struct Factors {
    float m, mine, theirs;
    __device__ __forceinline__ Factors(float a, float b) {
        m = fmaxf(a, b);
        mine = exp2f(__fsub_rn(a, m));
        theirs = exp2f(__fsub_rn(b, m));
    }
    __device__ __forceinline__ float operator()(float a, float b) const {
        return __fmaf_rn(a, mine, __fmul_rn(b, theirs));
    }
};
