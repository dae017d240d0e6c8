// Convolutions of bfloat16 on threads, without JAX: for sanitizers, and for other processors.
#include <cmath>

#include "convolution_bf16.cc"
#include "program.h"

namespace jaxpar {
namespace {

std::vector<Half> Halves(int64_t count) {
  std::vector<Half> halves;
  for (float value : Normal(count)) halves.push_back(Rounded(value));
  return halves;
}

bool IsNear(double found, double wanted, double size) { return std::abs(found - wanted) < std::abs(wanted) / 200 + size * 1e-4; }

// Each instruction set's product beside that of all.
bool AreProductsRight() {
  const int64_t depth = kDepth * From(1, 5), step = depth + From(0, 9);
  const auto left = Halves(kSquare * step), right = Halves(kSquare * depth);
  for (const Products& products : AllProducts()) {
    std::vector<float> sums(kSquare * kSquare, 7), wanted(kSquare * kSquare, 7);
    for (const bool add : {From(0, 1) == 1, true}) {
      products.start();
      products.product({left.data(), step, right.data(), depth}, sums.data(), add);
      products.stop();
      ProductBase({left.data(), step, right.data(), depth}, wanted.data(), add);
    }
    for (size_t i = 0; i < sums.size(); ++i)
      if (!IsNear(sums[i], wanted[i], 1)) return false;
  }
  return true;
}

bool IsRight() {
  Problem p{From(1, 5), From(0, 2) ? From(1, 40) : 3, From(1, 70), 1, {}};
  for (Axis& axis : p.axes) {
    axis = {From(1, 9), From(1, 4), 0, From(1, 3), From(1, 3), From(0, 2) ? 1 : From(2, 3), From(-1, 3)};
    const int64_t covered = (axis.window - 1) * axis.dilation + 1, images = (axis.images - 1) * axis.between + 1;
    axis.results = std::max<int64_t>(0, images + axis.low + From(-1, 3) - covered) / axis.stride + 1;
  }
  Problem dense = p;  // the gradient of the filter is of images without gaps
  for (Axis& axis : dense.axes) axis.between = 1;
  const auto x = Halves(p.examples * p.image()), w = Halves(p.window() * p.channels * p.features);
  const auto dy = Halves(p.examples * p.result());
  std::vector<Half> y(dy.size()), dw(w.size());
  {
    Threads threads;
    Forward(threads, p, x.data(), w.data(), y.data(), false);
    Filter(threads, dense, x.data(), dy.data(), dw.data());
  }
  std::vector<double> of_y(y.size()), of_dw(dw.size());
  for (int64_t n = 0, m = 0; n < p.examples; ++n)
    for (int64_t d = 0; d < p.axes[0].results; ++d)
      for (int64_t h = 0; h < p.axes[1].results; ++h)
        for (int64_t v = 0; v < p.axes[2].results; ++v, ++m)
          for (int64_t k = 0; k < p.window(); ++k)
            for (const Problem* q : {&p, &dense}) {
              const int64_t result[] = {d, h, v};
              int64_t at[3], rest = k;
              bool inside = true;
              for (int a = 2; a >= 0; rest /= p.axes[a--].window) {
                at[a] = q->axes[a].place(result[a], rest % p.axes[a].window);
                inside = inside && at[a] >= 0 && at[a] % q->axes[a].between == 0;
                at[a] /= q->axes[a].between;
                inside = inside && at[a] < p.axes[a].images;
              }
              if (!inside) continue;
              const Half* from = x.data() + n * p.image() + ((at[0] * p.axes[1].images + at[1]) * p.axes[2].images + at[2]) * p.channels;
              for (int64_t c = 0; c < p.channels; ++c)
                for (int64_t o = 0; o < p.features; ++o) {
                  const int64_t i = (k * p.channels + c) * p.features + o, j = m * p.features + o;
                  if (q == &p) of_y[j] += double(Wide(from[c])) * Wide(w[i]);
                  if (q == &dense) of_dw[i] += double(Wide(from[c])) * Wide(dy[j]);
                }
            }
  for (size_t i = 0; i < y.size(); ++i)
    if (!IsNear(Wide(y[i]), of_y[i], std::sqrt(p.window() * p.channels))) return false;
  for (size_t i = 0; i < dw.size(); ++i)
    if (!IsNear(Wide(dw[i]), of_dw[i], std::sqrt(dy.size() / p.features))) return false;
  return AreProductsRight();
}

}  // namespace
}  // namespace jaxpar
