// How do scores become weights, and weights factors of a product? The softmax of a group, two columns a thread.
#pragma once
#include "mma.cuh"
#include "states.cuh"

// Whether column `c` of this thread sees token lane / 4 of a piece of the group, or as `half` 1 the one eight later.
__device__ __forceinline__ bool sees_token(const Columns& columns, int group, int c, int piece, int half) {
    const int token = group * GROUP + int(threadIdx.x % 32) / 4 + piece * PIECE + half * 8;
    return token >= columns.from[c] && token < columns.to[c];
}

// Whether every column that sees anything sees all tokens of the group.
__device__ __forceinline__ bool sees_whole_group(const Span& span, int group) {
    return group * GROUP >= span.all_from && (group + 1) * GROUP <= span.all_to;
}

// The scores of a group become weights, once they are multiplied by their columns' scales. Columns that see nothing may hold
// anything in the end.
template <bool WHOLE, int DIM>
__device__ __forceinline__ void find_weights_of(const Columns& columns, int group, const float (&scale)[2],
                                                float (&scores)[PIECES][4], State<DIM>& state) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
        const auto sees = [&](int piece, int half) { return WHOLE || sees_token(columns, group, c, piece, half); };
        float m = -FLT_MAX, l = 0;
#pragma unroll
        for (int i = 0; i < 2 * PIECES; ++i) {
            float& score = scores[i / 2][i % 2 * 2 + c];
            score = sees(i / 2, i % 2) ? __fmul_rn(score, scale[c]) : -FLT_MAX;
            m = fmaxf(m, score);
        }
#pragma unroll
        for (int mask = 4; mask <= 16; mask *= 2) m = fmaxf(m, __shfl_xor_sync(WHOLE_WARP, m, mask));
#pragma unroll
        for (int i = 0; i < 2 * PIECES; ++i) {
            float& score = scores[i / 2][i % 2 * 2 + c];
            score = sees(i / 2, i % 2) ? power_of_two(__fsub_rn(score, m)) : 0.0f;
            l = __fadd_rn(l, score);
        }
#pragma unroll
        for (int mask = 4; mask <= 16; mask *= 2) l = __fadd_rn(l, __shfl_xor_sync(WHOLE_WARP, l, mask));
        state.m[c] = m;
        state.l[c] = l;
    }
}

template <int DIM>
__device__ __forceinline__ void find_weights(const Columns& columns, int group, const float (&scale)[2],
                                             float (&scores)[PIECES][4], State<DIM>& state) {
    if (sees_whole_group(columns.span, group)) {
        find_weights_of<true>(columns, group, scale, scores, state);
    } else {
        find_weights_of<false>(columns, group, scale, scores, state);
    }
}

// A piece's weights as two summands of 16 bits each, tokens × columns.
template <u32 FORMAT>
struct Weights {
    u32 high[2], low[2];
    __device__ __forceinline__ explicit Weights(const float (&weights)[4]) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            u32 large, small;
            pack_sum<FORMAT>(weights[2 * half], weights[2 * half + 1], large, small);
            high[half] = transpose(large);
            low[half] = transpose(small);
        }
    }
    __device__ __forceinline__ void times(float (&o)[4], const u32 (&v)[4]) const {
        multiply<FORMAT>(o, v, high);
        multiply<FORMAT>(o, v, low);
    }
};
