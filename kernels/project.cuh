// What are stored keys on a basis? A warp takes sixteen tokens of one run and KV head, the rows of its products on tensor
// cores, and 32 columns of the basis.
//
// Four lanes share a row, and each loads eight elements at a time, as they lie in the page. These are not the elements that
// the products give a lane, but a sum may take its elements in any order that is always the same: the basis lies in shared
// memory in that order too (`stage`), so keys need no shared memory. What a token's sums are depends on its key alone.
//
// Factors are bf16, as the basis is. A key of another format is the sum of a few such numbers (`SUMMANDS`).
#pragma once
#include "chunk.cuh"
#include "mma.cuh"
#include "projections.cuh"

constexpr u32 PROJECT_THREADS = 128;
constexpr u32 PROJECT_WARPS = PROJECT_THREADS / 32;
constexpr u32 TILE = 16;           // tokens of a warp
constexpr u32 SPAN = 32;           // columns of the basis that a block holds
constexpr u32 PRODUCTS = SPAN / 8;
constexpr u32 SLICE = 4 * CHUNK;   // elements that the lanes of a row load at once
constexpr u32 MAX_KEY = 256;

// A span of the basis: for each slice, product and lane eight elements of a column.
using Factors = uint4[MAX_KEY / SLICE][PRODUCTS][32];

__device__ __forceinline__ u32 count_slices(const ProjectParams& p) { return (p.record.k_dim + SLICE - 1) / SLICE; }
__device__ __forceinline__ u32 count_spans(const ProjectParams& p) { return (p.projections.rank + SPAN - 1) / SPAN; }

// Lays out span `span` of a KV head's basis, zeros where there is none. Of product n, lane / 4 is column
// 8 (lane / 8) + 2n + lane / 4 % 2: so the sums of a lane are eight neighbours.
__device__ __forceinline__ void stage(const ProjectParams& p, const u32* basis, u32 head, u32 span, Factors& factors) {
    const u32 pairs = p.projections.rank / 2;
    const u32* matrix = basis + p.basis_base + u64(head) * p.basis_stride;
    for (u32 i = threadIdx.x; i < count_slices(p) * 4 * (SPAN / 2); i += PROJECT_THREADS) {
        const u32 pair = i % (SPAN / 2), chunk = i / (SPAN / 2), column = span * (SPAN / 2) + pair;
        u32 words[CHUNK] = {};
        if (chunk * CHUNK < p.record.k_dim && column < pairs) {
#pragma unroll
            for (u32 e = 0; e < CHUNK; ++e) words[e] = __ldg(matrix + (chunk * CHUNK + e) * pairs + column);
        }
        const auto half = [&](u32 which) {
            return make_uint4(__byte_perm(words[0], words[1], which), __byte_perm(words[2], words[3], which),
                              __byte_perm(words[4], words[5], which), __byte_perm(words[6], words[7], which));
        };
        uint4* to = &factors[chunk / 4][pair % PRODUCTS][pair / PRODUCTS * 8 + chunk % 4];
        to[0] = half(0x5410);
        to[4] = half(0x7632);
    }
}

// How many bf16 numbers a key's element is the sum of: as many as hold all its bits; of a key in int8 17 bits, which is far
// more than its codes have.
template <u32 FORMAT>
constexpr u32 SUMMANDS = FORMAT == BF16 ? 1 : FORMAT == F32 ? 3 : 2;

// Blocks that run at a time on a multiprocessor, as registers allow: `project_blocks` of src/backend/cuda/predict.rs.
template <u32 FORMAT>
constexpr u32 PROJECT_BLOCKS = FORMAT == BF16 || FORMAT == INT8 ? 4 : 3;

// Eight elements of a key row as they are stored. Plain loads: the block may have written the row itself.
template <u32 FORMAT>
__device__ __forceinline__ void load_key(Chunk<FORMAT>& key, u64 at) {
    if constexpr (FORMAT == INT8) {
        key.units = *reinterpret_cast<const uint2*>(at);
    } else {
#pragma unroll
        for (int i = 0; i < Chunk<FORMAT>::UNITS; ++i) key.units[i] = reinterpret_cast<const uint4*>(at)[i];
    }
}

