// score: how well does the best token of a page match a query row? `project_queries` puts the queries on the basis, then
// `score` takes the largest product of each page.
#include <cfloat>
#include "descriptors.cuh"
#include "mma.cuh"
#include "projections.cuh"

namespace {

constexpr u32 THREADS = 128;
constexpr u32 WARPS = THREADS / 32;
constexpr u32 BLOCKS = 5;  // that run at a time on a multiprocessor
constexpr u32 MAX_DIM = 256;
constexpr u32 CHUNK = 8;   // consecutive elements of a key that a thread takes
constexpr u32 SLICE = 32;  // elements that the four threads of a key take at once
constexpr u32 TILE = 16;   // keys of a product
constexpr u32 AHEAD = 4;   // slices of tiles that are on their way at a time
constexpr u32 ALL = 0xffffffff;

// A KV head, and the first token of one of its tiles.
struct Spot {
    u32 head, first;
    __device__ __forceinline__ void advance(u32 tokens) {
        first += TILE;
        if (first >= tokens) first = 0, ++head;
    }
};

// Keys are the rows of a product on tensor cores and queries its columns. The four lanes of a row or column take eight
// neighbours at a time, as they lie in memory: a sum may take its elements in any order.
template <u32 SLICES>
struct Keys {
    uint4 rows[SLICES][2];  // of keys lane / 4 and eight later

    // The keys of a tile; zeros where there is none. Plain loads, which do not move behind `await_previous`.
    __device__ __forceinline__ void load(const ScoreParams& p, u64 record, const Spot& spot, u32 tokens) {
        const u32 lane = threadIdx.x % 32, rank = p.projections.rank;
#pragma unroll
        for (u32 half = 0; half < 2; ++half) {
            const u32 slot = spot.first + lane / 4 + 8 * half;
            const u64 row = record + projected_at(p.projections, spot.head, slot);
#pragma unroll
            for (u32 s = 0; s < SLICES; ++s) {
                const u32 element = s * SLICE + lane % 4 * CHUNK;
                rows[s][half] = make_uint4(0, 0, 0, 0);
                if (slot < tokens && element < rank)
                    rows[s][half] = *reinterpret_cast<const uint4*>(row + 2 * element);
            }
        }
    }

    // Their products with column lane / 4, a projected query, zeros where there is none.
    __device__ __forceinline__ void times(const float* query, u32 rank, float (&sums)[4]) const {
#pragma unroll
        for (u32 s = 0; s < SLICES; ++s) {
            const u32 element = s * SLICE + threadIdx.x % 4 * CHUNK;
            uint4 q = make_uint4(0, 0, 0, 0);
            if (query != nullptr && element < rank) {
                const float4 a = *reinterpret_cast<const float4*>(query + element);
                const float4 b = *reinterpret_cast<const float4*>(query + element + 4);
                q = make_uint4(pack<BF16>(a.x, a.y), pack<BF16>(a.z, a.w), pack<BF16>(b.x, b.y), pack<BF16>(b.z, b.w));
            }
            multiply_bf16(sums, {rows[s][0].x, rows[s][1].x, rows[s][0].y, rows[s][1].y}, {q.x, q.y});
            multiply_bf16(sums, {rows[s][0].z, rows[s][1].z, rows[s][0].w, rows[s][1].w}, {q.z, q.w});
        }
    }
};

// The largest product of an entry, over every `share`-th part of its tiles from `part` on. All queries of a head go over a
// tile once it is there.
template <u32 SLICES>
__device__ __forceinline__ float best_of(const ScoreParams& p, const Arena& arena, const float* queries,
                                         const ScoreEntry& entry, u32 part, u32 share) {
    constexpr u32 TILES = AHEAD / SLICES;
    const u32 lane = threadIdx.x % 32, rank = p.projections.rank;
    const u32 tiles = (entry.tokens + TILE - 1) / TILE, total = p.projections.kv_heads * tiles;
    const u64 record = projection_at(arena, p.projections, entry.page);
    float best = -FLT_MAX;
    for (u32 unit = part * TILES; unit < total; unit += share * TILES) {
        const Spot start = {unit / tiles, unit % tiles * TILE};
        Keys<SLICES> keys[TILES];
        Spot spot = start;
#pragma unroll
        for (u32 t = 0; t < TILES; ++t, spot.advance(entry.tokens))
            keys[t].load(p, record, spot, unit + t < total ? entry.tokens : 0);
        // The queries are those of the kernel before this one; the keys are older.
        await_previous();
        spot = start;
#pragma unroll
        for (u32 t = 0; t < TILES; ++t, spot.advance(entry.tokens)) {
            if (unit + t >= total) break;
            const float* vectors = queries + (u64(entry.row) * p.q_heads + u64(spot.head) * p.group) * rank;
            for (u32 member = 0; member < p.group; member += 8) {
                float sums[4] = {};
                keys[t].times(member + lane / 4 < p.group ? vectors + (member + lane / 4) * rank : nullptr, rank, sums);
#pragma unroll
                for (u32 i = 0; i < 4; ++i) {
                    const bool asked = spot.first + lane / 4 + i / 2 * 8 < entry.tokens &&
                                       member + lane % 4 * 2 + i % 2 < p.group;
                    // False for NaN and infinities.
                    if (asked && fabsf(sums[i]) <= FLT_MAX) best = fmaxf(best, sums[i]);
                }
            }
        }
    }
#pragma unroll
    for (u32 mask = 16; mask > 0; mask /= 2) best = fmaxf(best, __shfl_xor_sync(ALL, best, mask));
    return best;
}

__device__ __forceinline__ float score_of(const ScoreParams& p, const Arena& arena, const float* queries,
                                          const ScoreEntry& entry, u32 part, u32 share) {
    if (entry.tokens == 0) return -FLT_MAX;
    if (p.projections.rank <= SLICE) return best_of<1>(p, arena, queries, entry, part, share);
    if (p.projections.rank <= 2 * SLICE) return best_of<2>(p, arena, queries, entry, part, share);
    return best_of<4>(p, arena, queries, entry, part, share);
}

}  // namespace

