// merge: what is a row's output? Folds its states left to right, those of a section first, and divides; zeros where nothing
// was visible.
// fold: what is the state of several? The same fold, without sections, written as a state.
//
// To fold a state is o ← o · 2^(before − top) + o' · 2^(m' − top), where `before` and `top` are the largest m of the states
// up to it, without it and with it. Threads find these maxima together; what is left in sequence is one fused multiply-add
// a state and element, and one more a section. `merge_4` to `merge_16` have a thread for four elements of a row and head and
// take that many states at a time, `merge_long` has a block for sixteen elements: for many states of few rows. They give the
// same bits.
#include <cfloat>
#include "descriptors.cuh"
#include "divide.cuh"
#include "fold.cuh"
#include "mma.cuh"
#include "numeric.cuh"

namespace {

constexpr u32 ALL = 0xffffffff;

__device__ __forceinline__ float nothing() { return __uint_as_float(0xff800000); }

// A state's part in a fold: what is there times `rescale`, plus the state times `weight`. One that saw nothing is passed
// over, whatever its other words hold; the first that saw something comes through as it is, to the bit, so that a fold of
// folds is one fold. Sums start at −0 to that end.
struct Link {
    float rescale = 1, weight = -1;

    Link() = default;

    // Of a state with maximum `m`; `before` is the largest of the states before it.
    __device__ __forceinline__ Link(bool seen, float m, float before) {
        const float top = fmaxf(before, m);
        rescale = seen && before != nothing() ? power_of_two(__fsub_rn(before, top)) : 1.0f;
        weight = seen ? power_of_two(__fsub_rn(m, top)) : -1.0f;
    }

    __device__ __forceinline__ float scaled(float x) const { return weight < 0 ? -0.0f : __fmul_rn(x, weight); }
};

// NaN counts as seen: it is not "nothing was visible".
__device__ __forceinline__ bool seen(const float4& tail) { return tail.y != 0; }

__device__ __forceinline__ float m_of(const float4& tail) { return seen(tail) ? tail.x : nothing(); }

// The largest `x` of the lanes up to this one, of its `LANES`.
template <u32 LANES>
__device__ __forceinline__ float largest_so_far(float x) {
#pragma unroll
    for (u32 step = 1; step < LANES; step *= 2) {
        const float other = __shfl_up_sync(ALL, x, step);
        if (threadIdx.x % LANES >= step) x = fmaxf(x, other);
    }
    return x;
}

// The largest `x` of the lanes before this one, of its `LANES`, and `carried`.
template <u32 LANES>
__device__ __forceinline__ float largest_before(float so_far, float carried) {
    const float before = __shfl_up_sync(ALL, so_far, 1);
    return threadIdx.x % LANES == 0 ? carried : fmaxf(carried, before);
}

// A state's part in the fold of its section, of N states, a lane each; and the section's in the fold of all.
template <u32 N>
struct Links {
    Link inner, outer;

    // `before` is the largest m before this lane's state.
    __device__ __forceinline__ Links(const float4& tail, float before) {
        if constexpr (N == 1) {
            outer = Link(seen(tail), tail.x, before);
        } else {
            const u32 first = threadIdx.x % 32 / N * N;
            const float so_far = largest_so_far<N>(m_of(tail));
            inner = Link(seen(tail), tail.x, largest_before<N>(so_far, nothing()));
            const bool any = __ballot_sync(ALL, seen(tail)) >> first & ((1u << N) - 1);
            outer = Link(any, __shfl_sync(ALL, so_far, first + N - 1), __shfl_sync(ALL, before, first));
        }
    }
};

template <class Params>
__device__ __forceinline__ u64 state_at(const Params& p, u32 state, u32 head) {
    return (u64(state) * p.q_heads + head) * p.state_words;
}

// What a fold has come to: N elements, l, m, and what the scores lack.
template <int N>
struct Total {
    float o[N], l = -0.0f, m = nothing(), c = 0;

    __device__ __forceinline__ Total() {
#pragma unroll
        for (int i = 0; i < N; ++i) o[i] = -0.0f;
    }

    __device__ __forceinline__ bool seen() const { return l != 0; }

