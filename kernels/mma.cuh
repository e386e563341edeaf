// How do 16-bit elements come to the tensor cores? As words of two; products of the elements' type.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include "numeric.cuh"
#include "ptx.cuh"

// Two floats, rounded to elements of a word.
template <u32 FORMAT>
__device__ __forceinline__ u32 pack(float x, float y) {
    if constexpr (FORMAT == F16) {
        const __half2 both = __floats2half2_rn(x, y);
        return *reinterpret_cast<const u32*>(&both);
    } else {
        const __nv_bfloat162 both = __floats2bfloat162_rn(x, y);
        return *reinterpret_cast<const u32*>(&both);
    }
}

template <u32 FORMAT>
__device__ __forceinline__ float2 unpack(u32 word) {
    if constexpr (FORMAT == F16) return __half22float2(*reinterpret_cast<const __half2*>(&word));
    return make_float2(__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000));
}

// Two floats as the sum of two words: the nearest elements, and what is left.
template <u32 FORMAT>
__device__ __forceinline__ void pack_sum(float x, float y, u32& high, u32& low) {
    high = pack<FORMAT>(x, y);
    const float2 whole = unpack<FORMAT>(high);
    low = pack<FORMAT>(__fsub_rn(x, whole.x), __fsub_rn(y, whole.y));
}

// `multiply_f16` or `multiply_bf16`.
template <u32 FORMAT>
__device__ __forceinline__ void multiply(float (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    if constexpr (FORMAT == F16) {
        multiply_f16(c, a, b);
    } else {
        multiply_bf16(c, a, b);
    }
}
