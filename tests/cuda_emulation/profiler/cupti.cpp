// SPDX-License-Identifier: Apache-2.0
// libcupti.so.13: the part that torch.profiler uses to see calls of the runtime and copies. No kernels: operators run
// none. As in CUPTI, the profiler's buffer is asked for with the first record and handed back when full or flushed.
#include <cupti.h>
#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <map>
#include <mutex>
#include <string>

#include "../runtime/counters.h"
#include "../runtime/memory.h"

extern "C" void emulated_cuda_listen(const Profiler*);

namespace {

const std::map<std::string, uint32_t>& callback_numbers() {
  static const auto* numbers = new std::map<std::string, uint32_t>{
#include "callback_numbers.inc"
  };
  return *numbers;
}

std::mutex& mutex() {
  static auto* m = new std::mutex;
  return *m;
}
struct State {  // under mutex()
  bool calls = false, copies = false;
  uint8_t* buffer = nullptr;
  size_t bytes = 0, used_bytes = 0;  // of the buffer
  CUpti_BuffersCallbackRequestFunc request = nullptr;
  CUpti_BuffersCallbackCompleteFunc complete = nullptr;
};
State& state() {
  static auto* s = new State;
  return *s;
}

void hand_back() {
  State& s = state();
  if (s.buffer) s.complete(nullptr, 0, s.buffer, s.bytes, s.used_bytes);
  s.buffer = nullptr;
}

template <class Record>
void add(const Record& record) {
  State& s = state();
  if (!s.request) return;
  if (s.buffer && s.used_bytes + sizeof record > s.bytes) hand_back();
  if (!s.buffer) {
    size_t most_records = 0;
    s.used_bytes = 0;
    s.request(&s.buffer, &s.bytes, &most_records);
  }
  memcpy(s.buffer + s.used_bytes, &record, sizeof record);
  s.used_bytes += sizeof record;
}

std::atomic<CUpti_TimestampCallbackFunc> clock_of_profiler{nullptr};

uint64_t now_ns() {
  if (auto clock = clock_of_profiler.load()) return clock();
  return std::chrono::system_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
}

void note_call(const char* name, uint64_t start_ns, uint64_t end_ns, uint32_t correlation) {
  auto number = callback_numbers().find(name);
  if (number == callback_numbers().end()) return;
  std::lock_guard<std::mutex> lock(mutex());
  if (!state().calls) return;
  CUpti_ActivityAPI record{};
  record.kind = CUPTI_ACTIVITY_KIND_RUNTIME;
  record.cbid = number->second;
  record.start = start_ns;
  record.end = end_ns;
  record.processId = getpid();
  record.threadId = (uint32_t)pthread_self();
  record.correlationId = correlation;
  add(record);
}

uint8_t memory_kind(int kind) {
  switch ((Kind)kind) {
    case Kind::device: return CUPTI_ACTIVITY_MEMORY_KIND_DEVICE;
    case Kind::pinned: return CUPTI_ACTIVITY_MEMORY_KIND_PINNED;
    case Kind::pageable: return CUPTI_ACTIVITY_MEMORY_KIND_PAGEABLE;
  }
  return CUPTI_ACTIVITY_MEMORY_KIND_UNKNOWN;
}
uint8_t copy_kind(int to, int from) {
  bool to_device = (Kind)to == Kind::device, from_device = (Kind)from == Kind::device;
  if (to_device) return from_device ? CUPTI_ACTIVITY_MEMCPY_KIND_DTOD : CUPTI_ACTIVITY_MEMCPY_KIND_HTOD;
  return from_device ? CUPTI_ACTIVITY_MEMCPY_KIND_DTOH : CUPTI_ACTIVITY_MEMCPY_KIND_HTOH;
}

void note_copy(const CopyRecord& copy) {
  std::lock_guard<std::mutex> lock(mutex());
  if (!state().copies) return;
  CUpti_ActivityMemcpy6 record{};
  record.kind = CUPTI_ACTIVITY_KIND_MEMCPY;
  record.copyKind = copy_kind(copy.to_kind, copy.from_kind);
  record.srcKind = memory_kind(copy.from_kind);
  record.dstKind = memory_kind(copy.to_kind);
  record.bytes = copy.bytes;
  record.start = copy.start_ns;
  record.end = copy.end_ns;
  record.deviceId = copy.device;
  record.contextId = copy.device + 1;
  record.streamId = copy.stream + 7;  // the default stream of a device is number 7 in CUPTI
  record.correlationId = copy.correlation;
  record.copyCount = 1;
  add(record);
}

const Profiler LISTENING{now_ns, note_call, note_copy};

void listen() {
  emulated_cuda_listen(state().calls || state().copies ? &LISTENING : nullptr);
}

size_t size_of(CUpti_ActivityKind kind) {
  return kind == CUPTI_ACTIVITY_KIND_RUNTIME ? sizeof(CUpti_ActivityAPI) : sizeof(CUpti_ActivityMemcpy6);
}

CUptiResult switch_kind(CUpti_ActivityKind kind, bool on) {
  std::lock_guard<std::mutex> lock(mutex());
  if (kind == CUPTI_ACTIVITY_KIND_RUNTIME) state().calls = on;
  if (kind == CUPTI_ACTIVITY_KIND_MEMCPY) state().copies = on;
  listen();
  return CUPTI_SUCCESS;
}

}  // namespace

