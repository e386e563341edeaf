// attend for chunks of a prompt: the operation of attend_mma.cu where many rows of one sequence come in a call. Every vector
// gets the bits that it gets there.
//
// Alone, a warp would read keys and values for eight vectors. Here a block's warps share them: each has sixteen vectors, and
// all go through the groups of the work item, the next of which is on its way. Groups fold into the state of a split in
// registers, splits into that of a section in shared memory, and sections, where an item has many, into the state in memory.
//
// Two warps share a scheduler. One of them is half a group behind the other, so that one's products and the other's weights
// keep different units busy.
#include "vectors.cuh"
#include "weights.cuh"

namespace {

// What lies in a block's shared memory, behind the groups of keys and values.
template <int DIM, int WARPS>
struct Block {
    static constexpr int ALL = WARPS * VECTORS;
    static constexpr bool STAGGERED = WARPS > 4;
    static constexpr int AHEAD = STAGGERED ? 2 : 1;  // groups that are on their way
    static constexpr int COMING = AHEAD + 3;         // groups whose runs are known: to others, after they have met
    static constexpr u32 STAGE = 2 * GROUP * 2 * DIM;
    static constexpr u32 STAGES_BYTES = (AHEAD + 1) * STAGE;

    float4 o[WARPS][DIM / 8][32];  // of the section's state, by thread
    float4 sums[WARPS][8];         // maxima and sums of weights of a thread's two vectors
    u64 runs[COMING][GROUP / RUN];
    u32 state[ALL];  // where states are, in words
    int from[ALL], to[ALL];
    int first[WARPS], last[WARPS];
};

// What this thread's two vectors see.
template <class BLOCK>
__device__ __forceinline__ Seen seen_by(const BLOCK& block) {
    const u32 mine = threadIdx.x / 32 * VECTORS + threadIdx.x % 32 / 4;
    return {{block.from[mine], block.from[mine + 8]}, {block.to[mine], block.to[mine + 8]}};
}

// Scores of the group whose keys are at `keys`.
template <u32 FORMAT, int DIM>
__device__ __forceinline__ void find_scores(u32 keys, const u32 (&q)[DIM / 16][4], float (&scores)[GROUP / 8][4]) {
    const u32 lane = threadIdx.x % 32;
    const u32 first = keys + (lane / 16 * 8 + lane % 8) * (2 * DIM) + (lane / 8 % 2 ^ lane % 8) * 16;
    constexpr int AT_ONCE = 2;  // pieces
#pragma unroll
    for (int piece = 0; piece < PIECES; piece += AT_ONCE) {
        float even[2 * AT_ONCE][4] = {}, odd[2 * AT_ONCE][4] = {};
#pragma unroll
        for (u32 i = 0; i < DIM / 16; ++i) {
#pragma unroll
            for (int j = 0; j < AT_ONCE; ++j) {
                u32 k[4];
                load_matrices(k, (first + (piece + j) * PIECE * 2 * DIM) ^ (i * 32));
                multiply<FORMAT>(i % 2 ? odd[2 * j] : even[2 * j], q[i], {k[0], k[1]});
                multiply<FORMAT>(i % 2 ? odd[2 * j + 1] : even[2 * j + 1], q[i], {k[2], k[3]});
            }
        }
#pragma unroll
        for (int j = 0; j < 2 * AT_ONCE; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e) scores[2 * piece + j][e] = __fadd_rn(even[j][e], odd[j][e]);
    }
}

// Adds weights × values of a group that every vector sees whole.
template <u32 FORMAT, int DIM>
__device__ __forceinline__ void add_whole(u32 values, const VectorWeights<FORMAT> (&weights)[PIECES], const Fold& fold,
                                          VectorState<DIM>& sum) {
    const u32 lane = threadIdx.x % 32;
    const u32 first = values + lane % 16 * (2 * DIM) + (lane / 16 ^ lane % 8) * 16;
    constexpr int AT_ONCE = 4;  // times sixteen elements
#pragma unroll
    for (u32 i = 0; i < DIM / 16; i += AT_ONCE) {
        float o[2 * AT_ONCE][4] = {};
#pragma unroll
        for (int piece = 0; piece < PIECES; ++piece) {
            u32 v[AT_ONCE][4];
#pragma unroll
            for (u32 j = 0; j < AT_ONCE; ++j) load_transposed(v[j], (first + piece * PIECE * 2 * DIM) ^ ((i + j) * 32));
#pragma unroll
            for (u32 j = 0; j < 2 * AT_ONCE; ++j)
                multiply<FORMAT>(o[j], weights[piece].high, {v[j / 2][j % 2 * 2], v[j / 2][j % 2 * 2 + 1]});
#pragma unroll
            for (u32 j = 0; j < 2 * AT_ONCE; ++j)
                multiply<FORMAT>(o[j], weights[piece].low, {v[j / 2][j % 2 * 2], v[j / 2][j % 2 * 2 + 1]});
        }
#pragma unroll
        for (u32 j = 0; j < 2 * AT_ONCE; ++j) fold(sum.o[2 * i + j], o[j]);
    }
}

// Adds the values of a piece of which every vector that sees any sees tokens `from` to `to`. Others count as zeros: a weight
// of zero would not do, since what is stored there may be infinite or NaN.
template <u32 FORMAT, int DIM>
__device__ __forceinline__ void add_some(int from, int to, u32 at, const VectorWeights<FORMAT>& weights,
                                         float (&o)[DIM / 8][4]) {
    const int mine = 2 * (threadIdx.x % 4);
    const u32 early = keep(mine, from, to), late = keep(mine + 8, from, to);
#pragma unroll
    for (u32 i = 0; i < DIM / 16; ++i) {
        u32 v[4];
        load_transposed(v, at ^ (i * 32));
#pragma unroll
        for (u32 j = 0; j < 2; ++j) {
            const u32 b[2] = {v[2 * j] & early, v[2 * j + 1] & late};
            multiply<FORMAT>(o[2 * i + j], weights.high, b);
            multiply<FORMAT>(o[2 * i + j], weights.low, b);
        }
    }
}

// The same where vectors see different tokens: each has a product of its own.
template <u32 FORMAT, int DIM, class BLOCK>
__device__ __forceinline__ void add_each(const BLOCK& block, int token, u32 at, const VectorWeights<FORMAT>& weights,
                                         float (&o)[DIM / 8][4]) {
    const int mine = 2 * (threadIdx.x % 4), row = threadIdx.x % 32 / 4;
#pragma unroll 1
    for (int vector = 0; vector < VECTORS; ++vector) {
        const u32 index = threadIdx.x / 32 * VECTORS + vector;
        const int from = block.from[index] - token, to = block.to[index] - token;
        if (max(from, 0) >= min(to, PIECE)) continue;
        const u32 early = keep(mine, from, to), late = keep(mine + 8, from, to);
#pragma unroll
        for (u32 i = 0; i < DIM / 16; ++i) {
            u32 v[4];
            load_transposed(v, at ^ (i * 32));
#pragma unroll
            for (u32 j = 0; j < 2; ++j) {
                float(&to)[4] = o[2 * i + j];
                const u32 b[2] = {v[2 * j] & early, v[2 * j + 1] & late};
                float sum[4] = {to[0], to[1], to[2], to[3]};
                multiply<FORMAT>(sum, weights.high, b);
                multiply<FORMAT>(sum, weights.low, b);
#pragma unroll
                for (int e = 0; e < 4; ++e) to[e] = vector == row + e / 2 * 8 ? sum[e] : to[e];
            }
        }
    }
}

// Adds weights × values of a group that some vectors do not see whole, and folds.
template <u32 FORMAT, int DIM, class BLOCK>
__device__ __forceinline__ void add_part(const BLOCK& block, const Span& span, int group, u32 values,
                                         const VectorWeights<FORMAT> (&weights)[PIECES], const Fold& fold,
                                         VectorState<DIM>& sum) {
    const u32 lane = threadIdx.x % 32;
    const u32 first = values + lane % 16 * (2 * DIM) + (lane / 16 ^ lane % 8) * 16;
    float o[DIM / 8][4] = {};
#pragma unroll
    for (int piece = 0; piece < PIECES; ++piece) {
        const int token = group * GROUP + piece * PIECE;
        const u32 at = first + piece * PIECE * 2 * DIM;
        if (token >= span.to || token + PIECE <= span.from) continue;
        if (max(token, span.from) >= span.all_from && min(token + PIECE, span.to) <= span.all_to) {
            add_some<FORMAT, DIM>(span.from - token, span.to - token, at, weights[piece], o);
        } else {
            add_each<FORMAT, DIM>(block, token, at, weights[piece], o);
        }
    }
#pragma unroll
    for (int i = 0; i < DIM / 8; ++i) fold(sum.o[i], o[i]);
}

// Folds a split's states onto those of the splits of its section before it, which lie in shared memory, and so do the sums
// unless it is the `last`.
template <class BLOCK, int DIM>
__device__ __forceinline__ void fold_split(BLOCK& block, VectorState<DIM>& sum, bool first, bool last) {
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float4& sums = block.sums[warp][lane / 4];
    auto& mine = block.o[warp];
    if (!first) {
        float m[2] = {sums.x, sums.y}, l[2] = {sums.z, sums.w};
        const Fold fold(m, l, sum.m, sum.l);
#pragma unroll
        for (int i = 0; i < DIM / 8; ++i) {
            const float4 o = mine[i][lane];
            const float earlier[4] = {o.x, o.y, o.z, o.w};
            fold.onto(earlier, sum.o[i]);
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) sum.m[r] = m[r], sum.l[r] = l[r];
    }
    if (last) return;
#pragma unroll
    for (int i = 0; i < DIM / 8; ++i)
        mine[i][lane] = make_float4(sum.o[i][0], sum.o[i][1], sum.o[i][2], sum.o[i][3]);
    __syncwarp();  // the sums have been read by all who write them
    sums = make_float4(sum.m[0], sum.m[1], sum.l[0], sum.l[1]);
}

// Writes the states of a section, folded onto those of the sections before it.
template <class BLOCK, int DIM>
__device__ __forceinline__ void fold_section(const BLOCK& block, VectorState<DIM>& sum, bool first, float* states) {
    const u32 lane = threadIdx.x % 32, mine = threadIdx.x / 32 * VECTORS + lane / 4;
    const Seen seen = seen_by(block);
    const u32 state[2] = {block.state[mine], block.state[mine + 8]};
    const u64 policy = soon_policy();
    if (!first) {
        float m[2] = {-FLT_MAX, -FLT_MAX}, l[2] = {0, 0};
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            if (seen.from[r] >= seen.to[r]) continue;
            m[r] = states[state[r] + DIM];
            l[r] = states[state[r] + DIM + 1];
        }
        __syncwarp();  // all have read the maxima and sums, which one of them will write
        const Fold fold(m, l, sum.m, sum.l);
#pragma unroll
        for (int i = 0; i < DIM / 8; ++i) {
            float earlier[4] = {};
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                if (seen.from[r] >= seen.to[r]) continue;
                const float2 two = *reinterpret_cast<const float2*>(states + state[r] + 8 * i + 2 * (lane % 4));
                earlier[2 * r] = two.x, earlier[2 * r + 1] = two.y;
            }
            fold.onto(earlier, sum.o[i]);
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) sum.m[r] = m[r], sum.l[r] = l[r];
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        if (seen.from[r] >= seen.to[r]) continue;
        float* to = states + state[r];
#pragma unroll
        for (int i = 0; i < DIM / 8; ++i)
            store_for_next(reinterpret_cast<float2*>(to + 8 * i + 2 * (lane % 4)),
                           make_float2(sum.o[i][2 * r], sum.o[i][2 * r + 1]), policy);
        if (lane % 4 == 0)
            store_for_next(reinterpret_cast<float4*>(to + DIM), make_float4(sum.m[r], sum.l[r], 0, 0), policy);
    }
    __syncwarp();
}

