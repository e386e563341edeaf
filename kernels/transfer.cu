// transfer: which records move where? Frames and records in any combination, 16 bytes a thread at a time.
#include "descriptors.cuh"
#include "divide.cuh"
#include "record.cuh"

namespace {

constexpr u32 THREADS = 256;
// Words that a block copies: four 16-byte loads in flight a thread.
constexpr u32 PART = THREADS * 16;

// One side of a move: record `index` of a buffer, or frame `index` where `stride` is 0.
__device__ __forceinline__ u64 place(const Arena& arena, const RecordParams& record, u32 base, u32 stride, u32 index) {
    if (stride == 0) return frame_at(arena, record, index);
    return arena.slabs[0] + 4ull * (base + u64(index) * stride);
}

}  // namespace

// A block copies `PART` words of one record; `parts` blocks cover it.
extern "C" __global__ void __launch_bounds__(THREADS)
    transfer(const __grid_constant__ TransferParams p, const __grid_constant__ Arena from,
             const __grid_constant__ Arena to, const __grid_constant__ Descriptors descriptors, const u32 parts) {
    const u64 total = u64(p.moves) * parts;
    for (u64 work = blockIdx.x; work < total; work += gridDim.x) {
        const Quotient part = divide(work, parts);
        const Move move = descriptor<Move>(descriptors, p.moves_at, part.whole);
        const u64 source = place(from, p.record, p.from_base, p.from_stride, move.from);
        const u64 target = place(to, p.record, p.to_base, p.to_stride, move.to);
        const u32 first = part.rest * PART;
        // A record is a whole number of 16-byte units; only a buffer of records may be aligned to less.
        if ((source | target) % 16 == 0) {
            const uint4* src = reinterpret_cast<const uint4*>(source);
            uint4* dst = reinterpret_cast<uint4*>(target);
            const u32 units = p.record.record_words / 4;
            const u32 at = first / 4 + threadIdx.x;
            uint4 held[4];
#pragma unroll
            for (u32 i = 0; i < 4; ++i)
                if (at + i * THREADS < units) held[i] = __ldg(src + at + i * THREADS);
#pragma unroll
            for (u32 i = 0; i < 4; ++i)
                if (at + i * THREADS < units) dst[at + i * THREADS] = held[i];
        } else {
            const u32* src = reinterpret_cast<const u32*>(source);
            u32* dst = reinterpret_cast<u32*>(target);
            for (u32 at = first + threadIdx.x; at < first + PART && at < p.record.record_words; at += THREADS)
                dst[at] = __ldg(src + at);
        }
    }
}
