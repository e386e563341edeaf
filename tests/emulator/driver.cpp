// What does the CUDA driver do? As much of its interface as kvtide calls, on a CPU.
//
// Work is put off as long as the interface allows: a stream's work runs when somebody waits for it, and of other streams
// only what it was told to wait for. So a missing wait shows, and a host buffer that is written too early too. Memory ends
// at a page that cannot be touched, and starts with garbage.
#include <cuda.h>
#include <sys/mman.h>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <vector>
#include "block.h"
#include "stream.h"

namespace {

constexpr size_t MEMORY = size_t(16) << 30;
constexpr size_t CONTEXT = size_t(64) << 20;  // what a context takes of it
constexpr size_t GARBAGE = size_t(64) << 20;  // bytes of an allocation that start with it
constexpr size_t PAGE = 4096;

std::recursive_mutex lock;

int processors() {
    const char* asked = std::getenv("KVTIDE_EMULATED_PROCESSORS");
    return asked ? std::max(1, std::atoi(asked)) : 8;
}

}  // namespace

struct CUmod_st {};
struct CUfunc_st {
    emulator::Bind bind;
};
struct CUctx_st {};

namespace {

CUctx_st context;
thread_local CUcontext current;
struct Memory {
    size_t bytes, mapped;
    bool host;
};
std::map<uintptr_t, Memory> memories;
size_t used = CONTEXT;

// The allocation that holds an address.
const Memory* memory_of(uintptr_t at) {
    auto found = memories.upper_bound(at);
    if (found == memories.begin()) return nullptr;
    --found;
    return at < found->first + found->second.bytes ? &found->second : nullptr;
}

CUresult allocate(size_t bytes, bool host, void** out) {
    if (bytes == 0) return CUDA_ERROR_INVALID_VALUE;
    TRY(outside_captures(false));
    if (bytes > MEMORY || (!host && used + bytes > MEMORY)) return CUDA_ERROR_OUT_OF_MEMORY;
    const size_t whole = (bytes + PAGE - 1) / PAGE * PAGE;
    void* start = mmap(nullptr, whole + PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (start == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
    mprotect(static_cast<char*>(start) + whole, PAGE, PROT_NONE);
    memset(start, 0xa5, std::min(bytes, GARBAGE));
    // As far to the end as the alignment of cuMemAlloc lets it; pinned memory starts where pages of the system do.
    char* at = static_cast<char*>(start) + (host ? 0 : (whole - bytes) / 256 * 256);
    memories[uintptr_t(at)] = {bytes, whole + PAGE, host};
    if (!host) used += bytes;
    *out = at;
    return CUDA_SUCCESS;
}

CUresult release(uintptr_t at) {
    if (at == 0) return CUDA_SUCCESS;
    const auto found = memories.find(at);
    if (found == memories.end()) return CUDA_ERROR_INVALID_VALUE;
    TRY(outside_captures(false));
    run_all();
    const Memory memory = found->second;
    munmap(reinterpret_cast<void*>(at / PAGE * PAGE), memory.mapped);
    if (!memory.host) used -= memory.bytes;
    memories.erase(found);
    return CUDA_SUCCESS;
}

bool inside(const void* at, size_t bytes, bool must) {
    const Memory* memory = memory_of(uintptr_t(at));
    if (memory == nullptr) return !must;
    return bytes == 0 || memory_of(uintptr_t(at) + bytes - 1) == memory;
}

CUresult copy(CUstream raw, void* to, const void* from, size_t bytes) {
    if (!inside(to, bytes, false) || !inside(from, bytes, false)) return CUDA_ERROR_INVALID_VALUE;
    const auto stream = stream_of(raw);
    TRY(takes_work(raw));
    const bool pinned = memory_of(uintptr_t(from)) != nullptr && memory_of(uintptr_t(to)) != nullptr;
    if (!pinned) TRY(outside_capture(raw));
    if (memory_of(uintptr_t(from)) == nullptr) {
        // Memory that is not pinned has been read when the call returns.
        const auto* bytes_now = static_cast<const char*>(from);
        stream->submit([to, data = std::vector<char>(bytes_now, bytes_now + bytes)] {
            memcpy(to, data.data(), data.size());
        });
        return CUDA_SUCCESS;
    }
    stream->submit([=] { memmove(to, from, bytes); });
    if (memory_of(uintptr_t(to)) == nullptr) stream->run_until(stream->submitted);
    return CUDA_SUCCESS;
}

CUresult launch(CUfunction f, dim3 grid, dim3 block, unsigned shared, CUstream stream, void** arguments) {
    if (f == nullptr || grid.x == 0 || block.x == 0 || block.x > 1024) return CUDA_ERROR_INVALID_VALUE;
    if (grid.y * grid.z * block.y * block.z != 1) return CUDA_ERROR_NOT_SUPPORTED;
    TRY(takes_work(stream));
    stream_of(stream)->submit([=, work = f->bind(arguments)] { emulator::run(grid, block, shared, work); });
    return CUDA_SUCCESS;
}

}  // namespace

#define API extern "C" CUresult CUDAAPI
#define LOCK const std::lock_guard<std::recursive_mutex> guard(lock)

API cuInit(unsigned) { return CUDA_SUCCESS; }
API cuDriverGetVersion(int* version) { return *version = CUDA_VERSION, CUDA_SUCCESS; }
API cuDeviceGetCount(int* count) { return *count = 1, CUDA_SUCCESS; }
API cuDeviceGet(CUdevice* device, int ordinal) {
    return ordinal == 0 ? (*device = 0, CUDA_SUCCESS) : CUDA_ERROR_INVALID_DEVICE;
}
API cuDeviceGetName(char* name, int bytes, CUdevice) {
    std::snprintf(name, size_t(bytes), "CUDA kernels emulated on a CPU");
    return CUDA_SUCCESS;
}
API cuDeviceTotalMem(size_t* bytes, CUdevice) { return *bytes = MEMORY, CUDA_SUCCESS; }
API cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice) {
    switch (attribute) {
        case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = 9; break;
        case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: *value = 0; break;
        case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = processors(); break;
        case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: *value = 227 << 10; break;
        case CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE: *value = 1 << 20; break;
        default: *value = 0;
    }
    return CUDA_SUCCESS;
}
API cuDevicePrimaryCtxRetain(CUcontext* out, CUdevice) { return *out = &context, CUDA_SUCCESS; }
API cuDevicePrimaryCtxRelease(CUdevice) { return CUDA_SUCCESS; }
API cuCtxSetCurrent(CUcontext to) { return current = to, CUDA_SUCCESS; }
API cuCtxGetCurrent(CUcontext* out) { return *out = current, CUDA_SUCCESS; }
API cuCtxSynchronize(void) {
    LOCK;
    TRY(outside_captures(true));
    run_all();
    return CUDA_SUCCESS;
}
API cuGetErrorName(CUresult error, const char** text) {
    static thread_local char name[32];
    std::snprintf(name, sizeof name, "error %d", int(error));
    return *text = name, CUDA_SUCCESS;
}
API cuGetErrorString(CUresult error, const char** text) { return cuGetErrorName(error, text); }

API cuModuleLoadData(CUmodule* out, const void*) { return *out = new CUmod_st, CUDA_SUCCESS; }
API cuModuleUnload(CUmodule module) { return delete module, CUDA_SUCCESS; }
API cuModuleGetFunction(CUfunction* out, CUmodule, const char* name) {
    const emulator::Bind bind = emulator::find_kernel(name);
    if (bind == nullptr) return CUDA_ERROR_NOT_FOUND;
    return *out = new CUfunc_st{bind}, CUDA_SUCCESS;
}
API cuFuncSetAttribute(CUfunction, CUfunction_attribute, int) { return CUDA_SUCCESS; }
API cuLaunchKernel(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, CUstream stream, void** arguments, void**) {
    LOCK;
    return launch(f, {gx, gy, gz}, {bx, by, bz}, shared, stream, arguments);
}
API cuLaunchKernelEx(const CUlaunchConfig* c, CUfunction f, void** arguments, void**) {
    LOCK;
    return launch(f, {c->gridDimX, c->gridDimY, c->gridDimZ}, {c->blockDimX, c->blockDimY, c->blockDimZ},
                  c->sharedMemBytes, c->hStream, arguments);
}

API cuStreamCreate(CUstream* out, unsigned) {
    LOCK;
    const auto stream = std::make_shared<CUstream_st>();
    streams[stream.get()] = stream;
    return *out = stream.get(), CUDA_SUCCESS;
}
API cuStreamDestroy(CUstream raw) {
    LOCK;
    const auto stream = stream_of(raw);
    stream->run_until(stream->submitted);
    streams.erase(raw);
    return CUDA_SUCCESS;
}
API cuStreamSynchronize(CUstream raw) {
    LOCK;
    TRY(outside_capture(raw));
    const auto stream = stream_of(raw);
    stream->run_until(stream->submitted);
    return CUDA_SUCCESS;
}
API cuStreamQuery(CUstream raw) {
    LOCK;
    TRY(outside_capture(raw));
    const auto stream = stream_of(raw);
    if (stream->done == stream->submitted) return CUDA_SUCCESS;
    stream->run_until(stream->done + 1);
    return CUDA_ERROR_NOT_READY;
}
API cuStreamWaitEvent(CUstream raw, CUevent event, unsigned) {
    LOCK;
    TRY(takes_work(raw));
    const auto stream = stream_of(raw);
    if (event->captured) {
        // A second stream that joins a capture is more than this driver does.
        return event->stream == stream ? CUDA_SUCCESS : CUDA_ERROR_NOT_SUPPORTED;
    }
    if (stream->capture) return invalidate(*stream, CUDA_ERROR_STREAM_CAPTURE_ISOLATION);
    if (event->stream) stream->submit([from = event->stream, at = event->at] { from->run_until(at); });
    return CUDA_SUCCESS;
}
API cuStreamIsCapturing(CUstream raw, CUstreamCaptureStatus* status) {
    LOCK;
    const auto& capture = stream_of(raw)->capture;
    *status = !capture          ? CU_STREAM_CAPTURE_STATUS_NONE
              : capture->valid ? CU_STREAM_CAPTURE_STATUS_ACTIVE
                               : CU_STREAM_CAPTURE_STATUS_INVALIDATED;
    return CUDA_SUCCESS;
}
API cuStreamBeginCapture(CUstream raw, CUstreamCaptureMode mode) {
    LOCK;
    const auto stream = stream_of(raw);
    if (raw == nullptr || raw == CU_STREAM_LEGACY) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    if (stream->capture) return CUDA_ERROR_ILLEGAL_STATE;
    stream->capture.reset(new Capture{mode});
    return CUDA_SUCCESS;
}
API cuStreamEndCapture(CUstream raw, CUgraph* out) {
    LOCK;
    const auto stream = stream_of(raw);
    *out = nullptr;
    if (!stream->capture) return CUDA_ERROR_ILLEGAL_STATE;
    const bool here = stream->capture->thread == std::this_thread::get_id();
    if (!here && stream->capture->mode != CU_STREAM_CAPTURE_MODE_RELAXED) return CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
    const auto capture = std::move(stream->capture);
    if (!capture->valid) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    return *out = new CUgraph_st{std::move(capture->work)}, CUDA_SUCCESS;
}
API cuGraphInstantiateWithFlags(CUgraphExec* out, CUgraph graph, unsigned long long) {
    return *out = new CUgraphExec_st{graph->work}, CUDA_SUCCESS;
}
API cuGraphLaunch(CUgraphExec graph, CUstream raw) {
    LOCK;
    TRY(takes_work(raw));
    for (const Work& work : graph->work) stream_of(raw)->submit(work);
    return CUDA_SUCCESS;
}
API cuGraphExecDestroy(CUgraphExec graph) { return delete graph, CUDA_SUCCESS; }
API cuGraphDestroy(CUgraph graph) { return delete graph, CUDA_SUCCESS; }

API cuEventCreate(CUevent* out, unsigned) { return *out = new CUevent_st, CUDA_SUCCESS; }
API cuEventDestroy(CUevent event) {
    LOCK;
    return delete event, CUDA_SUCCESS;
}
API cuEventRecord(CUevent event, CUstream raw) {
    LOCK;
    TRY(takes_work(raw));
    event->stream = stream_of(raw);
    event->captured = event->stream->capture != nullptr;
    if (event->captured) return CUDA_SUCCESS;
    event->stream->submit([time = event->passed] { *time = Clock::now(); });
    event->at = event->stream->submitted;
    return CUDA_SUCCESS;
}
API cuEventQuery(CUevent event) {
    LOCK;
    if (event->captured) return CUDA_ERROR_CAPTURED_EVENT;
    if (passed(*event)) return CUDA_SUCCESS;
    event->stream->run_until(event->stream->done + 1);
    return CUDA_ERROR_NOT_READY;
}
API cuEventSynchronize(CUevent event) {
    LOCK;
    if (event->captured) return CUDA_ERROR_CAPTURED_EVENT;
    if (event->stream) event->stream->run_until(event->at);
    return CUDA_SUCCESS;
}
API cuEventElapsedTime(float* ms, CUevent from, CUevent to) {
    LOCK;
    if (!from->stream || !to->stream) return CUDA_ERROR_INVALID_HANDLE;
    if (!passed(*from) || !passed(*to)) return CUDA_ERROR_NOT_READY;
    *ms = std::chrono::duration<float, std::milli>(*to->passed - *from->passed).count();
    return CUDA_SUCCESS;
}

API cuMemAlloc(CUdeviceptr* out, size_t bytes) {
    LOCK;
    return allocate(bytes, false, reinterpret_cast<void**>(out));
}
API cuMemFree(CUdeviceptr at) {
    LOCK;
    return release(at);
}
API cuMemHostAlloc(void** out, size_t bytes, unsigned) {
    LOCK;
    return allocate(bytes, true, out);
}
API cuMemFreeHost(void* at) {
    LOCK;
    return release(uintptr_t(at));
}
API cuMemGetInfo(size_t* free, size_t* total) {
    LOCK;
    return *free = MEMORY - used, *total = MEMORY, CUDA_SUCCESS;
}
API cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
    LOCK;
    return copy(stream, reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes);
}
API cuMemcpyHtoDAsync(CUdeviceptr to, const void* from, size_t bytes, CUstream stream) {
    LOCK;
    if (!inside(reinterpret_cast<void*>(to), bytes, true)) return CUDA_ERROR_INVALID_VALUE;
    return copy(stream, reinterpret_cast<void*>(to), from, bytes);
}
API cuMemcpyDtoHAsync(void* to, CUdeviceptr from, size_t bytes, CUstream stream) {
    LOCK;
    if (!inside(reinterpret_cast<const void*>(from), bytes, true)) return CUDA_ERROR_INVALID_VALUE;
    return copy(stream, to, reinterpret_cast<const void*>(from), bytes);
}
API cuMemcpyDtoDAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
    LOCK;
    return copy(stream, reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes);
}
API cuMemsetD32Async(CUdeviceptr to, unsigned word, size_t words, CUstream stream) {
    LOCK;
    if (!inside(reinterpret_cast<void*>(to), 4 * words, true)) return CUDA_ERROR_INVALID_VALUE;
    TRY(takes_work(stream));
    stream_of(stream)->submit([=] { std::fill_n(reinterpret_cast<unsigned*>(to), words, word); });
    return CUDA_SUCCESS;
}
API cuMemsetD8Async(CUdeviceptr to, unsigned char byte, size_t bytes, CUstream stream) {
    LOCK;
    if (!inside(reinterpret_cast<void*>(to), bytes, true)) return CUDA_ERROR_INVALID_VALUE;
    TRY(takes_work(stream));
    stream_of(stream)->submit([=] { memset(reinterpret_cast<void*>(to), byte, bytes); });
    return CUDA_SUCCESS;
}

// The synchronous kinds, after everything that was submitted.
API cuMemcpyHtoD(CUdeviceptr to, const void* from, size_t bytes) {
    LOCK;
    TRY(outside_captures(true));
    return run_all(), memcpy(reinterpret_cast<void*>(to), from, bytes), CUDA_SUCCESS;
}
API cuMemcpyDtoH(void* to, CUdeviceptr from, size_t bytes) {
    LOCK;
    TRY(outside_captures(true));
    return run_all(), memcpy(to, reinterpret_cast<const void*>(from), bytes), CUDA_SUCCESS;
}
API cuMemcpyDtoD(CUdeviceptr to, CUdeviceptr from, size_t bytes) {
    LOCK;
    TRY(outside_captures(true));
    run_all();
    return memmove(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes), CUDA_SUCCESS;
}
API cuMemsetD8(CUdeviceptr to, unsigned char byte, size_t bytes) {
    LOCK;
    TRY(outside_captures(true));
    return run_all(), memset(reinterpret_cast<void*>(to), byte, bytes), CUDA_SUCCESS;
}