// A block takes one query vector. Each thread sums two columns over a part of its elements; the parts are then added in
// order.
extern "C" __global__ void __launch_bounds__(THREADS)
    project_queries(const __grid_constant__ QueryParams p, const u64 q, const u32* basis, float* projected) {
    __shared__ float query[MAX_DIM];
    __shared__ float2 sums[THREADS];
    const u32 pairs = p.rank / 2, parts = THREADS / pairs;
    const u32 pair = threadIdx.x % pairs, part = threadIdx.x / pairs;
    const u64 total = u64(p.rows) * p.q_heads;
    release_next();
    for (u64 vector = blockIdx.x; vector < total; vector += gridDim.x) {
        const u32 row = u32(vector / p.q_heads), head = u32(vector % p.q_heads);
        const u64 first = u64(p.q.base) + u64(row) * p.q.row + u64(head) * p.q.head;
        for (u32 d = threadIdx.x; d < p.k_dim; d += THREADS) {
            const u64 at = first + u64(d) * p.q.element;
            const u32 bits = p.q_dtype == F32 ? __ldg(reinterpret_cast<const u32*>(q) + at)
                                              : __ldg(reinterpret_cast<const u16*>(q) + at);
            query[d] = __uint_as_float(to_f32(bits, p.q_dtype));
        }
        __syncthreads();
        float2 sum = {0, 0};
        if (part < parts) {
            const u32* matrix = basis + p.basis_base + u64(head / p.group) * p.basis_stride;
#pragma unroll 8
            for (u32 d = part; d < p.k_dim; d += parts) {
                const float2 column = unpack_pair(__ldg(matrix + d * pairs + pair));
                sum.x = __fmaf_rn(query[d], column.x, sum.x);
                sum.y = __fmaf_rn(query[d], column.y, sum.y);
            }
        }
        sums[threadIdx.x] = sum;
        __syncthreads();
        if (part == 0) {
            for (u32 i = 1; i < parts; ++i) {
                const float2 other = sums[i * pairs + pair];
                sum = make_float2(__fadd_rn(sum.x, other.x), __fadd_rn(sum.y, other.y));
            }
            const u32 low = f32_to_bf16(__float_as_uint(sum.x)), high = f32_to_bf16(__float_as_uint(sum.y));
            float2* to = reinterpret_cast<float2*>(projected + vector * p.rank) + pair;
            *to = make_float2(__uint_as_float(low << 16), __uint_as_float(high << 16));
        }
        __syncthreads();
    }
}

// `share` warps of a block (1, 2 or 4) take an entry together, each block `WARPS` / `share` entries at a time. Its first entries
// and keys are asked for while `project_queries` runs.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    score(const __grid_constant__ ScoreParams p, const __grid_constant__ Arena arena,
          const __grid_constant__ Descriptors descriptors, const float* queries, float* out, const u32 share) {
    __shared__ float best[WARPS];
    const u32 warp = threadIdx.x / 32, part = warp % share, together = WARPS / share;
    const u64 step = u64(gridDim.x) * together;
    ScoreEntry ahead = {};
    const auto look = [&](u64 number) {
        if (number < p.entries) ahead = descriptor<ScoreEntry>(descriptors, p.entries_at, number);
    };
    look(u64(blockIdx.x) * together + warp / share);
    for (u64 first = u64(blockIdx.x) * together; first < p.entries; first += step) {
        const u64 number = first + warp / share;
        const ScoreEntry entry = ahead;
        look(number + step);
        float found = number < p.entries ? score_of(p, arena, queries, entry, part, share) : 0.0f;
        if (share > 1) {
            __syncthreads();
            if (threadIdx.x % 32 == 0) best[warp] = found;
            __syncthreads();
            for (u32 i = 1; i < share && part == 0; ++i) found = fmaxf(found, best[warp + i]);
        }
        // Every block waits, and before it writes.
        await_previous();
        if (threadIdx.x % 32 == 0 && part == 0 && number < p.entries) out[number] = found;
    }
}
