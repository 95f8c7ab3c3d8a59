// SPDX-License-Identifier: Apache-2.0
#include "counters.h"

#include <cstring>
#include <map>
#include <string>

namespace {
std::atomic<CallCounter*> newest{nullptr};
std::atomic<uint32_t> correlations{0};
thread_local uint32_t correlation_of_thread = 0;
}  // namespace

CallCounter::CallCounter(const char* name) : name(name), next(newest.load()) {
  while (!newest.compare_exchange_weak(next, this)) {
  }
}

std::atomic<const Profiler*>& profiler() {
  static auto* listening = new std::atomic<const Profiler*>(nullptr);
  return *listening;
}

Call::Call(CallCounter& counter) : name_(counter.name), profiler_(profiler()) {
  counter.calls++;
  correlation_ = correlation_of_thread = ++correlations;
  start_ns_ = profiler_ ? profiler_->now_ns() : 0;
}
Call::~Call() {
  if (profiler_) profiler_->call(name_, start_ns_, profiler_->now_ns(), correlation_);
}
uint32_t Call::correlation() { return correlation_of_thread; }

Totals& totals() {
  static auto* t = new Totals;
  return *t;
}

extern "C" {

uint64_t emulated_cuda_calls(const char* name) {
  uint64_t calls = 0;
  for (CallCounter* c = newest.load(); c; c = c->next)
    if (!strcmp(c->name, name)) calls += c->calls;
  return calls;
}

// The field of Totals with this name; all ones if there is none.
uint64_t emulated_cuda_total(const char* name) {
  Totals& t = totals();
  const std::map<std::string, std::atomic<uint64_t>*> fields = {
      {"h2d_bytes", &t.h2d_bytes},       {"d2h_bytes", &t.d2h_bytes},
      {"d2d_bytes", &t.d2d_bytes},       {"h2h_bytes", &t.h2h_bytes},
      {"pageable_bytes", &t.pageable_bytes}, {"tasks", &t.tasks},
      {"device_bytes", &t.device_bytes}, {"device_peak_bytes", &t.device_peak_bytes},
      {"pinned_bytes", &t.pinned_bytes}, {"pinned_peak_bytes", &t.pinned_peak_bytes},
  };
  auto field = fields.find(name);
  return field == fields.end() ? ~0ull : field->second->load();
}

// Null: nobody listens any more.
void emulated_cuda_listen(const Profiler* listening) { profiler() = listening; }

void emulated_cuda_reset_peaks() {
  totals().device_peak_bytes = totals().device_bytes.load();
  totals().pinned_peak_bytes = totals().pinned_bytes.load();
}
}
