// How does a CPU run a block of a kernel? Threads are fibers: each runs until it has to wait for others.
#pragma once
#include <cuda_runtime.h>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

namespace emulator {

constexpr uint32_t SLOT = 64;  // bytes of a lane in an exchange

// A copy to a block's memory that was started and not yet waited for.
struct Copy {
    void* to;
    const void* from;
};

// A thread of the block that runs.
struct Thread {
    uint3 index = {0, 0, 0};
    uint64_t exchanges = 0;  // that it has taken part in
    std::vector<std::vector<Copy>> batches = {{}};  // of copies; the last one is open
    bool done = false;
};

extern thread_local Thread* self;
extern thread_local uint3 block_index;
extern thread_local dim3 grid, threads;
// Addresses in a block's memory count from here.
extern thread_local unsigned char window;

// Waits until every thread of the block that has not ended is here.
void wait_for_block();

// Gives the warp's lanes what each brought, `SLOT` bytes apart; it stays until this lane's next exchange but one.
const void* exchange(const void* mine, std::size_t bytes);

template <class T>
const T& at(const void* all, uint32_t lane) {
    static_assert(sizeof(T) <= SLOT, "fits a slot");
    return *reinterpret_cast<const T*>(static_cast<const unsigned char*>(all) + lane * SLOT);
}

// Runs every block of a launch; a block's memory of `shared` bytes starts with garbage.
void run(dim3 grid, dim3 threads, uint32_t shared, const std::function<void()>& thread);

// A kernel: takes its arguments from where they lie, and is what one of its threads does.
using Bind = std::function<void()> (*)(void** arguments);
void add_kernel(const char* name, Bind bind);
Bind find_kernel(const char* name);

}  // namespace emulator
