#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "lanes.h"

namespace hpu {

// Scores [length] to weights; up to a whole vector behind them is overwritten.
inline void softmax(float* scores, int64_t length) {
  const float nothing = -std::numeric_limits<float>::infinity();
  for (int64_t t = length; t % LANES; ++t) scores[t] = nothing;
  Floats largest = load<Floats>(scores);
  for (int64_t t = LANES; t < length; t += LANES) {
    const Floats own = load<Floats>(scores + t);
    largest = own > largest ? own : largest;
  }
  float most = largest[0];
  for (int lane = 1; lane < LANES; ++lane) most = std::max(most, largest[lane]);
  Floats totals = {};
  for (int64_t t = 0; t < length; t += LANES) {
    const Floats weight = exponential(load<Floats>(scores + t) - most);
    store(scores + t, weight);
    totals += weight;
  }
  float total = 0;
  for (int lane = 0; lane < LANES; ++lane) total += totals[lane];
  for (int64_t t = 0; t < length; ++t) scores[t] /= total;
}

}  // namespace hpu
