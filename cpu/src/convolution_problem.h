// One convolution: how its window lies over its images.
//
//   y[n, p, o] = sum over k and c of x[n, stride * p + dilation * k - low, c] * w[k, c, o]
//
// x has `between` - 1 zeros between its entries, and zeros around. p and k have three axes: depth, height, width. The
// gradient of the images is such a convolution too, with a stride as gaps.
#pragma once
#include <cstdint>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;
using Numbers = ffi::Span<const int64_t>;

namespace jaxpar {
namespace {

struct Axis {
  int64_t images, window, results, stride, dilation, between, low;

  // Where a window has its entry k, in images with their gaps.
  int64_t place(int64_t result, int64_t k) const { return stride * result + dilation * k - low; }
};

struct Problem {
  int64_t examples, channels, features, groups;
  Axis axes[3];

  int64_t image() const { return axes[0].images * axes[1].images * axes[2].images * channels; }
  int64_t result() const { return axes[0].results * axes[1].results * axes[2].results * features; }
  int64_t window() const { return axes[0].window * axes[1].window * axes[2].window; }
  int64_t in() const { return channels / groups; }    // of a group
  int64_t out() const { return features / groups; }
  bool is_depthwise() const { return in() == 1 && out() == 1; }
  // Whether the channels of places that are neighbours are one run of numbers, which one result sums.
  bool has_long_runs() const { return groups == 1 && !is_depthwise(); }
};

// numbers: strides, dilation, between, low of the three axes, and groups.
template <class X, class W, class Y>
Problem Read(X x, W w, Y y, Numbers numbers) {
  Problem problem{x[0], x[4], y[4], numbers[12], {}};
  for (int a = 0; a < 3; ++a)
    problem.axes[a] = {x[a + 1], w[a], y[a + 1], numbers[a], numbers[3 + a], numbers[6 + a], numbers[9 + a]};
  return problem;
}

int64_t FloorDivide(int64_t a, int64_t b) { return a / b - (a % b < 0); }
int64_t CeilDivide(int64_t a, int64_t b) { return (a + b - 1) / b; }
struct Span2 {
  int64_t first, last;
};
Span2 Part(int64_t whole, int64_t part, int64_t parts) { return {part * whole / parts, (part + 1) * whole / parts}; }

}  // namespace
}  // namespace jaxpar
