// SPDX-License-Identifier: Apache-2.0
// What was called and what was moved: figures that a test reads through emulated_cuda_calls and emulated_cuda_total,
// and records for a profiler, while one listens (profiler/cupti.cpp).
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>

// Calls of one function of the runtime. It lives as long as the process.
struct CallCounter {
  explicit CallCounter(const char* name);
  const char* name;
  std::atomic<uint64_t> calls{0};
  CallCounter* next;
};

struct CopyRecord {
  int to_kind, from_kind;  // as enum class Kind
  size_t bytes;
  int device, stream;
  uint64_t start_ns, end_ns;
  uint32_t correlation;  // of the call
};

struct Profiler {
  uint64_t (*now_ns)();
  void (*call)(const char* name, uint64_t start_ns, uint64_t end_ns, uint32_t correlation);
  void (*copy)(const CopyRecord&);
};
std::atomic<const Profiler*>& profiler();

// A call while it runs.
class Call {
 public:
  explicit Call(CallCounter& counter);
  ~Call();
  // Of the newest call of this thread.
  static uint32_t correlation();

 private:
  const char* name_;
  const Profiler* profiler_;
  uint64_t start_ns_;
  uint32_t correlation_;
};

// First lines of a function of the runtime that tests and profilers may ask for.
#define COUNTED_AS(name)                          \
  static auto* call_counter = new CallCounter(name); \
  Call call(*call_counter)
#define COUNTED() COUNTED_AS(__func__)

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
