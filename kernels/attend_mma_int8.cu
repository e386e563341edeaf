// attend on tensor cores: the operation of attend.cu, for int8 pages and any queries. See attend_mma.cu for the plan.
//
// Codes become f16 on the way into a product. A query takes up the channels of the keys and goes in as the sum of two f16,
// a weight times its value's scale as well; both are brought near 1 by a power of two before. So a product is as good as one
// of f32. The scales of keys multiply the scores. What a column does not see has a weight of 0, and codes are finite.
#include "codes.cuh"
#include "warp.cuh"
#include "weights.cuh"

namespace {

// Column lane / 4: its elements, 4 (lane % 4) and the next three of every sixteen. Columns 2 (lane % 4) and the next: what
// their scores are multiplied by, and what they lack.
template <int DIM>
struct QueryColumns {
    u32 high[DIM / 16][2], low[DIM / 16][2];
    bool exact;  // whether all that is low is zero
    float scale[2], lack[2];
};

// `channels` are those of the KV head.
template <int DIM>
__device__ __forceinline__ QueryColumns<DIM> load_query(const AttendParams& p, u64 q, u64 first, bool live,
                                                        const float* channels) {
    const u32 lane = threadIdx.x % 32;
    QueryColumns<DIM> query;
    float x[DIM / 16][4], largest = 0, lack = 0;
#pragma unroll
    for (u32 i = 0; i < DIM / 16; ++i) {
        const u32 d = 16 * i + lane % 4 * 4;
        const float4 mean = __ldg(reinterpret_cast<const float4*>(channels + d));
        const float4 scale = __ldg(reinterpret_cast<const float4*>(channels + DIM + d));
        const float means[4] = {mean.x, mean.y, mean.z, mean.w}, scales[4] = {scale.x, scale.y, scale.z, scale.w};
#pragma unroll
        for (u32 e = 0; e < 4; ++e) {
            const float element = live ? load_element(q, first + u64(d + e) * p.q.element, p.q_dtype) : 0.0f;
            lack = __fmaf_rn(element, means[e], lack);
            x[i][e] = __fmul_rn(element, scales[e]);
            largest = fmaxf(largest, fabsf(x[i][e]));
        }
    }
#pragma unroll
    for (int mask = 1; mask <= 2; mask *= 2) {
        lack = __fadd_rn(lack, __shfl_xor_sync(WHOLE_WARP, lack, mask));
        largest = fmaxf(largest, __shfl_xor_sync(WHOLE_WARP, largest, mask));
    }
    const Power power(largest);
    u32 low = 0;
#pragma unroll
    for (u32 i = 0; i < DIM / 16; ++i) {
#pragma unroll
        for (u32 e = 0; e < 2; ++e) {
            pack_sum<F16>(__fmul_rn(x[i][2 * e], power.down), __fmul_rn(x[i][2 * e + 1], power.down), query.high[i][e],
                  query.low[i][e]);
            low |= query.low[i][e] & 0x7fff7fff;
        }
    }
    query.exact = __ballot_sync(WHOLE_WARP, low != 0) == 0;
    const float scale = __fmul_rn(p.scale_log2, power.up);
    lack = __fmul_rn(lack, p.scale_log2);
#pragma unroll
    for (u32 c = 0; c < 2; ++c) {
        const u32 column = 2 * (lane % 4) + c;
        query.scale[c] = __shfl_sync(WHOLE_WARP, scale, 4 * column);
        query.lack[c] = __shfl_sync(WHOLE_WARP, lack, 4 * column);
    }
    return query;
}

// Scores of the group's pieces, of tokens lane / 4 and eight later, and the scales of those tokens' values.
template <class ROWS, int DIM, int AT = 0, class RING>
__device__ __forceinline__ void find_scores(RING& ring, const QueryColumns<DIM>& q, float (&scores)[PIECES][4],
                                            float (&value_scales)[PIECES][2]) {
    if constexpr (AT < PIECES) {
        const u32 lane = threadIdx.x % 32, piece = ring.template next<AT>();
        const u32 at = piece + lane % 16 * DIM + (lane / 16 ^ ROWS::permutation(lane % 8)) * 16;
        float even[4] = {}, odd[4] = {};
#pragma unroll
        for (u32 i = 0; i < DIM / 32; ++i) {
            u32 k[4];
            load_matrices(k, at ^ (i * 32));
#pragma unroll
            for (u32 chunk = 0; chunk < 2; ++chunk) {
                const u32 a[4] = {codes_of<0, 1>(k[2 * chunk]), codes_of<0, 1>(k[2 * chunk + 1]),
                                  codes_of<2, 3>(k[2 * chunk]), codes_of<2, 3>(k[2 * chunk + 1])};
                multiply_f16(chunk ? odd : even, a, q.high[2 * i + chunk]);
                if (!q.exact) multiply_f16(chunk ? odd : even, a, q.low[2 * i + chunk]);
            }
        }
#pragma unroll
        for (u32 half = 0; half < 2; ++half) {
            const u32 scale = piece + ROWS::SCALES_AT + (lane / 4 + 8 * half) * 4;
            const float key_scale = load_shared(scale);
            value_scales[AT][half] = load_shared(scale + PIECE * 4);
#pragma unroll
            for (u32 c = 0; c < 2; ++c) {
                const u32 i = 2 * half + c;
                scores[AT][i] = __fmul_rn(__fadd_rn(even[i], odd[i]), key_scale);
            }
        }
        find_scores<ROWS, DIM, AT + 1>(ring, q, scores, value_scales);
    }
}

// Multiplies the weights of what is seen by their values' scales, and by a power of two that brings the largest near 1; the
// inverses are returned.
__device__ __forceinline__ float2 take_up_scales(const Columns& columns, int group, float (&weights)[PIECES][4],
                                                 const float (&value_scales)[PIECES][2]) {
    float up[2];
#pragma unroll
    for (int c = 0; c < 2; ++c) {
        float largest = 0;
#pragma unroll
        for (int i = 0; i < 2 * PIECES; ++i) {
            float& weight = weights[i / 2][i % 2 * 2 + c];
            // The scale of what is not seen may be anything.
            const bool seen = sees_token(columns, group, c, i / 2, i % 2);
            weight = seen ? __fmul_rn(weight, value_scales[i / 2][i % 2]) : 0.0f;
            largest = fmaxf(largest, fabsf(weight));
        }
#pragma unroll
        for (int mask = 4; mask <= 16; mask *= 2) largest = fmaxf(largest, __shfl_xor_sync(WHOLE_WARP, largest, mask));
        const Power power(largest);
#pragma unroll
        for (int i = 0; i < 2 * PIECES; ++i) {
            float& weight = weights[i / 2][i % 2 * 2 + c];
            weight = __fmul_rn(weight, power.down);
        }
        up[c] = power.up;
    }
    return make_float2(up[0], up[1]);
}

// Rows of products: of every sixteen elements the even ones, then the odd ones.
template <class ROWS, int DIM, int AT = 0, class RING>
__device__ __forceinline__ void find_values(RING& ring, const float (&weights)[PIECES][4], State<DIM>& state) {
    if constexpr (AT < PIECES) {
        const u32 lane = threadIdx.x % 32;
        const u32 at = ring.template next<PIECES + AT>() + (lane / 16 * 8 + lane % 8) * DIM +
                       (lane / 8 % 2 ^ ROWS::permutation(lane % 8)) * 16;
        const Weights<F16> factors(weights[AT]);
#pragma unroll
        for (u32 i = 0; i < DIM / 32; ++i) {
            u32 v[4];
            load_transposed(v, at ^ (i * 32));
#pragma unroll
            for (u32 chunk = 0; chunk < 2; ++chunk) {
                const u32 a[4] = {codes_of<0, 2>(v[chunk]), codes_of<1, 3>(v[chunk]), codes_of<0, 2>(v[chunk + 2]),
                                  codes_of<1, 3>(v[chunk + 2])};
                factors.times(state.o[2 * i + chunk], a);
            }
        }
        find_values<ROWS, DIM, AT + 1>(ring, weights, state);
    }
}

// Part `work` of the call.
template <int DIM, int WARPS, int SPLITS>
__device__ __forceinline__ void attend(const AttendParams& p, const Arena& arena, const u32* descriptors,
                                       const u32* tables, u64 q, const float* channels, float* states,
                                       u32 vector_tiles, u64 work, unsigned char* rings) {
    using Codes = Rows<DIM, true>;
    const Warp<SPLITS> warp(p, descriptors, tables, vector_tiles, work);
    if (warp.sees_nothing()) return;
    // On their way together.
    const u32 entry = warp.pages.entry(warp.first);
    const QueryColumns<DIM> query =
        load_query<DIM>(p, q, warp.q, warp.live, channels + 3ull * warp.kv_head * DIM);
    Ring<Codes, WARPS, SPLITS> ring({p.record, arena, warp.pages, warp.first, entry, warp.kv_head}, ring_of<WARPS>(rings));
    const auto group_state = [&](int group, State<DIM>& state) {
        float scores[PIECES][4], value_scales[PIECES][2];
        find_scores<Codes>(ring, query, scores, value_scales);
        find_weights(warp.columns, group, query.scale, scores, state);
        const float2 up = take_up_scales(warp.columns, group, scores, value_scales);
        find_values<Codes>(ring, scores, state);
#pragma unroll
        for (int i = 0; i < DIM / 16; ++i) {
#pragma unroll
            for (int e = 0; e < 4; ++e) state.o[i][e] = __fmul_rn(state.o[i][e], e % 2 ? up.y : up.x);
        }
    };
    const State<DIM> total = fold_groups<DIM, WARPS, SPLITS>(warp.columns.span, warp.first, group_state);
    release_next();
    give<true, WARPS>(warp.columns, total, query.lack, states, rings);
}

}  // namespace

ATTEND(attend_int8_64_1, 1, 64, 1, 1)
ATTEND(attend_int8_64_4, 4, 64, 4, 1)
ATTEND(attend_int8_64_section, 1, 64, 1, SECTION)
ATTEND(attend_int8_128_1, 1, 128, 1, 1)
ATTEND(attend_int8_128_4, 4, 128, 4, 1)
ATTEND(attend_int8_128_section, 1, 128, 1, SECTION)
