// What are an element's bits in another type? Integer arithmetic only, so that pages are the same bits on every backend.
// The rules are those of src/backend/cpu/memory.rs: round to nearest even; a NaN becomes quiet and keeps the top of its
// payload. Compiles as plain C++ too: tests/cuda_build.rs checks it against the `half` crate.
#pragma once
#include "params.cuh"

#ifdef __CUDACC__
#define KV_BOTH __host__ __device__ __forceinline__
#else
#define KV_BOTH inline
#endif

// `Dtype::code`, and `PageFormat::code` with one more
constexpr u32 F32 = 0, F16 = 1, BF16 = 2, INT8 = 3;

KV_BOTH u32 f16_to_f32(u32 half) {
    const u32 sign = (half & 0x8000) << 16;
    const u32 magnitude = half & 0x7fff;
    if (magnitude > 0x7c00) return sign | 0x7fc00000 | magnitude << 13;
    if (magnitude == 0x7c00) return sign | 0x7f800000;
    if (magnitude >= 0x0400) return sign | ((magnitude << 13) + (112u << 23));
    if (magnitude == 0) return sign;
    // A subnormal: its leading one becomes the hidden bit.
    u32 exponent = 113, mantissa = magnitude;
    while (!(mantissa & 0x0400)) {
        mantissa <<= 1;
        exponent -= 1;
    }
    return sign | exponent << 23 | (mantissa & 0x03ff) << 13;
}

KV_BOTH u32 f32_to_f16(u32 bits) {
    const u32 sign = bits >> 16 & 0x8000;
    const u32 magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) return sign | 0x7e00 | (magnitude >> 13 & 0x03ff);
    // From 65520 on, half a step above the largest number, everything rounds to infinity.
    if (magnitude >= 0x477ff000) return sign | 0x7c00;
    if (magnitude >= 0x38800000) {
        const u32 rebased = magnitude - (112u << 23);
        return sign | (rebased + 0x0fff + (rebased >> 13 & 1)) >> 13;
    }
    // Up to half of the smallest subnormal, everything rounds to zero.
    if (magnitude <= 0x33000000) return sign;
    const u32 shift = 126 - (magnitude >> 23);
    const u32 mantissa = (magnitude & 0x007fffff) | 0x00800000;
    const u32 kept = mantissa >> shift;
    const u32 rest = mantissa & ((1u << shift) - 1);
    const u32 middle = 1u << (shift - 1);
    return sign | (kept + (rest > middle || (rest == middle && (kept & 1))));
}

KV_BOTH u32 bf16_to_f32(u32 bits) { return ((bits & 0x7fff) > 0x7f80 ? bits | 0x0040 : bits) << 16; }

KV_BOTH u32 f32_to_bf16(u32 bits) {
    if ((bits & 0x7fffffff) > 0x7f800000) return bits >> 16 | 0x0040;
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

// An element's bits as those of a float.
KV_BOTH u32 to_f32(u32 bits, u32 dtype) {
    return dtype == F32 ? bits : dtype == F16 ? f16_to_f32(bits) : bf16_to_f32(bits);
}

// A float's bits as those of an element.
KV_BOTH u32 from_f32(u32 bits, u32 dtype) {
    return dtype == F32 ? bits : dtype == F16 ? f32_to_f16(bits) : f32_to_bf16(bits);
}

KV_BOTH u32 convert(u32 bits, u32 from, u32 to) { return from == to ? bits : from_f32(to_f32(bits, from), to); }

// Whether an element's bits are infinite or NaN.
KV_BOTH bool non_finite(u32 bits, u32 dtype) {
    const u32 exponent = dtype == F32 ? 0x7f800000 : dtype == F16 ? 0x7c00 : 0x7f80;
    return (bits & exponent) == exponent;
}