    __device__ __forceinline__ float out(int i) const { return seen() ? __fdiv_rn(o[i], l) : 0.0f; }
};

__device__ __forceinline__ Link from_lane(const Link& link, u32 lane) {
    Link theirs;
    theirs.rescale = __shfl_sync(ALL, link.rescale, lane);
    theirs.weight = __shfl_sync(ALL, link.weight, lane);
    return theirs;
}

// Elements `4 * unit` and the next three of a row's states, in sections of N. A warp takes BATCH states, whole sections, at a
// time; before the row's first state come places of its section that saw nothing.
template <u32 N, u32 BATCH, class Params>
__device__ __forceinline__ Total<4> fold_states(const Params& p, const float* states, const MergeRow& row, u32 head,
                                                u32 unit) {
    static_assert(BATCH % N == 0, "whole sections");
    const u32 lane = threadIdx.x % 32, end = row.before + row.states;
    const u64 stride = u64(p.q_heads) * p.state_words;
    const float* from = states + state_at(p, row.state, head) - row.before * stride;
    Total<4> total;
    for (u32 done = 0; done < end; done += BATCH, from += BATCH * stride) {
        const auto there = [&](u32 i) { return done + i - row.before < row.states; };
        const auto at = [&](u32 i) { return from + i * stride; };
        float4 tail = make_float4(0, 0, 0, 0), part[BATCH];
        if (lane < BATCH && there(lane)) tail = *reinterpret_cast<const float4*>(at(lane) + p.v_dim);
#pragma unroll
        for (u32 i = 0; i < BATCH; ++i)
            if (there(i) && 4 * unit < p.v_dim) part[i] = reinterpret_cast<const float4*>(at(i))[unit];
        const float so_far = largest_so_far<32>(m_of(tail));
        const Links<N> mine(tail, largest_before<32>(so_far, total.m));
        const u32 first = __ballot_sync(ALL, seen(tail));
        if (total.m == nothing() && first != 0) total.c = __shfl_sync(ALL, tail.z, __ffs(first) - 1);
        total.m = fmaxf(total.m, __shfl_sync(ALL, so_far, 31));
        float o[4], l;
#pragma unroll
        for (u32 i = 0; i < BATCH; ++i) {
            const float x[4] = {part[i].x, part[i].y, part[i].z, part[i].w}, state_l = __shfl_sync(ALL, tail.y, i);
            if constexpr (N > 1) {
                const Link link = from_lane(mine.inner, i);
#pragma unroll
                for (int e = 0; e < 4; ++e) o[e] = __fmaf_rn(i % N ? o[e] : -0.0f, link.rescale, link.scaled(x[e]));
                l = __fmaf_rn(i % N ? l : -0.0f, link.rescale, link.scaled(state_l));
            }
            if (i % N + 1 < N) continue;
            const Link link = from_lane(mine.outer, i);
#pragma unroll
            for (int e = 0; e < 4; ++e)
                total.o[e] = __fmaf_rn(total.o[e], link.rescale, link.scaled(N > 1 ? o[e] : x[e]));
            total.l = __fmaf_rn(total.l, link.rescale, link.scaled(N > 1 ? l : state_l));
        }
    }
    return total;
}

// Writes elements `at` and the next of the output.
__device__ __forceinline__ void write_pair(u64 out, u64 at, u32 dtype, float a, float b) {
    if (dtype == F32) {
        float* to = reinterpret_cast<float*>(out) + at;
        to[0] = a;
        to[1] = b;
    } else {
        *reinterpret_cast<u32*>(out + 2 * at) = dtype == F16 ? pack<F16>(a, b) : pack<BF16>(a, b);
    }
}

template <int N>
__device__ __forceinline__ void write_lse(const MergeParams& p, float* lse, u32 row, u32 head, const Total<N>& total) {
    constexpr float LN_2 = 0.693147180559945309f;
    const float value = __fmul_rn(__fadd_rn(__fadd_rn(total.m, log2f(total.l)), total.c), LN_2);
    lse[u64(p.lse.base) + u64(row) * p.lse.row + u64(head) * p.lse.head] = total.seen() ? value : nothing();
}

__device__ __forceinline__ u64 out_at(const MergeParams& p, u32 row, u32 head) {
    return u64(p.out.base) + u64(row) * p.out.row + u64(head) * p.out.head;
}

}  // namespace

constexpr u32 THREADS = 128;

