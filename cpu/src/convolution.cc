// Convolutions of float32 and the gradients of their filters.
//
// Rows of results are sums of products of runs: a run is what lies together in memory under a row of the window, all its
// columns and channels.
#include <algorithm>
#include <cstring>
#include <numeric>

#include "blocks.h"
#include "convolution_loops.h"
#include "convolution_problem.h"

using F32 = ffi::Buffer<ffi::F32>;
using F32Result = ffi::ResultBuffer<ffi::F32>;

namespace jaxpar {
namespace {

// How many products are added in one register before the sum goes to memory. Shorter sums round less, as those of lax.
constexpr int64_t kChain = 64;
constexpr int64_t kSums = 128;    // the same of the gradient of a filter, whose sums are over results
constexpr int64_t kSlab = 16384;  // numbers of the images that are copied at once: they stay in the second cache

// The images under some results: the images themselves, or a copy with zeros around them.
struct Slab {
  const float* data;
  int64_t first[3], steps[3];  // the place that is first in memory, and how far places are apart

  const float* at(int64_t d, int64_t h, int64_t w) const {
    return data + (d - first[0]) * steps[0] + (h - first[1]) * steps[1] + (w - first[2]) * steps[2];
  }
};

struct Region {
  Span2 axes[3];  // of results
};

// How many entries of the images are under the windows of results, and which is the first.
int64_t Entries(const Axis& axis, Span2 results, int64_t* first) {
  *first = FloorDivide(axis.place(results.first, 0), axis.between);
  return FloorDivide(axis.place(results.last - 1, axis.window - 1), axis.between) + 1 - *first;
}

Slab MakeSlab(const Problem& p, const float* image, const Region& region, std::vector<float>& kept) {
  Slab slab{};
  int64_t sizes[3];
  bool inside = true;
  for (int a = 0; a < 3; ++a) {
    sizes[a] = Entries(p.axes[a], region.axes[a], &slab.first[a]);
    inside = inside && slab.first[a] >= 0 && slab.first[a] + sizes[a] <= p.axes[a].images;
  }
  const int64_t C = p.channels, W = p.axes[2].images, H = p.axes[1].images;
  const int64_t width = inside ? W : sizes[2], height = inside ? H : sizes[1];
  slab.steps[2] = C;
  slab.steps[1] = width * C;
  slab.steps[0] = height * width * C;
  if (inside) {
    slab.data = image + ((slab.first[0] * H + slab.first[1]) * W + slab.first[2]) * C;
    return slab;
  }
  float* out = Kept(kept, sizes[0] * slab.steps[0]);
  slab.data = out;
  const int64_t left = std::min(std::max<int64_t>(-slab.first[2], 0), sizes[2]);
  const int64_t right = std::max(std::min(W - slab.first[2], sizes[2]), left);
  for (int64_t d = slab.first[0]; d < slab.first[0] + sizes[0]; ++d)
    for (int64_t h = slab.first[1]; h < slab.first[1] + sizes[1]; ++h, out += slab.steps[1]) {
      if (d < 0 || h < 0 || d >= p.axes[0].images || h >= H) {
        std::memset(out, 0, 4 * slab.steps[1]);
        continue;
      }
      std::memset(out, 0, 4 * left * C);
      std::memcpy(out + left * C, image + ((d * H + h) * W + slab.first[2] + left) * C, 4 * (right - left) * C);
      std::memset(out + right * C, 0, 4 * (sizes[2] - right) * C);
    }
  return slab;
}

// Forward. With gaps in the images, results fall into phases: those of one phase have the same places of the window on
// entries of the images, and the others on gaps.

struct Tap {
  int64_t k, at;  // the place of the window, and of the entry for the first result of the phase
};

struct Phases {
  int64_t count, advance;  // every `count`-th result is of a phase, and their entries are `advance` apart
  std::vector<std::vector<Tap>> taps;

  explicit Phases(const Axis& axis) {
    const int64_t common = std::gcd(axis.between, axis.stride);
    count = axis.between / common;
    advance = axis.stride / common;
    for (int64_t r = 0; r < count; ++r) {
      taps.emplace_back();
      for (int64_t k = 0; k < axis.window; ++k)
        if (axis.place(r, k) % axis.between == 0) taps[r].push_back({k, axis.place(r, k) / axis.between});
    }
  }
};

struct Run {
  int64_t d, h, w, c, length;  // where it begins, and how many numbers it has
  bool is_last = false;        // of a chain of sums