// This thread's part in the copies of groups: a chunk of a row of some runs, of keys and of values.
template <int DIM, int WARPS>
struct Copies {
    static constexpr u32 CHUNKS = DIM / 8, ROWS = 32 * WARPS / CHUNKS;  // rows that the block copies at a time
    static constexpr int COUNT = GROUP / ROWS;
    static_assert(ROWS % RUN == 0, "the same row of a run each time");

    u64 key, value_after;  // from a run's place to the key, and from there to the value
    u32 run, at;           // the first of its runs, and where its chunk goes in a stage
    u64 from[COUNT];

    __device__ __forceinline__ Copies(const RecordParams& record, u32 kv_head) {
        const u32 row = threadIdx.x / CHUNKS, chunk = threadIdx.x % CHUNKS;
        key = key_at(record, kv_head, 0) + row % RUN * (2 * DIM) + chunk * 16;
        value_after = value_at(record, kv_head, 0) - key_at(record, kv_head, 0);
        run = row / RUN;
        at = row * (2 * DIM) + (chunk ^ row % 8) * 16;
    }

    // Looks up where a group is, whose runs are `runs`.
    __device__ __forceinline__ void find(const u64 (&runs)[GROUP / RUN]) {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) from[i] = runs[run + i * (ROWS / RUN)];
    }

    // Starts the copies to `stage`, keys and then values.
    __device__ __forceinline__ void start(u32 stage) const {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            const u32 to = stage + at + i * (ROWS * 2 * DIM);
            copy_async(to, from[i] + key);
            copy_async(to + GROUP * 2 * DIM, from[i] + key + value_after);
        }
    }
};

