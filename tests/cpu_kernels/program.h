// For programs of kernels without JAX: threads of a pool, and random sizes, whose ends are ends of memory.
#pragma once
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <random>
#include <thread>
#include <vector>

namespace jaxpar {
namespace {

struct Threads {
  std::vector<std::thread> threads;
  int64_t num_threads() const { return 4; }
  void Schedule(std::function<void()> work) { threads.emplace_back(work); }
  ~Threads() {
    for (std::thread& thread : threads) thread.join();
  }
};

std::mt19937 random_bits(1);
int64_t From(int64_t first, int64_t last) { return std::uniform_int_distribution<int64_t>(first, last)(random_bits); }

std::vector<float> Normal(int64_t count) {
  std::vector<float> values(count);
  for (float& value : values) value = std::normal_distribution<float>()(random_bits);
  return values;
}

bool IsRight();

}  // namespace
}  // namespace jaxpar

int main(int count, char** arguments) {
  for (int i = 0; i < std::atoi(arguments[count - 1]); ++i)
    if (!jaxpar::IsRight()) return std::printf("wrong at %d\n", i), 1;
  std::printf("right\n");
}
