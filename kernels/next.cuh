// What passes from a kernel to the next one in the stream? An early start, and what stays in the cache for it.
#pragma once
#include "params.cuh"

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

__device__ __forceinline__ void store_for_next(float4* to, float4 x, u64 policy) {
    asm volatile("st.global.L2::cache_hint.v4.f32 [%0], {%1, %2, %3, %4}, %5;" ::"l"(to), "f"(x.x), "f"(x.y), "f"(x.z),
                 "f"(x.w), "l"(policy)
                 : "memory");
}
