// How do tiles of 16-bit elements come to the tensor cores? Copies to shared memory, fragments, products; a warp at a time.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include "numeric.cuh"

// Starts a copy of 16 bytes to shared memory, of which the first `bytes` are read and the others are zeros.
__device__ __forceinline__ void copy_async(u32 to, u64 from, u32 bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

// What this thread has started since the last call is one batch.
__device__ __forceinline__ void end_batch() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most `LATER` batches of this thread are under way.
template <int LATER>
__device__ __forceinline__ void wait_batches() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LATER) : "memory");
}

// Four matrices of 8 rows of 16 bytes; lanes 8i … 8i + 7 name the rows of matrix i. Thread `lane` gets, of each, elements
// 2 (lane % 4) and the next of row lane / 4.
__device__ __forceinline__ void load_matrices(u32 (&a)[4], u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
                 : "r"(at)
                 : "memory");
}

// The same with each matrix transposed.
__device__ __forceinline__ void load_transposed(u32 (&a)[4], u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
                 : "r"(at)
                 : "memory");
}

// Transposes the matrix of 8 × 8 elements that the warp holds.
__device__ __forceinline__ u32 transpose(u32 x) {
    u32 y;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}

// Two floats, rounded to elements of a word.
template <u32 FORMAT>
__device__ __forceinline__ u32 pack(float x, float y) {
    if constexpr (FORMAT == F16) {
        const __half2 both = __floats2half2_rn(x, y);
        return *reinterpret_cast<const u32*>(&both);
    } else {
        const __nv_bfloat162 both = __floats2bfloat162_rn(x, y);
        return *reinterpret_cast<const u32*>(&both);
    }
}

template <u32 FORMAT>
__device__ __forceinline__ float2 unpack(u32 word) {
    if constexpr (FORMAT == F16) return __half22float2(*reinterpret_cast<const __half2*>(&word));
    return make_float2(__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000));
}

// c += a · b: 16 × 16 by 16 × 8. Row lane / 4 (c[0], c[1]) and eight below (c[2], c[3]), columns 2 (lane % 4) and the next.
template <u32 FORMAT>
__device__ __forceinline__ void multiply(float (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    if constexpr (FORMAT == F16) {
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
                     : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    } else {
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    }
}
