// project: what are stored keys, or keys that are being stored, on a basis?
#include "append.cuh"
#include "descriptors.cuh"
#include "divide.cuh"
#include "project.cuh"

namespace {

// Writes K or V of a tile: tokens `first` … of a run, one KV head. How many of this thread's elements are not finite.
template <bool VALUE>
__device__ __forceinline__ u32 write_tile(const AppendParams& p, const Arena& arena, u64 source, const float* channels,
                                          const AppendRun& run, u32 head, u32 first) {
    const u32 dim = VALUE ? p.record.v_dim : p.record.k_dim, tokens = min(run.tokens - first, TILE);
    const bool quantizes = p.record.format == INT8;
    const u32 parts = quantizes ? lanes_of(dim) : dim / CHUNK;
    u32 bad = 0;
    // The same number of rounds for all threads, since those of a row exchange values.
    for (u32 round = 0; round < tokens * parts; round += PROJECT_THREADS) {
        const u32 index = round + threadIdx.x, token = index / parts;
        const Part part = {head, first + token, index % parts * CHUNK};
        const bool holds = token < tokens && part.first < dim;
        if (quantizes) {
            bad += write_codes<VALUE>(p, arena, source, channels, run, part, holds);
        } else if (holds) {
            bad += write_chunk<VALUE>(p, arena, source, run, part);
        }
    }
    return bad;
}

}  // namespace

// `tiles` blocks cover the longest run of one KV head.
extern "C" __global__ void __launch_bounds__(PROJECT_THREADS)
    project(const __grid_constant__ ProjectParams p, const __grid_constant__ Arena arena,
            const __grid_constant__ Arena projections, const __grid_constant__ Descriptors descriptors,
            const u32* basis, const float* channels, const u32 tiles) {
    __shared__ __align__(16) Keys keys;
    const u64 total = u64(p.runs) * p.record.kv_heads * tiles;
    for (u64 work = blockIdx.x; work < total; work += gridDim.x) {
        const Place3 place(work, tiles, p.record.kv_heads);
        const u32 first = place.x * TILE, head = place.y;
        const ProjectRun run = descriptor<ProjectRun>(descriptors, p.runs_at, place.z);
        if (first >= run.tokens) continue;
        __syncthreads();
        stage(p.record, frame_at(arena, p.record, run.frame), run, head, first,
              channels + 3ull * head * p.record.k_dim, keys);
        __syncthreads();
        project_tile(p, projections, basis, run, head, first, keys);
    }
}

// append and project in one: a block writes sixteen tokens of one run and KV head, then projects the keys that it has written.
extern "C" __global__ void __launch_bounds__(PROJECT_THREADS)
    append_project(const __grid_constant__ AppendParams a, const __grid_constant__ ProjectParams p,
                   const __grid_constant__ Arena arena, const __grid_constant__ Arena projections,
                   const __grid_constant__ Descriptors descriptors, const u64 k, const u64 v, const u32* basis,
                   const float* channels, u32* non_finite_count, const u32 tiles) {
    __shared__ __align__(16) Keys keys;
    const u64 total = u64(p.runs) * p.record.kv_heads * tiles;
    for (u64 work = blockIdx.x; work < total; work += gridDim.x) {
        const Place3 place(work, tiles, p.record.kv_heads);
        const u32 first = place.x * TILE, head = place.y;
        const AppendRun run = descriptor<AppendRun>(descriptors, p.runs_at, place.z);
        if (first >= run.tokens) continue;
        const float* mine = channels + 3ull * head * p.record.k_dim;
        u32 bad = write_tile<false>(a, arena, k, channels, run, head, first);
        bad += write_tile<true>(a, arena, v, channels, run, head, first);
        if (bad > 0) atomicAdd(non_finite_count, bad);
        __syncthreads();
        const ProjectRun stored = {run.frame, run.page, run.slot, run.tokens};
        stage(p.record, frame_at(arena, p.record, run.frame), stored, head, first, mine, keys);
        __syncthreads();
        project_tile(p, projections, basis, stored, head, first, keys);
    }
}
