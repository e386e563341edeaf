// How does a part of a new token's row get into its page? As it is or converted; or quantised, once the threads of the row
// agree on its scale.
#pragma once
#include <cuda_fp16.h>
#include "chunk.cuh"
#include "descriptors.cuh"
#include "quantize.cuh"
#include "record.cuh"

// Reads `CHUNK` elements as their own bits, by 16 bytes where they lie so.
__device__ __forceinline__ void load_source(u32 (&bits)[CHUNK], u64 base, u64 first, u32 element, u32 dtype) {
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
            for (int i = 0; i < CHUNK; ++i) bits[i] = __ldg(source + u64(i) * element);
        }
    } else if (vector) {
        const uint4 a = __ldg(reinterpret_cast<const uint4*>(at));
        const u32 words[4] = {a.x, a.y, a.z, a.w};
#pragma unroll
        for (int i = 0; i < CHUNK; ++i) bits[i] = words[i / 2] >> 16 * (i % 2) & 0xffff;
    } else {
        const u16* source = reinterpret_cast<const u16*>(at);
#pragma unroll
        for (int i = 0; i < CHUNK; ++i) bits[i] = __ldg(source + u64(i) * element);
    }
}

__device__ __forceinline__ void store_chunk(u64 at, const u32 (&bits)[CHUNK], u32 format) {
    uint4* to = reinterpret_cast<uint4*>(at);
    if (format == F32) {
        to[0] = make_uint4(bits[0], bits[1], bits[2], bits[3]);
        to[1] = make_uint4(bits[4], bits[5], bits[6], bits[7]);
    } else {
        to[0] = make_uint4(bits[0] | bits[1] << 16, bits[2] | bits[3] << 16, bits[4] | bits[5] << 16,
                           bits[6] | bits[7] << 16);
    }
}

// The runs of a launch: as they are, or those of one sequence over page after page, which are a first token, a slot and a
// number of tokens, and then the frames (`stretch` of src/backend/cuda/append.rs).
struct Runs {
    const Descriptors& descriptors;
    u32 first;
    bool stretch;

    __device__ __forceinline__ AppendRun at(const AppendParams& p, u32 index) const {
        if (!stretch) return descriptor<AppendRun>(descriptors, first, index);
        const auto word = [&](u32 i) { return read<u32>(descriptors, first + i); };
        const u32 slot = word(2), page = 1u << p.record.page_shift;
        const u32 before = index == 0 ? 0 : index * page - slot;  // tokens in the pages before
        AppendRun run = {};
        run.k_offset = word(0) + before * p.k.row;
        run.v_offset = word(1) + before * p.v.row;
        run.frame = word(4 + index);
        run.slot = index == 0 ? slot : 0;
        run.tokens = min(page - run.slot, word(3) - before);
        return run;
    }
};

// A thread's part of a row: eight elements from `first` on of a token of a run.
struct Part {
    u32 head, token, first;
};

// Of the two elements of a word those that are infinite or NaN: the highest bit of each.
__device__ __forceinline__ u32 non_finite_pair(u32 word, u32 dtype) {
    const u32 carried = dtype == F16 ? (word & 0x7c007c00) + 0x04000400 : (word & 0x7f807f80) + 0x00800080;
    return carried & 0x80008000;
}

// Eight elements of 16 bits that need no conversion.
struct Whole {
    uint4 words;

    __device__ __forceinline__ Whole(u64 at) : words(__ldg(reinterpret_cast<const uint4*>(at))) {}

    // Whether any of them is not finite: the highest bits of those.
    __device__ __forceinline__ u32 special(u32 dtype) const {
        return non_finite_pair(words.x, dtype) | non_finite_pair(words.y, dtype) | non_finite_pair(words.z, dtype) |
               non_finite_pair(words.w, dtype);
    }

    // How many are not.
    __device__ __forceinline__ u32 non_finite(u32 dtype) const {
        const auto count = [&](u32 word) { return __popc(non_finite_pair(word, dtype)); };
        return count(words.x) + count(words.y) + count(words.z) + count(words.w);
    }
};

// Where a part of a row comes from, and goes.
struct Way {
    u64 element, to;

    template <bool VALUE>
    static __device__ __forceinline__ Way of(const AppendParams& p, const Arena& arena, const AppendRun& run,
                                             const Part& part) {
        const RecordParams& record = p.record;
        const ViewParams& view = VALUE ? p.v : p.k;
        const u64 offset = u64(view.base) + (VALUE ? run.v_offset : run.k_offset);
        const u32 slot = run.slot + part.token;
        const u64 row = VALUE ? value_at(record, part.head, slot) : key_at(record, part.head, slot);
        return {offset + u64(part.token) * view.row + u64(part.head) * view.head + u64(part.first) * view.element,
                frame_at(arena, record, run.frame) + row + u64(part.first) * (record.format == F32 ? 4 : 2)};
    }
};

// Whether parts of this view are eight elements of 16 bits that need no conversion, as far as their addresses allow.
__device__ __forceinline__ bool copies(const AppendParams& p, const ViewParams& view) {
    return p.write && p.dtype == p.record.format && p.dtype != F32 && view.element == 1;
}

// Converts and writes a part of a run's K or V; how many of its elements are not finite.
__device__ __forceinline__ u32 convert_chunk(const AppendParams& p, const ViewParams& view, u64 source, const Way& way) {
    const RecordParams& record = p.record;
    u32 bits[CHUNK];
    load_source(bits, source, way.element, view.element, p.dtype);
    u32 bad = 0;
#pragma unroll
    for (int i = 0; i < CHUNK; ++i) bad += non_finite(bits[i], p.dtype);
    if (p.write) {
        if (p.dtype != record.format) {
#pragma unroll
            for (int i = 0; i < CHUNK; ++i) bits[i] = convert(bits[i], p.dtype, record.format);
        }
        store_chunk(way.to, bits, record.format);
    }
    return bad;
}