// Where the runs of groups are: the first lanes of the first warp say it, a group after the other.
template <class BLOCK>
struct Runs {
    BLOCK& block;
    const AttendParams& p;
    const Arena& arena;
    const u32* table;  // of the work item's first token
    int from, to;
    u32 row_bytes, entry = 0;

    __device__ __forceinline__ bool is_mine() const { return threadIdx.x < GROUP / RUN; }

    // The table entry of a run's page; the arena's first frame where nobody sees that page.
    __device__ __forceinline__ u32 entry_of(int group) const {
        const int page = (group * GROUP + int(threadIdx.x) * RUN) >> p.record.page_shift;
        const bool seen = page << p.record.page_shift < to && (page + 1) << p.record.page_shift > from;
        return seen ? __ldg(table + page) : 0;
    }

    __device__ __forceinline__ void say(int group, u32 entry) {
        const u32 slot = (group * GROUP + threadIdx.x * RUN) & ((1u << p.record.page_shift) - 1);
        block.runs[group % BLOCK::COMING][threadIdx.x] = frame_at(arena, p.record, entry) + slot * row_bytes;
    }

    // Of the first `COMING - 1` groups, and later of one more for each call.
    __device__ __forceinline__ void start(int group) {
        if (!is_mine()) return;
#pragma unroll
        for (int i = 0; i + 1 < BLOCK::COMING; ++i) say(group + i, entry_of(group + i));
        entry = entry_of(group + BLOCK::COMING - 1);
    }
    __device__ __forceinline__ void next(int group) {
        if (!is_mine()) return;
        say(group, entry);
        entry = entry_of(group + 1);
    }
};

