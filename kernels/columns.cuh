// What do the eight query vectors of a warp see? The columns of its tensor-core products, two of them a thread.
#pragma once
#include "tiles.cuh"

constexpr int COLUMNS = 8;
constexpr u32 WHOLE_WARP = 0xffffffff;

// Of columns 2 (lane % 4) and the next: the tokens of the split or section that each sees, and where its state is. Of all:
// the tokens that some column sees, and those that every column sees that sees any.
struct Columns {
    int from[2], to[2];
    u64 state[2];
    Span span;
};

// The columns of vectors `first` and after of a tile, over part `part` of `tokens` tokens. `live` and `q` are for the column
// that this thread multiplies by, lane / 4: whether it sees anything, and where its elements are.
__device__ __forceinline__ Columns columns_of(const AttendParams& p, const AttendDescriptors& descriptors,
                                              const Tile& tile, u32 kv_head, u32 part, int tokens, u64 first, bool& live,
                                              u64& q) {
    const u32 lane = threadIdx.x % 32;
    const Vector vector = vector_of(p, descriptors, tile, kv_head, part, part * tokens, tokens, first + lane % COLUMNS);
    Columns columns;
#pragma unroll
    for (u32 c = 0; c < 2; ++c) {
        const u32 from = 2 * (lane % 4) + c;
        columns.from[c] = __shfl_sync(WHOLE_WARP, vector.from, from);
        columns.to[c] = __shfl_sync(WHOLE_WARP, vector.to, from);
        columns.state[c] = __shfl_sync(WHOLE_WARP, vector.state, from);
    }
    live = __shfl_sync(WHOLE_WARP, int(vector.from < vector.to), lane / 4);
    q = __shfl_sync(WHOLE_WARP, vector.q, lane / 4);
    Span& span = columns.span;
    if (vector.from < vector.to) span = {vector.from, vector.to, vector.from, vector.to};
#pragma unroll
    for (u32 mask = 1; mask < COLUMNS; mask *= 2) {
        span.from = min(span.from, __shfl_xor_sync(WHOLE_WARP, span.from, mask));
        span.to = max(span.to, __shfl_xor_sync(WHOLE_WARP, span.to, mask));
        span.all_from = max(span.all_from, __shfl_xor_sync(WHOLE_WARP, span.all_from, mask));
        span.all_to = min(span.all_to, __shfl_xor_sync(WHOLE_WARP, span.all_to, mask));
    }
    return columns;
}

// Elements of column lane / 4 as fragments of products: 2 (lane % 4) and the next of every eight.
template <int DIM>
__device__ __forceinline__ void load_column(u32 (&fragments)[DIM / 16][2], const AttendParams& p, u64 q, u64 first,
                                            bool live) {
    const u16* elements = reinterpret_cast<const u16*>(q) + first;
    const u32 mine = 2 * (threadIdx.x % 4);
    if (p.q.element == 1 && reinterpret_cast<u64>(elements) % 4 == 0) {
        const u32* words = reinterpret_cast<const u32*>(elements + mine);
#pragma unroll
        for (u32 i = 0; i < DIM / 8; ++i) fragments[i / 2][i % 2] = live ? __ldg(words + 4 * i) : 0;
    } else {
#pragma unroll 1
        for (u32 i = 0; i < DIM / 8; ++i) {
            const u64 at = u64(8 * i + mine) * p.q.element;
            const u32 word = live ? __ldg(elements + at) | u32(__ldg(elements + at + p.q.element)) << 16 : 0;
#pragma unroll
            for (u32 to = 0; to < DIM / 8; ++to) fragments[to / 2][to % 2] = to == i ? word : fragments[to / 2][to % 2];
        }
    }
}
