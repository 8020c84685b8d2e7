// Attention on AMX tiles: single rows, and chunks, over pages of bfloat16.
#ifdef __AMX_BF16__

#include "pool.h"
#include "softmax.h"
#include "tiles.h"

namespace {

using namespace hpu;

constexpr int64_t STEP = 128;         // tokens that a chunk attends to at a time
constexpr int64_t MOST_QUERIES = 16;  // of a single row and one KV head: the columns of a tile
constexpr float NOTHING = -1e30f;     // far below any score, and finite: its weight is 0 whatever the largest score is
constexpr float MOST_ABOVE = 8.0f;    // how far a score may be above what weights are relative to

struct Pages {
  const uint16_t* keys;
  const uint16_t* values;
  int64_t kv_heads, block, dim;

  int64_t at(const int64_t* table, int64_t head, int64_t token) const {
    return ((table[token / block] * kv_heads + head) * block + token % block) * dim;
  }
};

// Scores of up to 16 queries, operands of tiles in `q`, with 16 keys at a time: [length up to 16, 16].
void score_single(const uint16_t* q, const Pages& pages, const int64_t* table, int64_t head, int64_t length,
                  float* scores) {
  for (int64_t token = 0; token < length; token += ROWS) {
    const uint16_t* keys = pages.keys + pages.at(table, head, token);
    _tile_zero(0);
    for (int64_t k = 0; k < pages.dim; k += DEPTH) {
      _tile_loadd(4, keys + k, pages.dim * 2);
      _tile_loadd(6, q + k * ROWS, 64);
      _tile_dpbf16ps(0, 4, 6);
    }
    _tile_stored(0, scores + token * 16, 64);
  }
}

// Adds the values of `tokens` tokens, weighted, to COUNT mixes of 64 elements (or fewer, a multiple of 16).
template <int COUNT>
void mix(const float* weights, int64_t stride, const uint16_t* values, int64_t tokens, int64_t dim, int64_t vectors,
         float* out) {
  Floats sums[COUNT][4];
  for (int c = 0; c < COUNT; ++c)
    for (int64_t v = 0; v < vectors; ++v) sums[c][v] = load<Floats>(out + c * dim + v * 16);
  if (vectors == 4)
    for (int64_t t = 0; t < tokens; ++t)
#pragma GCC unroll 4
      for (int v = 0; v < 4; ++v) {
        const Floats value = widened(values + t * dim + v * 16);
#pragma GCC unroll 4
        for (int c = 0; c < COUNT; ++c) sums[c][v] += value * weights[c * stride + t];
      }
  else
    for (int64_t t = 0; t < tokens; ++t)
      for (int64_t v = 0; v < vectors; ++v) {
        const Floats value = widened(values + t * dim + v * 16);
        for (int c = 0; c < COUNT; ++c) sums[c][v] += value * weights[c * stride + t];
      }
  for (int c = 0; c < COUNT; ++c)
    for (int64_t v = 0; v < vectors; ++v) store(out + c * dim + v * 16, sums[c][v]);
}

template <int COUNT>
void mix_pages(const float* weights, int64_t stride, const Pages& pages, const int64_t* table, int64_t head,
               int64_t length, float* out) {
  for (int64_t first = 0; first < pages.dim; first += 64)
    for (int64_t token = 0; token < length; token += pages.block)
      mix<COUNT>(weights + token, stride, pages.values + pages.at(table, head, token) + first,
                 std::min(pages.block, length - token), pages.dim, std::min<int64_t>(4, (pages.dim - first) / 16),
                 out + first);
}

// One row's queries of one KV head, `count` of them: q (scaled) and out [count, dim].
void attend_single(const float* q, int64_t count, const Pages& pages, const int64_t* table, int64_t head,
                   int64_t length, Scratch& scratch, float* out) {
  const int64_t dim = pages.dim, padded = up_to(length, ROWS), stride = padded + LANES;
  uint16_t* operands = scratch.of(dim * ROWS + 2 * (padded * 16 + count * stride));
  float* by_token = reinterpret_cast<float*>(operands + dim * ROWS);
  float* scores = by_token + padded * 16;
  // A column of a tile is a query; a row holds a pair of its elements.
  std::memset(operands, 0, dim * ROWS * 2);
  for (int64_t c = 0; c < count; ++c)
    for (int64_t i = 0; i < dim; i += 16) {
      alignas(32) uint16_t narrow[16];
      narrow_row(q + c * dim + i, 16, 1.0f, narrow, 16);
      for (int64_t j = 0; j < 16; j += 2)
        std::memcpy(operands + ((i + j) / 2 * ROWS + c) * 2, narrow + j, 4);
    }
  score_single(operands, pages, table, head, length, by_token);
  const __m512i every = _mm512_mullo_epi32(
      _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0), _mm512_set1_epi32(16));
  for (int64_t c = 0; c < count; ++c) {
    for (int64_t t = 0; t < padded; t += 16)
      _mm512_storeu_ps(scores + c * stride + t, _mm512_i32gather_ps(every, by_token + t * 16 + c, 4));
    softmax(scores + c * stride, length);
  }
  std::fill(out, out + count * dim, 0.0f);
  int64_t c = 0;
  for (; c + 3 <= count; c += 3)
    mix_pages<3>(scores + c * stride, stride, pages, table, head, length, out + c * dim);
  if (count - c == 2) mix_pages<2>(scores + c * stride, stride, pages, table, head, length, out + c * dim);
  if (count - c == 1) mix_pages<1>(scores + c * stride, stride, pages, table, head, length, out + c * dim);
}

