// SPDX-License-Identifier: Apache-2.0
// Copies and fills. As with CUDA, a copy from pageable memory has read its source when the call returns, and one to
// pageable memory has ended.
#include <cuda_runtime_api.h>

#include <chrono>
#include <cstring>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "counters.h"
#include "errors.h"
#include "memory.h"
#include "settings.h"
#include "streams.h"

namespace {

using Clock = std::chrono::steady_clock;
constexpr size_t SMALL = 64 << 10;  // copied even without arithmetic: indices, numbers, lengths

bool is_done(size_t bytes) { return settings().arithmetic || bytes <= SMALL; }

// One copy at a time each way, as on a link.
enum Direction { H2D, D2H, OTHER };
std::mutex& link(Direction direction) {
  static auto* mutexes = new std::mutex[2];
  return mutexes[direction];
}

void move(void* to, const void* from, size_t bytes, Direction direction) {
  if (direction == OTHER || settings().link_bytes_per_s <= 0) {
    if (is_done(bytes)) memcpy(to, from, bytes);
    return;
  }
  std::lock_guard<std::mutex> lock(link(direction));
  std::chrono::duration<double> takes(bytes / settings().link_bytes_per_s);
  auto until = Clock::now() + std::chrono::duration_cast<Clock::duration>(takes);
  if (is_done(bytes)) memcpy(to, from, bytes);
  std::this_thread::sleep_until(until);
}

Direction direction_of(Kind to, Kind from) {
  if (to == Kind::device && from != Kind::device) return H2D;
  if (from == Kind::device && to != Kind::device) return D2H;
  return OTHER;
}

void count(Kind to, Kind from, size_t bytes) {
  Totals& t = totals();
  switch (direction_of(to, from)) {
    case H2D: t.h2d_bytes += bytes; break;
    case D2H: t.d2h_bytes += bytes; break;
    case OTHER: (to == Kind::device ? t.d2d_bytes : t.h2h_bytes) += bytes;
  }
  if (to == Kind::pageable || from == Kind::pageable) t.pageable_bytes += bytes;
}

cudaError_t copy(void* to, const void* from, size_t bytes, cudaStream_t handle, bool wait) {
  if (!bytes) return cudaSuccess;
  Kind target = kind_of(to), source = kind_of(from);
  Direction direction = direction_of(target, source);
  Stream& stream = stream_of(handle);
  count(target, source, bytes);
  std::shared_ptr<std::vector<char>> staged;
  if (source == Kind::pageable && !wait && is_done(bytes))
    staged = std::make_shared<std::vector<char>>((const char*)from, (const char*)from + bytes);
  CopyRecord record{(int)target, (int)source, bytes, stream.device, stream.id, 0, 0, Call::correlation()};
  stream.put([=]() mutable {
    const Profiler* listening = profiler();
    if (listening) record.start_ns = listening->now_ns();
    move(to, staged ? staged->data() : from, bytes, direction);
    if (!listening) return;
    record.end_ns = listening->now_ns();
    listening->copy(record);
  });
  if (!wait && target != Kind::pageable) return cudaSuccess;
  stream.drain();
  return after_waiting();
}

void fill(void* to, int value, size_t bytes, cudaStream_t handle) {
  if (is_done(bytes)) stream_of(handle).put([=] { memset(to, value, bytes); });
}

}  // namespace

extern "C" {

cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  COUNTED();
  return copy(to, from, bytes, nullptr, true);
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  COUNTED();
  return copy(to, from, bytes, stream, false);
}
cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t bytes, cudaStream_t stream) {
  COUNTED();
  return copy(to, from, bytes, stream, false);
}
cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                              size_t height, cudaMemcpyKind, cudaStream_t stream) {
  COUNTED();
  for (size_t row = 0; row < height; row++)
    copy((char*)to + row * to_pitch, (const char*)from + row * from_pitch, width, stream, false);
  return cudaSuccess;
}
cudaError_t cudaMemset(void* to, int value, size_t bytes) {
  COUNTED();
  fill(to, value, bytes, nullptr);
  stream_of(nullptr).drain();
  return after_waiting();
}
cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) {
  COUNTED();
  fill(to, value, bytes, stream);
  return cudaSuccess;
}
}
