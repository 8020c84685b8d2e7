// Products on AMX tiles, and the gated MLPs made of them: dense ones and experts.
#include <cstdint>

#ifndef __AMX_BF16__

extern "C" int hpu_has_tiles() { return 0; }

#else

#include <sys/syscall.h>
#include <unistd.h>

#include <vector>

#include "pool.h"
#include "tiles.h"

namespace {

using namespace hpu;

// A weight's panels of 16 columns, of each panel its tiles; `depth` is a multiple of 32.
struct Panels {
  const uint16_t* weight;
  int64_t depth;

  const uint16_t* of(int64_t column) const { return weight + column * depth; }
};

// Tiles of 16 rows, those of the same rows one behind the other.
struct Operand {
  uint16_t* tiles;
  int64_t rows, depth;

  // Rows from `first` on, a multiple of 16.
  Operand part(int64_t first, int64_t count) const { return {of(first), count, depth}; }

  uint16_t* of(int64_t row) const { return tiles + row * depth; }
  uint16_t* at(int64_t row, int64_t k) const {
    return tiles + row / ROWS * ROWS * depth + k / DEPTH * TILE + row % ROWS * DEPTH + k % DEPTH;
  }
};

// Sums of up to 32 rows with two panels.
struct alignas(64) Sums {
  float left[2 * ROWS * 16], right[2 * ROWS * 16];
};

// Two panels, and where the two come from that are wanted next.
struct Pair {
  const uint16_t *left, *right, *next_left, *next_right;
};

// A share of what is wanted next, on its way to the second cache while something else is multiplied.
class Ahead {
 public:
  Ahead(const Pair& pair, int64_t depth, int64_t row, int64_t rows) {
    const int64_t blocks = (rows + 2 * ROWS - 1) / (2 * ROWS);
    // A single block of rows waits for its own panels: this would only be in the way.
    lines_ = blocks > 1 ? (16 + blocks - 1) / blocks : 0;
    const int64_t first = row / (2 * ROWS) * lines_ * (depth / DEPTH) * 64;
    left_ = reinterpret_cast<const char*>(pair.next_left) + first;
    right_ = reinterpret_cast<const char*>(pair.next_right) + first;
  }

  void step() {
    for (int64_t i = 0; i < lines_; ++i, left_ += 64, right_ += 64) {
      _mm_prefetch(left_, _MM_HINT_T1);
      _mm_prefetch(right_, _MM_HINT_T1);
    }
  }

 private:
  int64_t lines_;
  const char *left_, *right_;
};

// `between` is called once for every 32 elements of depth.
template <typename Between>
inline void multiply_tall(const uint16_t* upper, const Pair& pair, int64_t depth, Ahead ahead, Between&& between,
                          Sums& sums) {
  const uint16_t *lower = upper + ROWS * depth, *left = pair.left, *right = pair.right;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t k = 0; k < depth; k += DEPTH) {
    ahead.step();
    _tile_loadd(4, upper + k * ROWS, 64);
    _tile_loadd(6, left + k * ROWS, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, right + k * ROWS, 64);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, lower + k * ROWS, 64);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
    between();
  }
  _tile_stored(0, sums.left, 64);
  _tile_stored(1, sums.right, 64);
  _tile_stored(2, sums.left + ROWS * 16, 64);
  _tile_stored(3, sums.right + ROWS * 16, 64);
}

void multiply_flat(const uint16_t* rows, const Pair& pair, int64_t depth, Sums& sums) {
  _tile_zero(0);
  _tile_zero(1);
  for (int64_t k = 0; k < depth; k += DEPTH) {
    // So few rows wait for memory, and the processor's own look-ahead ends with every page. Measured: 4 tiles ahead
    // save 3 % of a step of one row, 8 save 1 %, 16 cost 3 %.
    for (int64_t line = 0; line < TILE; line += 32) {
      _mm_prefetch(pair.left + k * ROWS + 4 * TILE + line, _MM_HINT_T0);
      _mm_prefetch(pair.right + k * ROWS + 4 * TILE + line, _MM_HINT_T0);
    }
    _tile_loadd(4, rows + k * ROWS, 64);
    _tile_loadd(6, pair.left + k * ROWS, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, pair.right + k * ROWS, 64);
    _tile_dpbf16ps(1, 4, 7);
  }
  _tile_stored(0, sums.left, 64);
  _tile_stored(1, sums.right, 64);
}

