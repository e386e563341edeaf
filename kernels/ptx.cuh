// Which instructions are not words of CUDA C++? All of our PTX. tests/emulator has the same functions for a CPU.
#ifndef KV_PTX
#define KV_PTX
#include "params.cuh"

// Starts a copy of 16 bytes to shared memory.
__device__ __forceinline__ void copy_async(u32 to, u64 from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

// What this thread has started since the last call is one batch.
__device__ __forceinline__ void end_batch() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most `LATER` batches of this thread are under way.
template <int LATER>
__device__ __forceinline__ void wait_batches() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LATER) : "memory");
}

// 2^x, of which what is smaller than any normal number is zero.
__device__ __forceinline__ float power_of_two(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// A float of shared memory.
__device__ __forceinline__ float load_shared(u32 at) {
    float x;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(at) : "memory");
    return x;
}

// Sixteen bytes of shared memory become zeros.
__device__ __forceinline__ void clear_shared(u32 at) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(at), "r"(0) : "memory");
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

// c += a · b: 16 × 16 by 16 × 8. Row lane / 4 (c[0], c[1]) and eight below (c[2], c[3]), columns 2 (lane % 4) and the next.
__device__ __forceinline__ void multiply_f16(float (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

__device__ __forceinline__ void multiply_bf16(float (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// c += a · b over integers of a byte: 16 × 32 by 32 × 8. Bytes 4 (lane % 4) and the next three of every sixteen, in a row's
// words a[0] and a[2] (eight below: a[1] and a[3]) and a column's b[0] and b[1]; c as above.
__device__ __forceinline__ void multiply_signed(int (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// The same where the bytes of b have no sign.
__device__ __forceinline__ void multiply_unsigned(int (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.u8.s32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// A barrier of the block, for warps that meet it at different places.
__device__ __forceinline__ void sync_block() { asm volatile("barrier.sync.aligned 0;" ::: "memory"); }

// Lets the blocks of the next kernel come once every block of this one has been here or has ended. Near the end, because
// those that come earlier gather on the multiprocessors that are free first. Only a kernel that was launched so comes before
// this one has ended, and it waits before it touches memory.
__device__ __forceinline__ void release_next() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// Waits until the kernels before this one have ended and what they wrote is there.
__device__ __forceinline__ void await_previous() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Says of what is stored with it that it is read again soon.
__device__ __forceinline__ u64 soon_policy() {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

__device__ __forceinline__ void store_for_next(float* to, float x, u64 policy) {
    asm volatile("st.global.L2::cache_hint.f32 [%0], %1, %2;" ::"l"(to), "f"(x), "l"(policy) : "memory");
}

__device__ __forceinline__ void store_for_next(float2* to, float2 x, u64 policy) {
    asm volatile("st.global.L2::cache_hint.v2.f32 [%0], {%1, %2}, %3;" ::"l"(to), "f"(x.x), "f"(x.y), "l"(policy)
                 : "memory");
}

__device__ __forceinline__ void store_for_next(float4* to, float4 x, u64 policy) {
    asm volatile("st.global.L2::cache_hint.v4.f32 [%0], {%1, %2, %3, %4}, %5;" ::"l"(to), "f"(x.x), "f"(x.y), "f"(x.z),
                 "f"(x.w), "l"(policy)
                 : "memory");
}

#endif