// Mean and scale of eight channels.
struct Eight {
    float mean[CHUNK], scale[CHUNK];

    static __device__ __forceinline__ void load(float (&x)[CHUNK], const float* from) {
        const float4 a = __ldg(reinterpret_cast<const float4*>(from)), b = __ldg(reinterpret_cast<const float4*>(from) + 1);
        x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w, x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
    }

    // From `element` on, of a head's `dim`; zeros past its end.
    __device__ __forceinline__ Eight(const float* channels, u32 dim, u32 element) : mean{}, scale{} {
        if (element >= dim) return;
        load(mean, channels + element);
        load(scale, channels + dim + element);
    }
    __device__ __forceinline__ Eight() {}
};

// Eight elements of a key as the words of products. Codes stand for mean + code × scale of the row × scale of the channel.
template <u32 FORMAT>
__device__ __forceinline__ void find_words(const Chunk<FORMAT>& key, float scale, const Eight& eight,
                                           u32 (&words)[SUMMANDS<FORMAT>][4]) {
    if constexpr (FORMAT == BF16) {
        words[0][0] = key.units[0].x, words[0][1] = key.units[0].y;
        words[0][2] = key.units[0].z, words[0][3] = key.units[0].w;
    } else {
        float x[CHUNK];
        key.decode(x);
        if constexpr (FORMAT == INT8) {
#pragma unroll
            for (int i = 0; i < CHUNK; ++i)
                x[i] = __fadd_rn(eight.mean[i], __fmul_rn(__fmul_rn(x[i], scale), eight.scale[i]));
        }
#pragma unroll
        for (int w = 0; w < 4; ++w) {
#pragma unroll
            for (int s = 0; s < SUMMANDS<FORMAT>; ++s) {
                words[s][w] = pack<BF16>(x[2 * w], x[2 * w + 1]);
                const float2 whole = unpack<BF16>(words[s][w]);
                x[2 * w] = __fsub_rn(x[2 * w], whole.x), x[2 * w + 1] = __fsub_rn(x[2 * w + 1], whole.y);
            }
        }
    }
}

// The sums of two rows and the span's columns: those of the first summands, and those of the others, which are small.
struct Sums {
    float first[PRODUCTS][4], others[PRODUCTS][4];

    // Adds the products of a slice, two times sixteen elements.
    template <u32 COUNT>
    __device__ __forceinline__ void add(const u32 (&a)[2][COUNT][4], const uint4 (&slice)[PRODUCTS][32]) {
        uint4 b[PRODUCTS];
#pragma unroll
        for (u32 n = 0; n < PRODUCTS; ++n) b[n] = slice[n][threadIdx.x % 32];
#pragma unroll
        for (u32 s = 0; s < COUNT; ++s) {
            const u32 low[4] = {a[0][s][0], a[1][s][0], a[0][s][1], a[1][s][1]};
            const u32 high[4] = {a[0][s][2], a[1][s][2], a[0][s][3], a[1][s][3]};
#pragma unroll
            for (u32 n = 0; n < PRODUCTS; ++n) multiply_bf16(s == 0 ? first[n] : others[n], low, {b[n].x, b[n].y});
#pragma unroll
            for (u32 n = 0; n < PRODUCTS; ++n) multiply_bf16(s == 0 ? first[n] : others[n], high, {b[n].z, b[n].w});
        }
    }

    // Two neighbouring columns of one row as a word.
    template <u32 FORMAT>
    __device__ __forceinline__ u32 word(u32 n, u32 half) const {
        float x = first[n][2 * half], y = first[n][2 * half + 1];
        if constexpr (SUMMANDS<FORMAT> > 1)
            x = __fadd_rn(x, others[n][2 * half]), y = __fadd_rn(y, others[n][2 * half + 1]);
        return pack<BF16>(x, y);
    }
};

// Where a warp projects: tokens `first` … of a run, of one KV head, on one span.
struct Piece {
    ProjectRun run;
    u32 head, span, first;
};

