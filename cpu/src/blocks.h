// Blocks of work on XLA's threads, and memory that a thread keeps between calls.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace jaxpar {

// Calls work(0) to work(blocks - 1), each once, on any thread, and returns when all are done.
//
// The caller works too, and waits only for blocks that another thread has begun. Emulated devices share XLA's threads: a
// caller that waited for a thread of the pool could wait for one that itself waits in a collective.
// `Pool` is XLA's, or a test's.
template <class Pool>
void ForBlocks(Pool& pool, int64_t blocks, std::function<void(int64_t)> work) {
  struct State {
    std::atomic<int64_t> next{0}, done{0};
    std::mutex mutex;
    std::condition_variable all;
  };
  auto state = std::make_shared<State>();  // a thread that comes late, when all is done, reads it still
  auto run = [state, blocks, work] {
    for (int64_t i; (i = state->next++) < blocks;) {
      work(i);
      if (++state->done == blocks) {
        std::lock_guard<std::mutex> lock(state->mutex);
        state->all.notify_all();
      }
    }
  };
  for (int64_t i = 1; i < blocks && i < pool.num_threads(); ++i) pool.Schedule(std::function<void()>(run));
  run();
  std::unique_lock<std::mutex> lock(state->mutex);
  state->all.wait(lock, [&] { return state->done == blocks; });
}

// At least `count` numbers at a multiple of 64 bytes, with what was in them. `kept` is the thread's own, so that a step
// touches no new page of memory each time.
template <class T>
T* Kept(std::vector<T>& kept, int64_t count) {
  constexpr int64_t kLine = 64 / sizeof(T);
  if (static_cast<int64_t>(kept.size()) < count + kLine) kept.resize(count + kLine);
  return reinterpret_cast<T*>((reinterpret_cast<uintptr_t>(kept.data()) + 63) & ~uintptr_t{63});
}

}  // namespace jaxpar

// A handler that the library shows to XLA: JAXPAR_HANDLER(Name, function, its arguments, results and attributes).
#define JAXPAR_HANDLER(name, function, binding)                                                  \
  extern "C" __attribute__((visibility("default"))) XLA_FFI_Error* name(XLA_FFI_CallFrame* call); \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(name, function, binding)
