// Vectors of this processor's width, in the compiler's own extension: the sources name no instruction set, and the same
// ones are built for each processor.
#pragma once

#include <cstdint>
#include <cstring>

namespace hpu {

#ifdef __AVX512F__
constexpr int LANES = 16;
#else
constexpr int LANES = 8;
#endif

typedef float Floats __attribute__((vector_size(LANES * 4)));
typedef int32_t Ints __attribute__((vector_size(LANES * 4)));
typedef uint32_t Words __attribute__((vector_size(LANES * 4)));
typedef uint16_t Halves __attribute__((vector_size(LANES * 2)));
typedef float Eight __attribute__((vector_size(32)));

template <typename Vector>
inline Vector load(const float* from) {
  Vector vector;
  std::memcpy(&vector, from, sizeof vector);
  return vector;
}

inline Floats widened(const float* from) { return load<Floats>(from); }

// bfloat16 is the upper half of a float32.
inline Floats widened(const uint16_t* from) {
  Halves halves;
  std::memcpy(&halves, from, sizeof halves);
  const Words words = __builtin_convertvector(halves, Words) << 16;
  Floats floats;
  std::memcpy(&floats, &words, sizeof floats);
  return floats;
}

template <typename Vector>
inline void store(float* to, const Vector& vector) {
  std::memcpy(to, &vector, sizeof vector);
}

// e to the x for x <= 88: 2^n times a polynomial on [-ln(2)/2, ln(2)/2] (Cephes' expf), 0 below -87. Off by at most
// 2 units in the last place; a lane's result depends on that lane alone.
inline Floats exponential(Floats x) {
  const Floats zero = {};
  const Floats bounded = x < -87.0f ? zero - 87.0f : x;
  const Floats scaled = bounded * 1.44269504f;
  // Adding and taking away 1.5 * 2^23 rounds to the nearest whole number.
  const Floats whole = (scaled + 12582912.0f) - 12582912.0f;
  const Floats rest = (bounded - whole * 0.693359375f) - whole * -2.12194440e-4f;
  Floats sum = rest * 1.9875691500e-4f + 1.3981999507e-3f;
  sum = sum * rest + 8.3334519073e-3f;
  sum = sum * rest + 4.1665795894e-2f;
  sum = sum * rest + 1.6666665459e-1f;
  sum = sum * rest + 5.0000001201e-1f;
  sum = sum * rest * rest + rest + 1.0f;
  const Ints bits = (__builtin_convertvector(whole, Ints) + 127) << 23;
  Floats power;
  std::memcpy(&power, &bits, sizeof power);
  return x < -87.0f ? zero : sum * power;
}

}  // namespace hpu