extern "C" {

CUptiResult cuptiGetVersion(uint32_t* version) {
  *version = CUPTI_API_VERSION;
  return CUPTI_SUCCESS;
}
CUptiResult cuptiGetResultString(CUptiResult result, const char** text) {
  *text = result == CUPTI_SUCCESS ? "CUPTI_SUCCESS" : "an error of the emulated CUPTI";
  return CUPTI_SUCCESS;
}
CUptiResult cuptiGetCallbackName(CUpti_CallbackDomain, uint32_t number, const char** name) {
  for (const auto& entry : callback_numbers())
    if (entry.second == number) {
      *name = entry.first.c_str();
      return CUPTI_SUCCESS;
    }
  return CUPTI_ERROR_INVALID_PARAMETER;
}

// -- callbacks: nobody is called back
CUptiResult cuptiSubscribe(CUpti_SubscriberHandle* subscriber, CUpti_CallbackFunc, void*) {
  static int one;
  *subscriber = (CUpti_SubscriberHandle)&one;
  return CUPTI_SUCCESS;
}
CUptiResult cuptiUnsubscribe(CUpti_SubscriberHandle) { return CUPTI_SUCCESS; }
CUptiResult cuptiEnableCallback(uint32_t, CUpti_SubscriberHandle, CUpti_CallbackDomain, CUpti_CallbackId) {
  return CUPTI_SUCCESS;
}
CUptiResult cuptiEnableDomain(uint32_t, CUpti_SubscriberHandle, CUpti_CallbackDomain) { return CUPTI_SUCCESS; }
CUptiResult cuptiFinalize() { return CUPTI_SUCCESS; }

// -- activities
CUptiResult cuptiActivityRegisterCallbacks(CUpti_BuffersCallbackRequestFunc request,
                                           CUpti_BuffersCallbackCompleteFunc complete) {
  std::lock_guard<std::mutex> lock(mutex());
  state().request = request;
  state().complete = complete;
  return CUPTI_SUCCESS;
}
CUptiResult cuptiActivityRegisterTimestampCallback(CUpti_TimestampCallbackFunc clock) {
  clock_of_profiler = clock;
  return CUPTI_SUCCESS;
}
CUptiResult cuptiActivityEnable(CUpti_ActivityKind kind) { return switch_kind(kind, true); }
CUptiResult cuptiActivityDisable(CUpti_ActivityKind kind) { return switch_kind(kind, false); }
CUptiResult cuptiActivityFlushAll(uint32_t) {
  std::lock_guard<std::mutex> lock(mutex());
  hand_back();
  return CUPTI_SUCCESS;
}
CUptiResult cuptiActivityGetNextRecord(uint8_t* buffer, size_t bytes, CUpti_Activity** record) {
  uint8_t* next = *record ? (uint8_t*)*record + size_of((*record)->kind) : buffer;
  if (next >= buffer + bytes) return CUPTI_ERROR_MAX_LIMIT_REACHED;
  *record = (CUpti_Activity*)next;
  return CUPTI_SUCCESS;
}
CUptiResult cuptiActivityGetNumDroppedRecords(CUcontext, uint32_t, size_t* dropped) {
  *dropped = 0;
  return CUPTI_SUCCESS;
}
CUptiResult cuptiActivitySetAttribute(CUpti_ActivityAttribute, size_t*, void*) { return CUPTI_SUCCESS; }
CUptiResult cuptiActivityEnableRuntimeApi(CUpti_CallbackId, uint8_t) { return CUPTI_SUCCESS; }
CUptiResult cuptiActivityEnableDriverApi(CUpti_CallbackId, uint8_t) { return CUPTI_SUCCESS; }
CUptiResult cuptiActivityEnableCudaEventDeviceTimestamps(uint8_t) { return CUPTI_SUCCESS; }
CUptiResult cuptiActivityPushExternalCorrelationId(CUpti_ExternalCorrelationKind, uint64_t) { return CUPTI_SUCCESS; }
CUptiResult cuptiActivityPopExternalCorrelationId(CUpti_ExternalCorrelationKind, uint64_t* last) {
  if (last) *last = 0;
  return CUPTI_SUCCESS;
}
}
