// sum: what do the words of a range add up to, modulo 2^32? A kernel that reads and does nothing else: what it takes is what
// reading costs. A block takes `THREADS × LOADS` units of sixteen bytes, all of a thread's loads at once.
#include "params.cuh"

namespace {

constexpr u32 THREADS = 256;
constexpr u32 LOADS = 4;

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS) sum(const u64 from, const u64 count, u32* total) {
    const uint4* units = reinterpret_cast<const uint4*>(from);
    u32 mine = 0;
    for (u64 block = blockIdx.x; block * THREADS * LOADS < count; block += gridDim.x) {
        const u64 first = block * THREADS * LOADS + threadIdx.x;
        uint4 unit[LOADS];
#pragma unroll
        for (u32 i = 0; i < LOADS; ++i) {
            const u64 at = first + i * THREADS;
            unit[i] = at < count ? __ldg(units + at) : make_uint4(0, 0, 0, 0);
        }
#pragma unroll
        for (u32 i = 0; i < LOADS; ++i) mine += unit[i].x + unit[i].y + unit[i].z + unit[i].w;
    }
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) mine += __shfl_xor_sync(0xffffffff, mine, mask);
    __shared__ u32 warps[THREADS / 32];
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = mine;
    __syncthreads();
    if (threadIdx.x == 0) {
        u32 block = 0;
#pragma unroll
        for (u32 warp = 0; warp < THREADS / 32; ++warp) block += warps[warp];
        atomicAdd(total, block);
    }
}