// Some slices of a warp's sixteen keys as they are stored, and the scales of their rows.
template <u32 FORMAT>
struct Keys {
    static constexpr u32 SLICES = FORMAT == F32 ? 2 : 4, BYTES = Chunk<FORMAT>::BYTES;
    Chunk<FORMAT> rows[SLICES][2];  // of tokens lane / 4 and eight later
    float scales[2];

    // Asks for those from slice `from` on; zeros where there is none.
    __device__ __forceinline__ void load(const RecordParams& record, const Arena& arena, const Piece& piece, u32 from) {
        const u32 lane = threadIdx.x % 32, mine = lane % 4;
        const u64 frame = frame_at(arena, record, piece.run.frame);
#pragma unroll
        for (u32 half = 0; half < 2; ++half) {
            const u32 token = piece.first + lane / 4 + 8 * half, slot = piece.run.slot + token;
            const bool live = token < piece.run.tokens;
            const u64 row = frame + key_at(record, piece.head, slot) + (from * 4 + mine) * BYTES;
            scales[half] = 0;
            if (FORMAT == INT8 && live)
                scales[half] = *reinterpret_cast<const float*>(frame + key_scale_at(record, piece.head, slot));
#pragma unroll
            for (u32 s = 0; s < SLICES; ++s) {
                rows[s][half].clear();
                if (live && (from + s) * SLICE + mine * CHUNK < record.k_dim) load_key(rows[s][half], row + s * 4 * BYTES);
            }
        }
    }
};

// Adds the products of slices `from` … of a key. `channels` are those of the KV head, where pages are quantised.
template <u32 FORMAT>
__device__ __forceinline__ void add_slices(const ProjectParams& p, const Keys<FORMAT>& keys, const Factors& factors,
                                           const float* channels, u32 from, Sums& sums) {
#pragma unroll
    for (u32 s = 0; s < Keys<FORMAT>::SLICES; ++s) {
        if (from + s >= count_slices(p)) break;
        const u32 element = (from + s) * SLICE + threadIdx.x % 4 * CHUNK;
        const Eight eight = FORMAT == INT8 ? Eight(channels, p.record.k_dim, element) : Eight();
        u32 words[2][SUMMANDS<FORMAT>][4];
        find_words(keys.rows[s][0], keys.scales[0], eight, words[0]);
        find_words(keys.rows[s][1], keys.scales[1], eight, words[1]);
        sums.add(words, factors[from + s]);
    }
}

// Whole warps call this together, with the first slices of the piece's keys. `factors` hold its span by then; `channels` are
// those of all KV heads, where pages are quantised.
template <u32 FORMAT>
__device__ __forceinline__ void project_piece(const ProjectParams& p, const Arena& arena, const Arena& projections,
                                              const Factors& factors, const float* channels, const Piece& piece,
                                              const Keys<FORMAT>& first) {
    const u32 lane = threadIdx.x % 32;
    channels += 3ull * piece.head * p.record.k_dim;
    Sums sums = {};
    add_slices<FORMAT>(p, first, factors, channels, 0, sums);
#pragma unroll 1
    for (u32 from = Keys<FORMAT>::SLICES; from < count_slices(p); from += Keys<FORMAT>::SLICES) {
        Keys<FORMAT> keys;
        keys.load(p.record, arena, piece, from);
        add_slices<FORMAT>(p, keys, factors, channels, from, sums);
    }
    const u64 record = projection_at(projections, p.projections, piece.run.page);
    const u32 column = piece.span * SPAN + lane % 4 * 8;
#pragma unroll
    for (u32 half = 0; half < 2; ++half) {
        const u32 token = piece.first + lane / 4 + 8 * half, slot = piece.run.slot + token;
        if (token >= piece.run.tokens) continue;
        const u64 to = record + projected_at(p.projections, piece.head, slot) + 2 * column;
        const auto word = [&](u32 n) { return sums.word<FORMAT>(n, half); };
        if (column < p.projections.rank)
            *reinterpret_cast<uint4*>(to) = make_uint4(word(0), word(1), word(2), word(3));
        if (column == 0) *reinterpret_cast<u32*>(record + norm_at(p.projections, piece.head, slot)) = 0;
    }
}
