// How do scores become weights, and weights factors of products with values? The softmax of a group, two columns a thread.
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
template <bool WHOLE, class STATE>
__device__ __forceinline__ void find_weights_of(const Columns& columns, int group, const float (&scale)[2],
                                                float (&scores)[PIECES][4], STATE& state) {
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
    Weights() = default;
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

// The word of a piece's tokens `token` and the next that keeps what lies from `from` to `to`.
__device__ __forceinline__ u32 keep(int token, int from, int to) {
    return (token >= from && token < to ? 0xffff : 0) | (token + 1 >= from && token + 1 < to ? 0xffff0000 : 0);
}

// Values of a piece of which some columns do not see all: a weight of zero would not do, since what is stored there may be
// infinite or NaN. Each column has a product of its own.
template <u32 FORMAT, int DIM>
__device__ __forceinline__ void add_masked(const Columns& columns, int token, u32 at, const Weights<FORMAT>& weights,
                                           State<DIM>& state) {
    const int part = threadIdx.x % 4;
#pragma unroll 1
    for (int column = 0; column < COLUMNS; ++column) {
        const bool odd = column % 2;
        const int from = __shfl_sync(WHOLE_WARP, odd ? columns.from[1] : columns.from[0], column / 2) - token;
        const int to = __shfl_sync(WHOLE_WARP, odd ? columns.to[1] : columns.to[0], column / 2) - token;
        if (max(from, 0) >= min(to, PIECE)) continue;
        const u32 early = keep(2 * part, from, to), late = keep(2 * part + 8, from, to);
#pragma unroll
        for (u32 i = 0; i < DIM / 16; ++i) {
            u32 v[4];
            load_transposed(v, at ^ (i * 32));
            v[0] &= early;
            v[1] &= early;
            v[2] &= late;
            v[3] &= late;
            float(&o)[4] = state.o[i];
            float sum[4] = {o[0], o[1], o[2], o[3]};
            weights.times(sum, v);
#pragma unroll
            for (int e = 0; e < 4; ++e) o[e] = column == 2 * part + e % 2 ? sum[e] : o[e];
        }
    }
}
