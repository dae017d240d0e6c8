// Convolutions on threads, without JAX: for sanitizers, and for other processors.
#include "convolution.cc"
#include "program.h"

namespace jaxpar {
namespace {

// <y(x), dy> = <x, dx> would need three kernels; <y(x), dy> = <w, dw(x, dy)> needs the two that there are.
bool IsRight() {
  Problem p{From(1, 5), 0, 0, From(0, 2) ? 1 : From(2, 5), {}};
  p.channels = p.groups * (From(0, 3) ? From(1, 40) : 1);
  p.features = p.groups * (p.channels == p.groups ? 1 : From(1, 70));
  for (Axis& axis : p.axes) {
    axis = {From(1, 9), From(1, 4), 0, From(1, 3), From(1, 2), 1, From(-1, 3)};
    const int64_t covered = (axis.window - 1) * axis.dilation + 1;
    axis.results = std::max<int64_t>(0, axis.images + axis.low + From(-1, 3) - covered) / axis.stride + 1;
  }
  const auto x = Normal(p.examples * p.image()), w = Normal(p.window() * p.in() * p.features);
  const auto dy = Normal(p.examples * p.result());
  std::vector<float> y(dy.size()), again(dy.size()), dw(w.size());
  {
    Threads threads;
    Forward(threads, p, x.data(), w.data(), y.data(), false);
    Filter(threads, p, x.data(), dy.data(), dw.data());
  }
  Problem wide = p;  // and with gaps between the images
  for (Axis& axis : wide.axes) axis.between = 2, axis.results = axis.images;
  std::vector<float> spread(wide.examples * wide.result());
  Threads threads;
  Forward(threads, wide, x.data(), w.data(), spread.data(), false);
  double left = 0, right = 0, size = 1;
  for (size_t i = 0; i < y.size(); ++i) left += double(y[i]) * dy[i], size += std::abs(double(y[i]) * dy[i]);
  for (size_t i = 0; i < w.size(); ++i) right += double(w[i]) * dw[i];
  return std::abs(left - right) < 1e-4 * size;
}

}  // namespace
}  // namespace jaxpar
