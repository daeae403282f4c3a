// The machine that the kernels run on when they are compiled for the host, for tests: the threads
// of a block run one after the other, the blocks on hostWorkers threads of the host.
#pragma once

#include <sched.h>
#include <time.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <thread>
#include <vector>

#define TUTTI_HOST 1

struct HostThread {
	unsigned block, blocks, thread, threads;
	unsigned pauses;
};

static thread_local HostThread host_thread;

static inline unsigned long long host_nanoseconds() {
	return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// host_pause gives the processor to others. A thread that has often paused sleeps: ranks that poll
// would take it from the rank that they wait for, and from other tests.
static inline void host_pause() {
	const struct timespec briefly = {0, 20000};
	host_thread.pauses++ < 20 ? sched_yield() : nanosleep(&briefly, nullptr);
}

// A tutti_host_kernel runs whole launches: run returns when the grid has ended.
struct tutti_host_kernel {
	const char *name;
	size_t params; // bytes
	void (*run)(const void *params, unsigned grid, unsigned block, unsigned shared);
};

// tutti_host_workers is how many blocks run at a time.
extern "C" {
__attribute__((visibility("default"))) unsigned tutti_host_workers = 1;
}

template <class Body>
static void hostLaunch(unsigned grid, unsigned block, Body body) {
	std::atomic<unsigned> next{0};
	auto work = [&] {
		for (unsigned b; (b = next.fetch_add(1, std::memory_order_relaxed)) < grid;)
			for (unsigned t = 0; t < block; t++) {
				host_thread = HostThread{b, grid, t, block, 0};
				body();
			}
	};
	std::vector<std::thread> others;
	for (unsigned w = 1; w < tutti_host_workers && w < grid; w++)
		others.emplace_back(work);
	work();
	for (auto &o : others)
		o.join();
}
