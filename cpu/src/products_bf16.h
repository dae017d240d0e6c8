// Products of matrices of bfloat16 whose sums are of float32, 32 x 32 of them at once, for each instruction set.
//
// The left matrix has its rows anywhere. The right one is in pairs of rows: 32 columns, of each the numbers of both rows.
#pragma once
#include <cstdint>
#include <cstring>
#include <vector>

// Older compilers do not know the instructions.
#if defined(__x86_64__) && (defined(__clang__) ? __clang_major__ >= 12 : __GNUC__ >= 11)
#define JAXPAR_BF16 1
#include <cpuid.h>
#include <immintrin.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

#include "vectors.h"

namespace jaxpar {
namespace {

using Half = uint16_t;      // the upper half of a float32
constexpr int kSquare = 32;  // rows and columns of the sums
constexpr int kDepth = 32;   // rows of the right matrix that are multiplied at once

JAXPAR_INLINE float Wide(Half x) {
  const uint32_t bits = uint32_t{x} << 16;
  float result;
  std::memcpy(&result, &bits, 4);
  return result;
}

JAXPAR_INLINE Half Rounded(float x) {  // to the nearest, and of two the even one
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const uint32_t nearest = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  return x == x ? nearest : bits >> 16 | 0x40;
}

// sums (+)= left x right, over `depth` columns of the left matrix, a multiple of kDepth.
struct Factors {
  const Half* left;
  int64_t step;  // from one row of `left` to the next
  const Half* right;
  int64_t depth;
};

void ProductBase(const Factors& of, float* sums, bool add) {
  if (!add) std::memset(sums, 0, 4 * kSquare * kSquare);
  for (int64_t row = 0; row < kSquare; ++row)
    for (int64_t k = 0; k < of.depth; ++k) {
      const float by = Wide(of.left[row * of.step + k]);
      const Half* right = of.right + k / 2 * 2 * kSquare + k % 2;
      for (int64_t column = 0; column < kSquare; ++column) sums[row * kSquare + column] += by * Wide(right[2 * column]);
    }
}

void Nothing() {}

JAXPAR_INLINE void Round(const float* from, Half* to, int64_t count) {
  if (count == kSquare)
    for (int64_t i = 0; i < kSquare; ++i) to[i] = Rounded(from[i]);
  else
    for (int64_t i = 0; i < count; ++i) to[i] = Rounded(from[i]);
}

// A right matrix of rows that are `width` apart, a multiple of kSquare: 32 columns of all pairs after the other.
JAXPAR_INLINE void Pair(const Half* rows, int64_t count, int64_t width, Half* out) {
  for (int64_t first = 0; first < width; first += kSquare)
    for (int64_t row = 0; row < count; row += 2, out += 2 * kSquare) {
      const Half *upper = rows + row * width + first, *lower = upper + width;
      for (int64_t i = 0; i < kSquare; ++i) {
        const uint32_t pair = upper[i] | uint32_t{lower[i]} << 16;
        std::memcpy(out + 2 * i, &pair, 4);
      }
    }
}

// Columns as rows: out[column, row] = in[row, column].
JAXPAR_INLINE void Turn(const Half* in, int64_t step, int64_t columns, int64_t rows, Half* out, int64_t out_step) {
  for (int64_t row = 0; row + 1 < rows; row += 2)
    for (int64_t column = 0; column < columns; ++column) {
      const uint32_t pair = in[row * step + column] | uint32_t{in[(row + 1) * step + column]} << 16;
      std::memcpy(out + column * out_step + row, &pair, 4);
    }
  if (rows % 2)
    for (int64_t column = 0; column < columns; ++column) out[column * out_step + rows - 1] = in[(rows - 1) * step + column];
}

#define VERSION(name, lanes, target)                                                                                  \
  target void Round##name(const float* from, Half* to, int64_t count) { Round(from, to, count); }                     \
  target void Pair##name(const Half* rows, int64_t count, int64_t width, Half* out) { Pair(rows, count, width, out); } \
  target void Turn##name(const Half* in, int64_t step, int64_t columns, int64_t rows, Half* out, int64_t out_step) {  \
    Turn(in, step, columns, rows, out, out_step);                                                                     \
  }
JAXPAR_TARGETS(VERSION)
#undef VERSION

#if defined(JAXPAR_BF16)
__attribute__((target("avx512f,avx512bf16"))) void ProductAvx512(const Factors& of, float* sums, bool add) {
  constexpr int kRows = 8;
  for (int64_t first = 0; first < kSquare; first += kRows, sums += kRows * kSquare) {
    __m512 sum[kRows][2];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v) sum[r][v] = add ? _mm512_loadu_ps(sums + r * kSquare + 16 * v) : _mm512_setzero_ps();
    const Half* left = of.left + first * of.step;
    for (int64_t k = 0; k < of.depth; k += 2) {
      const __m512bh low = (__m512bh)_mm512_loadu_si512(of.right + k * kSquare);
      const __m512bh high = (__m512bh)_mm512_loadu_si512(of.right + k * kSquare + 32);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        int pair;
        __builtin_memcpy(&pair, left + r * of.step + k, 4);
        const __m512bh by = (__m512bh)_mm512_set1_epi32(pair);
        sum[r][0] = _mm512_dpbf16_ps(sum[r][0], by, low);
        sum[r][1] = _mm512_dpbf16_ps(sum[r][1], by, high);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v) _mm512_storeu_ps(sums + r * kSquare + 16 * v, sum[r][v]);
  }
}

