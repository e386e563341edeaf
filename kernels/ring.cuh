// How do pages reach a warp? As pieces of sixteen rows through a ring in shared memory, several on their way at a time.
//
// A group of tokens is PIECES pieces of keys and as many of values. A piece's rows lie as in the page, but the 16-byte
// chunks of a row are permuted by the row's number, so that eight rows of a column of chunks lie in different banks. Pieces
// of quantised keys bring the scales of their keys and then of their values, which follow the rows. Rows that nobody sees may hold
// anything.
#pragma once
#include "columns.cuh"
#include "mma.cuh"
#include "record.cuh"

constexpr int PIECE = 16;                // tokens of a piece
constexpr int GROUP = 64;                // tokens of a group
constexpr int PIECES = GROUP / PIECE;    // of keys, and of values
constexpr int GROUPS = SPLIT / GROUP;    // of a split
constexpr int RING_BYTES = 24576;        // of a warp

// How a block's part of a call, SPLITS splits, goes to its warps: all to one, a group of the only split to each, or a split.
template <int WARPS_, int SPLITS_>
struct Share {
    static constexpr int WARPS = WARPS_, SPLITS = SPLITS_;
    static constexpr bool BY_SPLITS = WARPS > 1 && SPLITS > 1, BY_GROUPS = WARPS > 1 && SPLITS == 1;
    static_assert(WARPS == 1 || (BY_SPLITS ? WARPS == SPLITS : WARPS == GROUPS), "one each");

    static __device__ __forceinline__ int warp() { return WARPS > 1 ? threadIdx.x / 32 : 0; }

    // This warp's groups of a split: the first, and the step from one to the next.
    static __device__ __forceinline__ int first() { return BY_GROUPS ? warp() : 0; }
    static constexpr int STEP = BY_GROUPS ? WARPS : 1;

    // One past its last split, and whether it has more than one.
    static __device__ __forceinline__ int end() { return BY_SPLITS ? warp() + 1 : SPLITS; }
    static constexpr bool SEVERAL = SPLITS > 1 && !BY_SPLITS;
};

__device__ __forceinline__ bool sees_group(int from, int to, int group) {
    return group * GROUP < to && (group + 1) * GROUP > from;
}

constexpr int RUN = 8;  // tokens of a run: a page holds one or more, and a split one for each lane

// The pages of one or more splits: where they are in the table, and which tokens are seen.
struct Pages {
    const u32* table;
    u32 page_shift;
    int from, to;

    // The table entry of the page of this lane's run of a split; the arena's first frame where nobody sees that page.
    __device__ __forceinline__ u32 entry(int split) const {
        const int page = (split * SPLIT + int(threadIdx.x % 32) * RUN) >> page_shift;
        const bool seen = page << page_shift < to && (page + 1) << page_shift > from;
        return seen ? __ldg(table + page) : 0;
    }

    // The slot of a run.
    __device__ __forceinline__ u32 slot(u32 run) const { return run * RUN & ((1u << page_shift) - 1); }
};

// Rows of a page, for keys and values alike: bytes, and whether they have scales.
template <u32 BYTES, bool SCALED>
struct Rows {
    static constexpr u32 ROW = BYTES;
    static constexpr bool SCALES = SCALED;
    static constexpr u32 CHUNKS = ROW / 16;
    static constexpr u32 COPIED = 32 / CHUNKS;  // by one copy of a warp
    static constexpr u32 SCALES_AT = PIECE * ROW;
    static constexpr u32 PIECE_BYTES = SCALES_AT + (SCALES ? 2 * PIECE * 4 : 0);

    // What the number of a chunk is combined with in row `row`, of eight.
    static __device__ __forceinline__ u32 permutation(u32 row) { return CHUNKS < 8 ? row / (8 / CHUNKS) % CHUNKS : row % 8; }
};

// The groups of a warp, as far as some column sees them: where the next piece to load is.
template <class ROWS, class SHARE>
struct Source {
    static constexpr u32 ROW = ROWS::ROW;

    const RecordParams& record;
    const Arena& arena;
    Pages pages;
    u64 run;         // where this lane's run of the group's split is, but for a head's rows
    u32 ahead = 0;   // the table entry of its run of the split after that
    u64 key, value;  // offsets of this lane's chunk of the head's first rows
    u32 lane_at;     // where it goes to in a piece
    u64 scales = 0;  // offset of this lane's scales, of keys or values
    int split, group;

