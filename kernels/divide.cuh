// What is a number of 64 bits divided by one of 32? Nearly always it has 32 bits itself, and then that is a division of such.
#pragma once
#include "params.cuh"

struct Quotient {
    u64 whole;
    u32 rest;
};

__device__ __forceinline__ Quotient divide(u64 x, u32 by) {
    if (x >> 32 == 0) {
        const u32 whole = u32(x) / by;
        return {whole, u32(x) - whole * by};
    }
    const u64 whole = x / by;
    return {whole, u32(x - whole * by)};
}

// Parts of a call in the order in which they run: `x` of `width` the fastest, then `y` of `height`, then `z`.
struct Place3 {
    u32 x, y;
    u64 z;
    __device__ __forceinline__ Place3(u64 work, u32 width, u32 height) {
        const Quotient row = divide(work, width), plane = divide(row.whole, height);
        x = row.rest;
        y = plane.rest;
        z = plane.whole;
    }
};
