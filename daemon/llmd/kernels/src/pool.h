// One pool of threads for all kernels of a process.
//
// Work is a number of tiles. Whoever is free takes the next one from a counter, the calling thread included, so a thread that the kernel has
// put aside delays a step by at most the tile it holds. Which thread computes a tile never changes a result.
// Workers spin for a short while between two calls and then sleep in a futex; with one thread there are no workers and no synchronisation.
// One caller at a time: `run` is neither reentrant nor for two threads at once.
#pragma once

#include <cstdint>

namespace llmd {

class Pool {
  public:
    using Tile = void (*)(void* context, int tile, int thread);

    static constexpr int MAX_THREADS = 1024;

    // threads: the caller and threads - 1 workers. cpus: worker i runs on cpus[i % n_cpus], and whoever calls `run` stays on cpus[0] from then
    // on; none: wherever the system puts it. spin: ticks of the time stamp counter before a waiting
    // thread sleeps; < 0: the default, 50 to 100 us.
    Pool(int threads, const int* cpus, int n_cpus, int spin);
    ~Pool();
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    int threads() const { return threads_; }

    // tile(context, i, thread) for each i in 0..tiles-1, thread in 0..threads-1 (0 = the caller); returns when all are done.
    void run(int tiles, Tile tile, void* context);

    // The same for anything that can be called as f(tile, thread).
    template <class F>
    void run(int tiles, F&& f) {
        run(tiles, [](void* context, int tile, int thread) { (*static_cast<F*>(context))(tile, thread); }, &f);
    }

  private:
    void close();

    struct Shared;
    Shared* shared_;
    int threads_;
};

}  // namespace llmd
