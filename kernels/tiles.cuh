// Which tokens does each query vector see? Work items, their tiles, and the tokens of a tile's vectors.
#pragma once
#include <cstddef>
#include "descriptors.cuh"
#include "divide.cuh"
#include "fold.cuh"
#include "numeric.cuh"

constexpr int SPLIT = 256;
constexpr int MOST_TOKENS = 1 << 30;  // of a work item: `Grain::Whole` of src/attention/mod.rs

// Tiles and rows: those of 64 sequences that decode fit. `ATTEND_WORDS` of src/backend/cuda/attend.rs.
using AttendDescriptors = DescriptorsOf<768>;

// A query vector: where its elements and its state are, and the tokens that it sees, from some token on.
struct Vector {
    u64 q, state;
    int from, to;
};

// The tile that a work item belongs to: the last one whose first item is not above it.
__device__ __forceinline__ Tile tile_of(const AttendParams& p, const AttendDescriptors& descriptors, u32 item) {
    u32 low = 0, high = p.tiles;
    while (high - low > 1) {
        const u32 middle = low + (high - low) / 2;
        if (read<u32>(descriptors, p.tiles_at + (u64(middle) * sizeof(Tile) + offsetof(Tile, item)) / 4) <= item) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return descriptor<Tile>(descriptors, p.tiles_at, low);
}

// Query vector `index` (row × head) of a tile, whose state is that of split or section `part`: what it sees of the `tokens`
// tokens from `first` on.
__device__ __forceinline__ Vector vector_of(const AttendParams& p, const AttendDescriptors& descriptors, const Tile& tile,
                                            u32 kv_head, u32 part, u32 first, int tokens, u64 index) {
    Vector vector = {0, 0, 0, 0};
    const Quotient at = divide(index, p.group);
    if (at.whole >= tile.rows) return vector;
    const u32 row_index = tile.row + u32(at.whole);
    const Row row = descriptor<Row>(descriptors, p.rows_at, row_index);
    const u32 head = kv_head * p.group + at.rest;
    vector.from = row.start > first ? int(min(row.start - first, u32(tokens))) : 0;
    vector.to = row.end > first ? int(min(row.end - first, u32(tokens))) : 0;
    vector.q = u64(p.q.base) + u64(row_index) * p.q.row + u64(head) * p.q.head;
    vector.state = (u64(row.state + part - row.split) * p.q_heads + head) * p.state_words;
    return vector;
}

// Tokens of a split or more, by the vectors that see them.
struct Span {
    int from = MOST_TOKENS, to = 0;          // some vector
    int all_from = 0, all_to = MOST_TOKENS;  // every vector that sees any
};

template <int Q>
__device__ __forceinline__ Span span_of(const Vector (&vectors)[Q]) {
    Span span;
#pragma unroll
    for (int j = 0; j < Q; ++j) {
        const int from = vectors[j].from, to = vectors[j].to;
        if (from >= to) continue;
        span.from = min(span.from, from);
        span.to = max(span.to, to);
        span.all_from = max(span.all_from, from);
        span.all_to = min(span.all_to, to);
    }
    return span;
}

// An element of a query, of any type.
__device__ __forceinline__ float load_element(u64 base, u64 index, u32 dtype) {
    const u32 bits = dtype == F32 ? __ldg(reinterpret_cast<const u32*>(base) + index)
                                  : __ldg(reinterpret_cast<const u16*>(base) + index);
    return __uint_as_float(to_f32(bits, dtype));
}