  int64_t at(const Slab& slab) const { return d * slab.steps[0] + h * slab.steps[1] + w * slab.steps[2] + c; }
};

// A phase of all three axes: its runs, and its weights, a panel of all features after the other.
struct Phase {
  const std::vector<Tap>*d, *h, *w;
  std::vector<Run> runs;
  int64_t length = 0;   // of all runs
  int64_t weights = 0;  // where they begin

  Phase(const std::vector<Tap>& d, const std::vector<Tap>& h, const std::vector<Tap>& w, const Problem& p)
      : d(&d), h(&h), w(&w) {
    for (const Tap& i : d)
      for (const Tap& j : h)
        for (const Tap& k : w) {
          const bool is_next = p.has_long_runs() && &k != &w[0] && (&k)[-1].at + 1 == k.at;
          if (is_next && runs.back().length + p.in() <= kChain)
            runs.back().length += p.in();
          else
            for (int64_t part = 0, parts = CeilDivide(p.in(), kChain); part < parts; ++part) {
              const auto [first, last] = Part(p.in(), part, parts);
              runs.push_back({i.at, j.at, k.at, first, last - first});
            }
          length += p.in();
        }
    int64_t in_chain = 0;
    for (size_t i = 0; i < runs.size(); ++i) {
      in_chain += runs[i].length;
      runs[i].is_last = i + 1 == runs.size() || in_chain + runs[i + 1].length > kChain;
      if (runs[i].is_last) in_chain = 0;
    }
  }
};

// The weights of one panel of a phase, in the order of its runs. `turned`: the filter is window x features x channels.
void Pack(const Problem& p, const Phase& phase, const float* w, bool turned, int64_t first, int64_t count, int64_t panel,
          float* out) {
  for (const Tap& i : *phase.d)
    for (const Tap& j : *phase.h)
      for (const Tap& k : *phase.w) {
        const float* of_place = w + ((i.k * p.axes[1].window + j.k) * p.axes[2].window + k.k) * p.in() * p.features;
        for (int64_t c = 0; c < p.in(); ++c, out += panel) {
          if (turned)
            for (int64_t o = 0; o < count; ++o) out[o] = of_place[(first + o) * p.in() + c];
          else
            std::memcpy(out, of_place + c * p.features + first, 4 * count);
          std::memset(out + count, 0, 4 * (panel - count));
        }
      }
}

struct Tile {
  int64_t example;
  Region region;
};

// Results that are computed from one slab: rows of one example and one depth.
std::vector<Tile> Tiles(const Problem& p) {
  int64_t first;
  const int64_t width = Entries(p.axes[2], {0, p.axes[2].results}, &first) * p.channels;
  const int64_t depth = Entries(p.axes[0], {0, 1}, &first);
  const int64_t height = p.axes[1].results, step = CeilDivide(p.axes[1].stride, p.axes[1].between);
  const int64_t rows = std::min(height, std::max<int64_t>(1, kSlab / (depth * step * width + p.axes[2].results * p.features)));
  const int64_t parts = CeilDivide(height, rows);
  std::vector<Tile> tiles;
  for (int64_t n = 0; n < p.examples; ++n)
    for (int64_t d = 0; d < p.axes[0].results; ++d)
      for (int64_t part = 0; part < parts; ++part)
        tiles.push_back({n, {{{d, d + 1}, Part(height, part, parts), {0, p.axes[2].results}}}});
  return tiles;
}

void Compute(const Problem& p, const Phases* phases, const std::vector<Phase>& all, const float* weights, int64_t panel,
             const Slab& slab, const Tile& tile, int64_t number, float* y) {
  const Loops& loops = TheLoops();
  const int lanes = kLanes[instructions()], most = kRows[instructions()];
  const int64_t panels = CeilDivide(p.out(), panel), group = number / panels, first = number % panels * panel;
  const int64_t count = std::min(panel, p.out() - first), vectors = CeilDivide(count, lanes), d = tile.region.axes[0].first;
  const bool is_whole = count == vectors * lanes;
  float beside[kMostRows * kMostPanel];
  thread_local std::vector<Piece> pieces;
  for (int64_t w = 0; w < phases[2].count; ++w)
    for (int64_t h = tile.region.axes[1].first; h < tile.region.axes[1].last; ++h) {
      const Phase& phase = all[(d % phases[0].count * phases[1].count + h % phases[1].count) * phases[2].count + w];
      pieces.clear();
      for (const Run& run : phase.runs) pieces.push_back({run.at(slab), run.length, run.is_last});
      if (pieces.empty()) pieces.push_back({0, 0, true});  // results on gaps alone are zeros
      const float* in = slab.at(d / phases[0].count * phases[0].advance, h / phases[1].count * phases[1].advance, 0) +
                        group * p.in();
      const int64_t step = phases[2].advance * p.channels, y_step = phases[2].count * p.features;
      float* out = y + (((d * p.axes[1].results + h) * p.axes[2].results) + w) * p.features + group * p.out() + first;
      const float* of_panel = weights + phase.weights + number * phase.length * panel;
      const int64_t results = CeilDivide(p.axes[2].results - w, phases[2].count), blocks = CeilDivide(results, most);
      for (int64_t b = 0; b < blocks; ++b) {
        const auto [from, to] = Part(results, b, blocks);
        const auto loop = loops.results[vectors - 1][to - from - 1];
        if (is_whole) {
          loop(in + from * step, step, pieces.data(), pieces.size(), of_panel, out + from * y_step, y_step);
          continue;
        }
        loop(in + from * step, step, pieces.data(), pieces.size(), of_panel, beside, panel);
        for (int64_t r = 0; r < to - from; ++r) std::memcpy(out + (from + r) * y_step, beside + r * panel, 4 * count);
      }
    }
}

void ComputeDepthwise(const Problem& p, const Phases* phases, const std::vector<Phase>& all, const float* weights,
                      const Slab& slab, const Tile& tile, float* y) {
  const Loops& loops = TheLoops();
  const int64_t d = tile.region.axes[0].first;
  thread_local std::vector<int64_t> places;
  for (int64_t w = 0; w < phases[2].count; ++w)
    for (int64_t h = tile.region.axes[1].first; h < tile.region.axes[1].last; ++h) {
      const Phase& phase = all[(d % phases[0].count * phases[1].count + h % phases[1].count) * phases[2].count + w];
      places.clear();
      for (const Run& run : phase.runs) places.push_back(run.at(slab));
      const float* in = slab.at(d / phases[0].count * phases[0].advance, h / phases[1].count * phases[1].advance, 0);
      const int64_t step = phases[2].advance * p.channels, y_step = phases[2].count * p.features;
      float* out = y + (((d * p.axes[1].results + h) * p.axes[2].results) + w) * p.features;
      const int64_t results = CeilDivide(p.axes[2].results - w, phases[2].count), blocks = CeilDivide(results, kMostTaps);
      for (int64_t b = 0; b < blocks; ++b) {
        const auto [from, to] = Part(results, b, blocks);
        loops.channels[to - from - 1](in + from * step, step, places.data(), places.size(), weights + phase.weights,
                                      out + from * y_step, y_step, p.channels);
      }
    }
}

template <class Pool>
void Forward(Pool& pool, const Problem& p, const float* x, const float* w, float* y, bool turned) {
  const Phases phases[] = {Phases(p.axes[0]), Phases(p.axes[1]), Phases(p.axes[2])};
  const bool depthwise = p.is_depthwise();
  const int64_t panel = depthwise ? p.channels : kVectors * kLanes[instructions()];
  const int64_t panels = depthwise ? 1 : CeilDivide(p.out(), panel), all_panels = depthwise ? 1 : p.groups * panels;
  std::vector<Phase> all;
  int64_t length = 0;
  for (const auto& d : phases[0].taps)
    for (const auto& h : phases[1].taps)
      for (const auto& v : phases[2].taps) {
        all.emplace_back(d, h, v, p);
        all.back().weights = length;
        length += all.back().length * panel * all_panels;
      }
  thread_local std::vector<float> kept;
  float* weights = Kept(kept, length);
  ForBlocks(pool, all_panels, [&, weights](int64_t number) {
    for (const Phase& phase : all) {
      float* out = weights + phase.weights + number * phase.length * panel;
      if (depthwise) {
        for (const Tap& i : *phase.d)
          for (const Tap& j : *phase.h)
            for (const Tap& k : *phase.w) {
              const int64_t place = (i.k * p.axes[1].window + j.k) * p.axes[2].window + k.k;
              std::memcpy(out, w + place * p.channels, 4 * p.channels);
              out += p.channels;
            }
      } else {
        const int64_t first = number % panels * panel;
        Pack(p, phase, w, turned, number / panels * p.out() + first, std::min(panel, p.out() - first), panel, out);
      }
    }
  });

  const std::vector<Tile> tiles = Tiles(p);
  // Blocks of a few tiles that share the weights of a panel, and where tiles are few, of some of the panels.
  const int64_t together = std::max<int64_t>(1, tiles.size() / 32), groups = CeilDivide(tiles.size(), std::min<int64_t>(together, 4));
  const int64_t shares = std::min(all_panels, CeilDivide(16, groups));
  ForBlocks(pool, groups * shares, [&, x, y, weights](int64_t block) {
    const auto [first, last] = Part(tiles.size(), block / shares, groups);
    const auto [first_panel, last_panel] = Part(all_panels, block % shares, shares);
    thread_local std::vector<float> slabs_kept[4];
    Slab slabs[4];
    for (int64_t t = first; t < last; ++t)
      slabs[t - first] = MakeSlab(p, x + tiles[t].example * p.image(), tiles[t].region, slabs_kept[t - first]);
    if (depthwise) {
      for (int64_t t = first; t < last; ++t)
        ComputeDepthwise(p, phases, all, weights, slabs[t - first], tiles[t], y + tiles[t].example * p.result());
      return;
    }
    for (int64_t number = first_panel; number < last_panel; ++number)
      for (int64_t t = first; t < last; ++t)
        Compute(p, phases, all, weights, panel, slabs[t - first], tiles[t], number, y + tiles[t].example * p.result());
  });
}

// The gradient of the filter, of images without gaps. Parts of the examples are summed apart, as many as the shapes say
// and not the threads, so the bits are those of any number of threads.

template <class Pool>
void Filter(Pool& pool, const Problem& p, const float* x, const float* dy, float* dw) {
  const Loops& loops = TheLoops();
  const int lanes = kLanes[instructions()], most = kRows[instructions()];
  const bool depthwise = p.is_depthwise();
  const int64_t panel = depthwise ? p.channels : kVectors * lanes;
  const int64_t panels = depthwise ? 1 : CeilDivide(p.out(), panel), all_panels = depthwise ? 1 : p.groups * panels;
  const int64_t length = p.window() * (depthwise ? 1 : p.in());
  const int64_t size = length * panel * all_panels;
  const int64_t parts = std::max<int64_t>(1, std::min({p.examples, int64_t{16}, (int64_t{1} << 21) / size}));
  const int64_t shares = std::min(all_panels, CeilDivide(16, parts));
  thread_local std::vector<float> kept;
  float* sums = Kept(kept, parts * size);

  // Runs of the window, which are rows of the gradient too.
  std::vector<Run> runs;
  const bool in_rows = p.has_long_runs() && p.axes[2].dilation == 1;
  for (int64_t i = 0; i < p.axes[0].window; ++i)
    for (int64_t j = 0; j < p.axes[1].window; ++j)
      for (int64_t k = 0; k < (in_rows ? 1 : p.axes[2].window); ++k)
        runs.push_back({i * p.axes[0].dilation, j * p.axes[1].dilation, k * p.axes[2].dilation, 0,
                        in_rows ? p.axes[2].window * p.in() : p.in()});
  const int64_t columns = p.axes[2].results, column_parts = CeilDivide(columns, kSums);
  const int64_t rows = std::max<int64_t>(1, kSums / columns), row_parts = CeilDivide(p.axes[1].results, rows);

  ForBlocks(pool, parts * shares, [&, x, dy, sums](int64_t block) {
    const auto [first, last] = Part(p.examples, block / shares, parts);
    const auto [first_panel, last_panel] = Part(all_panels, block % shares, shares);
    float* part = sums + block / shares * size;
    std::memset(part + first_panel * length * panel, 0, 4 * (last_panel - first_panel) * length * panel);
    thread_local std::vector<float> slab_kept, packed_kept;
    thread_local std::vector<int64_t> places;
    for (int64_t n = first; n < last; ++n)
      for (int64_t d = 0; d < p.axes[0].results; ++d)
        for (int64_t q = 0; q < row_parts * column_parts; ++q) {
          const Span2 h = Part(p.axes[1].results, q / column_parts, row_parts), v = Part(columns, q % column_parts, column_parts);
          const Slab slab = MakeSlab(p, x + n * p.image(), {{{d, d + 1}, h, v}}, slab_kept);
          const Lines lines{h.last - h.first, v.last - v.first, p.axes[1].stride * slab.steps[1], p.axes[2].stride * p.channels};
          const float* of_slab = slab.at(p.axes[0].place(d, 0), p.axes[1].place(h.first, 0), p.axes[2].place(v.first, 0));
          const float* of_dy = dy + n * p.result() + ((d * p.axes[1].results + h.first) * columns + v.first) * p.features;
          if (depthwise) {
            places.clear();
            for (const Run& run : runs) places.push_back(run.at(slab));
            for (size_t k = 0; k < places.size(); k += kMostTaps) {
              const int64_t taps = std::min<int64_t>(kMostTaps, places.size() - k);
              loops.channel_sums[taps - 1](of_slab, places.data() + k, of_dy, columns * p.channels, lines,
                                           part + k * p.channels, p.channels);
            }
            continue;
          }
          float* packed = Kept(packed_kept, lines.rows * lines.columns * panel);
          for (int64_t number = first_panel; number < last_panel; ++number) {
            const int64_t group = number / panels, feature = number % panels * panel;
            const int64_t count = std::min(panel, p.out() - feature), vectors = CeilDivide(count, lanes);
            float* to = packed;
            for (int64_t i = 0; i < lines.rows; ++i)
              for (int64_t j = 0; j < lines.columns; ++j, to += panel) {
                std::memcpy(to, of_dy + (i * columns + j) * p.features + group * p.out() + feature, 4 * count);
                std::memset(to + count, 0, 4 * (panel - count));
              }
            float* out = part + number * length * panel;
            for (const Run& run : runs) {
              const float* in = of_slab + run.at(slab) + group * p.in();
              const int64_t blocks = CeilDivide(run.length, most);
              for (int64_t b = 0; b < blocks; ++b) {
                const auto [from, until] = Part(run.length, b, blocks);
                loops.sums[vectors - 1][until - from - 1](in + from, packed, lines, out + from * panel);
              }
              out += run.length * panel;
            }
          }
        }
  });
  ForBlocks(pool, all_panels, [&, dw, sums](int64_t number) {
    const int64_t group = number / panels, feature = number % panels * panel;
    const int64_t count = depthwise ? p.channels : std::min(panel, p.out() - feature);
    for (int64_t k = 0; k < length; ++k) {
      float* out = dw + k * p.features + group * p.out() + feature;
      const float* from = sums + (number * length + k) * panel;
      std::memcpy(out, from, 4 * count);
      for (int64_t part = 1; part < parts; ++part)
        for (int64_t o = 0; o < count; ++o) out[o] += from[part * size + o];
    }
  });
}

ffi::Error Convolution(ffi::ThreadPool pool, F32 x, F32 w, F32Result y, Numbers numbers, bool turned) {
  const Problem problem = Read(x.dimensions(), w.dimensions(), y->dimensions(), numbers);
  Forward(pool, problem, x.typed_data(), w.typed_data(), y->typed_data(), turned);
  return ffi::Error::Success();
}

ffi::Error ConvolutionFilter(ffi::ThreadPool pool, F32 x, F32 dy, F32Result dw, Numbers numbers) {
  const Problem problem = Read(x.dimensions(), dw->dimensions(), dy.dimensions(), numbers);
  Filter(pool, problem, x.typed_data(), dy.typed_data(), dw->typed_data());
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxpar

JAXPAR_HANDLER(Convolution, jaxpar::Convolution,
               ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<F32>().Arg<F32>().Ret<F32>().Attr<Numbers>("numbers").Attr<bool>("turned"));
JAXPAR_HANDLER(ConvolutionFilter, jaxpar::ConvolutionFilter,
               ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<F32>().Arg<F32>().Ret<F32>().Attr<Numbers>("numbers"));
