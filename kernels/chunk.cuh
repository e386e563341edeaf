// Which numbers are eight consecutive elements of a page's row? They are loaded as they are stored, then decoded.
#pragma once
#include <cuda_fp16.h>
#include "numeric.cuh"

constexpr int CHUNK = 8;

// Eight elements of a row, as they are stored.
template <u32 FORMAT>
struct Chunk {
    static constexpr int UNITS = FORMAT == F32 ? 2 : 1;
    static constexpr u32 BYTES = 16 * UNITS;
    uint4 units[UNITS];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int i = 0; i < UNITS; ++i) units[i] = make_uint4(0, 0, 0, 0);
    }

    __device__ __forceinline__ void load(u64 at) {
#pragma unroll
        for (int i = 0; i < UNITS; ++i) units[i] = __ldg(reinterpret_cast<const uint4*>(at) + i);
    }

    __device__ __forceinline__ void decode(float (&x)[CHUNK]) const {
#pragma unroll
        for (int i = 0; i < UNITS; ++i) {
            const u32 words[4] = {units[i].x, units[i].y, units[i].z, units[i].w};
#pragma unroll
            for (int w = 0; w < 4; ++w) {
                if constexpr (FORMAT == F32) {
                    x[4 * i + w] = __uint_as_float(words[w]);
                } else if constexpr (FORMAT == F16) {
                    x[2 * w] = __half2float(__ushort_as_half(u16(words[w])));
                    x[2 * w + 1] = __half2float(__ushort_as_half(u16(words[w] >> 16)));
                } else {
                    x[2 * w] = __uint_as_float(words[w] << 16);
                    x[2 * w + 1] = __uint_as_float(words[w] & 0xffff0000);
                }
            }
        }
    }
};

// The four codes of a word as numbers. Code + 128 in the last byte of a float of 2^23 is 2^23 + 128 + code, exactly.
__device__ __forceinline__ void decode_codes(u32 word, float* x) {
    const u32 biased = word ^ 0x80808080;
#pragma unroll
    for (u32 i = 0; i < 4; ++i)
        x[i] = __fsub_rn(__uint_as_float(__byte_perm(biased, 0x4b000000, 0x7440 | i)), 8388736.0f);
}

// Codes of int8, less the scale of their row. Rows are whole multiples of eight bytes, not of sixteen.
template <>
struct Chunk<INT8> {
    static constexpr u32 BYTES = 8;
    uint2 units;

    __device__ __forceinline__ void clear() { units = make_uint2(0, 0); }

    __device__ __forceinline__ void load(u64 at) { units = __ldg(reinterpret_cast<const uint2*>(at)); }

    __device__ __forceinline__ void decode(float (&x)[CHUNK]) const {
        decode_codes(units.x, x);
        decode_codes(units.y, x + 4);
    }
};
