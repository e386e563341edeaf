// attend: what does each query row see in a split or section of its pages? A state for each row and query head.
//
// One block takes a work item (a tile's rows, and a split or the splits of a section, one after the other), one KV head and
// up to Q query vectors (row × head):
//   1. scores: eight threads share a key row and fold their parts of the dot product;
//   2. softmax: a warp finds a vector's maximum, its weights and their sum;
//   3. values: sixteen groups of eight threads each take every sixteenth run of four tokens; the groups are then folded;
//      the splits of a section fold left to right where their state is, as merge.cu folds those of splits.
// What is added in which order depends on a token's place in its split alone, and every step that rounds is spelled out,
// so neither the other vectors of the block nor Q change a bit of a state (contract C1). K and V are read once a block.
//
// Codes of int8 are used as they are: a key row's scale multiplies its scores, a value row's scale its weights, and the
// query absorbs the channels of the keys.
#include <cfloat>
#include "chunk.cuh"
#include "fold.cuh"
#include "ptx.cuh"
#include "record.cuh"
#include "scales.cuh"
#include "tiles.cuh"

namespace {

constexpr int THREADS = 128;
constexpr int WARPS = THREADS / 32;
constexpr int LANES = 8;                        // threads that share a row
constexpr int GROUPS = THREADS / LANES;         // such groups in a block
constexpr int TOKENS = 4;                       // consecutive tokens that a group takes at a time
constexpr int ROUNDS = SPLIT / (GROUPS * TOKENS);
constexpr int MAX_DIM = 256;
constexpr int MAX_PAGES = SPLIT / 8;
constexpr u32 ALL = 0xffffffff;

static_assert(THREADS == SCALE_THREADS, "every thread loads scales");

// How a split joins what a vector has seen of the section before it, whose maximum and sum are kept.
enum class Join { TAKE, PASS, ADD };
struct Fold {
    bool begun;
    Join join;
    float m, l, mine, theirs;
};

template <u32 FORMAT, int Q>
struct alignas(16) Shared : Scales<FORMAT, Q> {
    // Elements 0 to 3 and 4 to 7 of every chunk apart, so that eight threads read without bank conflicts.
    float4 q[Q][2][MAX_DIM / CHUNK];
    // Scores, then weights. Four words of padding for the same reason.
    float scores[Q][SPLIT + 4];
    float partial[WARPS][Q][LANES * CHUNK];
    u64 frames[MAX_PAGES];
    Vector vectors[Q];
    Fold folds[Q];
};

// Adds `N` values of every thread to those of the thread `MASK` lanes away, then `MASK / 2` … `LAST`. With each step a
// thread keeps the half of the values that its lane's bit says, until one is left.
template <int N, int MASK, int LAST>
__device__ __forceinline__ void fold(float* x, u32 lane) {
    constexpr int HALF = N > 1 ? N / 2 : 1;
    if constexpr (N > 1) {
        const bool upper = lane & MASK;
#pragma unroll
        for (int i = 0; i < HALF; ++i) {
            const float keep = upper ? x[i + HALF] : x[i];
            const float give = upper ? x[i] : x[i + HALF];
            x[i] = __fadd_rn(keep, __shfl_xor_sync(ALL, give, MASK));
        }
    } else {
        x[0] = __fadd_rn(x[0], __shfl_xor_sync(ALL, x[0], MASK));
    }
    if constexpr (MASK > LAST) fold<HALF, MASK / 2, LAST>(x, lane);
}

// Elements of the queries, decoded; zeros for vectors that see nothing. `channels` are those of the KV head, where pages
// are quantised: a warp then takes a vector, scales it and sums up what its scores lack.
template <u32 FORMAT, int Q>
__device__ __forceinline__ void load_queries(const AttendParams& p, Shared<FORMAT, Q>& shared, u64 q,
                                             const float* channels) {
    const auto element = [&](u32 j, u32 d) {
        const Vector& vector = shared.vectors[j];
        const bool live = vector.from < vector.to;
        return live ? load_element(q, vector.q + u64(d) * p.q.element, p.q_dtype) : 0.0f;
    };
    const auto keep = [&](u32 j, u32 d, float x) {
        reinterpret_cast<float*>(&shared.q[j][d % CHUNK / 4][d / CHUNK])[d % 4] = x;
    };
    if constexpr (FORMAT == INT8) {
        const float* scales = channels + p.record.k_dim;
        for (u32 j = threadIdx.x / 32; j < Q; j += WARPS) {
            float c = 0;
#pragma unroll 4
            for (u32 d = threadIdx.x % 32; d < p.record.k_dim; d += 32) {
                const float x = element(j, d);
                c = __fmaf_rn(x, __ldg(channels + d), c);
                keep(j, d, __fmul_rn(x, __ldg(scales + d)));
            }
            fold<1, 16, 1>(&c, threadIdx.x);
            if (threadIdx.x % 32 == 0) shared.c[j] = __fmul_rn(c, p.scale_log2);
        }
    } else {
        for (u32 i = threadIdx.x; i < Q * p.record.k_dim; i += THREADS) {
            const u32 j = i / p.record.k_dim, d = i % p.record.k_dim;
            keep(j, d, element(j, d));
        }
    }
}

// The first of the four tokens that this thread's group takes in a round.
__device__ __forceinline__ int first_token(int round) {
    return (round * GROUPS + int(threadIdx.x) / LANES) * TOKENS;
}

template <u32 FORMAT, int Q>
__device__ __forceinline__ void find_scores(const AttendParams& p, Shared<FORMAT, Q>& shared, const Span& span,
                                            u32 kv_head) {
    const u32 part = threadIdx.x % LANES;
    const u32 mask = (1u << p.record.page_shift) - 1;
    const u64 row_bytes = 4ull * p.record.k_row_words;
    // Chunks of a row that are loaded together, so that enough bytes are on their way.
    constexpr u32 STEP = FORMAT == INT8 ? 2 : 1;
    // The scale of a quantised row comes before that of the scores.
    const float scale = FORMAT == INT8 ? 1.0f : p.scale_log2;
    for (int round = 0; round < ROUNDS; ++round) {
        // The same for the whole warp, because its threads exchange values below.
        const int warp_first = (round * WARPS + int(threadIdx.x) / 32) * 4 * TOKENS;
        if (warp_first + 4 * TOKENS <= span.from || warp_first >= span.to) continue;
        const int token = first_token(round);
        const u64 row = shared.frames[token >> p.record.page_shift] + key_at(p.record, kv_head, token & mask);
        float dots[TOKENS][Q] = {};
        for (u32 first = part; first * CHUNK < p.record.k_dim; first += STEP * LANES) {
            Chunk<FORMAT> stored[STEP][TOKENS];
#pragma unroll
            for (u32 s = 0; s < STEP; ++s) {
                const u32 chunk = first + s * LANES;
                const bool held = s == 0 || chunk * CHUNK < p.record.k_dim;
#pragma unroll
                for (int t = 0; t < TOKENS; ++t) {
                    stored[s][t].clear();
                    if (held && token + t >= span.from && token + t < span.to)
                        stored[s][t].load(row + t * row_bytes + chunk * Chunk<FORMAT>::BYTES);
                }
            }
#pragma unroll
            for (u32 s = 0; s < STEP; ++s) {
                const u32 chunk = first + s * LANES;
                if (s > 0 && chunk * CHUNK >= p.record.k_dim) continue;
                float k[TOKENS][CHUNK];
#pragma unroll
                for (int t = 0; t < TOKENS; ++t) stored[s][t].decode(k[t]);
#pragma unroll
                for (int j = 0; j < Q; ++j) {
                    const float4 low = shared.q[j][0][chunk], high = shared.q[j][1][chunk];
                    const float q[CHUNK] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
                    for (int t = 0; t < TOKENS; ++t) {
#pragma unroll
                        for (int e = 0; e < CHUNK; ++e) dots[t][j] = __fmaf_rn(q[e], k[t][e], dots[t][j]);
                    }
                }
            }
        }
#pragma unroll
        for (int t = 0; t < TOKENS; ++t) fold<Q, LANES / 2, 1>(dots[t], threadIdx.x);
        // Vector j is now whole in the threads whose leading lane bits are j.
        constexpr u32 COPIES = LANES / Q;
        if (part % COPIES == 0) {
            float* to = &shared.scores[part / COPIES][token];
            *reinterpret_cast<float4*>(to) =
                make_float4(__fmul_rn(dots[0][0], scale), __fmul_rn(dots[1][0], scale), __fmul_rn(dots[2][0], scale),
                            __fmul_rn(dots[3][0], scale));
        }
    }
}

// The score of a token that vector j sees.
template <u32 FORMAT, int Q>
__device__ __forceinline__ float score_of(const AttendParams& p, const Shared<FORMAT, Q>& shared, int j, int token) {
    const float score = shared.scores[j][token];
    if constexpr (FORMAT == INT8) return __fmul_rn(__fmul_rn(score, shared.k_scale[token]), p.scale_log2);
    return score;
}

template <u32 FORMAT, int Q>
__device__ __forceinline__ void find_weights(const AttendParams& p, Shared<FORMAT, Q>& shared, float* states) {
    const int lane = threadIdx.x % 32;
    for (int j = threadIdx.x / 32; j < Q; j += WARPS) {
        const Vector vector = shared.vectors[j];
        float score[SPLIT / 32];
        float m = -FLT_MAX;
#pragma unroll
        for (int i = 0; i < SPLIT / 32; ++i) {
            const int token = lane + 32 * i;
            const bool seen = token >= vector.from && token < vector.to;
            score[i] = seen ? score_of<FORMAT, Q>(p, shared, j, token) : -FLT_MAX;
            m = fmaxf(m, score[i]);
        }
#pragma unroll
        for (int mask = 16; mask > 0; mask /= 2) m = fmaxf(m, __shfl_xor_sync(ALL, m, mask));
        float l = 0;
#pragma unroll
        for (int i = 0; i < SPLIT / 32; ++i) {
            const int token = lane + 32 * i;
            const bool seen = token >= vector.from && token < vector.to;
            const float weight = seen ? exp2f(__fsub_rn(score[i], m)) : 0.0f;
            float x = weight;
            if constexpr (FORMAT == INT8) x = seen ? __fmul_rn(weight, shared.v_scale[token]) : 0.0f;
            shared.scores[j][token] = x;
            l = __fadd_rn(l, weight);
        }
        fold<1, 16, 1>(&l, lane);
        if (lane == 0 && vector.from < vector.to) {
            Fold& fold = shared.folds[j];
            // What sums up to nothing is passed over; the first that does not comes as it is.
            fold.join = !fold.begun ? Join::TAKE : l == 0 ? Join::PASS : fold.l == 0 ? Join::TAKE : Join::ADD;
            fold.begun = true;
            if (fold.join == Join::TAKE) {
                fold.m = m;
                fold.l = l;
            } else if (fold.join == Join::ADD) {
                const Factors factors(fold.m, m);
                fold.m = factors.m;
                fold.l = factors(fold.l, l);
                fold.mine = factors.mine;
                fold.theirs = factors.theirs;
            }
            float c = 0;
            if constexpr (FORMAT == INT8) c = shared.c[j];
            *reinterpret_cast<float4*>(states + vector.state + p.record.v_dim) = make_float4(fold.m, fold.l, c, 0);
        }
    }
}

template <u32 FORMAT, int Q>
__device__ __forceinline__ void find_values(const AttendParams& p, Shared<FORMAT, Q>& shared, const Span& span,
                                            u32 kv_head, float* states) {
    constexpr u32 COLUMNS = LANES * CHUNK;
    const u32 lane = threadIdx.x % 32, part = threadIdx.x % LANES;
    const u32 mask = (1u << p.record.page_shift) - 1;
    const u64 row_bytes = 4ull * p.record.v_row_words;
    for (u32 column = 0; column < p.record.v_dim; column += COLUMNS) {
        const u32 first = column + part * CHUNK;
        float o[Q][CHUNK] = {};
        if (first < p.record.v_dim) {
            for (int round = 0; round < ROUNDS; ++round) {
                const int token = first_token(round);
                if (token + TOKENS <= span.from || token >= span.to) continue;
                const u64 row = shared.frames[token >> p.record.page_shift] +
                                value_at(p.record, kv_head, token & mask) + first / CHUNK * Chunk<FORMAT>::BYTES;
                if (token >= span.all_from && token + TOKENS <= span.all_to) {
                    Chunk<FORMAT> stored[TOKENS];
#pragma unroll
                    for (int t = 0; t < TOKENS; ++t) stored[t].load(row + t * row_bytes);
#pragma unroll
                    for (int t = 0; t < TOKENS; ++t) {
                        float v[CHUNK];
                        stored[t].decode(v);
#pragma unroll
                        for (int j = 0; j < Q; ++j) {
                            const float weight = shared.scores[j][token + t];
#pragma unroll
                            for (int e = 0; e < CHUNK; ++e) o[j][e] = __fmaf_rn(weight, v[e], o[j][e]);
                        }
                    }
                    continue;
                }
                // Some vector does not see some of these tokens: a weight of zero would not do, since what is stored
                // there may be infinite or NaN.
                for (int t = 0; t < TOKENS; ++t) {
                    if (token + t < span.from || token + t >= span.to) continue;
                    Chunk<FORMAT> stored;
                    stored.load(row + t * row_bytes);
                    float v[CHUNK];
                    stored.decode(v);
#pragma unroll
                    for (int j = 0; j < Q; ++j) {
                        if (token + t < shared.vectors[j].from || token + t >= shared.vectors[j].to) continue;
                        const float weight = shared.scores[j][token + t];
#pragma unroll
                        for (int e = 0; e < CHUNK; ++e) o[j][e] = __fmaf_rn(weight, v[e], o[j][e]);
                    }
                }
            }
        }
        // The four groups of the warp: two elements are left in each thread.
        const u32 element = (lane & 16 ? 4 : 0) + (lane & 8 ? 2 : 0);
#pragma unroll
        for (int j = 0; j < Q; ++j) {
            fold<CHUNK, 16, 8>(o[j], lane);
            float* to = &shared.partial[threadIdx.x / 32][j][part * CHUNK + element];
            *reinterpret_cast<float2*>(to) = make_float2(o[j][0], o[j][1]);
        }
        __syncthreads();
        for (u32 i = threadIdx.x; i < Q * COLUMNS; i += THREADS) {
            const u32 j = i / COLUMNS, at = i % COLUMNS;
            const Vector& vector = shared.vectors[j];
            if (column + at < p.record.v_dim && vector.from < vector.to) {
                float sum = shared.partial[0][j][at];
#pragma unroll
                for (int warp = 1; warp < WARPS; ++warp) sum = __fadd_rn(sum, shared.partial[warp][j][at]);
                float& to = states[vector.state + column + at];
                const Fold& fold = shared.folds[j];
                if (fold.join == Join::TAKE) to = sum;
                if (fold.join == Join::ADD) to = __fmaf_rn(to, fold.mine, __fmul_rn(sum, fold.theirs));
            }
        }
        __syncthreads();
    }
}

// The split that starts at token `start`, of the sequence whose page table is `table`.
template <u32 FORMAT, int Q>
__device__ __forceinline__ void attend_split(const AttendParams& p, const Arena& arena, Shared<FORMAT, Q>& shared,
                                             const u32* table, u64 q, const float* channels, float* states,
                                             u32 kv_head, u32 start) {
    const Span span = span_of(shared.vectors);
    if (span.from >= span.to) return;
    if (threadIdx.x < SPLIT >> p.record.page_shift) {
        const int page = threadIdx.x, first = page << p.record.page_shift;
        const bool seen = first < span.to && first + (1 << p.record.page_shift) > span.from;
        shared.frames[page] = seen ? frame_at(arena, p.record, __ldg(table + (start >> p.record.page_shift) + page)) : 0;
    }
    load_queries<FORMAT, Q>(p, shared, q, channels + 3ull * kv_head * p.record.k_dim);
    __syncthreads();
    if constexpr (FORMAT == INT8) {
        // On their way while the scores are summed.
        const float4 scales = load_scales(p.record, shared.frames, span, kv_head);
        find_scores<FORMAT, Q>(p, shared, span, kv_head);
        keep_scales<Q>(shared, scales);
    } else {
        find_scores<FORMAT, Q>(p, shared, span, kv_head);
    }
    __syncthreads();
    find_weights<FORMAT, Q>(p, shared, states);
    __syncthreads();
    find_values<FORMAT, Q>(p, shared, span, kv_head, states);
}

// Block `work` of the call: vectors, KV head and item, the fastest first, so that blocks that read the same pages run
// together.
template <u32 FORMAT, int Q>
__device__ __forceinline__ void attend(const AttendParams& p, const Arena& arena, Shared<FORMAT, Q>& shared,
                                       const AttendDescriptors& descriptors, const u32* tables, u64 q, const float* channels,
                                       float* states, u32 vector_tiles, u64 work) {
    const Place3 place(work, vector_tiles, p.record.kv_heads);
    const u32 kv_head = place.y, item = p.first_item + u32(place.z);
    const Tile tile = tile_of(p, descriptors, item);
    const u32 part = tile.split + (item - tile.item);
    if (threadIdx.x < Q) shared.folds[threadIdx.x].begun = false;
    const u32 splits = (1u << p.split_shift) / SPLIT;
    for (u32 split = part * splits; split < part * splits + splits; ++split) {
        const u32 first = split * SPLIT;
        if (threadIdx.x < Q) {
            const u64 index = u64(place.x) * Q + threadIdx.x;
            shared.vectors[threadIdx.x] = vector_of(p, descriptors, tile, kv_head, part, first, SPLIT, index);
        }
        __syncthreads();
        attend_split<FORMAT, Q>(p, arena, shared, tables + tile.table, q, channels, states, kv_head, first);
        __syncthreads();
    }
}

}  // namespace

