// append: which bits of the new tokens' K and V go where? One thread writes eight elements of a key or value row; where
// rows are quantised, the threads of a row agree on its scale first.
#include "append.cuh"
#include "divide.cuh"
#include "ptx.cuh"

namespace {

constexpr u32 THREADS = 256;

// Thread `index` of a run's K or V, counted in the order of the page: head, token, part of the row.
__device__ __forceinline__ Part chunk_of(u32 index, u32 parts, const AppendRun& run) {
    return {index / parts / run.tokens, index / parts % run.tokens, index % parts * CHUNK};
}

// Threads that quantise `rows` rows, in whole warps.
__device__ __forceinline__ u32 threads_of(u32 rows, u32 dim) { return (rows * lanes_of(dim) + 31) / 32 * 32; }

// Whether there is such a part: rows are padded to powers of two of threads, and threads to whole warps.
__device__ __forceinline__ bool holds(const Part& part, u32 dim, const RecordParams& record) {
    return part.first < dim && part.head < record.kv_heads;
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

// A block takes `THREADS` chunks of one run; `parts` blocks cover the longest run.
template <class RUNS>
__device__ __forceinline__ void append_chunks(const AppendParams& p, const Arena& arena, const RUNS& runs, u64 k, u64 v,
                                              u32* non_finite_count, u32 parts) {
    const u64 total = u64(p.runs) * parts;
    for (u64 work = blockIdx.x; work < total; work += gridDim.x) {
        const Quotient part_of = divide(work, parts);
        const AppendRun run = runs.at(p, u32(part_of.whole));
        const u32 rows = p.record.kv_heads * run.tokens;
        const u32 k_chunks = rows * (p.record.k_dim / CHUNK);
        const u32 v_chunks = rows * (p.record.v_dim / CHUNK);
        const u32 index = part_of.rest * THREADS + threadIdx.x;
        u32 bad = 0;
        if (index < k_chunks) {
            bad = write_chunk<false>(p, arena, k, run, chunk_of(index, p.record.k_dim / CHUNK, run));
        } else if (index - k_chunks < v_chunks) {
            bad = write_chunk<true>(p, arena, v, run, chunk_of(index - k_chunks, p.record.v_dim / CHUNK, run));
        }
        // Rare, so nothing is gained by adding up first.
        if (bad > 0) atomicAdd(non_finite_count, bad);
    }
}

// The same for int8, with as many blocks a run as its lanes need.
template <class RUNS>
__device__ __forceinline__ void append_codes(const AppendParams& p, const Arena& arena, const RUNS& runs, u64 k, u64 v,
                                             const float* channels, u32* non_finite_count, u32 parts) {
    const u64 total = u64(p.runs) * parts;
    for (u64 work = blockIdx.x; work < total; work += gridDim.x) {
        const Quotient part_of = divide(work, parts);
        const AppendRun run = runs.at(p, u32(part_of.whole));
        const u32 rows = p.record.kv_heads * run.tokens;
        const u32 k_threads = threads_of(rows, p.record.k_dim);
        const u32 v_threads = threads_of(rows, p.record.v_dim);
        const u32 index = part_of.rest * THREADS + threadIdx.x;
        u32 bad = 0;
        if (index < k_threads) {
            const Part part = chunk_of(index, lanes_of(p.record.k_dim), run);
            bad = write_codes<false>(p, arena, k, channels, run, part, holds(part, p.record.k_dim, p.record));
        } else if (index - k_threads < v_threads) {
            const Part part = chunk_of(index - k_threads, lanes_of(p.record.v_dim), run);
            bad = write_codes<true>(p, arena, v, channels, run, part, holds(part, p.record.v_dim, p.record));
        }
        if (bad > 0) atomicAdd(non_finite_count, bad);
    }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS)
    append(const __grid_constant__ AppendParams p, const u64 k, const u64 v, u32* non_finite_count, const u32 parts,
           const u32 stretch, const __grid_constant__ Arena arena, const __grid_constant__ Descriptors descriptors) {
    append_chunks(p, arena, Runs{descriptors, p.runs_at, stretch != 0}, k, v, non_finite_count, parts);
}

// It always writes: `append` counts for int8 too.
extern "C" __global__ void __launch_bounds__(THREADS)
    append_int8(const __grid_constant__ AppendParams p, const u64 k, const u64 v, const float* channels,
                u32* non_finite_count, const u32 parts, const u32 stretch, const __grid_constant__ Arena arena,
                const __grid_constant__ Descriptors descriptors) {
    append_codes(p, arena, Runs{descriptors, p.runs_at, stretch != 0}, k, v, channels, non_finite_count, parts);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    append_next(const __grid_constant__ AppendParams p, const __grid_constant__ Arena arena, const u32* tables,
                const Tile* tiles, const Row* rows, const u64 k, const u64 v, u32* non_finite_count, const u32 parts) {
    append_chunks(p, arena, Next{tables, tiles, rows}, k, v, non_finite_count, parts);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    append_next_int8(const __grid_constant__ AppendParams p, const __grid_constant__ Arena arena, const u32* tables,
                     const Tile* tiles, const Row* rows, const u64 k, const u64 v, const float* channels,
                     u32* non_finite_count, const u32 parts) {
    append_codes(p, arena, Next{tables, tiles, rows}, k, v, channels, non_finite_count, parts);
}