// `width` threads, whole warps, take a row and head.
template <u32 BATCH>
__device__ __forceinline__ void merge(const MergeParams& p, const Descriptors& descriptors, const float* states, u64 out,
                                      float* lse, u32 width) {
    const u32 unit = threadIdx.x % width, outputs = THREADS / width;
    const u64 first = u64(blockIdx.x) * outputs + threadIdx.x / width;
    for (u64 work = first; work < u64(p.rows) * p.q_heads; work += u64(gridDim.x) * outputs) {
        const Quotient output = divide(work, p.q_heads);
        const u32 row = u32(output.whole), head = output.rest;
        const MergeRow sources = descriptor<MergeRow>(descriptors, p.rows_at, row);
        await_previous();
        const Total<4> total = p.section == 1 ? fold_states<1, BATCH>(p, states, sources, head, unit)
                                              : fold_states<SECTION, BATCH>(p, states, sources, head, unit);
        if (4 * unit < p.v_dim) {
            const u64 at = out_at(p, row, head) + 4 * unit;
            write_pair(out, at, p.out_dtype, total.out(0), total.out(1));
            write_pair(out, at + 2, p.out_dtype, total.out(2), total.out(3));
        }
        if (p.with_lse && unit == 0) write_lse(p, lse, row, head, total);
    }
}

#define MERGE(BATCH)                                                                                                   \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                              \
        merge_##BATCH(const __grid_constant__ MergeParams p, const float* states, const u64 out, float* lse,           \
                      const u32 width, const __grid_constant__ Descriptors descriptors) {                              \
        merge<BATCH>(p, descriptors, states, out, lse, width);                                                         \
    }

MERGE(4)
MERGE(8)
MERGE(16)

constexpr u32 LONG_THREADS = 256;
constexpr u32 SLICE = 16;

// What a block of merge_long shares: scaled elements, then l. Rows are whole units of sixteen bytes.
struct Long {
    __align__(16) float parts[LONG_THREADS][SLICE + 4];
    __align__(16) float rescale[LONG_THREADS], weight[LONG_THREADS];              // inside of a section
    __align__(16) float outer_rescale[LONG_THREADS], outer_weight[LONG_THREADS];  // of a section
    float largest[LONG_THREADS / 32], lack;
};

// Column `thread` of the parts of `count` states, in sections of N: the sum goes on with them.
template <u32 N>
__device__ __forceinline__ float fold_parts(const Long& shared, u32 thread, u32 count, float sum) {
    // Up to a whole step come states that saw nothing.
    constexpr u32 STEP = 16;
#pragma unroll 2
    for (u32 i = 0; i < count; i += STEP) {
#pragma unroll
        for (u32 s = i; s < i + STEP; s += 4) {
            if constexpr (N == 1) {
                const float4 r = *reinterpret_cast<const float4*>(&shared.outer_rescale[s]);
                sum = __fmaf_rn(sum, r.x, shared.parts[s][thread]);
                sum = __fmaf_rn(sum, r.y, shared.parts[s + 1][thread]);
                sum = __fmaf_rn(sum, r.z, shared.parts[s + 2][thread]);
                sum = __fmaf_rn(sum, r.w, shared.parts[s + 3][thread]);
            } else {
                static_assert(N == 4, "a section a step of the loop");
                const float4 r = *reinterpret_cast<const float4*>(&shared.rescale[s]);
                float part = __fmaf_rn(-0.0f, r.x, shared.parts[s][thread]);
                part = __fmaf_rn(part, r.y, shared.parts[s + 1][thread]);
                part = __fmaf_rn(part, r.z, shared.parts[s + 2][thread]);
                part = __fmaf_rn(part, r.w, shared.parts[s + 3][thread]);
                Link link;
                link.weight = shared.outer_weight[s];
                sum = __fmaf_rn(sum, shared.outer_rescale[s], link.scaled(part));
            }
        }
    }
    return sum;
}

