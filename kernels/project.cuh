// What are stored keys on a basis? A block takes sixteen tokens of one run and KV head: it decodes their keys once, then each
// thread sums two columns of the basis for four tokens, in the order of the elements.
#pragma once
#include "chunk.cuh"
#include "projections.cuh"

constexpr u32 PROJECT_THREADS = 64;
constexpr u32 TILE = 16;   // tokens of a block
constexpr u32 QUAD = 4;    // tokens of a thread
constexpr u32 MAX_KEY = 256;

// Element d of the tile's tokens, with a quad of padding that spreads the elements over the banks.
using Keys = float[MAX_KEY][TILE + QUAD];

// Eight elements of a key row as floats; codes of int8 as they are. Plain loads: the block may have written the row itself.
__device__ __forceinline__ void load_key(float (&x)[CHUNK], u64 at, u32 format) {
    if (format == INT8) {
        Chunk<INT8> stored;
        stored.units = *reinterpret_cast<const uint2*>(at);
        return stored.decode(x);
    }
    const uint4* from = reinterpret_cast<const uint4*>(at);
    const uint4 a = from[0];
    if (format == F32) {
        const uint4 b = from[1];
        const u32 words[CHUNK] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
        for (int i = 0; i < CHUNK; ++i) x[i] = __uint_as_float(words[i]);
    } else {
        const u32 words[4] = {a.x, a.y, a.z, a.w};
#pragma unroll
        for (int i = 0; i < CHUNK; ++i) x[i] = __uint_as_float(to_f32(words[i / 2] >> 16 * (i % 2) & 0xffff, format));
    }
}

// Eight elements of the key that codes stand for: mean + code × scale of the row × scale of the channel.
__device__ __forceinline__ void restore(float (&x)[CHUNK], float row_scale, const float* mean, const float* scale) {
#pragma unroll
    for (int i = 0; i < CHUNK; ++i)
        x[i] = __fadd_rn(__ldg(mean + i), __fmul_rn(__fmul_rn(x[i], row_scale), __ldg(scale + i)));
}

// Decodes the keys of tokens `first` … of a run; zeros past its end. `channels` are those of the KV head, where pages
// are quantised.
__device__ __forceinline__ void stage(const RecordParams& record, u64 frame, const ProjectRun& run, u32 head, u32 first,
                                      const float* channels, Keys& keys) {
    const u32 bytes = record.format == INT8 ? 1 : record.format == F32 ? 4 : 2;
    for (u32 i = threadIdx.x; i < TILE * (record.k_dim / CHUNK); i += PROJECT_THREADS) {
        const u32 token = i % TILE, element = i / TILE * CHUNK;
        float x[CHUNK] = {};
        if (first + token < run.tokens) {
            const u32 slot = run.slot + first + token;
            load_key(x, frame + key_at(record, head, slot) + u64(element) * bytes, record.format);
            if (record.format == INT8) {
                const float scale = *reinterpret_cast<const float*>(frame + key_scale_at(record, head, slot));
                restore(x, scale, channels + element, channels + record.k_dim + element);
            }
        }
#pragma unroll
        for (int e = 0; e < CHUNK; ++e) keys[element + e][token] = x[e];
    }
}

// Columns 2 × pair and 2 × pair + 1 for the four tokens of a quad.
__device__ __forceinline__ void sum(const ProjectParams& p, const u32* matrix, const Keys& keys, u32 pair, u32 quad,
                                    float2 (&sums)[QUAD]) {
    const u32 pairs = p.projections.rank / 2;
#pragma unroll 8
    for (u32 d = 0; d < p.record.k_dim; ++d) {
        const float2 column = unpack_pair(__ldg(matrix + d * pairs + pair));
        const float4 key = *reinterpret_cast<const float4*>(&keys[d][quad * QUAD]);
        const float k[QUAD] = {key.x, key.y, key.z, key.w};
#pragma unroll
        for (u32 t = 0; t < QUAD; ++t) {
            sums[t].x = __fmaf_rn(k[t], column.x, sums[t].x);
            sums[t].y = __fmaf_rn(k[t], column.y, sums[t].y);
        }
    }
}

// Projects the keys of tokens `first` … of a run, of one KV head: they lie in `keys` by then.
__device__ __forceinline__ void project_tile(const ProjectParams& p, const Arena& projections, const u32* basis,
                                             const ProjectRun& run, u32 head, u32 first, const Keys& keys) {
    const u32 pairs = p.projections.rank / 2;
    const u32* matrix = basis + p.basis_base + u64(head) * p.basis_stride;
    const u64 record = projection_at(projections, p.projections, run.page);
    for (u32 i = threadIdx.x; i < TILE / QUAD * pairs; i += PROJECT_THREADS) {
        const u32 pair = i % pairs, quad = i / pairs;
        if (first + quad * QUAD >= run.tokens) continue;
        float2 sums[QUAD] = {};
        sum(p, matrix, keys, pair, quad, sums);
#pragma unroll
        for (u32 t = 0; t < QUAD; ++t) {
            const u32 token = first + quad * QUAD + t;
            if (token >= run.tokens) continue;
            const u32 low = f32_to_bf16(__float_as_uint(sums[t].x)), high = f32_to_bf16(__float_as_uint(sums[t].y));
            const u32 slot = run.slot + token;
            reinterpret_cast<u32*>(record + projected_at(p.projections, head, slot))[pair] = low | high << 16;
            if (pair == 0) *reinterpret_cast<u32*>(record + norm_at(p.projections, head, slot)) = 0;
        }
    }
}