// Keys and values of one chunk's tokens as operands of tiles, heads outermost. Behind the last token are zeros.
struct Operands {
  uint16_t* keys;    // [tokens / 16, dim / 32] tiles: a row holds a pair of elements of 16 keys
  uint16_t* values;  // [tokens / 32, dim / 16] tiles: a row holds a pair of tokens, 16 elements of each
  int64_t tokens, dim;

  uint16_t* key(int64_t head, int64_t token) const { return keys + (head * tokens + token) * dim; }
  uint16_t* value(int64_t head, int64_t token) const { return values + (head * tokens + token) * dim; }
};

// 32 tokens of one head.
void pack(const Pages& pages, const int64_t* table, int64_t head, int64_t token, int64_t length,
          const Operands& operands) {
  const int64_t dim = pages.dim, at = token < length ? pages.at(table, head, token) : 0;
  const __m512i rows = _mm512_mullo_epi32(_mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0),
                                          _mm512_set1_epi32(dim / 2));
  for (int64_t half = 0; half < 32; half += 16) {
    const __mmask16 seen = lanes_below(length - token - half);
    uint16_t* to = operands.key(head, token + half);
    for (int64_t i = 0; i < dim; i += 2, to += 32)
      _mm512_storeu_si512(to, _mm512_mask_i32gather_epi32(_mm512_setzero_si512(), seen, rows,
                                                          pages.keys + at + half * dim + i, 4));
  }
  uint16_t* to = operands.value(head, token);
  for (int64_t i = 0; i < dim; i += 16)
    for (int64_t t = 0; t < 32; t += 2, to += 32) {
      const uint16_t* pair = pages.values + at + t * dim + i;
      __m512i even = _mm512_setzero_si512(), odd = even;
      if (token + t < length) even = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)pair));
      if (token + t + 1 < length) odd = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)(pair + dim)));
      _mm512_storeu_si512(to, _mm512_or_si512(even, _mm512_slli_epi32(odd, 16)));
    }
}

// 32 rows of queries of one KV head on their way through the tokens.
struct Rows {
  uint16_t* q;        // [32, dim]
  float* mixes;       // [32, dim]
  float* totals;      // [32, 16]: of the weights, by lane
  float* scores;      // [32, STEP]
  uint16_t* weights;  // [32, STEP]
  float most[32];     // what weights are relative to: about the largest score so far

  static int64_t elements(int64_t dim) { return 32 * (dim + 2 * (dim + 16 + STEP) + STEP); }

  Rows(uint16_t* memory, int64_t dim)
      : q(memory),
        mixes(reinterpret_cast<float*>(memory + 32 * dim)),
        totals(mixes + 32 * dim),
        scores(totals + 32 * 16),
        weights(reinterpret_cast<uint16_t*>(scores + 32 * STEP)) {
    std::fill(mixes, scores, 0.0f);
    std::fill(most, most + 32, NOTHING);
  }
};

