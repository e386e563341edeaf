// Where do the rows lie that a launch works through? In its parameters where they are few, which saves a copy and the wait
// for it, else in memory.
#pragma once
#include "params.cuh"

// What fits beside the largest other parameters in the 4 KiB that every device takes: `INLINE_WORDS` of
// src/backend/cuda/kernels.rs.
constexpr u32 INLINE_WORDS = 640;

template <u32 WORDS>
struct DescriptorsOf {
    u64 at;
    u32 words[WORDS];
};

using Descriptors = DescriptorsOf<INLINE_WORDS>;
static_assert(sizeof(Descriptors) == 8 + 4 * INLINE_WORDS, "size of Descriptors, as kernels.rs passes it");

// The words of a T from word `at` on. Of a parameter they are constants, which no cache of memory has to bring first.
template <class T, u32 WORDS>
__device__ __forceinline__ T read(const DescriptorsOf<WORDS>& descriptors, u64 at) {
    union {
        u32 words[sizeof(T) / 4];
        T value;
    } row;
    if (descriptors.at) {
        const u32* from = reinterpret_cast<const u32*>(descriptors.at) + at;
#pragma unroll
        for (u32 i = 0; i < sizeof(T) / 4; ++i) row.words[i] = __ldg(from + i);
    } else {
#pragma unroll
        for (u32 i = 0; i < sizeof(T) / 4; ++i) row.words[i] = descriptors.words[u32(at) + i];
    }
    return row.value;
}

// Number `index` of the Ts from word `first` on.
template <class T, u32 WORDS>
__device__ __forceinline__ T descriptor(const DescriptorsOf<WORDS>& descriptors, u32 first, u64 index) {
    return read<T>(descriptors, first + index * (sizeof(T) / 4));
}
