// Memory that a system gives at the first write, taken before anybody waits for it.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <system_error>
#include <thread>
#include <vector>

#include "abi.h"

namespace {

constexpr int64_t PAGE = 4096, PIECE = int64_t(2) << 20;  // the smallest page that there may be, and the largest

}  // namespace

// Write a zero to each page of `bytes` at `memory`, by `threads` threads, or as many as the system has.
LLMD_API void llmd_touch(char* memory, int64_t bytes, int threads) {
    std::atomic<int64_t> next{0};
    const auto work = [&] {
        for (int64_t begin = next.fetch_add(PIECE); begin < bytes; begin = next.fetch_add(PIECE)) {
            const int64_t end = std::min(bytes, begin + PIECE);
            for (int64_t at = begin; at < end; at += PAGE) *static_cast<volatile char*>(memory + at) = 0;
        }
    };
    std::vector<std::thread> others;
    try {
        for (int i = 1; i < threads; ++i) others.emplace_back(work);
    } catch (const std::system_error&) {
    }
    work();
    for (std::thread& other : others) other.join();
}
