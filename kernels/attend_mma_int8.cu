// attend on tensor cores: the operation of attend.cu, for int8 pages and any queries. See attend_mma.cu for the plan.
//
// Products are of integers, and exact. A query takes up the channels of the keys and becomes, by a power of two, a column of
// numbers of 24 bits: three digits, each a factor of a product with the codes. So do the weights of a group, times the scales
// of their values. The scales of keys multiply the scores. What a column does not see has a weight of 0, and codes are finite.
#include "digits.cuh"
#include "warp.cuh"
#include "weights.cuh"

namespace {

// Column lane / 4: digits of its elements 4 (lane % 4) and the next three of every sixteen, the highest first. Columns
// 2 (lane % 4) and the next: what their scores are multiplied by, and what they lack.
template <int DIM>
struct QueryColumns {
    u32 digits[3][DIM / 16];
    float scale[2], lack[2];
};

// `channels` are those of the KV head.
template <int DIM>
__device__ __forceinline__ QueryColumns<DIM> load_query(const AttendParams& p, u64 q, u64 first, bool live,
                                                        const float* channels) {
    const u32 lane = threadIdx.x % 32;
    QueryColumns<DIM> query;
    float x[DIM / 16][4], largest = 0, lack = 0;
    bool finite = true;
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
            finite = finite && fabsf(x[i][e]) <= FLT_MAX;
            largest = fmaxf(largest, fabsf(x[i][e]));
        }
    }
    float scale = finite ? p.scale_log2 : NAN;
#pragma unroll
    for (int mask = 1; mask <= 2; mask *= 2) {
        lack = __fadd_rn(lack, __shfl_xor_sync(WHOLE_WARP, lack, mask));
        largest = fmaxf(largest, __shfl_xor_sync(WHOLE_WARP, largest, mask));
        scale = __fadd_rn(scale, __shfl_xor_sync(WHOLE_WARP, scale, mask));
    }
    const Fixed<23> fixed(largest);
#pragma unroll
    for (u32 i = 0; i < DIM / 16; ++i) {
        u32 numbers[4];
#pragma unroll
        for (u32 e = 0; e < 4; ++e) numbers[e] = signed_number(fixed, x[i][e]);
#pragma unroll
        for (u32 digit = 0; digit < 3; ++digit) query.digits[digit][i] = digits_of(numbers, 2 - digit);
    }
    // The sum of four.
    scale = __fmul_rn(__fmul_rn(scale, 0.25f), fixed.up);
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
        int high[4] = {}, middle[4] = {}, low[4] = {};
#pragma unroll
        for (u32 i = 0; i < DIM / 32; ++i) {
            u32 k[4];
            load_matrices(k, at ^ (i * 32));
            multiply_signed(high, k, {q.digits[0][2 * i], q.digits[0][2 * i + 1]});
            multiply_unsigned(middle, k, {q.digits[1][2 * i], q.digits[1][2 * i + 1]});
            multiply_unsigned(low, k, {q.digits[2][2 * i], q.digits[2][2 * i + 1]});
        }
#pragma unroll
        for (u32 half = 0; half < 2; ++half) {
            const u32 scale = piece + ROWS::SCALES_AT + (lane / 4 + 8 * half) * 4;
            const float key_scale = load_shared(scale);
            value_scales[AT][half] = load_shared(scale + PIECE * 4);
#pragma unroll
            for (u32 c = 0; c < 2; ++c) {
                const u32 i = 2 * half + c;
                // Neither part needs more than 31 bits, since a row has at most 128 codes.
                const float all = __fmaf_rn(float(high[i]), 65536.0f, float(middle[i] * 256 + low[i]));
                scores[AT][i] = __fmul_rn(all, key_scale);
            }
        }
        find_scores<ROWS, DIM, AT + 1>(ring, q, scores, value_scales);
    }
}

// The weights of a group's tokens times the scales of their values, as digits: of two pieces a product. And what brings the
// sums of columns 2 (lane % 4) and the next back.
struct ValueFactors {
    u32 digits[3][PIECES / 2][2];
    float up[2];
};

template <bool WHOLE>
__device__ __forceinline__ ValueFactors factors_of(const Columns& columns, int group, const float (&weights)[PIECES][4],
                                               const float (&value_scales)[PIECES][2]) {
    u32 numbers[PIECES][4];
    ValueFactors factors;
#pragma unroll
    for (int c = 0; c < 2; ++c) {
        float scaled[2 * PIECES], largest = 0;
#pragma unroll
        for (int i = 0; i < 2 * PIECES; ++i) {
            // The scale of what is not seen may be anything.
            const bool seen = WHOLE || sees_token(columns, group, c, i / 2, i % 2);
            scaled[i] = seen ? __fmul_rn(weights[i / 2][i % 2 * 2 + c], value_scales[i / 2][i % 2]) : 0.0f;
            largest = fmaxf(largest, scaled[i]);
        }
#pragma unroll
        for (int mask = 4; mask <= 16; mask *= 2) largest = fmaxf(largest, __shfl_xor_sync(WHOLE_WARP, largest, mask));
        const Fixed<24> fixed(largest);
#pragma unroll
        for (int i = 0; i < 2 * PIECES; ++i)
            numbers[i / 2][i % 2 * 2 + c] = unsigned_number(fixed, scaled[i]);
        factors.up[c] = fixed.up;
    }
#pragma unroll
    for (int piece = 0; piece < PIECES; ++piece) {
        const Transposed digits(numbers[piece]);
#pragma unroll
        for (u32 digit = 0; digit < 3; ++digit) factors.digits[digit][piece / 2][piece % 2] = digits.of[digit];
    }
    return factors;
}

