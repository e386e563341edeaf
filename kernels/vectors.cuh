// What does a warp hold of sixteen query vectors? The rows of its tensor-core products, two of them a thread: vectors
// lane / 4 and eight later, of every eight columns those at 2 (lane % 4) and the next.
//
// Every sum has the order that it has where vectors are columns (weights.cuh, states.cuh), so both give the same bits.
#pragma once
#include "mma.cuh"
#include "states.cuh"

constexpr int VECTORS = 16;

// The tokens that this thread's two vectors see.
struct Seen {
    int from[2], to[2];
};

// The state of this thread's two vectors: columns are elements.
template <int DIM>
struct VectorState {
    float o[DIM / 8][4];
    float m[2], l[2];

    // See `nothing_seen`.
    __device__ __forceinline__ void clear() {
        m[0] = m[1] = -FLT_MAX;
        l[0] = l[1] = -0.0f;
#pragma unroll
        for (int i = 0; i < DIM / 8; ++i) o[i][0] = o[i][1] = o[i][2] = o[i][3] = -0.0f;
    }
};

// What the sum of a vector and its part in a new state are multiplied by.
struct Fold {
    float mine[2], theirs[2];
    bool some[2];

    // Folds maxima and sums of weights.
    __device__ __forceinline__ Fold(float (&m)[2], float (&l)[2], const float (&their_m)[2], const float (&their_l)[2]) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const Factors factors(m[r], their_m[r]);
            mine[r] = factors.mine;
            theirs[r] = factors.theirs;
            some[r] = their_l[r] != 0;
            if (!some[r]) continue;
            m[r] = factors.m;
            l[r] = factors(l[r], their_l[r]);
        }
    }

    // `o` becomes its fold with `part`.
    __device__ __forceinline__ void operator()(float (&o)[4], const float (&part)[4]) const {
#pragma unroll
        for (int e = 0; e < 4; ++e)
            if (some[e / 2]) o[e] = folded(o[e], part[e], e / 2);
    }

    // `part` becomes the fold of `o` with it.
    __device__ __forceinline__ void onto(const float (&o)[4], float (&part)[4]) const {
#pragma unroll
        for (int e = 0; e < 4; ++e) part[e] = some[e / 2] ? folded(o[e], part[e], e / 2) : o[e];
    }

    __device__ __forceinline__ float folded(float o, float part, int r) const {
        return __fmaf_rn(o, mine[r], __fmul_rn(part, theirs[r]));
    }
};

// Scores of a group become weights: columns are tokens.
template <bool WHOLE>
__device__ __forceinline__ void find_weights_of(const Seen& seen, int group, float scale, float (&scores)[GROUP / 8][4],
                                                float (&m)[2], float (&l)[2]) {
    const int first = group * GROUP + 2 * (threadIdx.x % 4);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const auto sees = [&](int i, int e) {
            const int token = first + 8 * i + e;
            return WHOLE || (token >= seen.from[r] && token < seen.to[r]);
        };
        float most = -FLT_MAX;
#pragma unroll
        for (int i = 0; i < GROUP / 8; ++i) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                float& score = scores[i][2 * r + e];
                score = sees(i, e) ? __fmul_rn(score, scale) : -FLT_MAX;
                most = fmaxf(most, score);
            }
        }
#pragma unroll
        for (int mask = 1; mask <= 2; mask *= 2) most = fmaxf(most, __shfl_xor_sync(WHOLE_WARP, most, mask));
        float sum[2] = {0, 0};
#pragma unroll
        for (int i = 0; i < GROUP / 8; ++i) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                float& score = scores[i][2 * r + e];
                score = sees(i, e) ? power_of_two(__fsub_rn(score, most)) : 0.0f;
                sum[e] = __fadd_rn(sum[e], score);
            }
        }
        float all = __fadd_rn(sum[0], sum[1]);
#pragma unroll
        for (int mask = 1; mask <= 2; mask *= 2) all = __fadd_rn(all, __shfl_xor_sync(WHOLE_WARP, all, mask));
        m[r] = most;
        l[r] = all;
    }
}

// A piece's weights as two summands of 16 bits each, vectors × tokens.
template <u32 FORMAT>
struct VectorWeights {
    u32 high[4], low[4];

    __device__ __forceinline__ void set(const float (&early)[4], const float (&late)[4]) {
        pack_sum<FORMAT>(early[0], early[1], high[0], low[0]);
        pack_sum<FORMAT>(early[2], early[3], high[1], low[1]);
        pack_sum<FORMAT>(late[0], late[1], high[2], low[2]);
        pack_sum<FORMAT>(late[2], late[3], high[3], low[3]);
    }
};
