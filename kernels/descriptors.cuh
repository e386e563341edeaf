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

// The first word of the rows. `descriptors` is a __grid_constant__ parameter: its address may be taken.
template <u32 WORDS>
__device__ __forceinline__ const u32* words_of(const DescriptorsOf<WORDS>& descriptors) {
    return descriptors.at ? reinterpret_cast<const u32*>(descriptors.at) : descriptors.words;
}
