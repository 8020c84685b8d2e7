// What the kernels for AMX tiles share. Operands are bfloat16, sums float32.
//
// A tile instruction adds, for each row and column, the products of 16 pairs in order. So an element is one chain over
// k whatever stands beside it, and a row has the same bits in every batch.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "lanes.h"

namespace hpu {

constexpr int64_t ROWS = 16;            // of a tile
constexpr int64_t DEPTH = 32;           // elements of a row of an operand
constexpr int64_t TILE = ROWS * DEPTH;  // elements of an operand: one KiB

struct alignas(64) Config {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// All eight tiles whole, for as long as this lives. What another library of this thread had set up comes back: oneDNN
// remembers what it loaded last and would not load it again.
class Tiles {
 public:
  Tiles() {
    static const Config whole;
    _tile_storeconfig(&before_);
    _tile_loadconfig(&whole);
  }
  ~Tiles() {
    if (before_.palette)
      _tile_loadconfig(&before_);
    else
      _tile_release();
  }

 private:
  Config before_;
};

// Memory that a thread keeps from call to call.
class Scratch {
 public:
  uint16_t* of(int64_t count) {
    if (count > count_) {
      memory_.reset(static_cast<uint16_t*>(std::aligned_alloc(64, (count * 2 + 63) / 64 * 64)));
      count_ = count;
    }
    return memory_.get();
  }

 private:
  struct Free {
    void operator()(void* memory) const { std::free(memory); }
  };
  std::unique_ptr<uint16_t, Free> memory_;
  int64_t count_ = 0;
};

inline int64_t up_to(int64_t count, int64_t multiple) { return (count + multiple - 1) / multiple * multiple; }

inline __m256i narrowed(__m512 floats) { return (__m256i)_mm512_cvtneps_pbh(floats); }

// 2 to the x: as good as a result needs that is rounded to bfloat16, off by at most 8e-5 of it.
inline __m512 power_of_two(__m512 x) {
  const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 rest = _mm512_sub_ps(x, whole);
  // The polynomial of third degree whose greatest error on [-1/2, 1/2] is smallest.
  __m512 sum = _mm512_set1_ps(5.5171670e-2f);
  sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(2.4261113e-1f));
  sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(6.9326099e-1f));
  sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(9.9992807e-1f));
  return _mm512_scalef_ps(sum, whole);
}

inline __mmask16 lanes_below(int64_t count) {
  return count >= 16 ? __mmask16(-1) : count <= 0 ? __mmask16(0) : __mmask16((1u << count) - 1);
}

// `width` floats, scaled, to bfloat16, and zeros up to `padded`, a multiple of 16.
inline void narrow_row(const float* from, int64_t width, float scale, uint16_t* to, int64_t padded) {
  const __m512 factor = _mm512_set1_ps(scale);
  for (int64_t i = 0; i < padded; i += 16) {
    const __m512 own = _mm512_maskz_loadu_ps(lanes_below(width - i), from + i);
    _mm256_storeu_si256((__m256i*)(to + i), narrowed(_mm512_mul_ps(own, factor)));
  }
}

}  // namespace hpu
