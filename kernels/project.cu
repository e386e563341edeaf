// project: what are stored keys, or keys that are being stored, on a basis?
#include "append.cuh"
#include "descriptors.cuh"
#include "divide.cuh"
#include "project.cuh"

namespace {

// Writes K or V of a tile: tokens `first` … of a run, one KV head. How many of this thread's elements are not finite.
template <u32 FORMAT, bool VALUE>
__device__ __forceinline__ u32 write_tile(const AppendParams& p, const Arena& arena, u64 source, const float* channels,
                                          const AppendRun& run, u32 head, u32 first) {
    const u32 dim = VALUE ? p.record.v_dim : p.record.k_dim, tokens = min(run.tokens - first, TILE);
    constexpr bool quantizes = FORMAT == INT8;
    const u32 parts = quantizes ? lanes_of(dim) : dim / CHUNK;
    u32 bad = 0;
    // The same number of rounds for all threads, since those of a row exchange values.
    for (u32 round = 0; round < tokens * parts; round += PROJECT_THREADS) {
        const u32 index = round + threadIdx.x, token = index / parts;
        const Part part = {head, first + token, index % parts * CHUNK};
        const bool holds = token < tokens && part.first < dim;
        if constexpr (quantizes) {
            bad += write_codes<VALUE>(p, arena, source, channels, run, part, holds);
        } else if (holds) {
            bad += write_chunk<VALUE>(p, arena, source, run, part);
        }
    }
    return bad;
}

// A block has a KV head and a span of the basis of its own; `gridDim.x` is a multiple of how many of these there are. Its warps
// take sixteen tokens after sixteen, of which the longest run has `tiles`.
template <u32 FORMAT>
__device__ __forceinline__ void project(const ProjectParams& p, const Arena& arena, const Arena& projections,
                                        const Descriptors& descriptors, const u32* basis, const float* channels, u32 tiles,
                                        Factors& factors) {
    const u32 spans = count_spans(p), sides = p.record.kv_heads * spans, side = blockIdx.x % sides;
    const u64 total = u64(p.runs) * tiles, step = u64(gridDim.x / sides) * PROJECT_WARPS;
    u64 work = u64(blockIdx.x / sides) * PROJECT_WARPS + threadIdx.x / 32;
    // The run of the piece after the next, and the next one's keys, are on their way while a piece is projected.
    Piece ahead = {{}, side / spans, side % spans, 0};
    const auto look = [&] {
        ahead.run.tokens = 0;
        if (work < total) {
            const Quotient place = divide(work, tiles);
            ahead.run = descriptor<ProjectRun>(descriptors, p.runs_at, place.whole);
            ahead.first = place.rest * TILE;
        }
        work += step;
    };
    look();
    stage(p, basis, side / spans, side % spans, factors);
    Piece piece = ahead;
    Keys<FORMAT> keys;
    keys.load(p.record, arena, piece, 0);
    look();
    __syncthreads();
    while (work < total + 2 * step) {  // two pieces ahead
        const Piece after = ahead;
        Keys<FORMAT> next;
        next.load(p.record, arena, after, 0);
        look();
        if (piece.first < piece.run.tokens) project_piece<FORMAT>(p, arena, projections, factors, channels, piece, keys);
        piece = after;
        keys = next;
    }
}

// append and project in one: a block writes sixteen tokens after sixteen of one KV head, and its first warp projects the keys
// while the others go on. `gridDim.x` is a multiple of the KV heads.
template <u32 FORMAT>
__device__ __forceinline__ void append_project(const AppendParams& a, const ProjectParams& p, const Arena& arena,
                                               const Arena& projections, const Descriptors& descriptors, u64 k, u64 v,
                                               const u32* basis, const float* channels, u32* non_finite_count, u32 tiles,
                                               Factors& factors) {
    const u32 spans = count_spans(p), head = blockIdx.x % p.record.kv_heads;
    const u64 total = u64(p.runs) * tiles;
    if (spans == 1) stage(p, basis, head, 0, factors);
    for (u64 work = blockIdx.x / p.record.kv_heads; work < total; work += gridDim.x / p.record.kv_heads) {
        const Quotient place = divide(work, tiles);
        const u32 first = place.rest * TILE;
        const AppendRun run = descriptor<AppendRun>(descriptors, p.runs_at, place.whole);
        if (first >= run.tokens) continue;
        u32 bad = write_tile<FORMAT, false>(a, arena, k, channels, run, head, first);
        bad += write_tile<FORMAT, true>(a, arena, v, channels, run, head, first);
        if (bad > 0) atomicAdd(non_finite_count, bad);
        const ProjectRun stored = {run.frame, run.page, run.slot, run.tokens};
        for (u32 span = 0; span < spans; ++span) {
            __syncthreads();
            if (spans > 1) {
                stage(p, basis, head, span, factors);
                __syncthreads();
            }
            if (threadIdx.x < 32) {
                const Piece piece = {stored, head, span, first};
                Keys<FORMAT> keys;
                keys.load(p.record, arena, piece, 0);
                project_piece<FORMAT>(p, arena, projections, factors, channels, piece, keys);
            }
        }
    }
}

}  // namespace

#define PROJECT(FORMAT, NAME)                                                                                          \
    extern "C" __global__ void __launch_bounds__(PROJECT_THREADS, PROJECT_BLOCKS<FORMAT>)                              \
        project_##NAME(const __grid_constant__ ProjectParams p, const __grid_constant__ Arena arena,                   \
                       const __grid_constant__ Arena projections, const __grid_constant__ Descriptors descriptors,     \
                       const u32* basis, const float* channels, const u32 tiles) {                                     \
        __shared__ Factors factors;                                                                                    \
        project<FORMAT>(p, arena, projections, descriptors, basis, channels, tiles, factors);                          \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(PROJECT_THREADS, PROJECT_BLOCKS<FORMAT>)                              \
        append_project_##NAME(const __grid_constant__ AppendParams a, const __grid_constant__ ProjectParams p,         \
                              const __grid_constant__ Arena arena, const __grid_constant__ Arena projections,          \
                              const __grid_constant__ Descriptors descriptors, const u64 k, const u64 v,               \
                              const u32* basis, const float* channels, u32* non_finite_count, const u32 tiles) {       \
        __shared__ Factors factors;                                                                                    \
        append_project<FORMAT>(a, p, arena, projections, descriptors, k, v, basis, channels, non_finite_count, tiles,  \
                               factors);                                                                               \
    }

PROJECT(F32, f32)
PROJECT(F16, f16)
PROJECT(BF16, bf16)
PROJECT(INT8, int8)
