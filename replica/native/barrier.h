// A barrier between the threads of one step: spins for some tens of microseconds, then sleeps.
//
// OpenMP's own barrier spins for long. When another process holds the core of one thread, the others keep theirs busy with
// waiting, and the kernel has nowhere to move the late thread: with it a 14 ms step was once seen to take 280 ms beside
// busy processes. A sleeper frees its core. It is no cure: beside one busy process a 9 ms step still takes about 28 ms.
#pragma once
#include <atomic>
#include <cstdint>
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <thread>
#endif

namespace shoal {

class Barrier {
  public:
    // All `threads` threads of the region call it, with the same number.
    void wait(int threads) {
        if (threads == 1) return;
        const uint32_t turn = turn_.load(std::memory_order_acquire);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == threads) {
            arrived_.store(0, std::memory_order_relaxed);
            turn_.store(turn + 1, std::memory_order_seq_cst);
            if (sleepers_.load(std::memory_order_seq_cst)) wake();
            return;
        }
        for (int i = 0; i < SPINS; i++) {
            if (turn_.load(std::memory_order_acquire) != turn) return;
            pause();
        }
        sleepers_.fetch_add(1, std::memory_order_seq_cst);
        while (turn_.load(std::memory_order_seq_cst) == turn) sleep(turn);
        sleepers_.fetch_sub(1, std::memory_order_relaxed);
    }

  private:
    static constexpr int SPINS = 2000;
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<uint32_t> turn_{0};
    alignas(64) std::atomic<int> sleepers_{0};

    static void pause() {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#elif defined(__aarch64__)
        asm volatile("yield");
#endif
    }
#if defined(__linux__)
    void sleep(uint32_t turn) { syscall(SYS_futex, (uint32_t*)&turn_, FUTEX_WAIT_PRIVATE, turn, nullptr, nullptr, 0); }
    void wake() { syscall(SYS_futex, (uint32_t*)&turn_, FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0); }
#else
    void sleep(uint32_t) { std::this_thread::yield(); }
    void wake() {}
#endif
};

}  // namespace shoal
