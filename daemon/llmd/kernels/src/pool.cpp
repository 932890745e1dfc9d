#include "pool.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstdio>
#include <thread>
#include <vector>

#include "abi.h"

namespace llmd {
namespace {

constexpr int DEFAULT_SPIN = 200'000;

// True as soon as `done()` is, false after `ticks` of the time stamp counter: a pause takes 10 to 140 cycles, so counting them would not do.
template <class Done>
bool spin_until(Done&& done, int ticks) {
    const uint64_t start = __builtin_ia32_rdtsc();
    do {
        if (done()) return true;
        __builtin_ia32_pause();
    } while (__builtin_ia32_rdtsc() - start < uint64_t(ticks));
    return false;
}

void futex_wait(std::atomic<uint32_t>& word, uint32_t expected) { syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, expected, nullptr, nullptr, 0); }
void futex_wake(std::atomic<uint32_t>& word, int count) { syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, count, nullptr, nullptr, 0); }

// The counter that tiles are taken from carries their number too, so that one fetch_add says all there is to know: a thread that comes late to a call
// gets a tile of the present one, or none.
struct Ticket {
    uint64_t bits;
    static Ticket of(int tiles) { return {uint64_t(tiles) << 32}; }
    int tiles() const { return int(bits >> 32); }
    int next() const { return int(bits); }
    bool open() const { return next() < tiles(); }
};

}  // namespace

struct Pool::Shared {
    alignas(64) std::atomic<uint64_t> ticket{0};
    alignas(64) std::atomic<int> done{0};
    alignas(64) std::atomic<uint32_t> bell{0};  // rung for sleeping workers
    std::atomic<int> sleepers{0};
    std::atomic<bool> closing{false};
    alignas(64) std::atomic<uint32_t> finished{0};  // rung for a sleeping caller
    std::atomic<bool> caller_sleeps{false};
    // Written by the caller before it opens a call; read only by who holds one of its tiles.
    alignas(64) Tile tile = nullptr;
    void* context = nullptr;
    int spin = DEFAULT_SPIN;
    int caller_cpu = -1;
    bool caller_bound = false;
    pthread_t caller = {};
    std::vector<std::thread> workers;

    void start(int thread, int cpu) {
        workers.emplace_back([this, thread] { worker(thread); });
        const pthread_t handle = workers.back().native_handle();
        bind(handle, cpu);
        char name[16];
        snprintf(name, sizeof name, "llmd-kernel-%d", thread % 1000);
        pthread_setname_np(handle, name);
    }

    static void bind(pthread_t thread, int cpu) {
        if (cpu < 0) return;
        cpu_set_t set;
        CPU_ZERO(&set);
        CPU_SET(cpu, &set);
        pthread_setaffinity_np(thread, sizeof set, &set);  // a CPU that we may not use: then anywhere
    }

    void bind_caller() {
        if (caller_cpu < 0 || (caller_bound && pthread_equal(caller, pthread_self()))) return;
        caller = pthread_self(), caller_bound = true;
        bind(caller, caller_cpu);
    }

    void work(int thread) {
        // fetch_add only where a tile seemed left: the counter overshoots by the number of threads at most.
        while (Ticket{ticket.load(std::memory_order_acquire)}.open()) {
            const Ticket mine{ticket.fetch_add(1, std::memory_order_acq_rel)};
            if (!mine.open()) return;
            const int tiles = mine.tiles();
            tile(context, mine.next(), thread);
            if (done.fetch_add(1) + 1 == tiles && caller_sleeps.load()) {
                finished.fetch_add(1);
                futex_wake(finished, 1);
            }
        }
    }

    void worker(int thread) {
        while (!closing.load(std::memory_order_relaxed)) {
            work(thread);
            wait_for_call();
        }
    }

    bool ready() const { return Ticket{ticket.load()}.open() || closing.load(); }

    void wait_for_call() {
        if (spin_until([&] { return ready(); }, spin)) return;
        sleepers.fetch_add(1);
        const uint32_t rung = bell.load();
        if (!ready()) futex_wait(bell, rung);
        sleepers.fetch_sub(1);
    }

    void wait_for_end(int tiles) {
        if (spin_until([&] { return done.load(std::memory_order_acquire) == tiles; }, spin)) return;
        caller_sleeps.store(true);
        while (true) {
            const uint32_t rung = finished.load();
            if (done.load() == tiles) break;
            futex_wait(finished, rung);
        }
        caller_sleeps.store(false);
    }

    void ring() {
        if (sleepers.load() == 0) return;
        bell.fetch_add(1);
        futex_wake(bell, INT_MAX);
    }
};

Pool::Pool(int threads, const int* cpus, int n_cpus, int spin) : shared_(new Shared), threads_(threads) {
    if (spin >= 0) shared_->spin = spin;
    if (n_cpus > 0) shared_->caller_cpu = cpus[0];
    try {
        for (int i = 1; i < threads; ++i) shared_->start(i, n_cpus > 0 ? cpus[i % n_cpus] : -1);
    } catch (...) {  // the system has no more threads, or no memory
        close();
        throw;
    }
}

Pool::~Pool() { close(); }

void Pool::close() {
    shared_->closing.store(true);
    shared_->ring();
    for (std::thread& worker : shared_->workers) worker.join();
    delete shared_;
}

void Pool::run(int tiles, Tile tile, void* context) {
    shared_->bind_caller();
    if (tiles <= 1 || threads_ == 1) {
        for (int i = 0; i < tiles; ++i) tile(context, i, 0);
        return;
    }
    Shared& shared = *shared_;
    shared.tile = tile;
    shared.context = context;
    shared.done.store(0, std::memory_order_relaxed);
    shared.ticket.store(Ticket::of(tiles).bits);
    shared.ring();
    shared.work(0);
    shared.wait_for_end(tiles);
}

}  // namespace llmd

LLMD_API void* llmd_pool_new(int threads, const int* cpus, int n_cpus, int spin) {
    if (threads < 1 || threads > llmd::Pool::MAX_THREADS || n_cpus < 0) return nullptr;
    for (int i = 0; i < n_cpus; ++i) {
        if (cpus[i] < 0 || cpus[i] >= CPU_SETSIZE) return nullptr;
    }
    try {
        return new llmd::Pool(threads, cpus, n_cpus, spin);
    } catch (...) {  // the system has no more threads, or no memory
        return nullptr;
    }
}

LLMD_API void llmd_pool_free(void* pool) { delete static_cast<llmd::Pool*>(pool); }
LLMD_API int llmd_pool_threads(const void* pool) { return static_cast<const llmd::Pool*>(pool)->threads(); }
