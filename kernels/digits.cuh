// How do numbers become factors of products of integers? Three digits of base 256, each a byte, the highest with the sign.
#pragma once
#include "params.cuh"
#include "ptx.cuh"

// Numbers of up to BITS bits, the largest of which has as many or one less, for floats up to `largest`; and what brings them
// back. Not finer than multiples of 2^-126.
template <int BITS>
struct Fixed {
    float down, up;
    __device__ __forceinline__ explicit Fixed(float largest) {
        const int exponent = min(max(int(__float_as_uint(largest) >> 23), BITS), 253);
        down = __uint_as_float(u32(253 + BITS - exponent) << 23);
        up = __uint_as_float(u32(exponent + 1 - BITS) << 23);
    }
};

// With a sign, which the highest digit has. The largest float may round to one more than fits.
__device__ __forceinline__ u32 signed_number(const Fixed<23>& fixed, float x) {
    return min(__float2int_rn(__fmul_rn(x, fixed.down)), (1 << 23) - 1);
}

// Without. The largest float has 24 bits, and is exact.
__device__ __forceinline__ u32 unsigned_number(const Fixed<24>& fixed, float x) {
    return __float2uint_rn(__fmul_rn(x, fixed.down));
}

// Byte `digit` of four numbers.
__device__ __forceinline__ u32 digits_of(const u32 (&numbers)[4], u32 digit) {
    const u32 pair = digit | (digit + 4) << 4;
    return __byte_perm(__byte_perm(numbers[0], numbers[1], pair), __byte_perm(numbers[2], numbers[3], pair), 0x5410);
}

// Bytes `FIRST` and `FIRST` + 2 of two words, in turn.
template <u32 FIRST>
__device__ __forceinline__ u32 bytes_of(u32 a, u32 b) {
    return __byte_perm(a, b, FIRST == 0 ? 0x6240 : 0x7351);
}

// The digits of a piece's numbers, columns × tokens. They come as a product leaves them: of tokens lane / 4 (the first two)
// and eight later, columns 2 (lane % 4) and the next. They go as a product takes them: of column lane / 4, tokens t, t + 8,
// t + 1 and t + 9, where t is 2 (lane % 4).
struct Transposed {
    u32 of[3];
    __device__ __forceinline__ explicit Transposed(const u32 (&numbers)[4]) {
        const u32 early = transpose(__byte_perm(numbers[0], numbers[1], 0x5410));
        const u32 late = transpose(__byte_perm(numbers[2], numbers[3], 0x5410));
        of[0] = transpose(digits_of({numbers[0], numbers[2], numbers[1], numbers[3]}, 2));
        of[1] = bytes_of<1>(early, late);
        of[2] = bytes_of<0>(early, late);
    }
};
