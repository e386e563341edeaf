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
#include "warp.cuh"
#include "weights.cuh"

namespace {

// Scores of the group's pieces: of tokens lane / 4 and eight later, two columns each.
template <u32 FORMAT, int DIM, int AT = 0, class RING>
__device__ __forceinline__ void find_scores(RING& ring, const u32 (&q)[DIM / 16][2],
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
        find_scores<FORMAT, DIM, AT + 1>(ring, q, scores);
    }
}

// Rows of a piece, `from` to `to` of which stay what they are, become zeros elsewhere.
template <int DIM>
__device__ __noinline__ void clear_rows(u32 piece, int from, int to) {
    constexpr u32 CHUNKS = DIM / 8;
    for (u32 chunk = threadIdx.x % 32; chunk < PIECE * CHUNKS; chunk += 32) {
        const int row = int(chunk / CHUNKS);
        if (row < from || row >= to) clear_shared(piece + chunk * 16);
    }
    __syncwarp();
}

template <u32 FORMAT, int DIM, int AT = 0, class RING>
__device__ __forceinline__ void find_values(RING& ring, const Columns& columns, int group,
                                            const float (&scores)[PIECES][4], State<DIM>& state) {
    if constexpr (AT < PIECES) {
        const u32 lane = threadIdx.x % 32, piece = ring.template next<PIECES + AT>();
        const u32 at = piece + (lane / 16 * 8 + lane % 8) * (2 * DIM) + (lane / 8 % 2 ^ lane % 8) * 16;
        const int token = group * GROUP + AT * PIECE;
        const Span& span = columns.span;
        const Weights<FORMAT> weights(scores[AT]);
        if (max(token, span.from) >= span.all_from && min(token + PIECE, span.to) <= span.all_to) {
            if (token < span.from || token + PIECE > span.to) clear_rows<DIM>(piece, span.from - token, span.to - token);
#pragma unroll
            for (u32 i = 0; i < DIM / 16; ++i) {
                u32 v[4];
                load_transposed(v, at ^ (i * 32));
                weights.times(state.o[i], v);
            }
        } else {
            add_masked<FORMAT, DIM>(columns, token, at, weights, state);
        }
        find_values<FORMAT, DIM, AT + 1>(ring, columns, group, scores, state);
    }
}

// Part `work` of the call, whose channels are none.
template <u32 FORMAT, int DIM, class SHARE>
__device__ __forceinline__ void attend(const AttendParams& p, const Arena& arena,
                                       const AttendDescriptors& descriptors, const u32* tables, u64 q, const float*,
                                       float* states, u32 vector_tiles, u64 work, unsigned char* rings) {
    const Warp<SHARE> warp(p, descriptors, tables, vector_tiles, work);
    if (warp.sees_nothing()) return;
    Ring<Rows<2 * DIM, false>, SHARE> ring({p.record, arena, warp.pages, warp.first, warp.kv_head},
                                           ring_of<SHARE>(rings));
    // While the first keys are on their way.
    u32 query[DIM / 16][2];
    load_column<DIM>(query, p, q, warp.q, warp.live);
    const float scale[2] = {p.scale_log2, p.scale_log2}, lack[2] = {0, 0};
    const auto group_state = [&](int group, State<DIM>& state) {
        float scores[PIECES][4];
        find_scores<FORMAT, DIM>(ring, query, scores);
        find_weights(warp.columns, group, scale, scores, state);
        find_values<FORMAT, DIM>(ring, warp.columns, group, scores, state);
    };
    const State<DIM> total = fold_groups<DIM, SHARE>(warp.columns.span, warp.first, group_state);
    release_next();
    give<false, SHARE>(warp.columns, total, lack, states, rings);
}

}  // namespace

ATTEND_KINDS(attend_f16_64, F16, 64)
ATTEND_KINDS(attend_f16_128, F16, 128)
ATTEND_KINDS(attend_bf16_64, BF16, 64)
ATTEND_KINDS(attend_bf16_128, BF16, 128)
