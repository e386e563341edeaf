// Where does a projected key live? The formula of src/predictor/layout.rs over the same parameters; all in bytes.
#pragma once
#include "record.cuh"

// Address of a record.
__device__ __forceinline__ u64 projection_at(const Arena& arena, const ProjectionParams& p, u32 page) {
    const u32 index = page & ((1u << arena.slab_shift) - 1);
    return arena.slabs[page >> arena.slab_shift] + 4ull * index * p.record_words;
}

// Offset of the projected key of (head, slot) in its record, whose words 32 bits count.
__device__ __forceinline__ u64 projected_at(const ProjectionParams& p, u32 head, u32 slot) {
    return 4ull * (((head << p.page_shift) + slot) * p.key_words);
}

// Offset of the residual norm of (head, slot) in its record.
__device__ __forceinline__ u64 norm_at(const ProjectionParams& p, u32 head, u32 slot) {
    return 4ull * (p.norm_base_words + (u64(head) << p.page_shift) + slot);
}

// The two bf16 elements of a word.
__device__ __forceinline__ float2 unpack_pair(u32 word) {
    return make_float2(__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000));
}