// A block takes a row, a head and SLICE elements, and LONG_THREADS states at a time: each thread has the tail of a state,
// and quarters of four. Then the first warp goes through them, a lane an element, and one for l.
template <u32 N>
__device__ __forceinline__ void merge_slice(const MergeParams& p, const float* states, const MergeRow& sources, u32 row,
                                            u32 head, u32 first, u64 out, float* lse, Long& shared) {
    const u32 thread = threadIdx.x, end = sources.before + sources.states;
    float4 tail, quarter[SLICE / 4];
    const auto load = [&](u32 done) {
        const auto there = [&](u32 i) { return done + i - sources.before < sources.states; };
        const auto at = [&](u32 i) { return states + state_at(p, sources.state + (done + i - sources.before), head); };
        tail = make_float4(0, 0, 0, 0);
        if (there(thread)) tail = *reinterpret_cast<const float4*>(at(thread) + p.v_dim);
#pragma unroll
        for (u32 i = 0; i < SLICE / 4; ++i) {
            const u32 state = (thread + i * LONG_THREADS) / (SLICE / 4), from = first + thread % (SLICE / 4) * 4;
            if (there(state) && from < p.v_dim) quarter[i] = *reinterpret_cast<const float4*>(at(state) + from);
        }
    };
    load(0);
    Total<1> total;
    for (u32 done = 0; done < end; done += LONG_THREADS) {
        const float so_far = largest_so_far<32>(m_of(tail));
        if (thread % 32 == 31) shared.largest[thread / 32] = so_far;
        __syncthreads();
        float before = total.m;
        for (u32 warp = 0; warp < LONG_THREADS / 32; ++warp) {
            if (warp < thread / 32) before = fmaxf(before, shared.largest[warp]);
            total.m = fmaxf(total.m, shared.largest[warp]);
        }
        before = largest_before<32>(so_far, before);
        const Links<N> links(tail, before);
        const Link& scale = N == 1 ? links.outer : links.inner;
        shared.rescale[thread] = links.inner.rescale;
        shared.weight[thread] = scale.weight;
        shared.outer_rescale[thread] = links.outer.rescale;
        shared.outer_weight[thread] = links.outer.weight;
        shared.parts[thread][SLICE] = scale.scaled(tail.y);
        if (seen(tail) && before == nothing()) shared.lack = tail.z;
        __syncthreads();
#pragma unroll
        for (u32 i = 0; i < SLICE / 4; ++i) {
            const u32 state = (thread + i * LONG_THREADS) / (SLICE / 4);
            Link of;
            of.weight = shared.weight[state];
            *reinterpret_cast<float4*>(&shared.parts[state][thread % (SLICE / 4) * 4]) = make_float4(
                of.scaled(quarter[i].x), of.scaled(quarter[i].y), of.scaled(quarter[i].z), of.scaled(quarter[i].w));
        }
        __syncthreads();
        const u32 count = min(end - done, LONG_THREADS);
        if (done + LONG_THREADS < end) load(done + LONG_THREADS);
        if (thread <= SLICE) total.o[0] = fold_parts<N>(shared, thread, count, total.o[0]);
        __syncthreads();
    }
    if (thread < 32) {
        total.l = __shfl_sync(ALL, total.o[0], SLICE);
        if (total.m != nothing()) total.c = shared.lack;
        const float next = __shfl_down_sync(ALL, total.out(0), 1);
        const u32 element = first + thread;
        if (thread < SLICE && element < p.v_dim && thread % 2 == 0)
            write_pair(out, out_at(p, row, head) + element, p.out_dtype, total.out(0), next);
        if (p.with_lse && element == 0) write_lse(p, lse, row, head, total);
    }
}

extern "C" __global__ void __launch_bounds__(LONG_THREADS, 4)
    merge_long(const __grid_constant__ MergeParams p, const float* states, const u64 out, float* lse,
               const __grid_constant__ Descriptors descriptors) {
    __shared__ Long shared;
    const u32 slices = (p.v_dim + SLICE - 1) / SLICE;
    for (u64 work = blockIdx.x; work < u64(p.rows) * p.q_heads * slices; work += gridDim.x) {
        const Place3 place(work, slices, p.q_heads);
        const u32 first = place.x * SLICE, head = place.y, row = u32(place.z);
        const MergeRow sources = descriptor<MergeRow>(descriptors, p.rows_at, row);
        await_previous();
        if (p.section == 1) {
            merge_slice<1>(p, states, sources, row, head, first, out, lse, shared);
        } else {
            merge_slice<SECTION>(p, states, sources, row, head, first, out, lse, shared);
        }
    }
}

// The target may be the row's first source: a block has read all before it writes.
extern "C" __global__ void __launch_bounds__(64)
    fold(const __grid_constant__ FoldParams p, float* states, const __grid_constant__ Descriptors descriptors) {
    const u32 unit = threadIdx.x;
    for (u64 work = blockIdx.x; work < u64(p.rows) * p.q_heads; work += gridDim.x) {
        const Quotient output = divide(work, p.q_heads);
        const u32 head = output.rest;
        const FoldRow row = descriptor<FoldRow>(descriptors, p.rows_at, output.whole);
        const Total<4> total = fold_states<1, 16>(p, states, {row.state, row.states, 0}, head, unit);
        __syncthreads();
        float* to = states + state_at(p, row.to, head);
        const auto o = [&](int i) { return total.seen() ? total.o[i] : 0.0f; };
        if (4 * unit < p.v_dim) reinterpret_cast<float4*>(to)[unit] = make_float4(o(0), o(1), o(2), o(3));
        if (unit == 0) {
            const float4 tail =
                total.seen() ? make_float4(total.m, total.l, total.c, 0) : make_float4(-FLT_MAX, 0, 0, 0);
            *reinterpret_cast<float4*>(to + p.v_dim) = tail;
        }
    }
}
