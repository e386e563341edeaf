// What does a warp of attention on tensor cores do? Its part of a call, and the fold of what it finds.
#pragma once
#include "ring.cuh"
#include "states.cuh"

// Part `work` of a call: vectors, KV head and item, the fastest first, so that warps that read the same pages run together.
template <int SPLITS>
struct Warp {
    Columns columns;
    Pages pages;
    u32 kv_head;
    int first;  // split that some column sees
    u64 q;      // the elements of column lane / 4
    bool live;  // whether it sees anything

    __device__ __forceinline__ Warp(const AttendParams& p, const AttendDescriptors& descriptors, const u32* tables,
                                    u32 vector_tiles, u64 work) {
        const Place3 place(work, vector_tiles, p.record.kv_heads);
        kv_head = place.y;
        const u32 item = p.first_item + u32(place.z);
        const Tile tile = tile_of(p, descriptors, item);
        const u32 part = tile.split + (item - tile.item);
        columns = columns_of<SPLITS>(p, descriptors, tile, kv_head, part, u64(place.x) * COLUMNS, live, q);
        const u32* table = tables + tile.table + (u64(part) * SPLITS * SPLIT >> p.record.page_shift);
        pages = {table, p.record.page_shift, columns.span.from, columns.span.to};
        first = columns.span.from / SPLIT;
    }

    __device__ __forceinline__ bool sees_nothing() const { return columns.span.from >= columns.span.to; }
};

template <int WARPS>
__device__ __forceinline__ u32 ring_of(unsigned char* rings) {
    return u32(__cvta_generic_to_shared(rings)) + first_group<WARPS>() * RING_BYTES;
}

// Folds the states that `group_state` finds for the groups of this warp, and those of splits.
template <int DIM, int WARPS, int SPLITS, class GROUP_STATE>
__device__ __forceinline__ State<DIM> fold_groups(const Span& span, int first, const GROUP_STATE& group_state) {
    State<DIM> total = nothing_seen<DIM>();
#pragma unroll 1
    for (int split = first; split < SPLITS && split * SPLIT < span.to; ++split) {
        State<DIM> sum = nothing_seen<DIM>();
        for (int group = split * GROUPS + first_group<WARPS>(); group < (split + 1) * GROUPS; group += WARPS) {
            if (!sees_group(span.from, span.to, group)) continue;
            State<DIM> state;
            group_state(group, state);
            fold(sum, state);
        }
        if constexpr (SPLITS > 1) {
            fold(total, sum);
        } else {
            total = sum;
        }
    }
    return total;
}

// Writes the states, once the block's warps have folded theirs.
template <bool PAIRED, int WARPS, int DIM>
__device__ __forceinline__ void give(const Columns& columns, const State<DIM>& total, const float (&lack)[2],
                                     float* states, unsigned char* rings) {
    if constexpr (WARPS > 1) {
        fold_warps<PAIRED>(columns, total, lack, states, *reinterpret_cast<Parts<DIM>*>(rings));
    } else {
        store<PAIRED>(columns, total, lack, states);
    }
}

// A kernel whose blocks take part after part by `attend<…>` of its file.
#define ATTEND(NAME, WARPS, ...)                                                                                       \
    extern "C" __global__ void __launch_bounds__(32 * WARPS, 8 / WARPS)                                                \
        NAME(const __grid_constant__ AttendParams p, const __grid_constant__ Arena arena,                              \
             const __grid_constant__ AttendDescriptors descriptors, const u32* tables, const u64 q,                    \
             const float* channels, float* states, const u32 vector_tiles) {                                           \
        extern __shared__ __align__(1024) unsigned char rings[];                                                       \
        const u64 total = u64(p.items) * p.record.kv_heads * vector_tiles;                                             \
        for (u64 work = blockIdx.x; work < total; work += gridDim.x)                                                   \
            attend<__VA_ARGS__>(p, arena, descriptors, tables, q, channels, states, vector_tiles, work, rings);              \
    }
