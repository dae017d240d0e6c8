// Vectors of floats of any instruction set, by the compiler's vector types.
//
// A loop is written once, as a template over the number of lanes that is always inlined. `JAXPAR_TARGETS` makes a version
// for each instruction set, and `instructions()` says at run time which one this processor has:
//
//   template <int N> JAXPAR_INLINE void Scale(float* x, float by) { typename VectorOf<N>::type v; load<N>(v, x); ... }
//   #define VERSION(name, lanes, target) target void Scale##name(float* x, float by) { Scale<lanes>(x, by); }
//   JAXPAR_TARGETS(VERSION)
//   #define NAMED(name, lanes, target) Scale##name,
//   void (*const scales[])(float*, float) = {JAXPAR_TARGETS(NAMED)};  // scales[instructions()] is the one to call
//
// Of the standard library nothing but arithmetic belongs into such a loop: the linker might keep one instruction set's
// version of a shared inline function for all.
#pragma once
#include <cstdint>

#define JAXPAR_INLINE __attribute__((always_inline)) inline

namespace jaxpar {

template <int N>
struct VectorOf {
  typedef float type __attribute__((vector_size(4 * N)));
};

// By reference: how a vector is returned depends on the instruction set, which these functions do not know.
template <int N>
JAXPAR_INLINE void load(typename VectorOf<N>::type& to, const float* from) {
  __builtin_memcpy(&to, from, 4 * N);
}

template <int N>
JAXPAR_INLINE void store(float* to, const typename VectorOf<N>::type& from) {
  __builtin_memcpy(to, &from, 4 * N);
}

#if defined(__x86_64__)
#define JAXPAR_TARGETS(VERSION)                          \
  VERSION(Base, 4, )                                     \
  VERSION(Avx2, 8, __attribute__((target("avx2,fma"))))  \
  VERSION(Avx512, 16, __attribute__((target("avx2,fma,avx512f,avx512vl,avx512bw,avx512dq"))))

inline int instructions() {
  static const int found = [] {
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq"))
      return 2;
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? 1 : 0;
  }();
  return found;
}
#else  // NEON is part of every ARM of 64 bits
#define JAXPAR_TARGETS(VERSION) VERSION(Base, 4, )

inline int instructions() { return 0; }
#endif

}  // namespace jaxpar