template <u32 FORMAT, int DIM, int WARPS>
__device__ __forceinline__ void attend(const AttendParams& p, const Arena& arena, const AttendDescriptors& descriptors,
                                       const u32* tables, u64 q, float* states, u32 vector_tiles, u64 work,
                                       unsigned char* rings) {
    using Shared = Block<DIM, WARPS>;
    constexpr u32 STAGE = Shared::STAGE;
    constexpr int AHEAD = Shared::AHEAD;
    Shared& block = *reinterpret_cast<Shared*>(rings + Shared::STAGES_BYTES);
    const u32 stages = u32(__cvta_generic_to_shared(rings)), stages_end = stages + Shared::STAGES_BYTES;
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;

    const Place3 place(work, vector_tiles, p.record.kv_heads);
    const u32 kv_head = place.y, item = p.first_item + u32(place.z);
    const Tile tile = tile_of(p, descriptors, item);
    const u32 part = tile.split + (item - tile.item);

    u32 query[DIM / 16][4];
    Span span;
#pragma unroll
    for (u32 half = 0; half < 2; ++half) {
        const u32 mine = warp * VECTORS + half * COLUMNS;
        const u64 vector = u64(place.x) * Shared::ALL + mine;
        bool live;
        u64 first;
        const Columns columns = columns_of(p, descriptors, tile, kv_head, part, 1 << p.split_shift, vector, live, first);
        u32 column[DIM / 16][2];
        load_column<DIM>(column, p, q, first, live);
#pragma unroll
        for (u32 i = 0; i < DIM / 16; ++i) {
            query[i][half] = column[i][0];
            query[i][2 + half] = column[i][1];
        }
        span.from = min(span.from, columns.span.from);
        span.to = max(span.to, columns.span.to);
        span.all_from = max(span.all_from, columns.span.all_from);
        span.all_to = min(span.all_to, columns.span.all_to);
        if (lane < 4) {
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                block.from[mine + 2 * lane + c] = columns.from[c];
                block.to[mine + 2 * lane + c] = columns.to[c];
                block.state[mine + 2 * lane + c] = u32(columns.state[c]);
            }
        }
    }
    if (lane == 0) {
        block.first[warp] = span.from;
        block.last[warp] = span.to;
    }
    __syncthreads();
    int from = span.from, to = span.to;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
        from = min(from, block.first[w]);
        to = max(to, block.last[w]);
    }
    const int begin = from / GROUP, end = (to + GROUP - 1) / GROUP;

    const u32* table = tables + tile.table + (u64(part) << p.split_shift >> p.record.page_shift);
    Runs<Shared> runs = {block, p, arena, table, from, to, 2 * DIM};
    Copies<DIM, WARPS> copies(p.record, kv_head);
    if (from < to) runs.start(begin);
    __syncthreads();
    if (from >= to) return;
    u32 at = stages, next = stages + AHEAD * STAGE;
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
        copies.find(block.runs[(begin + i) % Shared::COMING]);
        if (begin + i < end) copies.start(stages + i * STAGE);
        end_batch();
    }
    wait_batches<AHEAD - 1>();
    __syncthreads();

    // All warps meet once a group, when nobody reads the one before any more and all that was on its way has come: most before
    // they begin it, the late ones, which have it already, when they know its weights.
    const bool late = Shared::STAGGERED && warp >= WARPS / 2;
    const auto meet = [&](int group) {
        copies.find(block.runs[(group + AHEAD) % Shared::COMING]);
        wait_batches<0>();
        sync_block();
        if (group + AHEAD < end) copies.start(next);
        end_batch();
        next = next + STAGE == stages_end ? stages : next + STAGE;
        runs.next(group + Shared::COMING - 1);
    };
    VectorState<DIM> sum;
    sum.clear();
    bool first_split = true, first_section = true;