void score_step(const Rows& rows, const Operands& operands, int64_t head, int64_t token) {
  const int64_t dim = operands.dim, stride = dim * 2;
  for (int64_t column = 0; column < STEP; column += 32) {
    const uint16_t *left = operands.key(head, token + column), *right = left + ROWS * dim;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t k = 0; k < dim; k += DEPTH) {
      _tile_loadd(4, rows.q + k, stride);
      _tile_loadd(5, rows.q + ROWS * dim + k, stride);
      _tile_loadd(6, left + k * ROWS, 64);
      _tile_loadd(7, right + k * ROWS, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    float* to = rows.scores + column;
    _tile_stored(0, to, STEP * 4);
    _tile_stored(1, to + 16, STEP * 4);
    _tile_stored(2, to + ROWS * STEP, STEP * 4);
    _tile_stored(3, to + ROWS * STEP + 16, STEP * 4);
  }
}

// Scores of row r (of base 2), of which the first `visible` count, to weights. Where a much larger score has come, what
// was weighed so far shrinks; a somewhat larger one gets a weight above 1 instead. A step of which a row sees nothing
// leaves it as it is.
void weigh(Rows& rows, int64_t r, int64_t visible, int64_t dim) {
  uint16_t* weights = rows.weights + r * STEP;
  if (visible <= 0) {
    std::memset(weights, 0, STEP * 2);
    return;
  }
  const __m512 nothing = _mm512_set1_ps(NOTHING);
  __m512 scores[STEP / 16], most = nothing;
#pragma GCC unroll 8
  for (int v = 0; v < STEP / 16; ++v) {
    scores[v] = _mm512_load_ps(rows.scores + r * STEP + v * 16);
    if (visible < STEP) scores[v] = _mm512_mask_mov_ps(nothing, lanes_below(visible - v * 16), scores[v]);
    most = _mm512_max_ps(most, scores[v]);
  }
  float* totals = rows.totals + r * 16;
  const float before = rows.most[r];
  if (_mm512_cmp_ps_mask(most, _mm512_set1_ps(before + MOST_ABOVE), _CMP_GT_OQ)) {
    rows.most[r] = _mm512_reduce_max_ps(most);
    const __m512 shrunk = power_of_two(_mm512_set1_ps(before - rows.most[r]));
    _mm512_store_ps(totals, _mm512_mul_ps(_mm512_load_ps(totals), shrunk));
    for (int64_t i = 0; i < dim; i += 16) {
      float* mix = rows.mixes + r * dim + i;
      _mm512_store_ps(mix, _mm512_mul_ps(_mm512_load_ps(mix), shrunk));
    }
  }
  const __m512 one = _mm512_set1_ps(rows.most[r]);
  __m512 total = _mm512_load_ps(totals);
#pragma GCC unroll 8
  for (int v = 0; v < STEP / 16; ++v) {
    const __m512 weight = power_of_two(_mm512_sub_ps(scores[v], one));
    total = _mm512_add_ps(total, weight);
    _mm256_store_si256((__m256i*)(weights + v * 16), narrowed(weight));
  }
  _mm512_store_ps(totals, total);
}

void mix_step(const Rows& rows, const Operands& operands, int64_t head, int64_t token) {
  const int64_t dim = operands.dim, stride = dim * 4;
  for (int64_t i = 0; i < dim; i += 32) {
    float *upper = rows.mixes + i, *lower = upper + ROWS * dim;
    _tile_loadd(0, upper, stride);
    _tile_loadd(1, upper + 16, stride);
    _tile_loadd(2, lower, stride);
    _tile_loadd(3, lower + 16, stride);
    for (int64_t k = 0; k < STEP; k += DEPTH) {
      const uint16_t* values = operands.value(head, token + k) + i * DEPTH;
      _tile_loadd(4, rows.weights + k, STEP * 2);
      _tile_loadd(5, rows.weights + ROWS * STEP + k, STEP * 2);
      _tile_loadd(6, values, 64);
      _tile_loadd(7, values + TILE, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, upper, stride);
    _tile_stored(1, upper + 16, stride);
    _tile_stored(2, lower, stride);
    _tile_stored(3, lower + 16, stride);
  }
}

struct ChunkShape {
  int64_t new_len, context_len, heads, kv_heads, dim;
  float scale;  // of the queries, so that scores have base 2

  int64_t group() const { return heads / kv_heads; }
  int64_t head_of(int64_t kv_head, int64_t row) const { return kv_head * group() + row % group(); }
  // Queries of one KV head: all of a token's, then the next token's.
  int64_t token_of(int64_t row) const { return row / group(); }
};

// Rows `first` to `first` + 32 of the queries of one KV head.
void attend_rows(const float* q, const ChunkShape& shape, const Operands& operands, int64_t kv_head, int64_t first,
                 Scratch& scratch, float* out) {
  const int64_t dim = shape.dim, count = std::min<int64_t>(32, shape.new_len * shape.group() - first);
  Rows rows(scratch.of(Rows::elements(dim)), dim);
  std::memset(rows.q, 0, 32 * dim * 2);
  for (int64_t r = 0; r < count; ++r)
    narrow_row(q + (shape.token_of(first + r) * shape.heads + shape.head_of(kv_head, first + r)) * dim, dim,
               shape.scale, rows.q + r * dim, dim);
  const int64_t last = shape.context_len + shape.token_of(first + count - 1);
  for (int64_t token = 0; token <= last; token += STEP) {
    score_step(rows, operands, kv_head, token);
    for (int64_t r = 0; r < 32; ++r)
      weigh(rows, r, r < count ? shape.context_len + shape.token_of(first + r) + 1 - token : 0, dim);
    mix_step(rows, operands, kv_head, token);
  }
  for (int64_t r = 0; r < count; ++r) {
    float* to = out + (shape.token_of(first + r) * shape.heads + shape.head_of(kv_head, first + r)) * dim;
    const Floats total = (Floats)_mm512_set1_ps(_mm512_reduce_add_ps(_mm512_load_ps(rows.totals + r * 16)));
    for (int64_t i = 0; i < dim; i += 16) store(to + i, load<Floats>(rows.mixes + r * dim + i) / total);
  }
}

thread_local Scratch own_scratch, shared_scratch;

}  // namespace

extern "C" {

// As hpu_write, to pages of bfloat16; dim a multiple of 16.
void hpu_write_narrow(const float* keys, const float* values, int64_t key_stride, int64_t value_stride, int64_t rows,
                      int64_t width, int64_t kv_heads, const int64_t* slots, uint16_t* key_pages,
                      uint16_t* value_pages) {
  const int64_t dim = width / kv_heads;
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t token = row / kv_heads, offset = row % kv_heads * dim;
    narrow_row(keys + token * key_stride + offset, dim, 1.0f, key_pages + slots[row] * dim, dim);
    narrow_row(values + token * value_stride + offset, dim, 1.0f, value_pages + slots[row] * dim, dim);
  }
}

// As hpu_attend_singles, over pages of bfloat16; dim a multiple of 32, block a multiple of 16.
void hpu_attend_singles_tiles(const float* q, const uint16_t* keys, const uint16_t* values, const int64_t* tables,
                              const int64_t* lens, int64_t rows, int64_t width, int64_t kv_heads, int64_t group,
                              int64_t block, int64_t dim, float* out, int threads) {
  const Pages pages{keys, values, kv_heads, block, dim};
  share_out(threads, rows * kv_heads, grain_of(rows * kv_heads, threads), [&](int64_t begin, int64_t end) {
    const Tiles tiles;
    for (int64_t item = begin; item < end; ++item)
      for (int64_t first = 0; first < group; first += MOST_QUERIES) {
        const int64_t row = item / kv_heads, at = (item * group + first) * dim;
        attend_single(q + at, std::min(MOST_QUERIES, group - first), pages, tables + row * width, item % kv_heads,
                      lens[row], own_scratch, out + at);
      }
  });
}

// q, out [new_len, heads, dim] of one row whose tokens lie in the blocks of `table`; dim and block multiples of 32.
void hpu_attend_chunk_tiles(const float* q, const uint16_t* keys, const uint16_t* values, const int64_t* table,
                            int64_t new_len, int64_t context_len, int64_t heads, int64_t kv_heads, int64_t block,
                            int64_t dim, float scale, float* out, int threads) {
  const Pages pages{keys, values, kv_heads, block, dim};
  const ChunkShape shape{new_len, context_len, heads, kv_heads, dim, scale * 1.44269504f};
  const int64_t length = context_len + new_len, tokens = up_to(length, STEP);
  uint16_t* memory = shared_scratch.of(2 * kv_heads * tokens * dim);
  const Operands operands{memory, memory + kv_heads * tokens * dim, tokens, dim};
  const int64_t row_blocks = (new_len * shape.group() + 31) / 32;
  const int64_t packs = kv_heads * (tokens / 32);
  share_out(threads, packs, grain_of(packs, threads), [&](int64_t first, int64_t last) {
    for (int64_t item = first; item < last; ++item)
      pack(pages, table, item / (tokens / 32), item % (tokens / 32) * 32, length, operands);
  });
  // The last rows see most: they come first, so that threads end together.
  share_out(threads, kv_heads * row_blocks, 1, [&](int64_t first, int64_t last) {
    const Tiles tiles;
    for (int64_t item = first; item < last; ++item)
      attend_rows(q, shape, operands, item % kv_heads, (row_blocks - 1 - item / kv_heads) * 32, own_scratch, out);
  });
}
}

#endif
