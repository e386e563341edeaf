// How do pages reach a warp? As pieces of sixteen rows through a ring in shared memory, several on their way at a time.
//
// A group of tokens is PIECES pieces of keys and as many of values. A piece's rows lie as in the page, but the 16-byte
// chunks of a row are permuted by the row's number, so that eight rows of a column of chunks lie in different banks. Pieces
// of quantised keys bring the scales of their keys and then of their values, which follow the rows.
#pragma once
#include "columns.cuh"
#include "mma.cuh"
#include "record.cuh"

constexpr int PIECE = 16;                // tokens of a piece
constexpr int GROUP = 64;                // tokens of a group
constexpr int PIECES = GROUP / PIECE;    // of keys, and of values
constexpr int GROUPS = SPLIT / GROUP;    // of a split
constexpr int RING_BYTES = 24576;        // of a warp

// Where each of a split's groups has a warp of its own, or one takes all.
template <int WARPS>
__device__ __forceinline__ int first_group() {
    return WARPS > 1 ? threadIdx.x / 32 : 0;
}

__device__ __forceinline__ bool sees_group(int from, int to, int group) {
    return group * GROUP < to && (group + 1) * GROUP > from;
}

// The pages of one or more splits, a lane each of a split: where they are in the table, and which tokens are seen.
struct Pages {
    const u32* table;
    u32 page_shift;
    int from, to;

    // The table entry of this lane's page of a split; the arena's first frame where nobody sees it.
    __device__ __forceinline__ u32 entry(int split) const {
        const int page = int(threadIdx.x % 32) << page_shift, first = split * SPLIT + page;
        const bool seen = page < SPLIT && first < to && first + (1 << page_shift) > from;
        return seen ? __ldg(table + (first >> page_shift)) : 0;
    }
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

// Groups `warp`, `warp + WARPS` … of SPLITS splits, as far as some column sees them: where the next piece to load is.
template <class ROWS, int WARPS, int SPLITS>
struct Source {
    static constexpr u32 ROW = ROWS::ROW;
    static constexpr int END = SPLITS * GROUPS;

    const RecordParams& record;
    const Arena& arena;
    Pages pages;
    u64 frame;       // of this lane's page of the group's split
    u32 ahead = 0;   // the table entry of its page of the split after that
    u64 key, value;  // offsets of this lane's chunk of the head's first rows
    u64 scales = 0;  // offset of the head's first scale, of keys or values
    int split, group;

    // `entry` is that of the first split that is seen, `first`.
    __device__ __forceinline__ Source(const RecordParams& record, const Arena& arena, const Pages& pages, int first,
                                      u32 entry, u32 kv_head)
        : record(record), arena(arena), pages(pages), frame(frame_at(arena, record, entry)), split(first),
          group(first * GROUPS + first_group<WARPS>() - WARPS) {
        look_ahead();
        const u32 lane = threadIdx.x % 32;
        key = key_at(record, kv_head, 0) + lane % ROWS::CHUNKS * 16;
        value = value_at(record, kv_head, 0) + lane % ROWS::CHUNKS * 16;
        if constexpr (ROWS::SCALES)
            scales = lane % 8 < 4 ? key_scale_at(record, kv_head, 0) : value_scale_at(record, kv_head, 0);
    }

    __device__ __forceinline__ void look_ahead() {
        if (SPLITS > 1 && split + 1 < SPLITS) ahead = pages.entry(split + 1);
    }

    // Goes to the next group.
    __device__ __forceinline__ void advance() {
        do group += WARPS;
        while (group < END && !sees_group(pages.from, pages.to, group));
        if (SPLITS > 1 && group < END && group / GROUPS > split) {
            split += 1;  // what is seen has no gaps
            frame = frame_at(arena, record, ahead);
            look_ahead();
        }
    }

    // Starts the copy of piece `AT` of the group; rows that nobody sees become zeros.
    template <int AT>
    __device__ __forceinline__ void load(u32 at) {
        if (group < END) {
            const u32 lane = threadIdx.x % 32, row = lane / ROWS::CHUNKS, chunk = lane % ROWS::CHUNKS;
            const int token = group * GROUP + AT % PIECES * PIECE;
            const u64 column = AT < PIECES ? key : value;
            if constexpr (ROWS::SCALES && AT < PIECES) load_scales(at + ROWS::SCALES_AT, token);
            at += row * ROW + (chunk ^ ROWS::permutation(row)) * 16;
#pragma unroll
            for (u32 half = 0; half < 2; ++half) {
                // A page holds at least eight tokens.
                const u32 first = token + 8 * half, slot = first & ((1u << pages.page_shift) - 1);
                const u64 page = __shfl_sync(WHOLE_WARP, frame, first % SPLIT >> pages.page_shift);
                const u64 rows = page + column + (slot + row) * ROW;
#pragma unroll
                for (u32 i = 0; i < 8; i += ROWS::COPIED) {
                    const bool seen = u32(int(first + i + row) - pages.from) < u32(pages.to - pages.from);
                    copy_async((at ^ (ROWS::permutation(i) * 16)) + (8 * half + i) * ROW, rows + i * ROW, seen ? 16 : 0);
                }
            }
        }
        end_batch();
    }

    // The scales of a piece, four a lane: of its keys, then of its values.
    __device__ __forceinline__ void load_scales(u32 at, int token) {
        const u32 lane = threadIdx.x % 32, first = token + lane % 4 * 4;
        const u64 page = __shfl_sync(WHOLE_WARP, frame, first % SPLIT >> pages.page_shift);
        const u32 slot = first & ((1u << pages.page_shift) - 1);
        const bool seen = int(first) < pages.to && int(first) + 4 > pages.from;
        if (lane < 8) copy_async(at + lane * 16, page + scales + 4ull * slot, seen ? 16 : 0);
    }
};

// The ring of a warp. Piece by piece, `next` waits for one and starts the load of the one STAGES - 1 later.
template <class ROWS, int WARPS, int SPLITS>
struct Ring {
    static constexpr u32 BYTES = ROWS::PIECE_BYTES;
    static constexpr int STAGES = RING_BYTES / BYTES;
    static_assert(BYTES % 16 == 0 && STAGES > 2, "copies of sixteen bytes, several on their way");

    Source<ROWS, WARPS, SPLITS> source;
    u32 base, at;

    __device__ __forceinline__ Ring(const Source<ROWS, WARPS, SPLITS>& source, u32 base)
        : source(source), base(base), at(base + (STAGES - 1) * BYTES) {
        start<0>();
    }

    template <int I>
    __device__ __forceinline__ void start() {
        if constexpr (I < STAGES - 1) {
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

    // Where piece `AT` of the group is.
    template <int AT>
    __device__ __forceinline__ u32 next() {
        wait_batches<STAGES - 2>();
        // Every lane's part has come, and no lane still reads the piece before, whose place the new one takes.
        __syncwarp();
        load<AT + STAGES - 1>(at);
        at = at == base + (STAGES - 1) * BYTES ? base : at + BYTES;
        return at;
    }
};
