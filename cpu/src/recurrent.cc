// The loop of an LSTM and of a GRU, forward and backward, float32, and the sum that is the gradient of their weight.
//
// Arrays are T x B x features. A thread takes some examples through all steps, so no thread waits for another. Each sum
// is taken in an order that depends on the sizes alone. So neither the number of threads nor the examples that are
// computed together change a bit.
//
// x is what the inputs add, with all biases. The columns of x and of the weight w (H x G) are blocks of H: those of an
// LSTM are i, f, g, o; those of a GRU r, z, n.
//
//     LSTM: s = x + h w,  c' = sigmoid(s_f) c + sigmoid(s_i) tanh(s_g),  h' = sigmoid(s_o) tanh(c')
//     GRU:  q = h w,  r = sigmoid(x_r + q_r),  z = sigmoid(x_z + q_z),
//           n = tanh(x_n + r (q_n + bias)),  h' = (1 - z) n + z h
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "blocks.h"
#include "vectors.h"

namespace ffi = xla::ffi;
using F32 = ffi::Buffer<ffi::F32>;
using F32Result = ffi::ResultBuffer<ffi::F32>;

namespace jaxpar {
namespace {

// Rows of a sum that is added to the others at once.
constexpr int64_t kPart = 256;
// Rows and columns of a block of the weight's gradient, and examples that are added at once: lax adds those of a step.
constexpr int64_t kRows = 256, kColumns = 128, kExamples = 64;

int64_t UpTo(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// Everything that is computed with vectors of W numbers. It is inlined into functions for one set of instructions each.
template <int W>
struct With {
  static constexpr int R = W == 16 ? 8 : W == 8 ? 6 : 4;  // rows whose sums fit in the registers, two vectors each
  static constexpr int64_t kPanel = 2 * W;                // columns that lie beside each other for each row
  typedef float F __attribute__((vector_size(4 * W)));
  typedef int32_t I __attribute__((vector_size(4 * W)));
  typedef float Unaligned __attribute__((vector_size(4 * W), aligned(4), may_alias));

  static JAXPAR_INLINE F Load(const float* p) { return *(const Unaligned*)p; }

  static JAXPAR_INLINE void Store(float* p, F v) { *(Unaligned*)p = v; }

  // The first n numbers where there are less than W.
  static JAXPAR_INLINE F Load(const float* p, int64_t n) {
    if (n >= W) return Load(p);
    F v = F{};
    std::memcpy(&v, p, 4 * n);
    return v;
  }

  static JAXPAR_INLINE void Store(float* p, F v, int64_t n) {
    if (n >= W) return Store(p, v);
    std::memcpy(p, &v, 4 * n);
  }

  // e^x = 2^n e^r, |r| <= log(2) / 2, with a polynomial of least relative error. NaN stays, and e^89 is infinite.
  static JAXPAR_INLINE F Exp(F x) {
    x = x > 104.0f ? F{} + 104.0f : x;
    x = x < -104.0f ? F{} - 104.0f : x;
    const F shifted = x * 1.44269504f + 12582912.0f;  // 1.5 * 2^23: n stands in the last bits
    const F n = shifted - 12582912.0f;
    const F r = x - n * 0.693359375f + n * 2.12194440e-4f;  // log(2) in two parts, the first of few bits
    const F q = (((1.395171916e-3f * r + 8.369598221e-3f) * r + 4.166618726e-2f) * r + 1.666651289e-1f) * r + 0.5f;
    const F p = 1.0f + (r + r * r * q);
    const I e = (I)shifted - 0x4B400000, half = e >> 1;  // 2^n as two factors: it may be infinite, or less than normal
    return p * (F)((half + 127) << 23) * (F)((e - half + 127) << 23);
  }

  static JAXPAR_INLINE F Sigmoid(F x) { return 1.0f / (1.0f + Exp(-x)); }

  static JAXPAR_INLINE F Tanh(F x) {
    const I sign = (I)x & INT32_MIN;
    const F a = (F)((I)x & INT32_MAX), u = a * a;
    const F q = (((-5.905867951e-3f * u + 2.080538418e-2f) * u - 5.378668345e-2f) * u + 1.333195824e-1f) * u -
                3.333329927e-1f;
    const F large = 1.0f - 2.0f / (1.0f + Exp(a + a));
    const F result = a < 0.6f ? a + a * u * q : large;
    return (F)((I)result | sign);
  }

  // c[r, :] (+)= sum over k of a[r * row + k * next] panel[k, :] for S rows.
  template <int S>
  static JAXPAR_INLINE void Tile(const float* a, int64_t row, int64_t next, int64_t K, const float* panel, float* c,
                          int64_t ldc, bool add) {
    F s[S][2];
#pragma GCC unroll 8
    for (int r = 0; r < S; ++r) s[r][0] = s[r][1] = F{};
    for (int64_t k = 0; k < K; ++k) {
      const F w0 = Load(panel + k * kPanel), w1 = Load(panel + k * kPanel + W);
#pragma GCC unroll 8
      for (int r = 0; r < S; ++r) {
        const float x = a[r * row + k * next];  // a vector F{} + x would cost an addition: -0 becomes 0
        s[r][0] += x * w0;
        s[r][1] += x * w1;
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < S; ++r)
      for (int v = 0; v < 2; ++v) {
        float* to = c + r * ldc + v * W;
        Store(to, add ? Load(to) + s[r][v] : s[r][v]);
      }
  }

  static JAXPAR_INLINE void Tiles(const float* a, int64_t row, int64_t next, int64_t rows, int64_t K, const float* panel,
                           float* c, int64_t ldc, bool add) {
    int64_t r = 0;
    for (; r + R <= rows; r += R) Tile<R>(a + r * row, row, next, K, panel, c + r * ldc, ldc, add);
    for (; r + 4 <= rows; r += 4) Tile<4>(a + r * row, row, next, K, panel, c + r * ldc, ldc, add);
    for (; r < rows; ++r) Tile<1>(a + r * row, row, next, K, panel, c + r * ldc, ldc, add);
  }

  // c = a times the panels.
  static JAXPAR_INLINE void Product(const float* a, int64_t lda, int64_t rows, int64_t K, const float* panels, int64_t N,
                             float* c, int64_t ldc) {
    for (int64_t p = 0; p < N; p += kPanel, panels += K * kPanel)
      for (int64_t k = 0; k < K; k += kPart)
        Tiles(a + k, lda, 1, rows, std::min(kPart, K - k), panels + k * kPanel, c + p, ldc, k > 0);
  }
};

// Sizes and arrays of a loop. A block is `rows` examples from `first` on.
struct Loop {
  int64_t T, B, H, G;
  const float *x, *w, *bias, *h0, *c0;
  float *states, *cells, *gates;          // results of the forward loop; gates may be null
  const float *dstates, *dcells;          // cotangents; null: zeros
  float *dx, *dh0, *dc0;                  // results of the backward loop
  float *ds, *dw;                         // cotangents of h w, an operand of what gives that of w
  const float* panels;

  int64_t At(int64_t t, int64_t b, int64_t width) const { return (t * B + b) * width; }
};

template <int W>
struct Lstm : With<W> {
  using V = With<W>;
  using typename V::F;

  static JAXPAR_INLINE void Forward(const Loop& l, int64_t first, int64_t rows) {
    const int64_t H = l.H, G = l.G, ld = UpTo(G, V::kPanel) + W;
    thread_local std::vector<float> kept;
    float* sums = Kept(kept, rows * ld);
    for (int64_t t = 0; t < l.T; ++t) {
      const float* before = t ? l.states + l.At(t - 1, first, H) : l.h0 + first * H;
      const float* cells = t ? l.cells + l.At(t - 1, first, H) : l.c0 + first * H;
      V::Product(before, H, rows, H, l.panels, G, sums, ld);
      for (int64_t r = 0; r < rows; ++r) {
        const float *s = &sums[r * ld], *x = l.x + l.At(t, first + r, G), *c = cells + r * H;
        float *c1 = l.cells + l.At(t, first + r, H), *h1 = l.states + l.At(t, first + r, H);
        float* g1 = l.gates ? l.gates + l.At(t, first + r, G) : nullptr;
        for (int64_t j = 0; j < H; j += W) {
          const int64_t n = H - j;
          const F i = V::Sigmoid(V::Load(x + j, n) + V::Load(s + j));
          const F f = V::Sigmoid(V::Load(x + H + j, n) + V::Load(s + H + j));
          const F g = V::Tanh(V::Load(x + 2 * H + j, n) + V::Load(s + 2 * H + j));
          const F o = V::Sigmoid(V::Load(x + 3 * H + j, n) + V::Load(s + 3 * H + j));
          const F cell = f * V::Load(c + j, n) + i * g;
          V::Store(c1 + j, cell, n);
          V::Store(h1 + j, o * V::Tanh(cell), n);
          if (!g1) continue;
          V::Store(g1 + j, i, n), V::Store(g1 + H + j, f, n);
          V::Store(g1 + 2 * H + j, g, n), V::Store(g1 + 3 * H + j, o, n);
        }
      }
    }
  }

  static JAXPAR_INLINE void Backward(const Loop& l, int64_t first, int64_t rows) {
    const int64_t H = l.H, G = l.G, ld = UpTo(H, V::kPanel) + W;
    thread_local std::vector<float> kept;
    float *dstates = Kept(kept, 2 * rows * ld), *dcells = dstates + rows * ld;
    std::fill(dstates, dstates + 2 * rows * ld, 0.0f);
    for (int64_t t = l.T - 1; t >= 0; --t) {
      const float* cells = t ? l.cells + l.At(t - 1, first, H) : l.c0 + first * H;
      for (int64_t r = 0; r < rows; ++r) {
        const float *g1 = l.gates + l.At(t, first + r, G), *c = cells + r * H;
        const float* c1 = l.cells + l.At(t, first + r, H);
        float *dx = l.dx + l.At(t, first + r, G), *dh = &dstates[r * ld], *dc = &dcells[r * ld];
        for (int64_t j = 0; j < H; j += W) {
          const int64_t n = H - j;
          const F i = V::Load(g1 + j, n), f = V::Load(g1 + H + j, n);
          const F g = V::Load(g1 + 2 * H + j, n), o = V::Load(g1 + 3 * H + j, n);
          const F y = V::Tanh(V::Load(c1 + j, n));
          F h = V::Load(dh + j), cell = V::Load(dc + j);
          if (l.dstates) h += V::Load(l.dstates + l.At(t, first + r, H) + j, n);
          if (l.dcells) cell += V::Load(l.dcells + l.At(t, first + r, H) + j, n);
          cell += h * o * (1.0f - y * y);
          V::Store(dx + j, cell * g * (i * (1.0f - i)), n);
          V::Store(dx + H + j, cell * V::Load(c + j, n) * (f * (1.0f - f)), n);
          V::Store(dx + 2 * H + j, cell * i * (1.0f - g * g), n);
          V::Store(dx + 3 * H + j, h * y * (o * (1.0f - o)), n);
          V::Store(dc + j, cell * f);
        }
      }
      V::Product(l.dx + l.At(t, first, G), G, rows, G, l.panels, H, dstates, ld);
    }
    for (int64_t r = 0; r < rows; ++r) {
      std::memcpy(l.dh0 + (first + r) * H, &dstates[r * ld], 4 * H);
      std::memcpy(l.dc0 + (first + r) * H, &dcells[r * ld], 4 * H);
    }
  }
};

template <int W>
struct Gru : With<W> {
  using V = With<W>;
  using typename V::F;

  // The gates that are kept are r, z, n and q_n + bias.
  static JAXPAR_INLINE void Forward(const Loop& l, int64_t first, int64_t rows) {
    const int64_t H = l.H, G = l.G, ld = UpTo(G, V::kPanel) + W;
    thread_local std::vector<float> kept;
    float* sums = Kept(kept, rows * ld);
    for (int64_t t = 0; t < l.T; ++t) {
      const float* before = t ? l.states + l.At(t - 1, first, H) : l.h0 + first * H;
      V::Product(before, H, rows, H, l.panels, G, sums, ld);
      for (int64_t r = 0; r < rows; ++r) {
        const float *s = &sums[r * ld], *x = l.x + l.At(t, first + r, G), *bias = l.bias + (first + r) * H;
        float* h1 = l.states + l.At(t, first + r, H);
        float* g1 = l.gates ? l.gates + l.At(t, first + r, 4 * H) : nullptr;
        for (int64_t j = 0; j < H; j += W) {
          const int64_t n = H - j;
          const F reset = V::Sigmoid(V::Load(x + j, n) + V::Load(s + j));
          const F z = V::Sigmoid(V::Load(x + H + j, n) + V::Load(s + H + j));
          const F q = V::Load(s + 2 * H + j) + V::Load(bias + j, n);
          const F y = V::Tanh(V::Load(x + 2 * H + j, n) + reset * q);
          V::Store(h1 + j, (1.0f - z) * y + z * V::Load(before + r * H + j, n), n);
          if (!g1) continue;
          V::Store(g1 + j, reset, n), V::Store(g1 + H + j, z, n);
          V::Store(g1 + 2 * H + j, y, n), V::Store(g1 + 3 * H + j, q, n);
        }
      }
    }
  }

  static JAXPAR_INLINE void Backward(const Loop& l, int64_t first, int64_t rows) {
    const int64_t H = l.H, G = l.G, ld = UpTo(H, V::kPanel) + W;
    thread_local std::vector<float> kept;
    float *dstates = Kept(kept, 2 * rows * ld), *products = dstates + rows * ld;
    std::fill(dstates, dstates + 2 * rows * ld, 0.0f);
    for (int64_t t = l.T - 1; t >= 0; --t) {
      const float* before = t ? l.states + l.At(t - 1, first, H) : l.h0 + first * H;
      for (int64_t r = 0; r < rows; ++r) {
        const float* g1 = l.gates + l.At(t, first + r, 4 * H);
        float *dx = l.dx + l.At(t, first + r, G), *ds = l.ds + l.At(t, first + r, G);
        for (int64_t j = 0; j < H; j += W) {
          const int64_t n = H - j;
          const F reset = V::Load(g1 + j, n), z = V::Load(g1 + H + j, n);
          const F y = V::Load(g1 + 2 * H + j, n), q = V::Load(g1 + 3 * H + j, n);
          F h = V::Load(&dstates[r * ld + j]) + V::Load(&products[r * ld + j]);
          if (l.dstates) h += V::Load(l.dstates + l.At(t, first + r, H) + j, n);
          const F dn = h * (1.0f - z) * (1.0f - y * y);
          const F dr = dn * q * (reset * (1.0f - reset));
          const F dz = h * (V::Load(before + r * H + j, n) - y) * (z * (1.0f - z));
          V::Store(dx + j, dr, n), V::Store(ds + j, dr, n);
          V::Store(dx + H + j, dz, n), V::Store(ds + H + j, dz, n);
          V::Store(dx + 2 * H + j, dn, n), V::Store(ds + 2 * H + j, dn * reset, n);
          V::Store(&dstates[r * ld + j], h * z);
        }
      }
      V::Product(l.ds + l.At(t, first, G), G, rows, G, l.panels, H, products, ld);
    }
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t j = 0; j < H; ++j) l.dh0[(first + r) * H + j] = dstates[r * ld + j] + products[r * ld + j];
  }
};

// Sum over steps and examples of (state before, H x 1) (ds, 1 x G): rows `first` on of H, columns `column` on of G.
template <int W>
JAXPAR_INLINE void WeightGradient(const Loop& l, int64_t first, int64_t column) {
  constexpr int64_t kPanel = With<W>::kPanel;
  const int64_t rows = std::min(kRows, l.H - first), columns = std::min(kColumns, l.G - column), all = l.T * l.B;
  thread_local std::vector<float> kept;
  float* before = Kept(kept, kExamples * (kRows + kColumns) + kRows * kColumns);
  float *panels = before + kExamples * kRows, *sums = panels + kExamples * kColumns;
  for (int64_t k0 = 0; k0 < all; k0 += kExamples) {
    const int64_t K = std::min(kExamples, all - k0);
    for (int64_t k = 0; k < K; ++k) {
      const int64_t at = k0 + k - l.B;
      std::memcpy(before + k * kRows, (at < 0 ? l.h0 + (at + l.B) * l.H : l.states + at * l.H) + first, 4 * rows);
      const float* from = l.ds + (k0 + k) * l.G + column;
      int64_t p = 0;
      for (; p + kPanel <= columns; p += kPanel) std::memcpy(panels + p * kExamples + k * kPanel, from + p, 4 * kPanel);
      if (p < columns) std::memcpy(panels + p * kExamples + k * kPanel, from + p, 4 * (columns - p));
    }
    for (int64_t p = 0; p < columns; p += kPanel)
      With<W>::Tiles(before, 1, kRows, rows, K, panels + p * kExamples, sums + p, kColumns, k0 > 0);
  }
  for (int64_t r = 0; r < rows; ++r)
    std::memcpy(l.dw + (first + r) * l.G + column, sums + r * kColumns, 4 * columns);
}

#define VERSION(name, lanes, target)                                                                           \
  target void LstmForward##name(const Loop& l, int64_t b, int64_t n) { Lstm<lanes>::Forward(l, b, n); }         \
  target void LstmBackward##name(const Loop& l, int64_t b, int64_t n) { Lstm<lanes>::Backward(l, b, n); }       \
  target void GruForward##name(const Loop& l, int64_t b, int64_t n) { Gru<lanes>::Forward(l, b, n); }           \
  target void GruBackward##name(const Loop& l, int64_t b, int64_t n) { Gru<lanes>::Backward(l, b, n); }         \
  target void Weight##name(const Loop& l, int64_t row, int64_t column) { WeightGradient<lanes>(l, row, column); }
JAXPAR_TARGETS(VERSION)

struct Functions {
  using Blocks = void (*)(const Loop&, int64_t, int64_t);
  int64_t panel;
  Blocks lstm_forward, lstm_backward, gru_forward, gru_backward, weight;
};
#define NAMED(name, lanes, target) \
  {With<lanes>::kPanel, LstmForward##name, LstmBackward##name, GruForward##name, GruBackward##name, Weight##name},
constexpr Functions kFunctions[] = {JAXPAR_TARGETS(NAMED)};

// Columns p to p + `panel` of a matrix of K x N, with zeros after the last. Transposed: of the N x K that is given.
void PackPanel(const float* w, int64_t K, int64_t N, bool transposed, int64_t panel, int64_t p, float* out) {
  for (int64_t k = 0; k < K; ++k)
    for (int64_t j = p; j < p + panel; ++j) *out++ = j >= N ? 0.0f : transposed ? w[j * K + k] : w[k * N + j];
}

template <class Pool>
const float* Pack(Pool& pool, const float* w, int64_t K, int64_t N, bool transposed) {
  thread_local std::vector<float> kept;
  const int64_t panel = kFunctions[instructions()].panel;
  float* out = Kept(kept, K * UpTo(N, panel));
  ForBlocks(pool, UpTo(N, panel) / panel, [=](int64_t block) {
    PackPanel(w, K, N, transposed, panel, block * panel, out + block * panel * K);
  });
  return out;
}

// Examples in blocks, of which each thread has one if they are few. A block reads the whole weight at each step.
template <class Pool>
void ForExamples(Pool& pool, const Loop& loop, Functions::Blocks work) {
  const int64_t threads = std::max<int64_t>(1, pool.num_threads());
  const int64_t rows = std::clamp<int64_t>(UpTo((loop.B + threads - 1) / threads, 8), 8, 32);
  ForBlocks(pool, (loop.B + rows - 1) / rows,
            [=, &loop](int64_t i) { work(loop, i * rows, std::min(rows, loop.B - i * rows)); });
}

template <class Pool>
void ForWeight(Pool& pool, const Loop& loop) {
  const int64_t down = (loop.H + kRows - 1) / kRows, across = (loop.G + kColumns - 1) / kColumns;
  const auto work = kFunctions[instructions()].weight;
  ForBlocks(pool, down * across, [=, &loop](int64_t i) { work(loop, i / across * kRows, i % across * kColumns); });
}

const float* Given(const F32& x) { return x.element_count() ? x.typed_data() : nullptr; }

ffi::Error LstmForward(ffi::ThreadPool pool, F32 x, F32 w, F32 h0, F32 c0, F32Result states, F32Result cells,
                       F32Result gates) {
  Loop l{};
  l.T = x.dimensions()[0], l.B = x.dimensions()[1], l.H = w.dimensions()[0], l.G = w.dimensions()[1];
  l.x = x.typed_data(), l.h0 = h0.typed_data(), l.c0 = c0.typed_data();
  l.states = states->typed_data(), l.cells = cells->typed_data();
  l.gates = gates->element_count() ? gates->typed_data() : nullptr;
  l.panels = Pack(pool, w.typed_data(), l.H, l.G, false);
  ForExamples(pool, l, kFunctions[instructions()].lstm_forward);
  return ffi::Error::Success();
}

ffi::Error LstmBackward(ffi::ThreadPool pool, F32 w, F32 c0, F32 cells, F32 gates, F32 dstates, F32 dcells,
                        F32Result dx, F32Result dh0, F32Result dc0) {
  Loop l{};
  l.T = gates.dimensions()[0], l.B = gates.dimensions()[1], l.H = w.dimensions()[0], l.G = w.dimensions()[1];
  l.c0 = c0.typed_data(), l.cells = cells.typed_data(), l.gates = gates.typed_data();
  l.dstates = Given(dstates), l.dcells = Given(dcells);
  l.dx = dx->typed_data(), l.dh0 = dh0->typed_data(), l.dc0 = dc0->typed_data();
  l.panels = Pack(pool, w.typed_data(), l.G, l.H, true);
  ForExamples(pool, l, kFunctions[instructions()].lstm_backward);
  return ffi::Error::Success();
}

ffi::Error GruForward(ffi::ThreadPool pool, F32 x, F32 w, F32 bias, F32 h0, F32Result states, F32Result gates) {
  Loop l{};
  l.T = x.dimensions()[0], l.B = x.dimensions()[1], l.H = w.dimensions()[0], l.G = w.dimensions()[1];
  l.x = x.typed_data(), l.bias = bias.typed_data(), l.h0 = h0.typed_data();
  l.states = states->typed_data();
  l.gates = gates->element_count() ? gates->typed_data() : nullptr;
  l.panels = Pack(pool, w.typed_data(), l.H, l.G, false);
  ForExamples(pool, l, kFunctions[instructions()].gru_forward);
  return ffi::Error::Success();
}

ffi::Error GruBackward(ffi::ThreadPool pool, F32 w, F32 h0, F32 states, F32 gates, F32 dstates, F32Result dx,
                       F32Result ds, F32Result dh0) {
  Loop l{};
  l.T = gates.dimensions()[0], l.B = gates.dimensions()[1], l.H = w.dimensions()[0], l.G = w.dimensions()[1];
  l.h0 = h0.typed_data(), l.states = states.typed_data(), l.gates = gates.typed_data();
  l.dstates = Given(dstates);
  l.dx = dx->typed_data(), l.ds = ds->typed_data(), l.dh0 = dh0->typed_data();
  l.panels = Pack(pool, w.typed_data(), l.G, l.H, true);
  ForExamples(pool, l, kFunctions[instructions()].gru_backward);
  return ffi::Error::Success();
}

ffi::Error RecurrentWeight(ffi::ThreadPool pool, F32 h0, F32 states, F32 ds, F32Result dw) {
  Loop l{};
  l.T = ds.dimensions()[0], l.B = ds.dimensions()[1], l.H = h0.dimensions()[1], l.G = ds.dimensions()[2];
  l.h0 = h0.typed_data(), l.states = states.typed_data();
  l.ds = const_cast<float*>(ds.typed_data()), l.dw = dw->typed_data();
  ForWeight(pool, l);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxpar

JAXPAR_HANDLER(LstmForward, jaxpar::LstmForward,
               ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<F32>().Arg<F32>().Arg<F32>().Arg<F32>().Ret<F32>().Ret<F32>()
                   .Ret<F32>());
JAXPAR_HANDLER(LstmBackward, jaxpar::LstmBackward,
               ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<F32>().Arg<F32>().Arg<F32>().Arg<F32>().Arg<F32>().Arg<F32>()
                   .Ret<F32>().Ret<F32>().Ret<F32>());
JAXPAR_HANDLER(GruForward, jaxpar::GruForward,
               ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<F32>().Arg<F32>().Arg<F32>().Arg<F32>().Ret<F32>()
                   .Ret<F32>());
JAXPAR_HANDLER(GruBackward, jaxpar::GruBackward,
               ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<F32>().Arg<F32>().Arg<F32>().Arg<F32>().Arg<F32>().Ret<F32>()
                   .Ret<F32>().Ret<F32>());
JAXPAR_HANDLER(RecurrentWeight, jaxpar::RecurrentWeight,
               ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<F32>().Arg<F32>().Arg<F32>().Ret<F32>());
