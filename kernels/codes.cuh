// How do int8 codes become factors of products? Two words of f16 for a word of four codes, exactly.
#pragma once
#include "mma.cuh"

// Codes `first` and `second` of a word: their bytes, offset by 128, are the low ones of 1024 to 1279.
template <u32 FIRST, u32 SECOND>
__device__ __forceinline__ u32 codes_of(u32 word) {
    const u32 offset = __byte_perm(word ^ 0x80808080, 0x64646464, FIRST | 0x40 | SECOND << 8 | 0x4000);
    const __half2 zero = __halves2half2(__ushort_as_half(0x6480), __ushort_as_half(0x6480));
    const __half2 codes = __hsub2(*reinterpret_cast<const __half2*>(&offset), zero);
    return *reinterpret_cast<const u32*>(&codes);
}

// The power of two that brings numbers up to `largest` near 1, and its inverse.
struct Power {
    float down, up;
    __device__ __forceinline__ explicit Power(float largest) {
        const int exponent = min(max(int(__float_as_uint(largest) >> 23), 1), 253);
        down = __uint_as_float(u32(254 - exponent) << 23);
        up = __uint_as_float(u32(exponent) << 23);
    }
};