// Of AMX: eight tiles of 16 rows of 64 bytes. The first four are sums, then two of the left matrix and two of the right.
__attribute__((target("amx-tile"))) void StartTiles() {
  // Not on the stack: the compiler does not know that the instruction reads all of it.
  alignas(64) static const struct {
    uint8_t palette = 1, start = 0, unused[14] = {};
    uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  } config;
  _tile_loadconfig(&config);
}

__attribute__((target("amx-tile"))) void StopTiles() { _tile_release(); }

__attribute__((target("amx-tile,amx-bf16"))) void ProductAmx(const Factors& of, float* sums, bool add) {
  constexpr int kStep = 4 * kSquare;  // bytes of a row of sums, and of a pair of rows
  float* lower = sums + 16 * kSquare;
  if (add) {
    _tile_loadd(0, sums, kStep);
    _tile_loadd(1, sums + 16, kStep);
    _tile_loadd(2, lower, kStep);
    _tile_loadd(3, lower + 16, kStep);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t k = 0; k < of.depth; k += kDepth) {
    const Half* right = of.right + k * kSquare;
    _tile_loadd(4, of.left + k, 2 * of.step);
    _tile_loadd(5, of.left + 16 * of.step + k, 2 * of.step);
    _tile_loadd(6, right, kStep);
    _tile_loadd(7, right + kSquare, kStep);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, sums, kStep);
  _tile_stored(1, sums + 16, kStep);
  _tile_stored(2, lower, kStep);
  _tile_stored(3, lower + 16, kStep);
}

bool HasAmx() {
#if defined(__linux__)
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d >> 22 & 1) || !(d >> 24 & 1)) return false;
  return syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* the data of tiles */) == 0;
#else
  return false;
#endif
}
#endif

// `start` before products on a thread, and `stop` after them.
struct Products {
  void (*start)();
  void (*product)(const Factors&, float* sums, bool add);
  void (*stop)();
  void (*round)(const float* from, Half* to, int64_t count);
  void (*pair)(const Half* rows, int64_t count, int64_t width, Half* out);
  void (*turn)(const Half* in, int64_t step, int64_t columns, int64_t rows, Half* out, int64_t out_step);
  bool is_fast;  // whether the processor multiplies bfloat16 faster than float32
};

// Those that this processor has, the fastest first.
std::vector<Products> AllProducts() {
  std::vector<Products> all;
#if defined(JAXPAR_BF16)
  unsigned a, b, c, d;
  if (instructions() == 2 && HasAmx())
    all.push_back({StartTiles, ProductAmx, StopTiles, RoundAvx512, PairAvx512, TurnAvx512, true});
  if (instructions() == 2 && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 5 & 1))
    all.push_back({Nothing, ProductAvx512, Nothing, RoundAvx512, PairAvx512, TurnAvx512, true});
#endif
  all.push_back({Nothing, ProductBase, Nothing, RoundBase, PairBase, TurnBase, false});
  return all;
}

const Products& TheProducts() {
  static const Products found = AllProducts()[0];
  return found;
}

}  // namespace
}  // namespace jaxpar
