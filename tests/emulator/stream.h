// What is a stream? Work that is put off until somebody waits for it, or taken down while the stream is captured.
#pragma once
#include <cuda.h>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <thread>
#include <vector>

#define TRY(call)                                                   \
    if (const CUresult result = (call); result != CUDA_SUCCESS) return result

using Work = std::function<void()>;
using Clock = std::chrono::steady_clock;

// What a stream takes down instead of doing it. A call that a capture forbids makes it invalid until it ends.
struct Capture {
    CUstreamCaptureMode mode;
    std::thread::id thread = std::this_thread::get_id();
    std::vector<Work> work = {};
    bool valid = true;
};

struct CUgraph_st {
    std::vector<Work> work;
};
struct CUgraphExec_st {
    std::vector<Work> work;
};

struct CUstream_st {
    std::deque<Work> queue;
    uint64_t submitted = 0, done = 0;
    std::unique_ptr<Capture> capture;

    void submit(Work work) {
        if (capture) {
            capture->work.push_back(std::move(work));
        } else {
            queue.push_back(std::move(work));
            submitted += 1;
        }
    }
    void run_until(uint64_t target) {
        while (done < target && !queue.empty()) {
            const Work work = std::move(queue.front());
            queue.pop_front();
            work();
            done += 1;
        }
    }
};

struct CUevent_st {
    std::shared_ptr<CUstream_st> stream;  // none before it is recorded
    uint64_t at = 0;
    bool captured = false;  // recorded by a capture last
    std::shared_ptr<Clock::time_point> passed = std::make_shared<Clock::time_point>();
};

inline std::map<CUstream, std::shared_ptr<CUstream_st>> streams;

inline std::shared_ptr<CUstream_st> stream_of(CUstream raw) {
    if (raw == CU_STREAM_LEGACY || raw == CU_STREAM_PER_THREAD) raw = nullptr;
    const auto found = streams.find(raw);
    if (found != streams.end()) return found->second;
    if (raw == nullptr) return streams[nullptr] = std::make_shared<CUstream_st>();
    std::fprintf(stderr, "emulator: a stream that does not exist\n");
    std::abort();
}

// Whether a stream takes more work: one whose capture is invalid does not.
inline CUresult takes_work(CUstream raw) {
    const auto stream = stream_of(raw);
    return stream->capture && !stream->capture->valid ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED : CUDA_SUCCESS;
}

inline CUresult invalidate(CUstream_st& stream, CUresult why) {
    if (!stream.capture->valid) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    return stream.capture->valid = false, why;
}

// A call that cannot be taken down, and is not about one stream: `always`, or as the modes of the captures say.
inline CUresult outside_captures(bool always) {
    CUresult result = CUDA_SUCCESS;
    for (const auto& [raw, stream] : streams) {
        if (!stream->capture) continue;
        const Capture& capture = *stream->capture;
        const bool forbids = always || capture.mode == CU_STREAM_CAPTURE_MODE_GLOBAL ||
                             (capture.mode == CU_STREAM_CAPTURE_MODE_THREAD_LOCAL &&
                              capture.thread == std::this_thread::get_id());
        if (forbids) {
            invalidate(*stream, CUDA_SUCCESS);
            result = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
        }
    }
    return result;
}

// The same, for a call that waits for one stream.
inline CUresult outside_capture(CUstream raw) {
    const auto stream = stream_of(raw);
    return stream->capture ? invalidate(*stream, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED) : CUDA_SUCCESS;
}

inline void run_all() {
    const auto all = streams;
    for (const auto& [raw, stream] : all) stream->run_until(stream->submitted);
}

inline bool passed(const CUevent_st& event) { return !event.stream || event.stream->done >= event.at; }
