// Convolutions of bfloat16 and the gradients of their filters, by products of matrices.
//
// The windows of some results are copied side by side, each a row of numbers. Their products with the filter are results,
// and those with the results' cotangents are the filter's gradient. Sums are of float32.
#include <algorithm>
#include <numeric>
#include <vector>

#include "blocks.h"
#include "convolution_problem.h"
#include "products_bf16.h"

using BF16 = ffi::Buffer<ffi::BF16>;
using BF16Result = ffi::ResultBuffer<ffi::BF16>;

namespace jaxpar {
namespace {

constexpr int64_t kBlocks = 16;        // of work at least, if there are as many
constexpr int64_t kCopied = 1 << 19;   // numbers of windows that lie side by side: they stay in the second cache
constexpr int64_t kMostRows = 256;     // of them
constexpr int64_t kMore = 32;
constexpr int64_t kDepthAtOnce = 512;  // of factors: 32 rows and 32 columns stay in the first cache

int64_t RoundUp(int64_t a, int64_t b) { return CeilDivide(a, b) * b; }

Half* KeptHalves(std::vector<float>& kept, int64_t count) { return reinterpret_cast<Half*>(Kept(kept, CeilDivide(count, 2))); }

// The place of one result, of all examples.
struct Result {
  const Problem& p;
  int64_t example, at[3];

  Result(const Problem& p, int64_t number) : p(p) {
    for (int a = 2; a >= 0; number /= p.axes[a--].results) at[a] = number % p.axes[a].results;
    example = number;
  }

  void Next() {
    int a = 2;
    while (a >= 0 && ++at[a] == p.axes[a].results) at[a--] = 0;
    example += a < 0;
  }
};

// Of a short line more is copied, where there is more: faster than a call for its length.
void CopyLine(Half* to, const Half* from, int64_t count, const Half* end) {
  if (count <= kMore && end - from >= kMore)
    std::memcpy(to, from, 2 * kMore);
  else
    std::memcpy(to, from, 2 * count);
}

void Clear(Half* from, int64_t count) {
  if (count > 0) std::memset(from, 0, 2 * count);
}

// The windows of results over images without gaps, each a row of `width` numbers. Of a window these are its lines from
// `lines.first` to `lines.last`, counted by depth and height. Behind the last row up to kMore numbers are written.
void CopyWindows(const Problem& p, const Half* x, Span2 results, Span2 lines, int64_t width, Half* out) {
  const Axis &depth = p.axes[0], &height = p.axes[1], &across = p.axes[2];
  const int64_t C = p.channels, line = across.window * C;
  const Half* end = x + p.examples * p.image();
  thread_local std::vector<const Half*> rows;  // of the images under the lines of a window, or null
  rows.assign(lines.last - lines.first, nullptr);
  Result result(p, results.first);
  for (int64_t m = results.first; m < results.last; ++m, result.Next(), out += width) {
    if (m == results.first || result.at[2] == 0)
      for (int64_t q = lines.first; q < lines.last; ++q) {
        const int64_t d = depth.place(result.at[0], q / height.window), h = height.place(result.at[1], q % height.window);
        const bool inside = d >= 0 && d < depth.images && h >= 0 && h < height.images;
        const int64_t row = (result.example * depth.images + d) * height.images + h;
        rows[q - lines.first] = inside ? x + row * across.images * C : nullptr;
      }
    const int64_t first = across.place(result.at[2], 0), left = std::clamp<int64_t>(-first, 0, across.window);
    const int64_t right = std::clamp<int64_t>(across.images - first, left, across.window);
    Half* to = out;
    for (const Half* row : rows) {
      if (row == nullptr) {
        Clear(to, line);
      } else if (across.dilation == 1) {
        Clear(to, left * C);
        if (right > left) CopyLine(to + left * C, row + (first + left) * C, (right - left) * C, end);
        Clear(to + right * C, line - right * C);
      } else {
        for (int64_t k = 0; k < across.window; ++k) {
          const int64_t from = first + across.dilation * k;
          if (from < 0 || from >= across.images)
            Clear(to + k * C, C);
          else
            CopyLine(to + k * C, row + from * C, C, end);
        }
      }
      to += line;
    }
    Clear(to, out + width - to);
  }
}

// How many windows are copied at once.
int64_t Rows(int64_t results, int64_t width) {
  const int64_t most = std::min({kMostRows, kCopied / width, RoundUp(results, kSquare)});
  return std::max<int64_t>(kSquare, most / kSquare * kSquare);
}

// Every so many of the places of a window, or of results.
struct Every {
  int64_t first = 0, apart = 1;

