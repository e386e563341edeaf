// merge: what is a row's output? Folds its states left to right and divides; zeros where nothing was visible.
// fold: what is the state of several? The same fold, written as a state.
//
// To fold a state is o ← o · 2^(before − top) + o' · 2^(m' − top), where `before` and `top` are the largest m of the states
// up to it, without it and with it. Threads find these maxima together; what is left in sequence is one fused multiply-add
// a state and element. `merge` has a thread for four elements of a row and head, `merge_long` a block for sixteen: for many
// states of few rows. They give the same bits.
#include <cfloat>
#include "descriptors.cuh"
#include "ptx.cuh"
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

    // `before` is the largest m of the states before this one.
    __device__ __forceinline__ Link(const float4& tail, float before) {
        const float top = fmaxf(before, tail.x);
        const bool seen = tail.y != 0;  // NaN too: it is not "nothing was visible"
        rescale = seen && before != nothing() ? exp2f(__fsub_rn(before, top)) : 1.0f;
        weight = seen ? exp2f(__fsub_rn(tail.x, top)) : -1.0f;
    }

    __device__ __forceinline__ float scaled(float x) const { return weight < 0 ? -0.0f : __fmul_rn(x, weight); }
};

__device__ __forceinline__ float m_of(const float4& tail) { return tail.y != 0 ? tail.x : nothing(); }

// The largest `x` of the lanes up to this one.
__device__ __forceinline__ float largest_so_far(float x) {
    const u32 lane = threadIdx.x % 32;
#pragma unroll
    for (u32 step = 1; step < 32; step *= 2) {
        const float other = __shfl_up_sync(ALL, x, step);
        if (lane >= step) x = fmaxf(x, other);
    }
    return x;
}

// The largest `x` of the lanes before this one, and `carried`.
__device__ __forceinline__ float largest_before(float so_far, float carried) {
    const float before = __shfl_up_sync(ALL, so_far, 1);
    return threadIdx.x % 32 == 0 ? carried : fmaxf(carried, before);
}

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

// Elements `4 * unit` and the next three of `count` states from `state` on. A warp takes a batch at a time.
template <class Params>
__device__ __forceinline__ Total<4> fold_states(const Params& p, const float* states, u32 state, u32 count, u32 head,
                                                u32 unit) {
    constexpr u32 BATCH = 16;
    const u32 lane = threadIdx.x % 32;
    Total<4> total;
    for (u32 done = 0; done < count; done += BATCH) {
        float4 tail = make_float4(0, 0, 0, 0), part[BATCH];
        if (lane < BATCH && done + lane < count)
            tail = *reinterpret_cast<const float4*>(states + state_at(p, state + done + lane, head) + p.v_dim);
#pragma unroll
        for (u32 i = 0; i < BATCH; ++i)
            if (done + i < count && 4 * unit < p.v_dim)
                part[i] = reinterpret_cast<const float4*>(states + state_at(p, state + done + i, head))[unit];
        const float so_far = largest_so_far(m_of(tail));
        const Link mine(tail, largest_before(so_far, total.m));
        const u32 first = __ballot_sync(ALL, tail.y != 0);
        if (total.m == nothing() && first != 0) total.c = __shfl_sync(ALL, tail.z, __ffs(first) - 1);
        total.m = fmaxf(total.m, __shfl_sync(ALL, so_far, 31));
#pragma unroll
        for (u32 i = 0; i < BATCH; ++i) {
            Link link;
            link.rescale = __shfl_sync(ALL, mine.rescale, i);
            link.weight = __shfl_sync(ALL, mine.weight, i);
            const float x[4] = {part[i].x, part[i].y, part[i].z, part[i].w};
#pragma unroll
            for (int e = 0; e < 4; ++e) total.o[e] = __fmaf_rn(total.o[e], link.rescale, link.scaled(x[e]));
            total.l = __fmaf_rn(total.l, link.rescale, link.scaled(__shfl_sync(ALL, tail.y, i)));
        }
    }
    return total;
}

