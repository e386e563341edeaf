// append: which bits of the new tokens' K and V go where? One thread writes eight elements of a key or value row; where
// rows are quantised, the threads of a row agree on its scale first.
#include <cuda_fp16.h>
#include "descriptors.cuh"
#include "numeric.cuh"
#include "quantize.cuh"
#include "record.cuh"

namespace {

constexpr u32 THREADS = 256;
constexpr u32 CHUNK = 8;
constexpr u32 ALL = 0xffffffff;

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

// Neighbouring threads that share a quantised row: a power of two, the last of which may have nothing to hold.
__device__ __forceinline__ u32 lanes_of(u32 dim) { return 1u << (32 - __clz(dim / CHUNK - 1)); }

// Threads that quantise `rows` rows, in whole warps.
__device__ __forceinline__ u32 threads_of(u32 rows, u32 dim) { return (rows * lanes_of(dim) + 31) / 32 * 32; }

// The value of an element. (What a NaN carries is of no interest here.)
__device__ __forceinline__ float value_of(u32 bits, u32 dtype) {
    if (dtype == F32) return __uint_as_float(bits);
    return dtype == F16 ? __half2float(__ushort_as_half(u16(bits))) : __uint_as_float(bits << 16);
}

// Centres and scales eight elements of a key. `channels` are those of the KV head.
__device__ __forceinline__ void calibrate_chunk(float (&x)[CHUNK], const float* channels, u32 dim, u32 first) {
#pragma unroll
    for (u32 i = 0; i < CHUNK; i += 4) {
        const float4 mean = __ldg(reinterpret_cast<const float4*>(channels + first + i));
        const float4 inverse = __ldg(reinterpret_cast<const float4*>(channels + 2 * dim + first + i));
        x[i] = calibrate(x[i], mean.x, inverse.x);
        x[i + 1] = calibrate(x[i + 1], mean.y, inverse.y);
        x[i + 2] = calibrate(x[i + 2], mean.z, inverse.z);
        x[i + 3] = calibrate(x[i + 3], mean.w, inverse.w);
    }
}

__device__ __forceinline__ u32 largest_of(const float (&x)[CHUNK]) {
    u32 largest = 0;
#pragma unroll
    for (u32 i = 0; i < CHUNK; ++i) largest = max(largest, magnitude(x[i]));
    return largest;
}

// The low bytes of four codes.
__device__ __forceinline__ u32 pack(const int* codes) {
    return __byte_perm(__byte_perm(codes[0], codes[1], 0x0040), __byte_perm(codes[2], codes[3], 0x0040), 0x5410);
}

// Quantises the row that thread `index` of a run's K or V shares, and writes this thread's part of it. Whole warps call
// this together.
template <bool VALUE>
__device__ __forceinline__ u32 write_codes(const AppendParams& p, const Arena& arena, u64 source,
                                           const float* channels, const AppendRun& run, u32 index) {
    const RecordParams& record = p.record;
    const ViewParams& view = VALUE ? p.v : p.k;
    const u32 dim = VALUE ? record.v_dim : record.k_dim, lanes = lanes_of(dim);
    const u32 first = index % lanes * CHUNK;
    const u32 token = index / lanes % run.tokens, head = index / lanes / run.tokens;
    const bool holds = first < dim && head < record.kv_heads;
    float x[CHUNK] = {};
    if (holds) {
        const u64 offset = u64(view.base) + (VALUE ? run.v_offset : run.k_offset);
        u32 bits[CHUNK];
        load(bits, source, offset + u64(token) * view.row + u64(head) * view.head + u64(first) * view.element,
             view.element, p.dtype);
#pragma unroll
        for (u32 i = 0; i < CHUNK; ++i) x[i] = value_of(bits[i], p.dtype);
    }
    u32 largest = largest_of(x), bad = 0;
    if (largest >= INFINITE) {
#pragma unroll
        for (u32 i = 0; i < CHUNK; ++i) bad += magnitude(x[i]) >= INFINITE;
    }
    if (!VALUE && holds) {
        calibrate_chunk(x, channels + 3ull * head * dim, dim, first);
        largest = largest_of(x);
    }
    const bool finite = largest < INFINITE;
    if (!finite) {
        largest = 0;
#pragma unroll
        for (u32 i = 0; i < CHUNK; ++i)
            if (magnitude(x[i]) < INFINITE) largest = max(largest, magnitude(x[i]));
    }
    for (u32 mask = lanes / 2; mask > 0; mask /= 2) largest = max(largest, __shfl_xor_sync(ALL, largest, mask));
    if (!holds) return 0;
    const RowScale row = row_scale(largest);
    int codes[CHUNK];
    if (finite) {
#pragma unroll
        for (u32 i = 0; i < CHUNK; ++i) codes[i] = finite_code(x[i], row.inverse);
    } else {
#pragma unroll
        for (u32 i = 0; i < CHUNK; ++i) codes[i] = code(x[i], row.inverse);
    }
    const u64 frame = frame_at(arena, record, run.frame);
    const u32 slot = run.slot + token;
    const u64 at = VALUE ? value_at(record, head, slot) : key_at(record, head, slot);
    *reinterpret_cast<uint2*>(frame + at + first) = make_uint2(pack(codes), pack(codes + 4));
    if (first == 0) {
        const u64 scale = VALUE ? value_scale_at(record, head, slot) : key_scale_at(record, head, slot);
        *reinterpret_cast<float*>(frame + scale) = row.scale;
    }
    return bad;
}

}  // namespace

// A block takes `THREADS` chunks of one run; `parts` blocks cover the longest run.
extern "C" __global__ void __launch_bounds__(THREADS)
    append(const __grid_constant__ AppendParams p, const __grid_constant__ Arena arena,
           const __grid_constant__ Descriptors descriptors,
           const u64 k, const u64 v, u32* non_finite_count, const u32 parts) {
    const AppendRun* runs = reinterpret_cast<const AppendRun*>(words_of(descriptors) + p.runs_at);
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

// The same for int8, with as many blocks a run as its lanes need. It always writes: `append` counts for int8 too.
extern "C" __global__ void __launch_bounds__(THREADS)
    append_int8(const __grid_constant__ AppendParams p, const __grid_constant__ Arena arena,
                const __grid_constant__ Descriptors descriptors,
                const u64 k, const u64 v, const float* channels, u32* non_finite_count, const u32 parts) {
    const AppendRun* runs = reinterpret_cast<const AppendRun*>(words_of(descriptors) + p.runs_at);
    const u64 total = u64(p.runs) * parts;
    for (u64 work = blockIdx.x; work < total; work += gridDim.x) {
        const AppendRun run = runs[work / parts];
        const u32 rows = p.record.kv_heads * run.tokens;
        const u32 k_threads = threads_of(rows, p.record.k_dim);
        const u32 v_threads = threads_of(rows, p.record.v_dim);
        const u32 index = u32(work % parts) * THREADS + threadIdx.x;
        u32 bad = 0;
        if (index < k_threads) {
            bad = write_codes<false>(p, arena, k, channels, run, index);
        } else if (index - k_threads < v_threads) {
            bad = write_codes<true>(p, arena, v, channels, run, index - k_threads);
        }
        if (bad > 0) atomicAdd(non_finite_count, bad);
    }
}
