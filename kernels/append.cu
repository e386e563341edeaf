// append: which bits of the new tokens' K and V go where? One thread writes eight elements of a key's and of a value's row;
// where rows are quantised, the threads of a row agree on its scale first.
#include "append.cuh"
#include "divide.cuh"
#include "ptx.cuh"

namespace {

constexpr u32 THREADS = 256;

// Thread `index` of a run, counted in the order of the page: head, token, part of the row, of which there are 2^shift.
__device__ __forceinline__ Part part_of(const AppendParams& p, u32 index, u32 shift, const AppendRun& run) {
    const u32 row = index >> shift;
    // Most runs are whole pages.
    const u32 head = run.tokens == 1u << p.record.page_shift ? row >> p.record.page_shift : row / run.tokens;
    return {head, row - head * run.tokens, (index & ((1u << shift) - 1)) * CHUNK};
}

// The tokens of a decode step, one for each row: the last one that the row sees, in the page that its table names.
// Descriptors and tables come from a copy, which has ended when the kernel starts; nothing else is touched before the wait.
struct Next {
    const u32* tables;
    const Tile* tiles;
    const Row* rows;

    __device__ __forceinline__ AppendRun at(const AppendParams& p, u32 index) const {
        AppendRun run = {};
        const u32 end = rows[index].end;
        if (end > 0) {
            const u32 shift = p.record.page_shift, token = end - 1;
            run.k_offset = index * p.k.row;
            run.v_offset = index * p.v.row;
            run.frame = tables[tiles[index].table + (token >> shift)];
            run.slot = token & ((1u << shift) - 1);
            run.tokens = 1;
        }
        await_previous();
        return run;
    }
};

// A block takes `THREADS` parts of one run; `blocks` of them cover the longest run. Rows are padded to powers of two of threads.
// Where there is little to do, blocks take keys and values apart: `sides` is 2.
template <class RUNS>
__device__ __forceinline__ void append_chunks(const AppendParams& p, const Arena& arena, const RUNS& runs, u64 k, u64 v,
                                              u32* non_finite_count, u32 blocks, u32 sides) {
    const u32 k_dim = p.record.k_dim, v_dim = p.record.v_dim, shift = lane_shift_of(max(k_dim, v_dim));
    const u64 total = u64(p.runs) * blocks * sides;
    for (u64 work = blockIdx.x; work < total; work += gridDim.x) {
        const Quotient place = divide(sides == 1 ? work : work / 2, blocks);
        const AppendRun run = runs.at(p, u32(place.whole));
        const u32 index = place.rest * THREADS + threadIdx.x;
        if (index >= p.record.kv_heads * run.tokens << shift) continue;
        const Part part = part_of(p, index, shift, run);
        const bool has_key = part.first < k_dim && (sides == 1 || work % 2 == 0);
        const bool has_value = part.first < v_dim && (sides == 1 || work % 2 == 1);
        u32 bad = 0;
        if (has_key && has_value) {
            bad = write_pair(p, arena, k, v, run, part);
        } else if (has_key) {
            bad = write_chunk<false>(p, arena, k, run, part);
        } else if (has_value) {
            bad = write_chunk<true>(p, arena, v, run, part);
        }
        // Rare, so nothing is gained by adding up first.
        if (bad > 0) atomicAdd(non_finite_count, bad);
    }
}

// The same for int8, keys before values: whole warps quantise, and registers are what they lack.
template <class RUNS>
__device__ __forceinline__ void append_codes(const AppendParams& p, const Arena& arena, const RUNS& runs, u64 k, u64 v,
                                             const float* channels, u32* non_finite_count, u32 blocks) {
    const u32 shift = lane_shift_of(max(p.record.k_dim, p.record.v_dim));
    const u64 total = u64(p.runs) * blocks;
    for (u64 work = blockIdx.x; work < total; work += gridDim.x) {
        const Quotient place = divide(work, blocks);
        const AppendRun run = runs.at(p, u32(place.whole));
        const u32 side = ((p.record.kv_heads * run.tokens << shift) + 31) / 32 * 32;
        const u32 index = place.rest * THREADS + threadIdx.x;
        if (index >= 2 * side) continue;
        const bool is_value = index >= side;
        const Part part = part_of(p, is_value ? index - side : index, shift, run);
        const bool holds = part.head < p.record.kv_heads && part.first < (is_value ? p.record.v_dim : p.record.k_dim);
        const u32 bad = is_value ? write_codes<true>(p, arena, v, channels, run, part, holds)
                                 : write_codes<false>(p, arena, k, channels, run, part, holds);
        if (bad > 0) atomicAdd(non_finite_count, bad);
    }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS)
    append(const __grid_constant__ AppendParams p, const u64 k, const u64 v, u32* non_finite_count, const u32 blocks,
           const u32 sides, const u32 stretch, const __grid_constant__ Arena arena,
           const __grid_constant__ Descriptors descriptors) {
    append_chunks(p, arena, Runs{descriptors, p.runs_at, stretch != 0}, k, v, non_finite_count, blocks, sides);
}

// It always writes: `append` counts for int8 too.
extern "C" __global__ void __launch_bounds__(THREADS)
    append_int8(const __grid_constant__ AppendParams p, const u64 k, const u64 v, const float* channels,
                u32* non_finite_count, const u32 blocks, const u32 stretch, const __grid_constant__ Arena arena,
                const __grid_constant__ Descriptors descriptors) {
    append_codes(p, arena, Runs{descriptors, p.runs_at, stretch != 0}, k, v, channels, non_finite_count, blocks);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    append_next(const __grid_constant__ AppendParams p, const __grid_constant__ Arena arena, const u32* tables,
                const Tile* tiles, const Row* rows, const u64 k, const u64 v, u32* non_finite_count, const u32 blocks,
                const u32 sides) {
    append_chunks(p, arena, Next{tables, tiles, rows}, k, v, non_finite_count, blocks, sides);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    append_next_int8(const __grid_constant__ AppendParams p, const __grid_constant__ Arena arena, const u32* tables,
                     const Tile* tiles, const Row* rows, const u64 k, const u64 v, const float* channels,
                     u32* non_finite_count, const u32 blocks) {
    append_codes(p, arena, Next{tables, tiles, rows}, k, v, channels, non_finite_count, blocks);
}
