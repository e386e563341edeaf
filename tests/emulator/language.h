// What do the words of CUDA C++ mean on a CPU? Put before every file of `kernels/` by scripts/setup-emulator.
//
// A thread of a block is a fiber (block.h); what a warp does together is an exchange through memory. A block's memory is
// static, one for each thread of the CPU that runs blocks.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include "block.h"

#undef __device__
#undef __forceinline__
#undef __noinline__
#undef __global__
#undef __grid_constant__
#undef __launch_bounds__
#undef __shared__
#undef __align__
#define __device__
#define __forceinline__ inline
#define __noinline__
#define __global__ KV_KERNEL
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__ thread_local
#define __align__(bytes) __attribute__((aligned(bytes)))
#ifndef KV_NAMES  // when the script looks for the names of kernels, the mark stays
#define KV_KERNEL
#endif

#define threadIdx (emulator::self->index)
#define blockIdx (emulator::block_index)
#define gridDim (emulator::grid)
#define blockDim (emulator::threads)

inline void __syncthreads() { emulator::wait_for_block(); }
inline void __syncwarp() { emulator::exchange(nullptr, 0); }

template <class T>
T emulated_shuffle(T mine, uint32_t from) {
    return emulator::at<T>(emulator::exchange(&mine, sizeof mine), from < 32 ? from : threadIdx.x % 32);
}

// Every lane takes part in every exchange: no kernel of ours has another mask, and no lane may have ended.
template <class T>
T __shfl_sync(uint32_t, T mine, uint32_t from) {
    return emulated_shuffle(mine, from % 32);
}
template <class T>
T __shfl_xor_sync(uint32_t, T mine, uint32_t mask) {
    return emulated_shuffle(mine, threadIdx.x % 32 ^ mask);
}
template <class T>
T __shfl_up_sync(uint32_t, T mine, uint32_t by) {
    return emulated_shuffle(mine, threadIdx.x % 32 - by);
}
template <class T>
T __shfl_down_sync(uint32_t, T mine, uint32_t by) {
    return emulated_shuffle(mine, threadIdx.x % 32 + by);
}

inline uint32_t __ballot_sync(uint32_t, int mine) {
    const void* all = emulator::exchange(&mine, sizeof mine);
    uint32_t bits = 0;
    for (uint32_t lane = 0; lane < 32; ++lane) bits |= uint32_t(emulator::at<int>(all, lane) != 0) << lane;
    return bits;
}

template <class T>
T atomicAdd(T* at, T by) {
    const T before = *at;  // one thread runs at a time
    *at += by;
    return before;
}

template <class T>
T __ldg(const T* at) {
    return *at;
}

// The C library's is a call.
inline float emulated_max(float a, float b) { return a != a ? b : b != b || a > b ? a : b; }
#define fmaxf emulated_max

template <class To, class From>
To emulated_bits(From from) {
    static_assert(sizeof(To) == sizeof(From), "as many bits");
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}
inline float __uint_as_float(uint32_t x) { return emulated_bits<float>(x); }
inline uint32_t __float_as_uint(float x) { return emulated_bits<uint32_t>(x); }
inline float __int_as_float(int32_t x) { return emulated_bits<float>(x); }
inline int32_t __float_as_int(float x) { return emulated_bits<int32_t>(x); }

inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline int __float2int_rn(float x) {
    if (x != x) return 0;
    if (x >= 2147483648.0f) return std::numeric_limits<int>::max();
    if (x < -2147483648.0f) return std::numeric_limits<int>::min();
    return int(lrintf(x));
}
inline uint32_t __float2uint_rn(float x) {
    if (!(x > 0)) return 0;
    return x >= 4294967296.0f ? std::numeric_limits<uint32_t>::max() : uint32_t(llrintf(x));
}
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(uint32_t(x)); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __popc(uint32_t x) { return __builtin_popcount(x); }

inline uint32_t __byte_perm(uint32_t x, uint32_t y, uint32_t selector) {
    const uint64_t both = uint64_t(y) << 32 | x;
    uint32_t out = 0;
    for (int i = 0; i < 4; ++i) {
        const uint32_t nibble = selector >> (4 * i);
        uint32_t byte = uint32_t(both >> (nibble % 8 * 8)) & 0xff;
        if (nibble & 8) byte = byte & 0x80 ? 0xff : 0;
        out |= byte << (8 * i);
    }
    return out;
}

template <class A, class B>
std::common_type_t<A, B> min(A a, B b) {
    using T = std::common_type_t<A, B>;
    return std::min<T>(a, b);
}
template <class A, class B>
std::common_type_t<A, B> max(A a, B b) {
    using T = std::common_type_t<A, B>;
    return std::max<T>(a, b);
}
