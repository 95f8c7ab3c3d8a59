// SPDX-License-Identifier: Apache-2.0
// What was called and what was moved: figures that a test reads through emulated_cuda_calls and emulated_cuda_total.
#pragma once
#include <atomic>
#include <cstdint>

// Calls of one function of the runtime. It lives as long as the process.
struct CallCounter {
  explicit CallCounter(const char* name);
  const char* name;
  std::atomic<uint64_t> calls{0};
  CallCounter* next;
};

// First line of a function of the runtime that tests may ask for.
#define COUNTED()                              \
  do {                                         \
    static auto* counter = new CallCounter(__func__); \
    counter->calls++;                          \
  } while (0)

struct Totals {
  std::atomic<uint64_t> h2d_bytes{0}, d2h_bytes{0}, d2d_bytes{0}, h2h_bytes{0};
  std::atomic<uint64_t> pageable_bytes{0};  // part of the above: copies from or to memory that is not pinned
  std::atomic<uint64_t> tasks{0};           // of all streams
  std::atomic<uint64_t> device_bytes{0}, device_peak_bytes{0};  // of all devices
  std::atomic<uint64_t> pinned_bytes{0}, pinned_peak_bytes{0};
};
Totals& totals();

inline void raise_to(std::atomic<uint64_t>& peak, uint64_t now) {
  uint64_t before = peak;
  while (before < now && !peak.compare_exchange_weak(before, now)) {
  }
}
