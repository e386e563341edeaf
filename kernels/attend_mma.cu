// attend on tensor cores: the operation of attend.cu, for pages and queries of the same 16-bit type.
//
// A warp takes a split or a section, a KV head and up to eight query vectors, the columns of its products. It streams keys
// and values through a ring of its own (ring.cuh) and gives the state where attend.cu does. Tokens are the rows: a group of
// 64 has scores S = K Q, a maximum, weights P and values Vᵀ P; groups fold left to right into the split's state, and so do
// the splits of a section. In small calls a split's four groups have a warp each, and the block folds them, with the same
// bits.
//
// Sums are f32, and a weight goes into its product as the sum of two elements, so nothing is rounded to 16 bits. What a
// column holds depends on the tokens that its vector sees of a split alone: not on the other columns, or on what lies in
// slots that it does not see (contract C1).
#include "ring.cuh"
#include "states.cuh"

namespace {

// Scores of the group's pieces: of tokens lane / 4 and eight later, two columns each.
template <u32 FORMAT, int DIM, int WARPS, int SPLITS, int AT = 0>
__device__ __forceinline__ void find_scores(Ring<DIM, WARPS, SPLITS>& ring, const u32 (&q)[DIM / 16][2],
                                            float (&scores)[PIECES][4]) {
    if constexpr (AT < PIECES) {
        const u32 lane = threadIdx.x % 32;
        const u32 at = ring.template next<AT>() + lane % 16 * (2 * DIM) + (lane / 16 ^ lane % 8) * 16;
        float even[4] = {}, odd[4] = {};
#pragma unroll
        for (u32 i = 0; i < DIM / 16; ++i) {
            u32 k[4];
            load_matrices(k, at ^ (i * 32));
            multiply<FORMAT>(i % 2 ? odd : even, k, q[i]);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) scores[AT][i] = __fadd_rn(even[i], odd[i]);
        find_scores<FORMAT, DIM, WARPS, SPLITS, AT + 1>(ring, q, scores);
    }
}

// Scores become weights.
template <int DIM>
__device__ __forceinline__ void find_weights(const Columns& columns, int group, float scale, float (&scores)[PIECES][4],
                                             State<DIM>& state) {
    const int first = group * GROUP + int(threadIdx.x % 32) / 4;
#pragma unroll
    for (int c = 0; c < 2; ++c) {
        const auto sees = [&](int piece, int half) {
            const int token = first + piece * PIECE + half * 8;
            return token >= columns.from[c] && token < columns.to[c];
        };
        float m = -FLT_MAX, l = 0;
#pragma unroll
        for (int i = 0; i < 2 * PIECES; ++i) {
            float& score = scores[i / 2][i % 2 * 2 + c];
            score = sees(i / 2, i % 2) ? __fmul_rn(score, scale) : -FLT_MAX;
            m = fmaxf(m, score);
        }
#pragma unroll
        for (int mask = 4; mask <= 16; mask *= 2) m = fmaxf(m, __shfl_xor_sync(WHOLE_WARP, m, mask));
#pragma unroll
        for (int i = 0; i < 2 * PIECES; ++i) {
            float& score = scores[i / 2][i % 2 * 2 + c];
            score = sees(i / 2, i % 2) ? exp2f(__fsub_rn(score, m)) : 0.0f;
            l = __fadd_rn(l, score);
        }
#pragma unroll
        for (int mask = 4; mask <= 16; mask *= 2) l = __fadd_rn(l, __shfl_xor_sync(WHOLE_WARP, l, mask));
        state.m[c] = m;
        state.l[c] = l;
    }
}

// A piece's weights as two summands of 16 bits each, tokens × columns.
template <u32 FORMAT>
struct Weights {
    u32 high[2], low[2];
    __device__ __forceinline__ explicit Weights(const float (&weights)[4]) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float x = weights[2 * half], y = weights[2 * half + 1];
            const u32 rounded = pack<FORMAT>(x, y);
            const float2 whole = unpack<FORMAT>(rounded);
            high[half] = transpose(rounded);
            low[half] = transpose(pack<FORMAT>(__fsub_rn(x, whole.x), __fsub_rn(y, whole.y)));
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

template <u32 FORMAT, int DIM, int WARPS, int SPLITS, int AT = 0>
__device__ __forceinline__ void find_values(Ring<DIM, WARPS, SPLITS>& ring, const Columns& columns, int group,
                                            const float (&scores)[PIECES][4], State<DIM>& state) {
    if constexpr (AT < PIECES) {
        const u32 lane = threadIdx.x % 32;
        const u32 at = ring.template next<PIECES + AT>() + (lane / 16 * 8 + lane % 8) * (2 * DIM) +
                       (lane / 8 % 2 ^ lane % 8) * 16;
        const int token = group * GROUP + AT * PIECE;
        const Span& span = columns.span;
        const Weights<FORMAT> weights(scores[AT]);
        if (max(token, span.from) >= span.all_from && min(token + PIECE, span.to) <= span.all_to) {
#pragma unroll
            for (u32 i = 0; i < DIM / 16; ++i) {
                u32 v[4];
                load_transposed(v, at ^ (i * 32));
                weights.times(state.o[i], v);
            }
        } else {
            add_masked<FORMAT, DIM>(columns, token, at, weights, state);
        }
        find_values<FORMAT, DIM, WARPS, SPLITS, AT + 1>(ring, columns, group, scores, state);
    }
}

// Block `work` of the call: vectors, KV head and item, the fastest first, so that blocks that read the same pages run
// together.
template <u32 FORMAT, int DIM, int WARPS, int SPLITS>
__device__ __forceinline__ void attend(const AttendParams& p, const Arena& arena, const u32* descriptors,
                                       const u32* tables, u64 q, float* states, u32 vector_tiles, u64 work,
                                       unsigned char* rings) {
    const u32 vector_tile = u32(work % vector_tiles);
    const u32 kv_head = u32(work / vector_tiles % p.record.kv_heads);
    const u32 item = p.first_item + u32(work / vector_tiles / p.record.kv_heads);
    const Tile tile = tile_of(reinterpret_cast<const Tile*>(descriptors + p.tiles_at), p.tiles, item);
    const u32 part = tile.split + (item - tile.item);
    bool live;
    u64 q_at;
    const Row* rows = reinterpret_cast<const Row*>(descriptors + p.rows_at);
    const Columns columns =
        columns_of<SPLITS>(p, rows, tile, kv_head, part, u64(vector_tile) * COLUMNS, live, q_at);
    const Span& span = columns.span;
    if (span.from >= span.to) return;
    const u32* table = tables + tile.table + (u64(part) * SPLITS * SPLIT >> p.record.page_shift);
    const Pages pages = {table, p.record.page_shift, span.from, span.to};
    const int first = span.from / SPLIT;
    // On their way together.
    const u32 entry = pages.entry(first);
    u32 query[DIM / 16][2];
    load_column<DIM>(query, p, q, q_at, live);
    Ring<DIM, WARPS, SPLITS> ring({p.record, arena, pages, first, entry, kv_head},
                                  u32(__cvta_generic_to_shared(rings)) + first_group<WARPS>() * RING_BYTES);
    State<DIM> total = nothing_seen<DIM>();
#pragma unroll 1
    for (int split = first; split < SPLITS && split * SPLIT < span.to; ++split) {
        State<DIM> sum = nothing_seen<DIM>();
        for (int group = split * GROUPS + first_group<WARPS>(); group < (split + 1) * GROUPS; group += WARPS) {
            if (!sees_group(span.from, span.to, group)) continue;
            State<DIM> state;
            float scores[PIECES][4];
            find_scores<FORMAT>(ring, query, scores);
            find_weights(columns, group, p.scale_log2, scores, state);
            find_values<FORMAT>(ring, columns, group, scores, state);
            fold(sum, state);
        }
        if constexpr (SPLITS > 1) {
            fold(total, sum);
        } else {
            total = sum;
        }
    }
    release_next();
    if constexpr (WARPS > 1) {
        fold_groups(columns, total, states, *reinterpret_cast<Parts<DIM>*>(rings));
    } else {
        store(columns, total, states);
    }
}

}  // namespace

// The parameters of attend.cu; there are no channels.
#define ATTEND(NAME, FORMAT, DIM, WARPS, SPLITS)                                                                       \
    extern "C" __global__ void __launch_bounds__(32 * WARPS, 8 / WARPS)                                                \
        NAME(const __grid_constant__ AttendParams p, const __grid_constant__ Arena arena,                              \
             const __grid_constant__ AttendDescriptors descriptors, const u32* tables, const u64 q, const float*,      \
             float* states, const u32 vector_tiles) {                                                                  \
        extern __shared__ __align__(1024) unsigned char rings[];                                                       \
        const u32* words = words_of(descriptors);                                                                      \
        const u64 total = u64(p.items) * p.record.kv_heads * vector_tiles;                                             \
        for (u64 work = blockIdx.x; work < total; work += gridDim.x)                                                   \
            attend<FORMAT, DIM, WARPS, SPLITS>(p, arena, words, tables, q, states, vector_tiles, work, rings);         \
    }

ATTEND(attend_f16_64_1, F16, 64, 1, 1)
ATTEND(attend_f16_64_4, F16, 64, 4, 1)
ATTEND(attend_f16_64_section, F16, 64, 1, SECTION)
ATTEND(attend_f16_128_1, F16, 128, 1, 1)
ATTEND(attend_f16_128_4, F16, 128, 4, 1)
ATTEND(attend_f16_128_section, F16, 128, 1, SECTION)
ATTEND(attend_bf16_64_1, BF16, 64, 1, 1)
ATTEND(attend_bf16_64_4, BF16, 64, 4, 1)
ATTEND(attend_bf16_64_section, BF16, 64, 1, SECTION)
ATTEND(attend_bf16_128_1, BF16, 128, 1, 1)
ATTEND(attend_bf16_128_4, BF16, 128, 4, 1)
ATTEND(attend_bf16_128_section, BF16, 128, 1, SECTION)