// Where this lane's rows of the group's pieces of values are.
template <class ROWS, int DIM, int AT = 0, class RING>
__device__ __forceinline__ void find_pieces(RING& ring, u32 (&at)[PIECES]) {
    if constexpr (AT < PIECES) {
        const u32 lane = threadIdx.x % 32;
        at[AT] = ring.template next<PIECES + AT>() + (lane / 16 * 8 + lane % 8) * DIM +
                 (lane / 8 % 2 ^ ROWS::permutation(lane % 8)) * 16;
        find_pieces<ROWS, DIM, AT + 1>(ring, at);
    }
}

// The group's values. Rows of products: of every sixteen elements the even ones, then the odd ones.
template <class ROWS, int DIM, class RING>
__device__ __forceinline__ void find_values(RING& ring, const ValueFactors& factors, State<DIM>& state) {
    u32 at[PIECES];
    find_pieces<ROWS, DIM>(ring, at);
#pragma unroll
    for (u32 i = 0; i < DIM / 32; ++i) {
        u32 v[PIECES][4];
#pragma unroll
        for (int piece = 0; piece < PIECES; ++piece) load_transposed(v[piece], at[piece] ^ (i * 32));
#pragma unroll
        for (u32 chunk = 0; chunk < 2; ++chunk) {
            u32 a[PIECES / 2][4];
#pragma unroll
            for (int piece = 0; piece < PIECES; ++piece) {
                const u32 early = v[piece][chunk], late = v[piece][chunk + 2];
                a[piece / 2][piece % 2 * 2] = bytes_of<0>(early, late);
                a[piece / 2][piece % 2 * 2 + 1] = bytes_of<1>(early, late);
            }
            int high[4] = {}, low[4] = {};
#pragma unroll
            for (int pair = 0; pair < PIECES / 2; ++pair) {
                multiply_unsigned(high, a[pair], factors.digits[0][pair]);
                multiply_unsigned(low, a[pair], factors.digits[2][pair]);
            }
#pragma unroll
            for (int e = 0; e < 4; ++e) high[e] *= 256;
#pragma unroll
            for (int pair = 0; pair < PIECES / 2; ++pair) multiply_unsigned(high, a[pair], factors.digits[1][pair]);
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const float all = __fmaf_rn(float(high[e]), 256.0f, float(low[e]));
                state.o[2 * i + chunk][e] = __fmul_rn(all, factors.up[e % 2]);
            }
        }
    }
}

// Part `work` of the call.
template <int DIM, class SHARE>
__device__ __forceinline__ void attend(const AttendParams& p, const Arena& arena,
                                       const AttendDescriptors& descriptors, const u32* tables, u64 q, const float* channels, float* states,
                                       u32 vector_tiles, u64 work, unsigned char* rings) {
    using Codes = Rows<DIM, true>;
    const Warp<SHARE> warp(p, descriptors, tables, vector_tiles, work);
    if (warp.sees_nothing()) return;
    Ring<Codes, SHARE, PIECES> ring({p.record, arena, warp.pages, warp.first, warp.kv_head},
                                            ring_of<SHARE>(rings));
    // While the first keys are on their way.
    const QueryColumns<DIM> query =
        load_query<DIM>(p, q, warp.q, warp.live, channels + 3ull * warp.kv_head * DIM);
    const auto group_state = [&](int group, State<DIM>& state) {
        float scores[PIECES][4], value_scales[PIECES][2];
        find_scores<Codes>(ring, query, scores, value_scales);
        find_weights(warp.columns, group, query.scale, scores, state);
        const bool whole = sees_whole_group(warp.columns.span, group);
        const ValueFactors factors = whole ? factors_of<true>(warp.columns, group, scores, value_scales)
                                       : factors_of<false>(warp.columns, group, scores, value_scales);
        find_values<Codes>(ring, factors, state);
    };
    const State<DIM> total = fold_groups<DIM, SHARE>(warp.columns.span, warp.first, group_state);
    release_next();
    give<true, SHARE>(warp.columns, total, query.lack, states, rings);
}

}  // namespace

ATTEND_KINDS(attend_int8_64, 64)
ATTEND_KINDS(attend_int8_128, 128)