#define ATTEND(NAME, FORMAT, Q)                                                                                        \
    extern "C" __global__ void __launch_bounds__(THREADS, Q == 8 ? 3 : 4)                                              \
        NAME(const __grid_constant__ AttendParams p, const u32* tables, const u64 q, const float* channels,            \
             float* states, const u32 vector_tiles, const __grid_constant__ Arena arena,                               \
             const __grid_constant__ AttendDescriptors descriptors) {                                                  \
        __shared__ Shared<FORMAT, Q> shared;                                                                           \
        await_previous();                                                                                              \
        const u64 total = u64(p.items) * p.record.kv_heads * vector_tiles;                                             \
        for (u64 work = blockIdx.x; work < total; work += gridDim.x) {                                                 \
            attend<FORMAT, Q>(p, arena, shared, descriptors, tables, q, channels, states, vector_tiles, work);         \
            __syncthreads();                                                                                           \
        }                                                                                                              \
        release_next();                                                                                                \
    }

ATTEND(attend_f32_1, F32, 1)
ATTEND(attend_f32_4, F32, 4)
ATTEND(attend_f32_8, F32, 8)
ATTEND(attend_f16_1, F16, 1)
ATTEND(attend_f16_4, F16, 4)
ATTEND(attend_f16_8, F16, 8)
ATTEND(attend_bf16_1, BF16, 1)
ATTEND(attend_bf16_4, BF16, 4)
ATTEND(attend_bf16_8, BF16, 8)
ATTEND(attend_int8_1, INT8, 1)
ATTEND(attend_int8_4, INT8, 4)
ATTEND(attend_int8_8, INT8, 8)
