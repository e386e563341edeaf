// What does a warp of attention on tensor cores do? Its part of a call, and the fold of what it finds.
#pragma once
#include "ring.cuh"
#include "states.cuh"

// Part `work` of a call: vectors, KV head and item, the fastest first, so that warps that read the same pages run together.
template <class SHARE>
struct Warp {
    Columns columns;
    Pages pages;
    u32 kv_head;
    int first;  // split that some column may see
    u64 q;      // the elements of column lane / 4
    bool live;  // whether it sees anything

    __device__ __forceinline__ Warp(const AttendParams& p, const AttendDescriptors& descriptors, const u32* tables,
                                    u32 vector_tiles, u64 work) {
        const Place3 place(work, vector_tiles, p.record.kv_heads);
        kv_head = place.y;
        const u32 item = p.first_item + u32(place.z);
        const Tile tile = tile_of(p, descriptors, item);
        const u32 part = tile.split + (item - tile.item);
        columns = columns_of(p, descriptors, tile, kv_head, part, SHARE::SPLITS * SPLIT, u64(place.x) * COLUMNS, live, q);
        const u32* table = tables + tile.table + (u64(part) * SHARE::SPLITS * SPLIT >> p.record.page_shift);
        pages = {table, p.record.page_shift, columns.span.from, columns.span.to};
        first = SHARE::BY_SPLITS ? SHARE::warp() : columns.span.from / SPLIT;
    }

    __device__ __forceinline__ bool sees_nothing() const { return columns.span.from >= columns.span.to; }
};

template <class SHARE>
__device__ __forceinline__ u32 ring_of(unsigned char* rings) {
    return u32(__cvta_generic_to_shared(rings)) + SHARE::warp() * RING_BYTES;
}

// Folds the states that `group_state` finds for the groups of this warp, and those of splits.
template <int DIM, class SHARE, class GROUP_STATE>
__device__ __forceinline__ State<DIM> fold_groups(const Span& span, int first, const GROUP_STATE& group_state) {
    State<DIM> total = nothing_seen<DIM>();
#pragma unroll 1
    for (int split = first; split < SHARE::end() && split * SPLIT < span.to; ++split) {
        State<DIM> sum = nothing_seen<DIM>();
        for (int group = split * GROUPS + SHARE::first(); group < (split + 1) * GROUPS; group += SHARE::STEP) {
            if (!sees_group(span.from, span.to, group)) continue;
            State<DIM> state;
            group_state(group, state);
            fold(sum, state);
        }
        if constexpr (SHARE::SEVERAL) {
            fold(total, sum);
        } else {
            total = sum;
        }
    }
    return total;
}

// Writes the states, once the block's warps have folded theirs.
template <bool PAIRED, class SHARE, int DIM>
__device__ __forceinline__ void give(const Columns& columns, const State<DIM>& total, const float (&lack)[2],
                                     float* states, unsigned char* rings) {
    if constexpr (SHARE::WARPS > 1) {
        fold_warps<PAIRED>(columns, total, lack, states, *reinterpret_cast<Parts<DIM>*>(rings));
    } else {
        store<PAIRED>(columns, total, lack, states);
    }
}

// A kernel whose blocks take part after part by `attend<…, Share<WARPS, SPLITS>>` of its file.
#define ATTEND(NAME, WARPS, SPLITS, ...)                                                                               \
    extern "C" __global__ void __launch_bounds__(32 * WARPS, 8 / WARPS)                                                \
        NAME(const __grid_constant__ AttendParams p, const u32* tables, const u64 q, const float* channels,            \
             float* states, const u32 vector_tiles, const __grid_constant__ Arena arena,                               \
             const __grid_constant__ AttendDescriptors descriptors) {                                                  \
        extern __shared__ __align__(1024) unsigned char rings[];                                                       \
        await_previous();                                                                                              \
        const u64 total = u64(p.items) * p.record.kv_heads * vector_tiles;                                             \
        for (u64 work = blockIdx.x; work < total; work += gridDim.x)                                                   \
            attend<__VA_ARGS__, Share<WARPS, SPLITS>>(p, arena, descriptors, tables, q, channels, states,              \
                                                      vector_tiles, work, rings);                                      \
    }

// The four ways to share a part, and the ends of their names: `MMA_KINDS` of src/backend/cuda/attend.rs.
#define ATTEND_KINDS(NAME, ...)                                                                                        \
    ATTEND(NAME##_1, 1, 1, __VA_ARGS__)                                                                                \
    ATTEND(NAME##_4, 4, 1, __VA_ARGS__)                                                                                \
    ATTEND(NAME##_section_1, 1, SECTION, __VA_ARGS__)                                                                  \
    ATTEND(NAME##_section_4, 4, SECTION, __VA_ARGS__)
