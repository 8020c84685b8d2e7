// Attention of rows with one new token each, over pages where they lie: [page, kv_heads, block, dim] of keys and of
// values. For each row and KV head: scores of its group of queries, one softmax, the mix of values, all in float32.
#include <algorithm>
#include <vector>

#include "lanes.h"
#include "pool.h"
#include "softmax.h"

namespace {

using namespace hpu;

constexpr int STRIPE = 32;  // elements of a head mixed at a time: 4 vectors of 8 for each of up to 3 queries

inline Eight eight(const float* from) { return load<Eight>(from); }

// The sums of eight vectors, in their order: three rounds of adding neighbours.
inline Eight sums_of(const Eight* v) {
  Eight pairs[4], fours[2];
  for (int i = 0; i < 4; ++i)
    pairs[i] = __builtin_shufflevector(v[2 * i], v[2 * i + 1], 0, 8, 2, 10, 4, 12, 6, 14) +
               __builtin_shufflevector(v[2 * i], v[2 * i + 1], 1, 9, 3, 11, 5, 13, 7, 15);
  for (int i = 0; i < 2; ++i)
    fours[i] = __builtin_shufflevector(pairs[2 * i], pairs[2 * i + 1], 0, 1, 8, 9, 4, 5, 12, 13) +
               __builtin_shufflevector(pairs[2 * i], pairs[2 * i + 1], 2, 3, 10, 11, 6, 7, 14, 15);
  return __builtin_shufflevector(fours[0], fours[1], 0, 1, 2, 3, 8, 9, 10, 11) +
         __builtin_shufflevector(fours[0], fours[1], 4, 5, 6, 7, 12, 13, 14, 15);
}

struct Pages {
  const float* keys;
  const float* values;
  int64_t kv_heads, block, dim;

  const float* key(int64_t page, int64_t head) const { return keys + (page * kv_heads + head) * block * dim; }
  const float* value(int64_t page, int64_t head) const { return values + (page * kv_heads + head) * block * dim; }
};

// Scores of COUNT queries with `tokens` keys; up to 7 scores behind the last one are written and mean nothing.
template <int COUNT>
void score(const float* q, const float* keys, int64_t tokens, int64_t dim, float* scores, int64_t stride) {
  for (int64_t t = 0; t < tokens; t += 8) {
    Eight sums[COUNT][8] = {};
    const int64_t last = std::min<int64_t>(8, tokens - t);
    for (int64_t j = 0; j < last; ++j) {
      const float* key = keys + (t + j) * dim;
      Eight own[COUNT] = {};
      for (int64_t i = 0; i < dim; i += 8) {
        const Eight k = eight(key + i);
        for (int c = 0; c < COUNT; ++c) own[c] += eight(q + c * dim + i) * k;
      }
      for (int c = 0; c < COUNT; ++c) sums[c][j] = own[c];
    }
    for (int c = 0; c < COUNT; ++c) store(scores + c * stride + t, sums_of(sums[c]));
  }
}

template <int COUNT, int WIDTH>
inline void mix_stripe(const float* weights, int64_t stride, const float* values, int64_t tokens, int64_t dim,
                       float* out) {
  Eight sums[COUNT][WIDTH / 8];
  for (int c = 0; c < COUNT; ++c)
    for (int v = 0; v < WIDTH / 8; ++v) sums[c][v] = eight(out + c * dim + v * 8);
  for (int64_t t = 0; t < tokens; ++t)
    for (int v = 0; v < WIDTH / 8; ++v) {
      const Eight value = eight(values + t * dim + v * 8);
      for (int c = 0; c < COUNT; ++c) sums[c][v] += value * weights[c * stride + t];
    }
  for (int c = 0; c < COUNT; ++c)
    for (int v = 0; v < WIDTH / 8; ++v) store(out + c * dim + v * 8, sums[c][v]);
}

// Adds the values of `tokens` tokens, weighted, to COUNT mixes.
template <int COUNT>
void mix(const float* weights, int64_t stride, const float* values, int64_t tokens, int64_t dim, float* out) {
  int64_t start = 0;
  for (; start + STRIPE <= dim; start += STRIPE)
    mix_stripe<COUNT, STRIPE>(weights, stride, values + start, tokens, dim, out + start);
  for (; start < dim; start += 8) mix_stripe<COUNT, 8>(weights, stride, values + start, tokens, dim, out + start);
}

template <int COUNT>
void attend(const float* q, const Pages& pages, const int64_t* table, int64_t length, int64_t head,
            std::vector<float>& scores, float* out) {
  const int64_t stride = length + 2 * 16;
  if (int64_t(scores.size()) < stride * COUNT) scores.resize(stride * COUNT);
  for (int64_t start = 0; start < length; start += pages.block)
    score<COUNT>(q, pages.key(table[start / pages.block], head), std::min(pages.block, length - start), pages.dim,
                 scores.data() + start, stride);
  for (int c = 0; c < COUNT; ++c) softmax(scores.data() + c * stride, length);
  std::fill(out, out + COUNT * pages.dim, 0.0f);
  for (int64_t start = 0; start < length; start += pages.block)
    mix<COUNT>(scores.data() + start, stride, pages.value(table[start / pages.block], head),
               std::min(pages.block, length - start), pages.dim, out);
}

void attend_group(const float* q, const Pages& pages, const int64_t* table, int64_t length, int64_t head,
                  int64_t group, std::vector<float>& scores, float* out) {
  int64_t first = 0;
  for (; first + 3 <= group; first += 3)
    attend<3>(q + first * pages.dim, pages, table, length, head, scores, out + first * pages.dim);
  if (group - first == 2)
    attend<2>(q + first * pages.dim, pages, table, length, head, scores, out + first * pages.dim);
  if (group - first == 1)
    attend<1>(q + first * pages.dim, pages, table, length, head, scores, out + first * pages.dim);
}

}  // namespace

extern "C" {

// q (scaled), out [rows, kv_heads, group, dim]; tables [rows, width]; lens [rows], each at least 1; dim a multiple
// of 8.
void hpu_attend_singles(const float* q, const float* keys, const float* values, const int64_t* tables,
                        const int64_t* lens, int64_t rows, int64_t width, int64_t kv_heads, int64_t group,
                        int64_t block, int64_t dim, float* out, int threads) {
  const Pages pages{keys, values, kv_heads, block, dim};
  share_out(threads, rows * kv_heads, grain_of(rows * kv_heads, threads), [&](int64_t first, int64_t last) {
    std::vector<float> scores;
    for (int64_t item = first; item < last; ++item) {
      const int64_t row = item / kv_heads;
      attend_group(q + item * group * dim, pages, tables + row * width, lens[row], item % kv_heads, group,
                   scores, out + item * group * dim);
    }
  });
}
}
