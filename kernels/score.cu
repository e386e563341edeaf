// score: how well does the best token of a page match a query row? `project_queries` puts the queries on the basis, then
// `score` takes the largest product of each page.
#include <cfloat>
#include "descriptors.cuh"
#include "numeric.cuh"
#include "projections.cuh"

namespace {

constexpr u32 THREADS = 128;
constexpr u32 WARPS = THREADS / 32;
constexpr u32 MAX_DIM = 256;
constexpr u32 CHUNK = 8;  // consecutive elements of a key that a thread takes
constexpr u32 STEP = 4;   // keys that a thread loads at once
constexpr u32 ALL = 0xffffffff;

// Eight elements of a projected query.
struct Query {
    float4 low, high;
    __device__ __forceinline__ explicit Query(const float* at)
        : low(__ldg(reinterpret_cast<const float4*>(at))), high(__ldg(reinterpret_cast<const float4*>(at) + 1)) {}
};

__device__ __forceinline__ float product(const Query& q, const uint4& words) {
    const float2 a = unpack_pair(words.x), b = unpack_pair(words.y), c = unpack_pair(words.z), d = unpack_pair(words.w);
    float sum = __fmul_rn(q.low.x, a.x);
    sum = __fmaf_rn(q.low.y, a.y, sum);
    sum = __fmaf_rn(q.low.z, b.x, sum);
    sum = __fmaf_rn(q.low.w, b.y, sum);
    sum = __fmaf_rn(q.high.x, c.x, sum);
    sum = __fmaf_rn(q.high.y, c.y, sum);
    sum = __fmaf_rn(q.high.z, d.x, sum);
    return __fmaf_rn(q.high.w, d.y, sum);
}

// The largest product of an entry, over every `share`-th group of keys from `part` on. `lanes` neighbouring threads (a
// power of two) share a key, so that a warp reads whole rows; a warp takes `STEP` × 32 / `lanes` keys of a KV head at
// once, and all of the head's queries go over them.
__device__ __forceinline__ float best_of(const ScoreParams& p, const Arena& arena, const float* queries,
                                         const ScoreEntry& entry, u32 lanes, u32 part, u32 share) {
    const u32 lane = threadIdx.x % 32, chunk = lane % lanes * CHUNK;
    const u32 rank = p.projections.rank, rows = 32 / lanes, take = STEP * rows;
    const u32 groups = (entry.tokens + take - 1) / take;
    const u64 record = projection_at(arena, p.projections, entry.page);
    float best = -FLT_MAX;
    for (u32 unit = part; unit < p.projections.kv_heads * groups; unit += share) {
        const u32 head = unit / groups, first = unit % groups * take + lane / lanes;
        uint4 keys[STEP];
#pragma unroll
        for (u32 s = 0; s < STEP; ++s) {
            const u32 slot = first + s * rows;
            keys[s] = make_uint4(0, 0, 0, 0);
            if (slot < entry.tokens && chunk < rank)
                keys[s] =
                    __ldg(reinterpret_cast<const uint4*>(record + projected_at(p.projections, head, slot) + 2 * chunk));
        }
        // Lanes past the row's end hold zeros and may read any query.
        const u64 vector = u64(entry.row) * p.q_heads + u64(head) * p.group;
        const float* query = queries + vector * rank + (chunk < rank ? chunk : 0);
        for (u32 member = 0; member < p.group; ++member, query += rank) {
            const Query q(query);
            float sums[STEP];
#pragma unroll
            for (u32 s = 0; s < STEP; ++s) sums[s] = chunk < rank ? product(q, keys[s]) : 0.0f;
            for (u32 mask = lanes / 2; mask > 0; mask /= 2) {
#pragma unroll
                for (u32 s = 0; s < STEP; ++s) sums[s] = __fadd_rn(sums[s], __shfl_xor_sync(ALL, sums[s], mask));
            }
#pragma unroll
            for (u32 s = 0; s < STEP; ++s) {
                // False for NaN and infinities.
                const bool finite = fabsf(sums[s]) <= FLT_MAX;
                if (first + s * rows < entry.tokens && finite) best = fmaxf(best, sums[s]);
            }
        }
    }
#pragma unroll
    for (u32 mask = 16; mask > 0; mask /= 2) best = fmaxf(best, __shfl_xor_sync(ALL, best, mask));
    return best;
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
#pragma unroll 4
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

// `share` warps of a block (1, 2 or 4) take an entry together, each block `WARPS` / `share` entries.
extern "C" __global__ void __launch_bounds__(THREADS)
    score(const __grid_constant__ ScoreParams p, const __grid_constant__ Arena arena,
          const __grid_constant__ Descriptors descriptors,
          const float* queries, float* out, const u32 lanes, const u32 share) {
    __shared__ float best[WARPS];
    const u32 warp = threadIdx.x / 32, part = warp % share, together = WARPS / share;
    const u64 blocks = (u64(p.entries) + together - 1) / together;
    for (u64 block = blockIdx.x; block < blocks; block += gridDim.x) {
        const u64 number = block * together + warp / share;
        float found = -FLT_MAX;
        if (number < p.entries) {
            const ScoreEntry entry = descriptor<ScoreEntry>(descriptors, p.entries_at, number);
            if (entry.tokens > 0) found = best_of(p, arena, queries, entry, lanes, part, share);
        }
        if (threadIdx.x % 32 == 0) best[warp] = found;
        __syncthreads();
        if (threadIdx.x % 32 == 0 && part == 0 && number < p.entries) {
            for (u32 i = 1; i < share; ++i) found = fmaxf(found, best[warp + i]);
            out[number] = found;
        }
        __syncthreads();
    }
}
