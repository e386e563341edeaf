// What do quantised pages bring to attention? The scales of a split's rows, and queries that absorb the keys' channels.
#pragma once
#include "chunk.cuh"
#include "record.cuh"
#include "tiles.cuh"

// What a block keeps beside the rest; nothing for native formats.
template <u32 FORMAT, int Q>
struct Scales {};

template <int Q>
struct alignas(16) Scales<INT8, Q> {
    float k_scale[SPLIT], v_scale[SPLIT];
    // What the scores of each vector lack: query · mean × scale × log2 e.
    float c[Q];
};

// Threads that load the scales of a split, four each: those of the keys, then those of the values.
constexpr int SCALE_THREADS = SPLIT / 2;

// This thread's four scales; what no vector sees is not read.
__device__ __forceinline__ float4 load_scales(const RecordParams& record, const u64* frames, const Span& span,
                                              u32 kv_head) {
    const int token = int(threadIdx.x) % (SPLIT / 4) * 4;
    if (token + 4 <= span.from || token >= span.to) return make_float4(0, 0, 0, 0);
    const u32 slot = token & ((1u << record.page_shift) - 1);
    const bool of_key = threadIdx.x < SPLIT / 4;
    const u64 at = of_key ? key_scale_at(record, kv_head, slot) : value_scale_at(record, kv_head, slot);
    return __ldg(reinterpret_cast<const float4*>(frames[token >> record.page_shift] + at));
}

template <int Q>
__device__ __forceinline__ void keep_scales(Scales<INT8, Q>& shared, const float4& scales) {
    float* to = threadIdx.x < SPLIT / 4 ? shared.k_scale : shared.v_scale;
    reinterpret_cast<float4*>(to)[threadIdx.x % (SPLIT / 4)] = scales;
}