// Calls `put(row, left, right)` with each row of the product of x with two panels, 16 sums with each. While 32 rows are
// multiplied those before are put: tiles and vectors are units of their own.
template <typename Put>
inline void multiply(const Operand& x, const Pair& pair, Put&& put) {
  Sums sums[2];
  const Sums* done = nullptr;
  int64_t first = 0, next = 0, last = 0;
  const auto put_some = [&](int64_t count) {
    for (; count > 0 && next < last; --count, ++next)
      put(next, done->left + (next - first) * 16, done->right + (next - first) * 16);
  };
  for (int64_t row = 0; row < x.rows; row += 2 * ROWS) {
    const int64_t count = std::min(2 * ROWS, x.rows - row);
    Sums& own = sums[row / (2 * ROWS) % 2];
    if (count > ROWS)
      multiply_tall(x.of(row), pair, x.depth, Ahead(pair, x.depth, row, x.rows), [&] { put_some(2); }, own);
    else
      multiply_flat(x.of(row), pair, x.depth, own);
    put_some(2 * ROWS);
    done = &own;
    first = next = row;
    last = row + count;
  }
  put_some(2 * ROWS);
}

// y [rows, n] from `column` on, 32 columns.
void put_pair(const Operand& x, const Panels& panels, const float* bias, int64_t n, int64_t column, float* y) {
  const __mmask16 wanted[2] = {lanes_below(n - column), lanes_below(n - column - 16)};
  const __m512 zero = _mm512_setzero_ps();
  const __m512 left = bias ? _mm512_maskz_loadu_ps(wanted[0], bias + column) : zero;
  const __m512 right = bias ? _mm512_maskz_loadu_ps(wanted[1], bias + column + 16) : zero;
  const Pair pair{panels.of(column), panels.of(column + 16), panels.of(column + 32), panels.of(column + 48)};
  multiply(x, pair, [&](int64_t row, const float* left_sums, const float* right_sums) {
    float* to = y + row * n + column;
    _mm512_mask_storeu_ps(to, wanted[0], _mm512_add_ps(_mm512_load_ps(left_sums), left));
    _mm512_mask_storeu_ps(to + 16, wanted[1], _mm512_add_ps(_mm512_load_ps(right_sums), right));
  });
}

// Columns `first` to `last` of y [rows, n]; `first` a multiple of 32.
void put_columns(const Operand& x, const Panels& panels, const float* bias, int64_t n, int64_t first, int64_t last,
                 float* y) {
  for (int64_t column = first; column < last; column += 32) put_pair(x, panels, bias, n, column, y);
}

// silu(gate) * up, as good as a result needs that is rounded to bfloat16.
inline __m256i gated(__m512 gate, __m512 up) {
  const __m512 power = power_of_two(_mm512_mul_ps(gate, _mm512_set1_ps(-1.44269504f)));
  const __m512 share = _mm512_rcp14_ps(_mm512_add_ps(power, _mm512_set1_ps(1.0f)));
  return narrowed(_mm512_mul_ps(_mm512_mul_ps(gate, share), up));
}

// The middle of an MLP from `column` on, 32 columns; gates are the first columns of `gate_up`, then come the others.
void put_gated(const Operand& x, const Panels& gate_up, int64_t column, const Operand& middle) {
  for (int64_t half = column; half < column + 32; half += 16) {
    const int64_t other = middle.depth + half;
    const Pair pair{gate_up.of(half), gate_up.of(other), gate_up.of(half + 16), gate_up.of(other + 16)};
    multiply(x, pair, [&](int64_t row, const float* gates, const float* ups) {
      _mm256_store_si256((__m256i*)middle.at(row, half), gated(_mm512_load_ps(gates), _mm512_load_ps(ups)));
    });
  }
}

// Slots `first` to `last`, up to a whole tile; `row_of(slot)` is the row of x [.., width] that comes to one, negative:
// zeros.
template <typename RowOf>
void narrow_rows(const float* x, int64_t width, const Operand& to, int64_t first, int64_t last, RowOf&& row_of) {
  for (int64_t slot = first; slot < up_to(last, ROWS); ++slot) {
    const int64_t row = row_of(slot);
    for (int64_t k = 0; k < to.depth; k += DEPTH)
      if (row < 0)
        std::memset(to.at(slot, k), 0, DEPTH * 2);
      else
        narrow_row(x + row * width + k, width - k, 1.0f, to.at(slot, k), DEPTH);
  }
}

// Many rows are shared out as such: a thread reads what it has written itself, and multiplies it by all of a weight.
// Few wait for the weight, so that is shared out.
constexpr int64_t MANY = 64;  // rows of each thread

inline bool are_many(int64_t rows, int threads) { return rows >= MANY * threads; }

// Calls `piece(first, last)` for columns [n] of a product, 32 at a time, with tiles.
template <typename Piece>
void share_columns(int threads, int64_t n, Piece&& piece) {
  const int64_t pairs = (n + 31) / 32;
  share_out(threads, pairs, grain_of(pairs, threads), [&](int64_t first, int64_t last) {
    const Tiles tiles;
    piece(first * 32, last * 32);
  });
}

struct Mlp {
  Panels gate_up, down;
  int64_t hidden;

