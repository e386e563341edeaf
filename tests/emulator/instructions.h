// What does kernels/ptx.cuh do on a CPU? The same functions, by what the PTX manual says of the instructions.
//
// A copy to a block's memory happens when it is waited for, and its target holds garbage until then.
#pragma once
#define KV_PTX
#include <bit>
#include <cfloat>
#include "language.h"
#include "params.cuh"

inline u32 __cvta_generic_to_shared(const void* at) {
    return u32(static_cast<const unsigned char*>(at) - &emulator::window);
}
inline unsigned char* emulated_shared(u32 at) { return &emulator::window + int32_t(at); }

inline void copy_async(u32 to, u64 from) {
    memset(emulated_shared(to), 0xff, 16);
    emulator::self->batches.back().push_back({emulated_shared(to), reinterpret_cast<const void*>(from)});
}

inline void end_batch() { emulator::self->batches.emplace_back(); }

template <int LATER>
void wait_batches() {
    auto& batches = emulator::self->batches;
    while (batches.size() > LATER + 1) {
        for (const emulator::Copy& copy : batches.front()) memcpy(copy.to, copy.from, 16);
        batches.erase(batches.begin());
    }
}

inline float power_of_two(float x) { return x < -126 ? 0.0f : exp2f(x); }

inline void sync_block() { __syncthreads(); }

inline void clear_shared(u32 at) { memset(emulated_shared(at), 0, 16); }

inline float load_shared(u32 at) {
    float x;
    memcpy(&x, emulated_shared(at), sizeof x);
    return x;
}

// Row `row` of matrix `matrix`, as the lanes named it.
inline const uint16_t* emulated_row(const void* all, u32 matrix, u32 row) {
    return reinterpret_cast<const uint16_t*>(emulated_shared(emulator::at<u32>(all, 8 * matrix + row)));
}

inline void load_matrices(u32 (&a)[4], u32 at) {
    const void* all = emulator::exchange(&at, sizeof at);
    const u32 row = threadIdx.x % 32 / 4, pair = threadIdx.x % 4;
    for (u32 i = 0; i < 4; ++i) memcpy(&a[i], emulated_row(all, i, row) + 2 * pair, 4);
}

inline void load_transposed(u32 (&a)[4], u32 at) {
    const void* all = emulator::exchange(&at, sizeof at);
    const u32 column = threadIdx.x % 32 / 4, pair = threadIdx.x % 4;
    for (u32 i = 0; i < 4; ++i)
        a[i] = emulated_row(all, i, 2 * pair)[column] | u32(emulated_row(all, i, 2 * pair + 1)[column]) << 16;
}

inline u32 transpose(u32 x) {
    const void* all = emulator::exchange(&x, sizeof x);
    const u32 column = threadIdx.x % 32 / 4, pair = threadIdx.x % 4;
    const auto element = [&](u32 row) {
        return emulator::at<u32>(all, 4 * row + column / 2) >> (16 * (column % 2)) & 0xffff;
    };
    return element(2 * pair) | element(2 * pair + 1) << 16;
}

// The sum of a product's terms, as tensor cores add: what lies more than 25 bits below the largest term is cut off from each,
// and what a float does not hold from the sum. (Seen on an H200; the manual leaves it open.)
inline float emulated_sum(const double (&terms)[17]) {
    int64_t largest = 0;  // by its bits, of which NaN's and infinity's are the largest
    for (const double term : terms) largest = std::max(largest, std::bit_cast<int64_t>(term) & INT64_MAX);
    const int64_t exponent = largest >> 52;
    int units = 0;
    if (largest > 0 && exponent < 2047) {
        const double inverse = std::bit_cast<double>((2046 + 25 - exponent) << 52);
        for (const double term : terms) units += int(term * inverse);
    }
    const double sum = units * std::bit_cast<double>(std::max<int64_t>(exponent - 25, 0) << 52);
    if (largest == 0 || exponent == 2047 || fabs(sum) > FLT_MAX) {
        double plain = 0;
        for (const double term : terms) plain += term;
        return float(plain);
    }
    const float nearest = float(sum);
    const bool away = fabs(double(nearest)) > fabs(sum);
    return away ? std::bit_cast<float>(std::bit_cast<u32>(nearest) - 1) : nearest;
}

// c += a · b over 16 elements.
template <class T, T (*FROM)(u32)>
void emulated_multiply(float (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    const u32 mine[6] = {a[0], a[1], a[2], a[3], b[0], b[1]};
    struct Words {
        u32 words[6];
    };
    const void* all = emulator::exchange(mine, sizeof mine);
    const u32 row = threadIdx.x % 32 / 4, pair = threadIdx.x % 4;
    float left[2][16], right[2][16];
    for (u32 half = 0; half < 2; ++half) {
        for (u32 k = 0; k < 16; k += 2) {
            const Words& rows = emulator::at<Words>(all, 4 * row + k % 8 / 2);
            const Words& columns = emulator::at<Words>(all, 4 * (2 * pair + half) + k % 8 / 2);
            const u32 a_word = rows.words[half + k / 8 * 2], b_word = columns.words[4 + k / 8];
            left[half][k] = FROM(a_word & 0xffff), left[half][k + 1] = FROM(a_word >> 16);
            right[half][k] = FROM(b_word & 0xffff), right[half][k + 1] = FROM(b_word >> 16);
        }
    }
    for (u32 i = 0; i < 4; ++i) {
        double terms[17] = {c[i]};
        for (u32 k = 0; k < 16; ++k) terms[k + 1] = double(left[i / 2][k]) * double(right[i % 2][k]);
        c[i] = emulated_sum(terms);
    }
}

inline float emulated_f16(u32 bits) { return __half2float(__ushort_as_half(static_cast<unsigned short>(bits))); }
inline float emulated_bf16(u32 bits) { return __uint_as_float(bits << 16); }
inline void multiply_f16(float (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    emulated_multiply<float, emulated_f16>(c, a, b);
}
inline void multiply_bf16(float (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    emulated_multiply<float, emulated_bf16>(c, a, b);
}

// c += a · b over 32 bytes, those of b with a sign or not.
template <class B>
void emulated_multiply_bytes(int (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    const u32 mine[6] = {a[0], a[1], a[2], a[3], b[0], b[1]};
    struct Words {
        u32 words[6];
    };
    const void* all = emulator::exchange(mine, sizeof mine);
    const u32 row = threadIdx.x % 32 / 4, pair = threadIdx.x % 4;
    for (u32 i = 0; i < 4; ++i) {
        const u32 column = 2 * pair + i % 2;
        for (u32 k = 0; k < 32; ++k) {
            const u32 left = emulator::at<Words>(all, 4 * row + k % 16 / 4).words[i / 2 + k / 16 * 2] >> (8 * (k % 4));
            const u32 right = emulator::at<Words>(all, 4 * column + k % 16 / 4).words[4 + k / 16] >> (8 * (k % 4));
            c[i] += int(int8_t(left)) * int(B(right));
        }
    }
}
inline void multiply_signed(int (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    emulated_multiply_bytes<int8_t>(c, a, b);
}
inline void multiply_unsigned(int (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    emulated_multiply_bytes<uint8_t>(c, a, b);
}

inline void release_next() {}
inline void await_previous() {}
inline u64 soon_policy() { return 0; }
inline void store_for_next(float* to, float x, u64) { *to = x; }
inline void store_for_next(float2* to, float2 x, u64) { *to = x; }
inline void store_for_next(float4* to, float4 x, u64) { *to = x; }
