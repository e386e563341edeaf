// How do the threads of a block take turns? Fibers of one thread of the CPU, each with a stack of its own.
#include "block.h"
#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <string>

// What `extern __shared__` names; the kernels have one such name.
extern thread_local unsigned char rings[];
constexpr std::size_t RINGS = 227 << 10;
alignas(1024) thread_local unsigned char rings[RINGS];

namespace emulator {

thread_local Thread* self;
thread_local uint3 block_index;
thread_local dim3 grid, threads;
alignas(16) thread_local unsigned char window;

namespace {

constexpr std::size_t STACK = 256 << 10;

struct Fiber {
    Thread thread;
    jmp_buf here;
    bool started = false;
    void* stack = nullptr;
};

struct Warp {
    alignas(16) unsigned char slots[2][32 * SLOT];
    uint64_t arrived[2];
};

// What runs blocks.
struct Processor {
    std::vector<std::unique_ptr<Fiber>> fibers;
    std::vector<Warp> warps;
    const std::function<void()>* body = nullptr;
    jmp_buf scheduler;
    uint32_t live = 0, waiting = 0;
    uint64_t barriers = 0;  // that the block has passed
    uint64_t progress = 0;  // anything that may let a fiber go on
};

thread_local Processor* processor;
thread_local Fiber* fiber;

void yield() {
    if (_setjmp(fiber->here) == 0) _longjmp(processor->scheduler, 1);
}

void pass_barrier() {
    processor->waiting = 0;
    processor->barriers += 1;
}

// A fiber runs one thread after the other.
void live() {
    for (;;) {
        (*processor->body)();
        self->done = true;
        processor->progress += 1;
        processor->live -= 1;
        if (processor->live > 0 && processor->waiting == processor->live) pass_barrier();
        yield();
    }
}

void start(Fiber& f) {
    if (f.stack == nullptr) {
        f.stack = mmap(nullptr, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (f.stack == MAP_FAILED) std::abort();
    }
    f.started = true;
    ucontext_t context;
    getcontext(&context);
    context.uc_stack.ss_sp = f.stack;
    context.uc_stack.ss_size = STACK;
    context.uc_link = nullptr;
    makecontext(&context, live, 0);
    setcontext(&context);
}

void resume(Fiber& f) {
    fiber = &f;
    self = &f.thread;
    if (_setjmp(processor->scheduler) == 0) {
        if (f.started) _longjmp(f.here, 1);
        start(f);
    }
}

// Two orders of the threads, so that what one of them hides the other shows.
void run_block(uint32_t count, bool backwards) {
    Processor& p = *processor;
    while (p.fibers.size() < count) p.fibers.push_back(std::make_unique<Fiber>());
    p.warps.assign((count + 31) / 32, Warp());
    p.live = count;
    p.waiting = 0;
    for (uint32_t i = 0; i < count; ++i) {
        p.fibers[i]->thread = Thread();
        p.fibers[i]->thread.index = {i, 0, 0};
    }
    while (p.live > 0) {
        const uint64_t before = p.progress;
        for (uint32_t i = 0; i < count; ++i) {
            Fiber& f = *p.fibers[backwards ? count - 1 - i : i];
            if (!f.thread.done) resume(f);
        }
        if (p.progress == before) {
            std::fprintf(stderr, "emulator: a block waits for ever: threads differ in what they wait for\n");
            std::abort();
        }
    }
}

std::map<std::string, Bind>& kernels() {
    static std::map<std::string, Bind> all;
    return all;
}

}  // namespace

void wait_for_block() {
    Processor& p = *processor;
    const uint64_t barrier = p.barriers;
    p.progress += 1;
    p.waiting += 1;
    if (p.waiting == p.live) pass_barrier();
    while (p.barriers == barrier) yield();
    p.progress += 1;
}

const void* exchange(const void* mine, std::size_t bytes) {
    const uint32_t lane = self->index.x % 32;
    Warp& warp = processor->warps[self->index.x / 32];
    const uint64_t number = self->exchanges++;
    unsigned char* slots = warp.slots[number % 2];
    if (bytes > 0) memcpy(slots + lane * SLOT, mine, bytes);
    uint64_t& arrived = warp.arrived[number % 2];
    arrived += 1;
    processor->progress += 1;
    while (arrived < 32 * (number / 2 + 1)) yield();
    processor->progress += 1;
    return slots;
}

void run(dim3 all, dim3 size, uint32_t shared, const std::function<void()>& thread) {
    if (shared > RINGS) std::abort();
    thread_local std::unique_ptr<Processor> mine;
    if (!mine) mine = std::make_unique<Processor>();
    processor = mine.get();
    processor->body = &thread;
    grid = all;
    threads = size;
    for (uint32_t block = 0; block < all.x; ++block) {
        block_index = {block, 0, 0};
        memset(rings, 0xff, shared);
        run_block(size.x, block % 2);
    }
}

void add_kernel(const char* name, Bind bind) { kernels()[name] = bind; }

Bind find_kernel(const char* name) {
    const auto found = kernels().find(name);
    return found == kernels().end() ? nullptr : found->second;
}

}  // namespace emulator