#pragma unroll 1
    for (int group = begin; group < end; ++group) {
        if (!late) meet(group);
        const bool sees = sees_group(span.from, span.to, group), whole = sees && sees_whole_group(span, group);
        VectorWeights<FORMAT> weights[PIECES];
        float m[2] = {-FLT_MAX, -FLT_MAX}, l[2] = {0, 0};
        if (sees) {
            float scores[GROUP / 8][4];
            find_scores<FORMAT, DIM>(at, query, scores);
            if (whole) {
                find_weights_of<true>({}, group, p.scale_log2, scores, m, l);
            } else {
                find_weights_of<false>(seen_by(block), group, p.scale_log2, scores, m, l);
            }
#pragma unroll
            for (int i = 0; i < PIECES; ++i) weights[i].set(scores[2 * i], scores[2 * i + 1]);
        }
        if (late) meet(group);
        if (sees) {
            const Fold fold(sum.m, sum.l, m, l);
            const u32 values = at + GROUP * 2 * DIM;
            if (whole) {
                add_whole<FORMAT, DIM>(values, weights, fold, sum);
            } else {
                add_part<FORMAT, DIM>(block, span, group, values, weights, fold, sum);
            }
        }
        at = at + STAGE == stages_end ? stages : at + STAGE;
        const bool last = group + 1 == end, section = last || (group + 1) % (GROUPS * SECTION) == 0;
        if (!section && (group + 1) % GROUPS) continue;
        fold_split(block, sum, first_split, section);
        first_split = section;
        if (section) {
            fold_section(block, sum, first_section, states);
            first_section = false;
        }
        sum.clear();
    }
    wait_batches<0>();
    __syncthreads();
}

}  // namespace

// Rows by blocks that go on to other work where there is more than blocks; the last rows of a chunk, which see most, first.
#define PREFILL(NAME, FORMAT, DIM, WARPS)                                                                              \
    static_assert(Block<DIM, WARPS>::STAGES_BYTES + sizeof(Block<DIM, WARPS>) <= PREFILL_BYTES(WARPS), "too large");   \
    extern "C" __global__ void __launch_bounds__(32 * WARPS, 1)                                                        \
        NAME##_##WARPS(const __grid_constant__ AttendParams p, const u32* tables, const u64 q, const float*,           \
                       float* states, const u32 vector_tiles, const __grid_constant__ Arena arena,                     \
                       const __grid_constant__ AttendDescriptors descriptors) {                                        \
        extern __shared__ __align__(1024) unsigned char rings[];                                                       \
        await_previous();                                                                                              \
        const u64 total = u64(p.items) * p.record.kv_heads * vector_tiles;                                             \
        for (u64 work = blockIdx.x; work < total; work += gridDim.x)                                                   \
            attend<FORMAT, DIM, WARPS>(p, arena, descriptors, tables, q, states, vector_tiles, total - 1 - work,       \
                                       rings);                                                                         \
        release_next();                                                                                                \
    }

// Shared memory of a block. `PREFILL_KINDS` of src/backend/cuda/attend.rs.
#define PREFILL_BYTES(WARPS) (WARPS == 8 ? 166912 : 101376)

#define PREFILL_KINDS(NAME, FORMAT, DIM)                                                                               \
    PREFILL(NAME, FORMAT, DIM, 8)                                                                                      \
    PREFILL(NAME, FORMAT, DIM, 4)

PREFILL_KINDS(attend_prefill_f16_64, F16, 64)
PREFILL_KINDS(attend_prefill_f16_128, F16, 128)
PREFILL_KINDS(attend_prefill_bf16_64, BF16, 64)
PREFILL_KINDS(attend_prefill_bf16_128, BF16, 128)
