// What a step does row by row between its products: norms with the sum before them, gated activations, rotations with
// the writing of keys and values. A row's bits depend on that row alone.
#include <cmath>
#include <vector>

#include "lanes.h"
#include "pool.h"

namespace {

using namespace hpu;

// What is worth a second thread: rows of `width` elements, or as many as cost so much.
inline int64_t rows_at_once(int64_t width, int64_t rows, int threads) {
  return std::max<int64_t>(64 * 1024 / width, row_grain(rows, threads));
}

// Mean of squares, summed in lanes and then over the lanes in order.
inline float inverse_rms(const float* x, int64_t width, float eps) {
  Floats squares = {};
  int64_t i = 0;
  for (; i + LANES <= width; i += LANES) {
    const Floats own = load<Floats>(x + i);
    squares += own * own;
  }
  float total = 0;
  for (int lane = 0; lane < LANES; ++lane) total += squares[lane];
  for (; i < width; ++i) total += x[i] * x[i];
  return 1.0f / std::sqrt(total / width + eps);
}

inline void scale_row(const float* x, const float* weight, int64_t width, float factor, float* out) {
  for (int64_t i = 0; i < width; ++i) out[i] = x[i] * factor * weight[i];
}

struct Turn {
  int64_t dim;
  const float* cos;
  const float* sin;
  int interleaved;
};

// x * cos + swap(x) * sin: swap exchanges the two elements of a pair, the sign is in sin.
inline void rotate(const float* x, const Turn& turn, float* out) {
  const int64_t half = turn.dim / 2;
  if (turn.interleaved) {
    for (int64_t i = 0; i < turn.dim; i += 2) {
      out[i] = x[i] * turn.cos[i] + x[i + 1] * turn.sin[i];
      out[i + 1] = x[i + 1] * turn.cos[i + 1] + x[i] * turn.sin[i + 1];
    }
    return;
  }
  for (int64_t i = 0; i < half; ++i) out[i] = x[i] * turn.cos[i] + x[i + half] * turn.sin[i];
  for (int64_t i = half; i < turn.dim; ++i) out[i] = x[i] * turn.cos[i] + x[i - half] * turn.sin[i];
}

}  // namespace

extern "C" {

// sum = x + delta where delta is given; out = rms_norm(sum) * weight.
void hpu_add_norm(const float* x, const float* delta, const float* weight, float eps, int64_t rows, int64_t width,
                  float* sum, float* out, int threads) {
  share_out(threads, rows, rows_at_once(width, rows, threads), [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
      const float* own = x + row * width;
      if (delta) {
        const float* more = delta + row * width;
        float* total = sum + row * width;
        for (int64_t i = 0; i < width; ++i) total[i] = own[i] + more[i];
        own = total;
      }
      scale_row(own, weight, width, inverse_rms(own, width, eps), out + row * width);
    }
  });
}

// gate_up [rows, 2 * width], gate first: out = gate / (1 + exp(-gate)) * up.
void hpu_silu_mul(const float* gate_up, int64_t rows, int64_t width, float* out, int threads) {
  share_out(threads, rows, rows_at_once(4 * width, rows, threads), [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
      const float* gate = gate_up + row * 2 * width;
      const float* up = gate + width;
      float* own = out + row * width;
      int64_t i = 0;
      for (; i + LANES <= width; i += LANES) {
        const Floats value = load<Floats>(gate + i), zero = {};
        // Below -80 the quotient is nothing, and exp(-value) would not be finite further down.
        const Floats kept = value < -80.0f ? zero : value;
        store(own + i, kept / (exponential(-kept) + 1.0f) * load<Floats>(up + i));
      }
      for (; i < width; ++i) own[i] = gate[i] / (std::exp(-gate[i]) + 1.0f) * up[i];
    }
  });
}

// qkv [tokens, heads + 2 * kv_heads, dim]; cos, sin [tokens, dim]; norms [dim] or null. To q [tokens, heads, dim] and
// keys [tokens, kv_heads, dim].
void hpu_rotate(const float* qkv, int64_t tokens, int64_t heads, int64_t kv_heads, int64_t dim, const float* cos,
                const float* sin, int interleaved, const float* q_norm, const float* k_norm, float eps, float* q,
                float* keys, int threads) {
  const int64_t grain = rows_at_once(2 * (heads + kv_heads) * dim, tokens, threads);
  share_out(threads, tokens, grain, [&](int64_t first, int64_t last) {
    for (int64_t token = first; token < last; ++token) {
      std::vector<float> normed(q_norm || k_norm ? dim : 0);
      const Turn turn{dim, cos + token * dim, sin + token * dim, interleaved};
      for (int64_t head = 0; head < heads + kv_heads; ++head) {
        const float* x = qkv + (token * (heads + 2 * kv_heads) + head) * dim;
        const float* norm = head < heads ? q_norm : k_norm;
        if (norm) {
          scale_row(x, norm, dim, inverse_rms(x, dim, eps), normed.data());
          x = normed.data();
        }
        float* to = head < heads ? q + (token * heads + head) * dim : keys + (token * kv_heads + head - heads) * dim;
        rotate(x, turn, to);
      }
    }
  });
}

// Keys and values of `rows` heads, kv_heads of them to a token, each token's `width` elements together: to the rows
// slots[row] of the pages, which have as many elements as a head.
void hpu_write(const float* keys, const float* values, int64_t key_stride, int64_t value_stride, int64_t rows,
               int64_t width, int64_t kv_heads, const int64_t* slots, float* key_pages, float* value_pages) {
  const int64_t dim = width / kv_heads;
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t token = row / kv_heads, offset = row % kv_heads * dim;
    std::memcpy(key_pages + slots[row] * dim, keys + token * key_stride + offset, dim * sizeof(float));
    std::memcpy(value_pages + slots[row] * dim, values + token * value_stride + offset, dim * sizeof(float));
  }
}
}