// Writes elements `at` and the next of the output.
__device__ __forceinline__ void write_pair(u64 out, u64 at, u32 dtype, float a, float b) {
    const u32 x = __float_as_uint(a), y = __float_as_uint(b);
    if (dtype == F32) {
        u32* to = reinterpret_cast<u32*>(out) + at;
        to[0] = x;
        to[1] = y;
    } else {
        *reinterpret_cast<u32*>(out + 2 * at) = from_f32(x, dtype) | from_f32(y, dtype) << 16;
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

// A block takes a row and head.
extern "C" __global__ void __launch_bounds__(64)
    merge(const __grid_constant__ MergeParams p, const __grid_constant__ Descriptors descriptors, const float* states,
          const u64 out, float* lse) {
    const MergeRow* rows = reinterpret_cast<const MergeRow*>(words_of(descriptors) + p.rows_at);
    const u32 unit = threadIdx.x;
    for (u64 work = blockIdx.x; work < u64(p.rows) * p.q_heads; work += gridDim.x) {
        const u32 row = u32(work / p.q_heads), head = u32(work % p.q_heads);
        const MergeRow sources = rows[row];
        await_previous();
        const Total<4> total = fold_states(p, states, sources.state, sources.states, head, unit);
        if (4 * unit < p.v_dim) {
            const u64 at = out_at(p, row, head) + 4 * unit;
            write_pair(out, at, p.out_dtype, total.out(0), total.out(1));
            write_pair(out, at + 2, p.out_dtype, total.out(2), total.out(3));
        }
        if (p.with_lse && unit == 0) write_lse(p, lse, row, head, total);
    }
}

constexpr u32 LONG_THREADS = 256;
constexpr u32 SLICE = 16;

// A block takes a row, a head and SLICE elements, and LONG_THREADS states at a time: each thread has the tail of a state,
// and quarters of four. Then the first warp goes through them, a lane an element, and one for l.
extern "C" __global__ void __launch_bounds__(LONG_THREADS)
    merge_long(const __grid_constant__ MergeParams p, const __grid_constant__ Descriptors descriptors,
               const float* states, const u64 out, float* lse) {
    // Scaled elements, then l. Rows are whole units of sixteen bytes.
    __shared__ __align__(16) float parts[LONG_THREADS][SLICE + 4];
    __shared__ __align__(16) float rescale[LONG_THREADS];
    __shared__ float weight[LONG_THREADS], largest[LONG_THREADS / 32], lack;
    const MergeRow* rows = reinterpret_cast<const MergeRow*>(words_of(descriptors) + p.rows_at);
    const u32 slices = (p.v_dim + SLICE - 1) / SLICE, thread = threadIdx.x;
    for (u64 work = blockIdx.x; work < u64(p.rows) * p.q_heads * slices; work += gridDim.x) {
        const u32 first = u32(work % slices) * SLICE, head = u32(work / slices % p.q_heads);
        const u32 row = u32(work / slices / p.q_heads);
        const MergeRow sources = rows[row];
        float4 tail, quarter[SLICE / 4];
        const auto load = [&](u32 done) {
            const u32 count = sources.states - done;
            tail = make_float4(0, 0, 0, 0);
            const auto at = [&](u32 i) { return states + state_at(p, sources.state + done + i, head); };
            if (thread < count) tail = *reinterpret_cast<const float4*>(at(thread) + p.v_dim);
#pragma unroll
            for (u32 i = 0; i < SLICE / 4; ++i) {
                const u32 state = (thread + i * LONG_THREADS) / (SLICE / 4), from = first + thread % (SLICE / 4) * 4;
                if (state < count && from < p.v_dim) quarter[i] = *reinterpret_cast<const float4*>(at(state) + from);
            }
        };
        await_previous();
        load(0);
        Total<1> total;
        for (u32 done = 0; done < sources.states; done += LONG_THREADS) {
            const float so_far = largest_so_far(m_of(tail));
            if (thread % 32 == 31) largest[thread / 32] = so_far;
            __syncthreads();
            float before = total.m;
            for (u32 warp = 0; warp < LONG_THREADS / 32; ++warp) {
                if (warp < thread / 32) before = fmaxf(before, largest[warp]);
                total.m = fmaxf(total.m, largest[warp]);
            }
            before = largest_before(so_far, before);
            const Link link(tail, before);
            rescale[thread] = link.rescale;
            weight[thread] = link.weight;
            parts[thread][SLICE] = link.scaled(tail.y);
            if (tail.y != 0 && before == nothing()) lack = tail.z;
            __syncthreads();
#pragma unroll
            for (u32 i = 0; i < SLICE / 4; ++i) {
                const u32 state = (thread + i * LONG_THREADS) / (SLICE / 4);
                Link of;
                of.weight = weight[state];
                *reinterpret_cast<float4*>(&parts[state][thread % (SLICE / 4) * 4]) =
                    make_float4(of.scaled(quarter[i].x), of.scaled(quarter[i].y), of.scaled(quarter[i].z),
                                of.scaled(quarter[i].w));
            }
            __syncthreads();
            const u32 count = min(sources.states - done, LONG_THREADS);
            if (done + LONG_THREADS < sources.states) load(done + LONG_THREADS);
            if (thread <= SLICE) {
                // Up to a whole step come states that saw nothing.
                constexpr u32 STEP = 16;
#pragma unroll 2
                for (u32 i = 0; i < count; i += STEP) {
#pragma unroll
                    for (u32 s = 0; s < STEP; s += 4) {
                        const float4 r = *reinterpret_cast<const float4*>(rescale + i + s);
                        total.o[0] = __fmaf_rn(total.o[0], r.x, parts[i + s][thread]);
                        total.o[0] = __fmaf_rn(total.o[0], r.y, parts[i + s + 1][thread]);
                        total.o[0] = __fmaf_rn(total.o[0], r.z, parts[i + s + 2][thread]);
                        total.o[0] = __fmaf_rn(total.o[0], r.w, parts[i + s + 3][thread]);
                    }
                }
            }
            __syncthreads();
        }
        if (thread < 32) {
            total.l = __shfl_sync(ALL, total.o[0], SLICE);
            if (total.m != nothing()) total.c = lack;
            const float next = __shfl_down_sync(ALL, total.out(0), 1);
            const u32 element = first + thread;
            if (thread < SLICE && element < p.v_dim && thread % 2 == 0)
                write_pair(out, out_at(p, row, head) + element, p.out_dtype, total.out(0), next);
            if (p.with_lse && element == 0) write_lse(p, lse, row, head, total);
        }
    }
}

// The target may be the row's first source: a block has read all before it writes.
extern "C" __global__ void __launch_bounds__(64)
    fold(const __grid_constant__ FoldParams p, const __grid_constant__ Descriptors descriptors, float* states) {
    const FoldRow* rows = reinterpret_cast<const FoldRow*>(words_of(descriptors) + p.rows_at);
    const u32 unit = threadIdx.x;
    for (u64 work = blockIdx.x; work < u64(p.rows) * p.q_heads; work += gridDim.x) {
        const u32 head = u32(work % p.q_heads);
        const FoldRow row = rows[work / p.q_heads];
        const Total<4> total = fold_states(p, states, row.state, row.states, head, unit);
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
