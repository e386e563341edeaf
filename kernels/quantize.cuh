// What is a row in int8? The rule of src/quantize, step by step, to the bit: f32, each step rounded. tests/cuda_build.rs
// compiles this as plain C++ too and compares.
#pragma once
#include "params.cuh"

// The magnitude of an infinity; that of a NaN is larger.
constexpr u32 INFINITE = 0x7f800000;
// Magnitudes below this make a row of zeros: `quantize::SMALLEST`.
constexpr u32 SMALLEST = 0x04800000;

// |x| as an integer: magnitudes are ordered as these are.
__device__ __forceinline__ u32 magnitude(float x) { return __float_as_uint(x) & 0x7fffffff; }

// An element of a key, centred and scaled by its channel.
__device__ __forceinline__ float calibrate(float x, float mean, float inverse) {
    return magnitude(x) < INFINITE ? __fmul_rn(__fsub_rn(x, mean), inverse) : x;
}

// What codes are multiplied by, and elements to become codes.
struct RowScale {
    float scale, inverse;
};

// Those of a row whose largest finite magnitude this is.
__device__ __forceinline__ RowScale row_scale(u32 largest) {
    if (largest < SMALLEST) return {1.0f, 0.0f};
    const float x = __uint_as_float(largest);
    return {__fmul_rn(x, 1.0f / 127.0f), __fdiv_rn(127.0f, x)};
}

// The code of a finite element. The product is within ±127 once rounded, since no element of the row is larger.
__device__ __forceinline__ int finite_code(float x, float inverse) { return __float2int_rn(__fmul_rn(x, inverse)); }

// The code of any element.
__device__ __forceinline__ int code(float x, float inverse) {
    if (magnitude(x) < INFINITE) return finite_code(x, inverse);
    return magnitude(x) > INFINITE ? 0 : x > 0 ? 127 : -127;
}
