// Where does a byte of a page live? The formula of src/record.rs over the same parameters; all in bytes, all in 64 bits.
#pragma once
#include "params.cuh"

// Slabs that one arena may have: `MAX_SLABS` of src/backend/cuda/kernels.rs.
constexpr int MAX_SLABS = 64;

// The slabs' addresses, passed by value. A buffer of records is an arena of one slab whose frames are never asked for.
struct Arena {
    u64 slabs[MAX_SLABS];
    u32 slab_shift, reserved;
};
static_assert(sizeof(Arena) == 520, "size of Arena, as kernels.rs passes it");

// Address of a frame.
__device__ __forceinline__ u64 frame_at(const Arena& arena, const RecordParams& record, u32 frame) {
    const u32 index = frame & ((1u << arena.slab_shift) - 1);
    return arena.slabs[frame >> arena.slab_shift] + 4ull * index * record.frame_words;
}

// Offset of a key row in its record.
__device__ __forceinline__ u64 key_at(const RecordParams& record, u32 head, u32 slot) {
    return 4ull * ((u64(head) << record.page_shift) + slot) * record.k_row_words;
}

// Offset of a value row in its record.
__device__ __forceinline__ u64 value_at(const RecordParams& record, u32 head, u32 slot) {
    return 4ull * (record.v_base_words + ((u64(head) << record.page_shift) + slot) * record.v_row_words);
}

// Offset of the scale of a key row in its record, in quantised formats.
__device__ __forceinline__ u64 key_scale_at(const RecordParams& record, u32 head, u32 slot) {
    return 4ull * (u64(record.scale_base_words) + (u64(head) << record.page_shift) + slot);
}

// Offset of the scale of a value row in its record, in quantised formats.
__device__ __forceinline__ u64 value_scale_at(const RecordParams& record, u32 head, u32 slot) {
    return key_scale_at(record, head, slot) + (4ull * record.kv_heads << record.page_shift);
}