// Writes a part of a run's K or V; how many of its elements are not finite.
template <bool VALUE>
__device__ __forceinline__ u32 write_chunk(const AppendParams& p, const Arena& arena, u64 source, const AppendRun& run,
                                           const Part& part) {
    const ViewParams& view = VALUE ? p.v : p.k;
    const Way way = Way::of<VALUE>(p, arena, run, part);
    const u64 from = source + 2 * way.element;
    if (!copies(p, view) || from % 16 != 0) return convert_chunk(p, view, source, way);
    const Whole whole(from);
    *reinterpret_cast<uint4*>(way.to) = whole.words;
    return whole.non_finite(p.dtype);
}

// Writes the same part of a key and of its value: what is only copied is on its way together.
__device__ __forceinline__ u32 write_pair(const AppendParams& p, const Arena& arena, u64 k, u64 v, const AppendRun& run,
                                          const Part& part) {
    const Way key = Way::of<false>(p, arena, run, part), value = Way::of<true>(p, arena, run, part);
    const u64 k_from = k + 2 * key.element, v_from = v + 2 * value.element;
    if (!copies(p, p.k) || !copies(p, p.v) || (k_from | v_from) % 16 != 0)
        return convert_chunk(p, p.k, k, key) + convert_chunk(p, p.v, v, value);
    const Whole a(k_from), b(v_from);
    *reinterpret_cast<uint4*>(key.to) = a.words;
    *reinterpret_cast<uint4*>(value.to) = b.words;
    // Rare, and counting is slow.
    return (a.special(p.dtype) | b.special(p.dtype)) == 0 ? 0 : a.non_finite(p.dtype) + b.non_finite(p.dtype);
}

constexpr u32 ALL_LANES = 0xffffffff;

// Neighbouring threads that share a row: a power of two, the last of which may have nothing to hold.
__device__ __forceinline__ u32 lane_shift_of(u32 dim) { return 32 - __clz(dim / CHUNK - 1); }
__device__ __forceinline__ u32 lanes_of(u32 dim) { return 1u << lane_shift_of(dim); }

// The value of an element. (What a NaN carries is of no interest here.)
__device__ __forceinline__ float value_of(u32 bits, u32 dtype) {
    if (dtype == F32) return __uint_as_float(bits);
    return dtype == F16 ? __half2float(__ushort_as_half(u16(bits))) : __uint_as_float(bits << 16);
}

// Centres and scales eight elements of a key. `channels` are those of the KV head.
__device__ __forceinline__ void calibrate_chunk(float (&x)[CHUNK], const float* channels, u32 dim, u32 first) {
#pragma unroll
    for (int i = 0; i < CHUNK; i += 4) {
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
    for (int i = 0; i < CHUNK; ++i) largest = max(largest, magnitude(x[i]));
    return largest;
}

// The low bytes of four codes.
__device__ __forceinline__ u32 pack(const int* codes) {
    return __byte_perm(__byte_perm(codes[0], codes[1], 0x0040), __byte_perm(codes[2], codes[3], 0x0040), 0x5410);
}

// Quantises the row of a run's K or V that this thread shares with its neighbours, and writes its part of it, where it
// `holds` one; how many of its elements are not finite. Whole warps call this together.
template <bool VALUE>
__device__ __forceinline__ u32 write_codes(const AppendParams& p, const Arena& arena, u64 source,
                                           const float* channels, const AppendRun& run, const Part& part, bool holds) {
    const RecordParams& record = p.record;
    const ViewParams& view = VALUE ? p.v : p.k;
    const u32 dim = VALUE ? record.v_dim : record.k_dim, lanes = lanes_of(dim);
    const auto [head, token, first] = part;
    float x[CHUNK] = {};
    if (holds) {
        const u64 offset = u64(view.base) + (VALUE ? run.v_offset : run.k_offset);
        u32 bits[CHUNK];
        load_source(bits, source, offset + u64(token) * view.row + u64(head) * view.head + u64(first) * view.element,
             view.element, p.dtype);
#pragma unroll
        for (int i = 0; i < CHUNK; ++i) x[i] = value_of(bits[i], p.dtype);
    }
    u32 largest = largest_of(x), bad = 0;
    if (largest >= INFINITE) {
#pragma unroll
        for (int i = 0; i < CHUNK; ++i) bad += magnitude(x[i]) >= INFINITE;
    }
    if (!VALUE && holds) {
        calibrate_chunk(x, channels + 3ull * head * dim, dim, first);
        largest = largest_of(x);
    }
    const bool finite = largest < INFINITE;
    if (!finite) {
        largest = 0;
#pragma unroll
        for (int i = 0; i < CHUNK; ++i)
            if (magnitude(x[i]) < INFINITE) largest = max(largest, magnitude(x[i]));
    }
    for (u32 mask = lanes / 2; mask > 0; mask /= 2) largest = max(largest, __shfl_xor_sync(ALL_LANES, largest, mask));
    if (!holds) return 0;
    const RowScale row = row_scale(largest);
    int codes[CHUNK];
    if (finite) {
#pragma unroll
        for (int i = 0; i < CHUNK; ++i) codes[i] = finite_code(x[i], row.inverse);
    } else {
#pragma unroll
        for (int i = 0; i < CHUNK; ++i) codes[i] = code(x[i], row.inverse);
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
