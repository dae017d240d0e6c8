// The loops of an LSTM and of a GRU on threads, without JAX: for sanitizers, and for other processors.
#include <cmath>

#include "recurrent.cc"
#include "program.h"

namespace jaxpar {
namespace {

using Arrays = std::vector<std::vector<float>>;

// Runs the loop of these arrays, x, w, bias, h0, c0. Returns <states, dy>, and where asked the gradients of it.
double Run(bool lstm, Loop l, const Arrays& of, const std::vector<float>& dy, Arrays* gradients) {
  const Functions& run = kFunctions[instructions()];
  std::vector<float> states(dy.size()), cells(dy.size()), gates(dy.size() * 4), ds(of[0].size());
  l.x = of[0].data(), l.bias = of[2].data(), l.h0 = of[3].data(), l.c0 = of[4].data();
  l.states = states.data(), l.cells = cells.data(), l.gates = gates.data();
  Threads threads;
  l.panels = Pack(threads, of[1].data(), l.H, l.G, false);
  ForExamples(threads, l, lstm ? run.lstm_forward : run.gru_forward);
  double value = 0;
  for (size_t i = 0; i < dy.size(); ++i) value += double(states[i]) * dy[i];
  if (!gradients) return value;
  for (const auto& array : of) gradients->emplace_back(array.size());
  Arrays& d = *gradients;
  l.dstates = dy.data(), l.dx = d[0].data(), l.dw = d[1].data(), l.dh0 = d[3].data(), l.dc0 = d[4].data();
  l.ds = lstm ? l.dx : ds.data();
  l.panels = Pack(threads, of[1].data(), l.G, l.H, true);
  ForExamples(threads, l, lstm ? run.lstm_backward : run.gru_backward);
  ForWeight(threads, l);
  for (int64_t i = 0; !lstm && i < l.T * l.B; ++i)  // the bias, one for each example: JAX sums it over the steps
    for (int64_t j = 0; j < l.H; ++j) d[2][i % l.B * l.H + j] += ds[i * l.G + 2 * l.H + j];
  return value;
}

// Along a direction the gradients give what a difference of two values gives.
bool IsRight() {
  const bool lstm = From(0, 1);
  Loop l{};
  l.T = From(1, 5), l.B = From(1, 70), l.H = From(1, 70), l.G = (lstm ? 4 : 3) * l.H;
  Arrays of, along;
  for (int64_t size : {l.T * l.B * l.G, l.H * l.G, l.B * l.H, l.B * l.H, l.B * l.H}) {
    of.push_back(Normal(size)), along.push_back(Normal(size));
    for (float& value : of.back()) value *= of.size() == 2 ? 1 / std::sqrt(float(l.H)) : 1;
  }
  const auto dy = Normal(l.T * l.B * l.H);
  Arrays gradients;
  Run(lstm, l, of, dy, &gradients);
  double expected = 0, squares = 1;
  Arrays more = of, less = of;
  for (size_t n = 0; n < of.size(); ++n)
    for (size_t i = 0; i < of[n].size(); ++i) {
      const double term = double(gradients[n][i]) * along[n][i];
      expected += term, squares += term * term;
      more[n][i] += 2e-3f * along[n][i], less[n][i] -= 2e-3f * along[n][i];
    }
  const double found = (Run(lstm, l, more, dy, nullptr) - Run(lstm, l, less, dy, nullptr)) / 4e-3;
  return std::abs(found - expected) < 1e-2 * std::sqrt(squares);
}

}  // namespace
}  // namespace jaxpar
