// merge: what is a row's output? Folds its states left to right and divides; zeros where nothing was visible.
// fold: what is the state of several? The same fold, written as a state.
#include <cfloat>
#include "numeric.cuh"

namespace {

constexpr u32 MAX_THREADS = 128;
// States that are loaded together, so that their loads overlap.
constexpr u32 BATCH = 4;

// Two elements of a state, and its maximum, its sum and what its scores lack.
struct Part {
    float2 o;
    float m, l, c;
};

struct Total {
    float2 o = {0, 0};
    float m = -FLT_MAX, l = 0, c = 0;

    // A state that saw nothing is passed over, whatever its other words hold; the first that saw something is taken as
    // it is, so that a fold of folds has the bits of one fold.
    __device__ __forceinline__ void take(const Part& part) {
        if (part.l == 0) return;
        if (l == 0) {
            o = part.o;
            m = part.m;
            l = part.l;
            c = part.c;
            return;
        }
        const float top = fmaxf(m, part.m);
        const float mine = exp2f(__fsub_rn(m, top)), theirs = exp2f(__fsub_rn(part.m, top));
        l = __fmaf_rn(l, mine, __fmul_rn(part.l, theirs));
        o.x = __fmaf_rn(o.x, mine, __fmul_rn(part.o.x, theirs));
        o.y = __fmaf_rn(o.y, mine, __fmul_rn(part.o.y, theirs));
        m = top;
    }
};

// Floats of states that this kernel only reads, or that it also writes.
template <bool WRITTEN, class Floats>
__device__ __forceinline__ Floats load(const float* from) {
    const Floats* floats = reinterpret_cast<const Floats*>(from);
    if constexpr (WRITTEN) return *floats;
    return __ldg(floats);
}

// Elements `2 * pair` and the next of `count` states from `first` on, folded left to right.
template <bool WRITTEN, class Params>
__device__ __forceinline__ Total fold_states(const Params& p, const float* states, u32 first, u32 count, u32 head,
                                             u32 pair) {
    Total sum;
    for (u32 done = 0; done < count; done += BATCH) {
        Part parts[BATCH];
#pragma unroll
        for (u32 i = 0; i < BATCH; ++i) {
            if (done + i >= count) continue;
            const float* state = states + ((u64(first) + done + i) * p.q_heads + head) * p.state_words;
            const float4 tail = load<WRITTEN, float4>(state + p.v_dim);
            parts[i] = {load<WRITTEN, float2>(state + 2 * pair), tail.x, tail.y, tail.z};
        }
#pragma unroll
        for (u32 i = 0; i < BATCH; ++i)
            if (done + i < count) sum.take(parts[i]);
    }
    return sum;
}

}  // namespace

// A block folds one row and head; a thread holds two elements of the output, which are one word of a 16-bit type.
extern "C" __global__ void __launch_bounds__(MAX_THREADS)
    merge(const __grid_constant__ MergeParams p, const u32* descriptors, const float* states, const u64 out,
          float* lse) {
    const MergeRow* rows = reinterpret_cast<const MergeRow*>(descriptors + p.rows_at);
    const u32 pair = threadIdx.x;
    if (2 * pair >= p.v_dim) return;
    const u64 total = u64(p.rows) * p.q_heads;
    for (u64 work = blockIdx.x; work < total; work += gridDim.x) {
        const u32 row = u32(work / p.q_heads), head = u32(work % p.q_heads);
        const MergeRow sources = rows[row];
        Total sum = fold_states<false>(p, states, sources.state, sources.states, head, pair);
        const bool seen = sum.l != 0;  // NaN too: it is not "nothing was visible"
        if (seen) sum.o = make_float2(__fdiv_rn(sum.o.x, sum.l), __fdiv_rn(sum.o.y, sum.l));
        const u32 x = __float_as_uint(sum.o.x), y = __float_as_uint(sum.o.y);
        const u64 at = u64(p.out.base) + u64(row) * p.out.row + u64(head) * p.out.head + 2 * pair;
        if (p.out_dtype == F32) {
            u32* to = reinterpret_cast<u32*>(out) + at;
            to[0] = x;
            to[1] = y;
        } else {
            u32* to = reinterpret_cast<u32*>(out + 2 * at);
            *to = from_f32(x, p.out_dtype) | from_f32(y, p.out_dtype) << 16;
        }
        if (p.with_lse && pair == 0) {
            constexpr float LN_2 = 0.693147180559945309f;
            const float value = seen ? __fmul_rn(__fadd_rn(__fadd_rn(sum.m, log2f(sum.l)), sum.c), LN_2)
                                     : __uint_as_float(0xff800000);
            lse[u64(p.lse.base) + u64(row) * p.lse.row + u64(head) * p.lse.head] = value;
        }
    }
}

// A block folds one row and head; a thread holds two elements. The target may be the row's first source, whose tail
// every thread reads: nobody writes before all have read.
extern "C" __global__ void __launch_bounds__(MAX_THREADS)
    fold(const __grid_constant__ FoldParams p, const u32* descriptors, float* states) {
    const FoldRow* rows = reinterpret_cast<const FoldRow*>(descriptors + p.rows_at);
    const u32 pair = threadIdx.x;
    const bool holds = 2 * pair < p.v_dim;
    const u64 total = u64(p.rows) * p.q_heads;
    for (u64 work = blockIdx.x; work < total; work += gridDim.x) {
        const u32 head = u32(work % p.q_heads);
        const FoldRow row = rows[work / p.q_heads];
        Total sum;
        if (holds) sum = fold_states<true>(p, states, row.state, row.states, head, pair);
        __syncthreads();
        float* to = states + (u64(row.to) * p.q_heads + head) * p.state_words;
        if (holds) reinterpret_cast<float2*>(to)[pair] = sum.o;
        if (pair == 0) *reinterpret_cast<float4*>(to + p.v_dim) = make_float4(sum.m, sum.l, sum.c, 0);
    }
}