  void put_middle(const Operand& x, const Operand& middle, int64_t first, int64_t last) const {
    for (int64_t column = first; column < last; column += 32) put_gated(x, gate_up, column, middle);
  }
  void put(const Operand& middle, float* y, int64_t first, int64_t last) const {
    put_columns(middle, down, nullptr, hidden, first, last, y);
  }
};

// Rows sorted by expert. An expert's rows begin with a tile; behind its last one come slots without a row.
struct Sorted {
  struct Part {
    int64_t expert, first, rows;
  };
  std::vector<Part> parts;      // of the experts that were hit
  std::vector<int64_t> row_of;  // of each slot, -1: none
  // Of each row, in ascending order of expert: which slots have its results, and what they weigh; a slot of -1: none.
  std::vector<int64_t> slots;
  std::vector<float> weights;
  int64_t top_k;

  Sorted(const int64_t* ids, const float* own_weights, int64_t rows, int64_t top_k, int64_t experts)
      : slots(rows * top_k, -1), weights(rows * top_k), top_k(top_k) {
    std::vector<int64_t> next(experts, 0);
    for (int64_t i = 0; i < rows * top_k; ++i)
      if (ids[i] >= 0 && ids[i] < experts) ++next[ids[i]];
    int64_t first = 0;
    for (int64_t expert = 0; expert < experts; ++expert) {
      const int64_t count = next[expert];
      next[expert] = first;
      if (count) parts.push_back({expert, first, count});
      first += up_to(count, ROWS);
    }
    row_of.assign(first, -1);
    std::vector<int64_t> order;
    for (int64_t row = 0; row < rows; ++row) {
      order.clear();
      for (int64_t i = row * top_k; i < (row + 1) * top_k; ++i)
        if (ids[i] >= 0 && ids[i] < experts) order.push_back(i);
      std::sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return ids[a] < ids[b]; });
      for (size_t place = 0; place < order.size(); ++place) {
        const int64_t slot = next[ids[order[place]]]++;
        row_of[slot] = row;
        slots[row * top_k + place] = slot;
        weights[row * top_k + place] = own_weights[order[place]];
      }
    }
  }

  // The parts, large ones in even pieces of about `wanted` rows: a small rest would cost a whole pass over the weights.
  std::vector<Part> cut(int64_t wanted) const {
    std::vector<Part> pieces;
    for (const Part& part : parts) {
      const int64_t count = std::max<int64_t>(1, (part.rows + wanted / 2) / wanted);
      const int64_t most = up_to((part.rows + count - 1) / count, ROWS);
      for (int64_t row = 0; row < part.rows; row += most)
        pieces.push_back({part.expert, part.first + row, std::min(most, part.rows - row)});
    }
    return pieces;
  }

  // Of all slots' `results` [slots, hidden] those of one row, weighted.
  void add_up(int64_t row, const float* results, int64_t hidden, float* to) const {
    std::fill(to, to + hidden, 0.0f);
    for (int64_t place = row * top_k; place < (row + 1) * top_k && slots[place] >= 0; ++place) {
      const float *from = results + slots[place] * hidden, weight = weights[place];
      for (int64_t i = 0; i < hidden; ++i) to[i] += from[i] * weight;
    }
  }
};

thread_local Scratch scratch;

}  // namespace

