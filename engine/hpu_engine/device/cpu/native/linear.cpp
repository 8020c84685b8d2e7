// Products with a weight [n, depth] kept in panels of 16 rows: for each panel, for each k, the 16 elements of column k.
//
// An element of a product is one chain of fused multiply-adds over k, in order, whatever the number of rows: a row has
// the same bits in every batch. Weights are bfloat16 where that is exact, else float32; activations and sums float32.
#include <algorithm>
#include <vector>

#include "lanes.h"
#include "pool.h"

namespace {

using namespace hpu;

constexpr int PANEL = 16;
constexpr int VECTORS = PANEL / LANES;
constexpr int TALL = VECTORS == 2 ? 6 : 12;  // rows of a tile: 6 x 16 sums fill the registers of AVX2
constexpr int WIDE = 4;                    // panels of a tile of one row, so that sums do not wait for each other
constexpr int64_t WIDEN_FROM = 12;         // rows from which a bfloat16 panel is widened once instead of per tile
constexpr int64_t CHUNK_FLOATS = 64 * 1024;  // activations that stay in the second cache while panels pass by

template <int ROWS, int PANELS, typename Weight>
inline void tile(const float* x, const Weight* weight, const float* bias, int64_t depth, float* y, int64_t n,
                 int64_t columns) {
  Floats sums[ROWS][PANELS * VECTORS] = {};
  for (int64_t k = 0; k < depth; ++k) {
    Floats w[PANELS * VECTORS];
#pragma GCC unroll 8
    for (int p = 0; p < PANELS; ++p)
#pragma GCC unroll 8
      for (int v = 0; v < VECTORS; ++v) w[p * VECTORS + v] = widened(weight + (p * depth + k) * PANEL + v * LANES);
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) {
      const float value = x[r * depth + k];
#pragma GCC unroll 8
      for (int j = 0; j < PANELS * VECTORS; ++j) sums[r][j] += w[j] * value;
    }
  }
  for (int r = 0; r < ROWS; ++r) {
    float row[PANELS * PANEL];
    std::memcpy(row, sums[r], sizeof row);
    if (bias)
      for (int64_t c = 0; c < columns; ++c) row[c] += bias[c];
    std::memcpy(y + r * n, row, columns * sizeof(float));
  }
}

template <typename Weight>
void panel(const float* x, int64_t rows, const Weight* weight, const float* bias, int64_t depth, float* y, int64_t n,
           int64_t columns) {
  int64_t r = 0;
  for (; r + TALL <= rows; r += TALL) tile<TALL, 1>(x + r * depth, weight, bias, depth, y + r * n, n, columns);
  for (; r + 6 <= rows; r += 6) tile<6, 1>(x + r * depth, weight, bias, depth, y + r * n, n, columns);
  x += r * depth;
  y += r * n;
  switch (rows - r) {
    case 1: tile<1, 1>(x, weight, bias, depth, y, n, columns); break;
    case 2: tile<2, 1>(x, weight, bias, depth, y, n, columns); break;
    case 3: tile<3, 1>(x, weight, bias, depth, y, n, columns); break;
    case 4: tile<4, 1>(x, weight, bias, depth, y, n, columns); break;
    case 5: tile<5, 1>(x, weight, bias, depth, y, n, columns); break;
  }
}

template <typename Weight>
void one_row(const float* x, const Weight* weight, const float* bias, int64_t n, int64_t depth, float* y,
             int64_t first, int64_t last) {
  int64_t p = first;
  for (; p + WIDE <= last && (p + WIDE) * PANEL <= n; p += WIDE)
    tile<1, WIDE>(x, weight + p * depth * PANEL, bias ? bias + p * PANEL : nullptr, depth, y + p * PANEL, n,
                  WIDE * PANEL);
  for (; p < last; ++p)
    tile<1, 1>(x, weight + p * depth * PANEL, bias ? bias + p * PANEL : nullptr, depth, y + p * PANEL, n,
               std::min<int64_t>(PANEL, n - p * PANEL));
}

inline const float* wide_panel(const float* weight, int64_t, float*) { return weight; }

inline const float* wide_panel(const uint16_t* weight, int64_t size, float* buffer) {
  for (int64_t i = 0; i < size; i += LANES) store(buffer + i, widened(weight + i));
  return buffer;
}

template <typename Weight>
void some_panels(const float* x, int64_t rows, const Weight* weight, const float* bias, int64_t n, int64_t depth,
                 float* y, int64_t first, int64_t last) {
  if (rows == 1) return one_row(x, weight, bias, n, depth, y, first, last);
  const int64_t size = depth * PANEL;
  const int64_t chunk = std::max<int64_t>(CHUNK_FLOATS / depth / TALL, 2) * TALL;
  const bool widens = rows >= WIDEN_FROM;
  std::vector<float> buffer(widens && sizeof(Weight) == 2 ? size : 0);
  for (int64_t start = 0; start < rows; start += chunk) {
    const int64_t count = std::min(chunk, rows - start);
    for (int64_t p = first; p < last; ++p) {
      const float* own_bias = bias ? bias + p * PANEL : nullptr;
      const int64_t columns = std::min<int64_t>(PANEL, n - p * PANEL);
      float* out = y + start * n + p * PANEL;
      if (widens)
        panel(x + start * depth, count, wide_panel(weight + p * size, size, buffer.data()), own_bias, depth, out, n,
              columns);
      else
        panel(x + start * depth, count, weight + p * size, own_bias, depth, out, n, columns);
    }
  }
}

template <typename Weight>
void linear(const float* x, int64_t rows, const Weight* weight, const float* bias, int64_t n, int64_t depth, float* y,
            int threads) {
  const int64_t panels = (n + PANEL - 1) / PANEL;
  share_out(threads, panels, grain_of(panels, threads, WIDE), [&](int64_t first, int64_t last) {
    some_panels(x, rows, weight, bias, n, depth, y, first, last);
  });
}

template <typename Weight>
void pack(const Weight* weight, int64_t n, int64_t depth, Weight* packed) {
  for (int64_t p = 0; p * PANEL < n; ++p)
    for (int64_t c = 0; c < PANEL; ++c)
      for (int64_t k = 0; k < depth; ++k)
        packed[(p * depth + k) * PANEL + c] = p * PANEL + c < n ? weight[(p * PANEL + c) * depth + k] : Weight(0);
}

}  // namespace

extern "C" {

void hpu_pack_bfloat16(const uint16_t* weight, int64_t n, int64_t depth, uint16_t* packed) {
  pack(weight, n, depth, packed);
}

void hpu_pack_float32(const float* weight, int64_t n, int64_t depth, float* packed) { pack(weight, n, depth, packed); }

void hpu_linear_bfloat16(const float* x, int64_t rows, const uint16_t* weight, const float* bias, int64_t n,
                         int64_t depth, float* y, int threads) {
  linear(x, rows, weight, bias, n, depth, y, threads);
}

void hpu_linear_float32(const float* x, int64_t rows, const float* weight, const float* bias, int64_t n, int64_t depth,
                        float* y, int threads) {
  linear(x, rows, weight, bias, n, depth, y, threads);
}
}
