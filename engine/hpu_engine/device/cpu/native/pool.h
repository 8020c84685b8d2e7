// Work shared out among threads that may come late or not at all.
//
// Whoever calls does the work, piece by piece; helpers that are awake in time take pieces too. The caller waits only
// for helpers that hold a piece, never for one that has no core: beside a busy neighbour nothing stands still.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <type_traits>

namespace hpu {

// A few pieces for each thread: who comes late still finds some, and nobody waits long for the last one.
inline int64_t grain_of(int64_t items, int threads, int64_t multiple = 1) {
  const int64_t pieces = int64_t(threads) * 4 * multiple;
  return std::max<int64_t>(1, (items + pieces - 1) / pieces) * multiple;
}

// Rows of one piece where every thread gets one: what a thread has computed it finds in its own caches when the next
// operation cuts its rows alike. A multiple of the 16 rows of a tile.
inline int64_t row_grain(int64_t rows, int threads) {
  const int64_t tiles = (rows + threads * 16 - 1) / (threads * 16);
  return std::max<int64_t>(1, tiles) * 16;
}

// Calls `piece(context, first, last)` for pieces of `items` of at most `grain`, by up to `threads` threads.
void share_out(int threads, int64_t items, int64_t grain, void (*piece)(void*, int64_t, int64_t), void* context);

// `body(first, last)` for all of `items`.
template <typename Body>
inline void share_out(int threads, int64_t items, int64_t grain, Body&& body) {
  if (threads < 2 || items <= grain) {
    if (items > 0) body(int64_t(0), items);
    return;
  }
  using Own = std::remove_reference_t<Body>;
  share_out(
      threads, items, grain,
      [](void* context, int64_t first, int64_t last) { (*static_cast<Own*>(context))(first, last); }, &body);
}

}  // namespace hpu