    // `first` is the first split to look at.
    __device__ __forceinline__ Source(const RecordParams& record, const Arena& arena, const Pages& pages, int first,
                                      u32 kv_head)
        : record(record), arena(arena), pages(pages), run(run_at(pages.entry(first))), split(first),
          group(first * GROUPS + SHARE::first() - SHARE::STEP) {
        look_ahead();
        const u32 lane = threadIdx.x % 32, row = lane / ROWS::CHUNKS, chunk = lane % ROWS::CHUNKS;
        key = key_at(record, kv_head, 0) + row * ROW + chunk * 16;
        value = value_at(record, kv_head, 0) + row * ROW + chunk * 16;
        lane_at = row * ROW + (chunk ^ ROWS::permutation(row)) * 16;
        if constexpr (ROWS::SCALES)
            scales = (lane % 8 < 4 ? key_scale_at(record, kv_head, 0) : value_scale_at(record, kv_head, 0)) + lane % 2 * 16;
    }

    __device__ __forceinline__ u64 run_at(u32 entry) const {
        return frame_at(arena, record, entry) + pages.slot(threadIdx.x % 32) * ROW;
    }

    __device__ __forceinline__ void look_ahead() {
        if (SHARE::SEVERAL && split + 1 < SHARE::SPLITS) ahead = pages.entry(split + 1);
    }

    static __device__ __forceinline__ int end() { return SHARE::end() * GROUPS; }

    // Goes to the next group.
    __device__ __forceinline__ void advance() {
        do group += SHARE::STEP;
        while (group < end() && !sees_group(pages.from, pages.to, group));
        if (SHARE::SEVERAL && group < end() && group / GROUPS > split) {
            split += 1;  // what is seen has no gaps
            run = run_at(ahead);
            look_ahead();
        }
    }

    // Starts the copy of piece `AT` of the group. Where nobody sees any of it, its place keeps what it had.
    template <int AT>
    __device__ __forceinline__ void load(u32 at) {
        const int token = group * GROUP + AT % PIECES * PIECE;
        if (group < end() && token < pages.to && token + PIECE > pages.from) {
            const u32 first = u32(token) % SPLIT / RUN;
            if constexpr (ROWS::SCALES && AT < PIECES) load_scales(at + ROWS::SCALES_AT, first);
#pragma unroll
            for (u32 half = 0; half < 2; ++half) {
                const u64 rows = __shfl_sync(WHOLE_WARP, run, first + half) + (AT < PIECES ? key : value);
#pragma unroll
                for (u32 i = 0; i < RUN; i += ROWS::COPIED)
                    copy_async(at + (lane_at ^ ROWS::permutation(i) * 16) + (RUN * half + i) * ROW, rows + i * ROW);
            }
        }
        end_batch();
    }

    // The scales of a piece, four a lane: of its keys, then of its values.
    __device__ __forceinline__ void load_scales(u32 at, u32 first) {
        const u32 lane = threadIdx.x % 32, mine = first + lane % 4 / 2, slot = pages.slot(mine);
        const u64 rows = __shfl_sync(WHOLE_WARP, run, mine);
        if (lane < 8) copy_async(at + lane * 16, rows - slot * ROW + scales + slot * 4);
    }
};

// The ring of a warp. Piece by piece, `next` waits for one and starts the load of the one AHEAD later. A piece stays until the
// HELD-th after it is asked for.
template <class ROWS, class SHARE, int HELD = 1>
struct Ring {
    static constexpr u32 BYTES = ROWS::PIECE_BYTES;
    static constexpr int STAGES = RING_BYTES / BYTES;
    static constexpr int AHEAD = STAGES - HELD;
    static_assert(BYTES % 16 == 0 && AHEAD > 1, "copies of sixteen bytes, several on their way");

    Source<ROWS, SHARE> source;
    u32 base, from, to;  // the next piece, and where the one to load goes

    __device__ __forceinline__ Ring(const Source<ROWS, SHARE>& source, u32 base)
        : source(source), base(base), from(base), to(base + AHEAD * BYTES) {
        start<0>();
    }

    template <int I>
    __device__ __forceinline__ void start() {
        if constexpr (I < AHEAD) {
            load<I>(base + I * BYTES);
            start<I + 1>();
        }
    }

    template <int I>
    __device__ __forceinline__ void load(u32 to) {
        constexpr int AT = I % (2 * PIECES);
        if constexpr (AT == 0) source.advance();
        source.template load<AT>(to);
    }

    __device__ __forceinline__ u32 after(u32 at) const { return at == base + (STAGES - 1) * BYTES ? base : at + BYTES; }

    // Where piece `AT` of the group is.
    template <int AT>
    __device__ __forceinline__ u32 next() {
        wait_batches<AHEAD - 1>();
        // Every lane's part has come, and no lane still reads the piece whose place the new one takes.
        __syncwarp();
        load<AT + AHEAD>(to);
        to = after(to);
        const u32 at = from;
        from = after(at);
        return at;
    }
};