extern "C" {

// Asks the kernel for the tiles of this process: they are not given unasked.
int hpu_has_tiles() {
  constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
  return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}

// weight [n, depth] to panels of 16 columns, an even number of them, depth up to a multiple of 32: of each panel the
// tiles, of a tile 16 rows with a pair of elements of each column.
void hpu_pack_tiles(const uint16_t* weight, int64_t n, int64_t depth, uint16_t* packed) {
  const int64_t padded = up_to(depth, DEPTH);
  for (int64_t column = 0; column < up_to(n, 32); ++column)
    for (int64_t k = 0; k < padded; ++k)
      packed[column / 16 * padded * 16 + k / 2 * 32 + column % 16 * 2 + k % 2] =
          column < n && k < depth ? weight[column * depth + k] : 0;
}

void hpu_linear_tiles(const float* x, int64_t rows, const uint16_t* weight, const float* bias, int64_t n,
                      int64_t depth, float* y, int threads) {
  const int64_t padded = up_to(depth, DEPTH);
  const Operand narrow{scratch.of(up_to(rows, ROWS) * padded), rows, padded};
  const Panels panels{weight, padded};
  const auto row_of = [&](int64_t slot) { return slot < rows ? slot : -1; };
  if (are_many(rows, threads)) {
    share_out(threads, rows, row_grain(rows, threads), [&](int64_t first, int64_t last) {
      const Tiles tiles;
      narrow_rows(x, depth, narrow, first, last, row_of);
      put_columns(narrow.part(first, last - first), panels, bias, n, 0, n, y + first * n);
    });
    return;
  }
  narrow_rows(x, depth, narrow, 0, rows, row_of);
  share_columns(threads, n,
                [&](int64_t first, int64_t last) { put_columns(narrow, panels, bias, n, first, last, y); });
}

// x, y [rows, hidden]; packed gate_up [2 * width, hidden], gates first, and down [hidden, width]; 32 divides width.
void hpu_mlp_tiles(const float* x, int64_t rows, const uint16_t* gate_up, const uint16_t* down, int64_t hidden,
                   int64_t width, float* y, int threads) {
  const int64_t padded = up_to(hidden, DEPTH), all_rows = up_to(rows, ROWS);
  const Operand narrow{scratch.of(all_rows * (padded + width)), rows, padded};
  const Operand middle{narrow.tiles + all_rows * padded, rows, width};
  const Mlp mlp{{gate_up, padded}, {down, width}, hidden};
  const auto row_of = [&](int64_t slot) { return slot < rows ? slot : -1; };
  if (are_many(rows, threads)) {
    share_out(threads, rows, row_grain(rows, threads), [&](int64_t first, int64_t last) {
      const Tiles tiles;
      const Operand own = middle.part(first, last - first);
      narrow_rows(x, hidden, narrow, first, last, row_of);
      mlp.put_middle(narrow.part(first, last - first), own, 0, width);
      mlp.put(own, y + first * hidden, 0, hidden);
    });
    return;
  }
  narrow_rows(x, hidden, narrow, 0, rows, row_of);
  share_columns(threads, width, [&](int64_t first, int64_t last) { mlp.put_middle(narrow, middle, first, last); });
  share_columns(threads, hidden, [&](int64_t first, int64_t last) { mlp.put(middle, y, first, last); });
}

// The same for experts [experts], each with weights of its own: to y [rows, hidden] comes the sum of the results of a
// row's experts, ids [rows, top_k], times weights [rows, top_k], in ascending order of expert. Other ids are nobody's.
void hpu_experts_tiles(const float* x, int64_t rows, const int64_t* ids, const float* weights, int64_t top_k,
                       const uint16_t* const* gate_up, const uint16_t* const* down, int64_t experts, int64_t hidden,
                       int64_t width, float* y, int threads) {
  const Sorted sorted(ids, weights, rows, top_k, experts);
  const int64_t slots = sorted.row_of.size(), padded = up_to(hidden, DEPTH);
  uint16_t* memory = scratch.of(slots * (padded + width + 2 * padded));
  const Operand narrow{memory, slots, padded}, middle{memory + slots * padded, slots, width};
  float* results = reinterpret_cast<float*>(middle.tiles + slots * width);
  const auto row_of = [&](int64_t slot) { return sorted.row_of[slot]; };
  const auto mlp_of = [&](int64_t expert) { return Mlp{{gate_up[expert], padded}, {down[expert], width}, hidden}; };
  if (are_many(slots, threads)) {
    const std::vector<Sorted::Part> pieces = sorted.cut(MANY * 2);
    share_out(threads, pieces.size(), 1, [&](int64_t first, int64_t last) {
      const Tiles tiles;
      for (int64_t number = first; number < last; ++number) {
        const Sorted::Part& piece = pieces[number];
        const Mlp mlp = mlp_of(piece.expert);
        const Operand own = middle.part(piece.first, piece.rows);
        narrow_rows(x, hidden, narrow, piece.first, piece.first + piece.rows, row_of);
        mlp.put_middle(narrow.part(piece.first, piece.rows), own, 0, width);
        mlp.put(own, results + piece.first * hidden, 0, hidden);
      }
    });
  } else {
    narrow_rows(x, hidden, narrow, 0, slots, row_of);
    const int64_t all_middles = sorted.parts.size() * width, all_columns = sorted.parts.size() * padded;
    share_columns(threads, all_middles, [&](int64_t first, int64_t last) {
      for (int64_t at = first; at < last; at += 32) {
        const Sorted::Part& part = sorted.parts[at / width];
        const int64_t column = at % width;
        mlp_of(part.expert).put_middle(narrow.part(part.first, part.rows), middle.part(part.first, part.rows), column,
                                       column + 32);
      }
    });
    share_columns(threads, all_columns, [&](int64_t first, int64_t last) {
      for (int64_t at = first; at < last; at += 32) {
        const Sorted::Part& part = sorted.parts[at / padded];
        const int64_t column = at % padded;
        mlp_of(part.expert).put(middle.part(part.first, part.rows), results + part.first * hidden, column, column + 32);
      }
    });
  }
  share_out(threads, rows, std::max<int64_t>(16 * 1024 / hidden, row_grain(rows, threads)),
            [&](int64_t first, int64_t last) {
              for (int64_t row = first; row < last; ++row) sorted.add_up(row, results, hidden, y + row * hidden);
            });
}
}

#endif
