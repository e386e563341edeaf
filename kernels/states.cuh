// How do groups of tokens become the state of a split, and splits that of a section? Folded left to right, by a warp or by
// the warps that have a group each.
#pragma once
#include <cfloat>
#include "columns.cuh"
#include "fold.cuh"
#include "ptx.cuh"
#include "ring.cuh"

// The state of this thread's two columns: row lane / 4 and the one eight below of every sixteen rows of the product.
template <int DIM>
struct State {
    float o[DIM / 16][4];
    float m[2] = {-FLT_MAX, -FLT_MAX}, l[2] = {0, 0};

    __device__ __forceinline__ explicit State(float zero = 0) {
        l[0] = l[1] = zero;
#pragma unroll
        for (int i = 0; i < DIM / 16; ++i) o[i][0] = o[i][1] = o[i][2] = o[i][3] = zero;
    }
};

// A fold starts at −0, so that the first state comes through as it is, to the bit: see merge.cu, whose fold this is.
template <int DIM>
__device__ __forceinline__ State<DIM> nothing_seen() {
    return State<DIM>(-0.0f);
}

template <int DIM>
__device__ __forceinline__ void fold(State<DIM>& sum, const State<DIM>& part) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
        if (part.l[c] == 0) continue;  // it saw nothing
        const Factors factors(sum.m[c], part.m[c]);
        sum.m[c] = factors.m;
        sum.l[c] = factors(sum.l[c], part.l[c]);
#pragma unroll
        for (int i = 0; i < DIM / 16; ++i) {
            sum.o[i][c] = factors(sum.o[i][c], part.o[i][c]);
            sum.o[i][c + 2] = factors(sum.o[i][c + 2], part.o[i][c + 2]);
        }
    }
}

// A vector that sees something has a state, even if its weights add up to zero (its scores may all be minus infinity).
__device__ __forceinline__ bool has_state(const Columns& columns, int c) { return columns.from[c] < columns.to[c]; }

// The element that is row lane / 4 of sixteen (or, as `half` 1, the one eight below) of product `i`. Rows are in the order of
// the elements, or neighbours are the two halves.
template <bool PAIRED>
__device__ __forceinline__ u32 element_of(u32 i, u32 half) {
    const u32 row = threadIdx.x % 32 / 4;
    return 16 * i + (PAIRED ? 2 * row + half : row + 8 * half);
}

// `lack` is what the columns' scores lack.
template <bool PAIRED, int DIM>
__device__ __forceinline__ void store(const Columns& columns, const State<DIM>& state, const float (&lack)[2],
                                      float* states) {
    const u64 policy = soon_policy();
#pragma unroll
    for (int c = 0; c < 2; ++c) {
        if (!has_state(columns, c)) continue;
        float* to = states + columns.state[c];
#pragma unroll
        for (int i = 0; i < DIM / 16; ++i) {
            store_for_next(to + element_of<PAIRED>(i, 0), state.o[i][c], policy);
            store_for_next(to + element_of<PAIRED>(i, 1), state.o[i][c + 2], policy);
        }
        const float4 tail = make_float4(state.m[c], state.l[c], lack[c], 0);
        if (threadIdx.x % 32 < 4) store_for_next(reinterpret_cast<float4*>(to + DIM), tail, policy);
    }
}

// The states of a split's groups, which lie where the rings were.
template <int DIM>
struct Parts {
    float o[GROUPS][COLUMNS][DIM + 4];  // padded, so that a warp's columns lie in different banks
    float m[GROUPS][COLUMNS], l[GROUPS][COLUMNS], lack[COLUMNS];
    float* to[COLUMNS];  // none where there is no state
};

// Folds the groups that a block's warps have taken.
template <bool PAIRED, int DIM>
__device__ __forceinline__ void fold_warps(const Columns& columns, const State<DIM>& state, const float (&lack)[2],
                                           float* states, Parts<DIM>& parts) {
    constexpr u32 THREADS = 32 * GROUPS;
    const u32 warp = threadIdx.x / 32;
    __syncthreads();
#pragma unroll
    for (int c = 0; c < 2; ++c) {
        const u32 column = 2 * (threadIdx.x % 4) + c;
#pragma unroll
        for (int i = 0; i < DIM / 16; ++i) {
            parts.o[warp][column][element_of<PAIRED>(i, 0)] = state.o[i][c];
            parts.o[warp][column][element_of<PAIRED>(i, 1)] = state.o[i][c + 2];
        }
        if (threadIdx.x % 32 >= 4) continue;
        parts.m[warp][column] = state.m[c];
        parts.l[warp][column] = state.l[c];
        if (warp > 0) continue;
        parts.lack[column] = lack[c];
        parts.to[column] = has_state(columns, c) ? states + columns.state[c] : nullptr;
    }
    __syncthreads();
    const u64 policy = soon_policy();
#pragma unroll
    for (u32 i = threadIdx.x; i < COLUMNS * DIM / 4; i += THREADS) {
        const u32 column = i / (DIM / 4), element = i % (DIM / 4) * 4;
        float4 o = make_float4(-0.0f, -0.0f, -0.0f, -0.0f);
        float m = -FLT_MAX, l = -0.0f;
#pragma unroll
        for (int group = 0; group < GROUPS; ++group) {
            const float theirs = parts.l[group][column];
            if (theirs == 0) continue;
            const Factors factors(m, parts.m[group][column]);
            const float4 part = *reinterpret_cast<const float4*>(&parts.o[group][column][element]);
            m = factors.m;
            l = factors(l, theirs);
            o = make_float4(factors(o.x, part.x), factors(o.y, part.y), factors(o.z, part.z), factors(o.w, part.w));
        }
        float* to = parts.to[column];
        if (to == nullptr) continue;
        store_for_next(reinterpret_cast<float4*>(to + element), o, policy);
        if (element == 0) store_for_next(reinterpret_cast<float4*>(to + DIM), make_float4(m, l, parts.lack[column], 0), policy);
    }
    __syncthreads();
}
