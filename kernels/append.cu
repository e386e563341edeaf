// append: which bits of the new tokens' K and V go where? One thread writes eight elements of a key or value row.
#include "numeric.cuh"
#include "record.cuh"

namespace {

constexpr u32 THREADS = 256;
constexpr u32 CHUNK = 8;

// Reads `CHUNK` elements as their own bits, by 16 bytes where they lie so.
__device__ __forceinline__ void load(u32 (&bits)[CHUNK], u64 base, u64 first, u32 element, u32 dtype) {
    const u64 at = base + first * (dtype == F32 ? 4 : 2);
    const bool vector = element == 1 && at % 16 == 0;
    if (dtype == F32) {
        if (vector) {
            const uint4* source = reinterpret_cast<const uint4*>(at);
            const uint4 a = __ldg(source), b = __ldg(source + 1);
            bits[0] = a.x, bits[1] = a.y, bits[2] = a.z, bits[3] = a.w;
            bits[4] = b.x, bits[5] = b.y, bits[6] = b.z, bits[7] = b.w;
        } else {
            const u32* source = reinterpret_cast<const u32*>(at);
#pragma unroll
            for (u32 i = 0; i < CHUNK; ++i) bits[i] = __ldg(source + u64(i) * element);
        }
    } else if (vector) {
        const uint4 a = __ldg(reinterpret_cast<const uint4*>(at));
        const u32 words[4] = {a.x, a.y, a.z, a.w};
#pragma unroll
        for (u32 i = 0; i < CHUNK; ++i) bits[i] = words[i / 2] >> 16 * (i % 2) & 0xffff;
    } else {
        const u16* source = reinterpret_cast<const u16*>(at);
#pragma unroll
        for (u32 i = 0; i < CHUNK; ++i) bits[i] = __ldg(source + u64(i) * element);
    }
}

__device__ __forceinline__ void store(u64 at, const u32 (&bits)[CHUNK], u32 format) {
    uint4* to = reinterpret_cast<uint4*>(at);
    if (format == F32) {
        to[0] = make_uint4(bits[0], bits[1], bits[2], bits[3]);
        to[1] = make_uint4(bits[4], bits[5], bits[6], bits[7]);
    } else {
        to[0] = make_uint4(bits[0] | bits[1] << 16, bits[2] | bits[3] << 16, bits[4] | bits[5] << 16,
                           bits[6] | bits[7] << 16);
    }
}

// Chunk `index` of a run's K or V, counted in the order of the page: head, token, chunk of the row.
template <bool VALUE>
__device__ __forceinline__ u32 write_chunk(const AppendParams& p, const Arena& arena, u64 source, const AppendRun& run,
                                           u32 index) {
    const RecordParams& record = p.record;
    const ViewParams& view = VALUE ? p.v : p.k;
    const u32 row_chunks = (VALUE ? record.v_dim : record.k_dim) / CHUNK;
    const u32 first = index % row_chunks * CHUNK;
    const u32 token = index / row_chunks % run.tokens;
    const u32 head = index / row_chunks / run.tokens;
    const u64 offset = u64(view.base) + (VALUE ? run.v_offset : run.k_offset);
    u32 bits[CHUNK];
    load(bits, source, offset + u64(token) * view.row + u64(head) * view.head + u64(first) * view.element, view.element,
         p.dtype);
    u32 bad = 0;
#pragma unroll
    for (u32 i = 0; i < CHUNK; ++i) bad += non_finite(bits[i], p.dtype);
    if (p.write) {
        if (p.dtype != record.format) {
#pragma unroll
            for (u32 i = 0; i < CHUNK; ++i) bits[i] = convert(bits[i], p.dtype, record.format);
        }
        const u32 slot = run.slot + token;
        const u64 row = VALUE ? value_at(record, head, slot) : key_at(record, head, slot);
        store(frame_at(arena, record, run.frame) + row + u64(first) * (record.format == F32 ? 4 : 2), bits,
              record.format);
    }
    return bad;
}

}  // namespace

// A block takes `THREADS` chunks of one run; `parts` blocks cover the longest run.
extern "C" __global__ void __launch_bounds__(THREADS)
    append(const __grid_constant__ AppendParams p, const __grid_constant__ Arena arena, const u32* descriptors,
           const u64 k, const u64 v, u32* non_finite_count, const u32 parts) {
    const AppendRun* runs = reinterpret_cast<const AppendRun*>(descriptors + p.runs_at);
    const u64 total = u64(p.runs) * parts;
    for (u64 work = blockIdx.x; work < total; work += gridDim.x) {
        const AppendRun run = runs[work / parts];
        const u32 rows = p.record.kv_heads * run.tokens;
        const u32 k_chunks = rows * (p.record.k_dim / CHUNK);
        const u32 v_chunks = rows * (p.record.v_dim / CHUNK);
        const u32 index = u32(work % parts) * THREADS + threadIdx.x;
        u32 bad = 0;
        if (index < k_chunks) {
            bad = write_chunk<false>(p, arena, k, run, index);
        } else if (index - k_chunks < v_chunks) {
            bad = write_chunk<true>(p, arena, v, run, index - k_chunks);
        }
        // Rare, so nothing is gained by adding up first.
        if (bad > 0) atomicAdd(non_finite_count, bad);
    }
}