  int64_t at(int64_t i) const { return first + i * apart; }
};

// With gaps in the images, results fall into phases: those of one have the same places of the window on entries of the
// images, and the others on gaps. So a phase is a convolution without gaps.
struct Phase {
  Problem problem;
  Every window[3], results[3];  // of the whole convolution
};

std::vector<Phase> Phases(const Problem& p) {
  std::vector<Phase> phases{{p, {}, {}}};
  for (int a = 0; a < 3; ++a) {
    const Axis& axis = p.axes[a];
    const int64_t count = axis.between / std::gcd(axis.between, axis.stride);
    const int64_t apart = axis.between / std::gcd(axis.between, axis.dilation);
    std::vector<Phase> split;
    for (int64_t r = 0; r < std::min(count, axis.results); ++r) {
      int64_t k = 0;
      while (k < apart && axis.place(r, k) % axis.between) ++k;
      const int64_t places = k == apart ? 0 : std::max<int64_t>(0, CeilDivide(axis.window - k, apart));
      const Axis own{axis.images, places, CeilDivide(axis.results - r, count), axis.stride * count / axis.between,
                     axis.dilation * apart / axis.between, 1, -(axis.place(r, k) / axis.between)};
      for (Phase phase : phases) {
        phase.problem.axes[a] = own;
        phase.window[a] = {k, apart};
        phase.results[a] = {r, count};
        split.push_back(phase);
      }
    }
    phases = split;
  }
  return phases;
}

template <class Pool>
void ComputePhase(Pool& pool, const Problem& whole, const Phase& phase, const Half* x, const Half* w, Half* y, bool turned) {
  const Products& products = TheProducts();
  const Problem& p = phase.problem;
  const int64_t width = std::max<int64_t>(kDepth, RoundUp(p.window() * p.channels, kDepth)), panels = CeilDivide(p.features, kSquare);
  thread_local std::vector<float> kept;
  Half* weights = KeptHalves(kept, panels * width * kSquare);
  ForBlocks(pool, panels, [&, w, weights](int64_t panel) {
    Half* out = weights + panel * width * kSquare;
    Clear(out, width * kSquare);
    const int64_t first = panel * kSquare, count = std::min<int64_t>(kSquare, p.features - first);
    int64_t k = 0;
    for (int64_t place = 0; place < p.window(); ++place) {
      const int64_t by[] = {p.axes[1].window * p.axes[2].window, p.axes[2].window, 1};
      int64_t at = 0;  // in the whole window
      for (int a = 0; a < 3; ++a) at = at * whole.axes[a].window + phase.window[a].at(place / by[a] % p.axes[a].window);
      const Half* of_place = w + at * p.channels * p.features;
      for (int64_t c = 0; c < p.channels; ++c, ++k)
        for (int64_t o = 0; o < count; ++o)
          out[(k / 2 * kSquare + o) * 2 + k % 2] = of_place[turned ? (first + o) * p.channels + c : c * p.features + first + o];
    }
  });

  const int64_t results = p.examples * p.result() / p.features, rows = Rows(CeilDivide(results, kBlocks), width);
  const int64_t blocks = CeilDivide(results, rows), shares = std::min(panels, CeilDivide(kBlocks, blocks));
  ForBlocks(pool, blocks * shares, [&, x, y, weights](int64_t block) {
    const auto [first_panel, last_panel] = Part(panels, block % shares, shares);
    const int64_t first = block / shares * rows, count = std::min(rows, results - first), squares = CeilDivide(count, kSquare);
    thread_local std::vector<float> windows_kept, sums_kept;
    Half* windows = KeptHalves(windows_kept, rows * width + kMore);
    float* sums = Kept(sums_kept, (last_panel - first_panel) * rows * kSquare);
    CopyWindows(p, x, {first, first + count}, {0, p.axes[0].window * p.axes[1].window}, width, windows);
    Clear(windows + count * width, (squares * kSquare - count) * width);
    products.start();
    for (int64_t k = 0; k < width; k += kDepthAtOnce)
      for (int64_t panel = first_panel; panel < last_panel; ++panel)
        for (int64_t square = 0; square < squares; ++square)
          products.product({windows + square * kSquare * width + k, width, weights + (panel * width + k) * kSquare,
                            std::min(kDepthAtOnce, width - k)},
                           sums + ((panel - first_panel) * rows + square * kSquare) * kSquare, k > 0);
    products.stop();
    Result result(p, first);
    for (int64_t row = 0; row < count; ++row, result.Next()) {
      int64_t at = result.example;  // in the whole
      for (int a = 0; a < 3; ++a) at = at * whole.axes[a].results + phase.results[a].at(result.at[a]);
      Half* to = y + at * p.features;
      for (int64_t panel = first_panel; panel < last_panel; ++panel)
        products.round(sums + ((panel - first_panel) * rows + row) * kSquare, to + panel * kSquare,
                       std::min<int64_t>(kSquare, p.features - panel * kSquare));
    }
  });
}

template <class Pool>
void Forward(Pool& pool, const Problem& p, const Half* x, const Half* w, Half* y, bool turned) {
  for (const Phase& phase : Phases(p)) ComputePhase(pool, p, phase, x, w, y, turned);
}

// The gradient of the filter, of images without gaps. Parts of the examples are summed apart, as many as the shapes say
// and not the threads, so the bits are those of any number of threads. Sums are features x numbers of a window.

template <class Pool>
void Filter(Pool& pool, const Problem& p, const Half* x, const Half* dy, Half* dw) {
  const Products& products = TheProducts();
  const int64_t window = p.axes[0].window * p.axes[1].window, line = p.axes[2].window * p.channels;
  const int64_t features = RoundUp(p.features, kSquare), panels = features / kSquare;
  const int64_t size = features * RoundUp(window * line, kDepth);
  const int64_t parts = std::max<int64_t>(1, std::min({p.examples, kBlocks, (int64_t{1} << 21) / size}));
  const int64_t of_lines = std::min(window, CeilDivide(kBlocks, parts));
  const int64_t of_panels = std::min(panels, CeilDivide(kBlocks, parts * of_lines));
  std::vector<int64_t> widths(of_lines), begins(of_lines);
  int64_t whole = 0;  // numbers of a window, each share of lines with zeros at its end
  for (int64_t share = 0; share < of_lines; whole += widths[share++]) {
    const auto [first, last] = Part(window, share, of_lines);
    widths[share] = RoundUp((last - first) * line, kSquare);
    begins[share] = whole;
  }
  thread_local std::vector<float> kept;
  float* sums = Kept(kept, parts * features * whole);

  const int64_t results = p.result() / p.features;
  ForBlocks(pool, parts * of_lines * of_panels, [&, x, dy, sums](int64_t block) {
    const int64_t share = block / of_panels % of_lines, part = block / of_panels / of_lines, width = widths[share];
    const auto [first_panel, last_panel] = Part(panels, block % of_panels, of_panels);
    const Span2 examples = Part(p.examples, part, parts), lines = Part(window, share, of_lines);
    const int64_t most = Rows((examples.last - examples.first) * results, width);
    thread_local std::vector<float> windows_kept, pairs_kept, turned_kept;
    Half* windows = KeptHalves(windows_kept, most * width + kMore);
    Half* pairs = KeptHalves(pairs_kept, most * width);
    Half* turned = KeptHalves(turned_kept, (last_panel - first_panel) * kSquare * most);
    products.start();
    for (int64_t first = examples.first * results; first < examples.last * results; first += most) {
      const int64_t count = std::min(most, examples.last * results - first), rows = RoundUp(count, kDepth);
      CopyWindows(p, x, {first, first + count}, lines, width, windows);
      Clear(windows + count * width, (rows - count) * width);
      products.pair(windows, rows, width, pairs);
      const int64_t feature = first_panel * kSquare, here = std::min(last_panel * kSquare, p.features) - feature;
      Clear(turned, (last_panel - first_panel) * kSquare * most);
      products.turn(dy + first * p.features + feature, p.features, here, count, turned, most);
      for (int64_t panel = first_panel; panel < last_panel; ++panel)
        for (int64_t k = 0; k < width; k += kSquare)
          products.product({turned + (panel - first_panel) * kSquare * most, most, pairs + k * rows, rows},
                           sums + (part * whole + begins[share]) * features + (panel * width + k) * kSquare,
                           first > examples.first * results);
    }
    products.stop();
  });
  ForBlocks(pool, p.window(), [&, dw, sums](int64_t place) {
    int64_t share = 0;
    while (Part(window, share, of_lines).last * p.axes[2].window <= place) ++share;
    for (int64_t k = place * p.channels; k < (place + 1) * p.channels; ++k) {
      const int64_t at = k - Part(window, share, of_lines).first * line;
      for (int64_t o = 0; o < p.features; ++o) {
        const float* from = sums + begins[share] * features + (o / kSquare * widths[share] + at / kSquare * kSquare) * kSquare +
                            o % kSquare * kSquare + at % kSquare;
        float sum = from[0];
        for (int64_t part = 1; part < parts; ++part) sum += from[part * whole * features];
        dw[k * p.features + o] = Rounded(sum);
      }
    }
  });
}

ffi::Error Convolution(ffi::ThreadPool pool, BF16 x, BF16 w, BF16Result y, Numbers numbers, bool turned) {
  const Problem problem = Read(x.dimensions(), w.dimensions(), y->dimensions(), numbers);
  Forward(pool, problem, x.typed_data(), w.typed_data(), y->typed_data(), turned);
  return ffi::Error::Success();
}

ffi::Error ConvolutionFilter(ffi::ThreadPool pool, BF16 x, BF16 dy, BF16Result dw, Numbers numbers) {
  const Problem problem = Read(x.dimensions(), dw->dimensions(), dy.dimensions(), numbers);
  Filter(pool, problem, x.typed_data(), dy.typed_data(), dw->typed_data());
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxpar

JAXPAR_HANDLER(ConvolutionBf16, jaxpar::Convolution,
               ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<BF16>().Arg<BF16>().Ret<BF16>().Attr<Numbers>("numbers").Attr<bool>("turned"));
JAXPAR_HANDLER(ConvolutionFilterBf16, jaxpar::ConvolutionFilter,
               ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<BF16>().Arg<BF16>().Ret<BF16>().Attr<Numbers>("numbers"));

extern "C" __attribute__((visibility("default"))) bool JaxparHasFastBf16() { return jaxpar::TheProducts().is_fast; }
