// The inner loops of convolutions and of their filters' gradients, for each instruction set.
#pragma once
#include <cstdint>
#include <utility>

#include "vectors.h"

namespace jaxpar {
namespace {

// A panel is as many features as have their sums in registers: kVectors vectors, for each of up to kRows results.
#if defined(__x86_64__)
constexpr int kVectors = 2;
#else
constexpr int kVectors = 4;
#endif
constexpr int kRows[] = {6, 6, 12}, kLanes[] = {4, 8, 16};
constexpr int kMostRows = 12, kMostPanel = 32;

// Numbers that lie together. `is_last`: of a chain, whose sum then goes to memory.
struct Piece {
  int64_t at, length;
  bool is_last;
};

// R results, V vectors of features: y[r, :] = sum over pieces of x[r * step + piece] * w.
template <int N, int V, int R>
JAXPAR_INLINE void Results(const float* x, int64_t step, const Piece* pieces, int64_t count, const float* w, float* y,
                           int64_t y_step) {
  typename VectorOf<N>::type sum[R][V];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) sum[r][v] = typename VectorOf<N>::type{};
  bool add = false;
  for (const Piece* piece = pieces; piece < pieces + count; ++piece) {
    const float* in = x + piece->at;
    for (int64_t k = 0; k < piece->length; ++k, w += N * kVectors) {
      typename VectorOf<N>::type weights[V];
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) load<N>(weights[v], w + v * N);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) sum[r][v] += in[r * step + k] * weights[v];
    }
    if (!piece->is_last) continue;
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) {
        float* out = y + r * y_step + v * N;
        typename VectorOf<N>::type before{};
        if (add) load<N>(before, out);
        store<N>(out, add ? before + sum[r][v] : sum[r][v]);
        sum[r][v] = typename VectorOf<N>::type{};
      }
    add = true;
  }
}

struct Lines {
  int64_t rows, columns, x_row, x_step;  // of results, and how far their windows are apart
};

// R numbers of a window, V vectors of features: out[r, :] += sum over results of x[.. + r] * dy[.., :].
template <int N, int V, int R>
JAXPAR_INLINE void Sums(const float* x, const float* dy, const Lines& lines, float* out) {
  typename VectorOf<N>::type sum[R][V];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) sum[r][v] = typename VectorOf<N>::type{};
  for (int64_t i = 0; i < lines.rows; ++i) {
    const float* in = x + i * lines.x_row;
    for (int64_t j = 0; j < lines.columns; ++j, in += lines.x_step, dy += N * kVectors) {
      typename VectorOf<N>::type d[V];
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) load<N>(d[v], dy + v * N);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) sum[r][v] += in[r] * d[v];
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
      float* to = out + (r * kVectors + v) * N;
      typename VectorOf<N>::type before;
      load<N>(before, to);
      store<N>(to, before + sum[r][v]);
    }
}

// One channel a group: y[r, c] = sum over places of x[r * step + place + c] * w[place, c], for R results.
template <int N, int R>
JAXPAR_INLINE int64_t Channels(const float* x, int64_t step, const int64_t* places, int64_t count, const float* w,
                               float* y, int64_t y_step, int64_t channels, int64_t c) {
  for (; c + N <= channels; c += N) {
    typename VectorOf<N>::type sum[R];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) sum[r] = typename VectorOf<N>::type{};
    for (int64_t k = 0; k < count; ++k) {
      typename VectorOf<N>::type weight, entry;
      load<N>(weight, w + k * channels + c);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        load<N>(entry, x + r * step + places[k] + c);
        sum[r] += entry * weight;
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) store<N>(y + r * y_step + c, sum[r]);
  }
  return c;
}

// The gradient of T places of such a filter: out[t, c] += sum over results of x[.. + places[t] + c] * dy[.., c].
template <int N, int T>
JAXPAR_INLINE int64_t ChannelSums(const float* x, const int64_t* places, const float* dy, int64_t dy_row,
                                  const Lines& lines, float* out, int64_t channels, int64_t c) {
  for (; c + N <= channels; c += N) {
    typename VectorOf<N>::type sum[T];
#pragma GCC unroll 16
    for (int t = 0; t < T; ++t) sum[t] = typename VectorOf<N>::type{};
    for (int64_t i = 0; i < lines.rows; ++i)
      for (int64_t j = 0; j < lines.columns; ++j) {
        const float* in = x + i * lines.x_row + j * lines.x_step + c;
        typename VectorOf<N>::type d, entry;
        load<N>(d, dy + i * dy_row + j * channels + c);
#pragma GCC unroll 16
        for (int t = 0; t < T; ++t) {
          load<N>(entry, in + places[t]);
          sum[t] += entry * d;
        }
      }
#pragma GCC unroll 16
    for (int t = 0; t < T; ++t) {
      typename VectorOf<N>::type before;
      load<N>(before, out + t * channels + c);
      store<N>(out + t * channels + c, before + sum[t]);
    }
  }
  return c;
}

constexpr int kMostTaps = 8;
using ResultsFn = void (*)(const float*, int64_t, const Piece*, int64_t, const float*, float*, int64_t);
using SumsFn = void (*)(const float*, const float*, const Lines&, float*);
using ChannelsFn = void (*)(const float*, int64_t, const int64_t*, int64_t, const float*, float*, int64_t, int64_t);
using ChannelSumsFn = void (*)(const float*, const int64_t*, const float*, int64_t, const Lines&, float*, int64_t);

// By vectors and rows - 1.
struct Loops {
  ResultsFn results[kVectors][kMostRows];
  SumsFn sums[kVectors][kMostRows];
  ChannelsFn channels[kMostTaps];
  ChannelSumsFn channel_sums[kMostTaps];
};

#define VERSION(name, lanes, target)                                                                                   \
  template <int V, int R>                                                                                              \
  target void Results##name(const float* x, int64_t step, const Piece* pieces, int64_t count, const float* w, float* y,\
                            int64_t y_step) {                                                                          \
    Results<lanes, V, R>(x, step, pieces, count, w, y, y_step);                                                        \
  }                                                                                                                    \
  template <int V, int R>                                                                                              \
  target void Sums##name(const float* x, const float* dy, const Lines& lines, float* out) {                            \
    Sums<lanes, V, R>(x, dy, lines, out);                                                                              \
  }                                                                                                                    \
  template <int R>                                                                                                     \
  target void Channels##name(const float* x, int64_t step, const int64_t* places, int64_t count, const float* w,       \
                             float* y, int64_t y_step, int64_t channels) {                                             \
    const int64_t c = Channels<lanes, R>(x, step, places, count, w, y, y_step, channels, 0);                           \
    Channels<1, R>(x, step, places, count, w, y, y_step, channels, c);                                                 \
  }                                                                                                                    \
  template <int T>                                                                                                     \
  target void ChannelSums##name(const float* x, const int64_t* places, const float* dy, int64_t dy_row,                \
                                const Lines& lines, float* out, int64_t channels) {                                    \
    const int64_t c = ChannelSums<lanes, T>(x, places, dy, dy_row, lines, out, channels, 0);                           \
    ChannelSums<1, T>(x, places, dy, dy_row, lines, out, channels, c);                                                 \
  }                                                                                                                    \
  template <int V, int... R>                                                                                           \
  void FillPanels##name(Loops& loops, std::integer_sequence<int, R...>) {                                              \
    ((loops.results[V - 1][R] = Results##name<V, R + 1>, loops.sums[V - 1][R] = Sums##name<V, R + 1>), ...);           \
    if constexpr (V > 1) FillPanels##name<V - 1>(loops, std::integer_sequence<int, R...>());                           \
  }                                                                                                                    \
  template <int... R>                                                                                                  \
  Loops Make##name(std::integer_sequence<int, R...>) {                                                                 \
    Loops loops{};                                                                                                     \
    FillPanels##name<kVectors>(loops, std::make_integer_sequence<int, lanes == 16 ? 12 : 6>());                        \
    ((loops.channels[R] = Channels##name<R + 1>, loops.channel_sums[R] = ChannelSums##name<R + 1>), ...);              \
    return loops;                                                                                                      \
  }
JAXPAR_TARGETS(VERSION)
#undef VERSION

const Loops& TheLoops() {
#define MAKE(name, lanes, target) Make##name(std::make_integer_sequence<int, kMostTaps>()),
  static const Loops loops[] = {JAXPAR_TARGETS(MAKE)};
#undef MAKE
  return loops[instructions()];
}

}  // namespace
}  // namespace jaxpar
