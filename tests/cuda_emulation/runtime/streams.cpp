// SPDX-License-Identifier: Apache-2.0
#include "streams.h"

#include <map>
#include <thread>

#include "counters.h"
#include "devices.h"
#include "errors.h"
#include "settings.h"

namespace {

// splitmix64: the same delays for the same seed, whatever the threads do.
uint64_t mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}
double unit(uint64_t x) { return (mix(x) >> 11) * (1.0 / 9007199254740992.0); }

// Streams are never deleted: their threads may outlive everything else in the process.
std::mutex& all_mutex() {
  static auto* m = new std::mutex;
  return *m;
}
std::vector<Stream*>& all() {
  static auto* streams = new std::vector<Stream*>;
  return *streams;
}
Stream* make_stream(int device, int priority) {
  std::lock_guard<std::mutex> lock(all_mutex());
  auto* stream = new Stream((int)all().size(), device, priority);
  all().push_back(stream);
  return stream;
}
Stream& default_stream(int device) {
  static auto* streams = [] {
    auto* made = new std::vector<Stream*>;
    for (int d = 0; d < settings().devices; d++) made->push_back(make_stream(d, 0));
    return made;
  }();
  return *(*streams)[device];
}

// A point in the order of a stream.
struct Point {
  std::mutex mutex;
  std::condition_variable reached;
  bool is_reached = false;
  std::chrono::steady_clock::time_point at;

  void reach() {
    std::lock_guard<std::mutex> lock(mutex);
    at = std::chrono::steady_clock::now();
    is_reached = true;
    reached.notify_all();
  }
  void wait() {
    std::unique_lock<std::mutex> lock(mutex);
    reached.wait(lock, [&] { return is_reached; });
  }
  bool ready() {
    std::lock_guard<std::mutex> lock(mutex);
    return is_reached;
  }
};

struct Event {
  explicit Event(unsigned flags) : flags(flags) {}
  const unsigned flags;
  std::mutex mutex;
  std::shared_ptr<Point> point;      // where it was recorded last
  std::shared_ptr<Capture> capture;  // or the capture that it was recorded in

  std::shared_ptr<Point> last() {
    std::lock_guard<std::mutex> lock(mutex);
    return point;
  }
  std::shared_ptr<Capture> captured() {
    std::lock_guard<std::mutex> lock(mutex);
    return capture;
  }
};
Event& event_of(cudaEvent_t handle) { return *(Event*)handle; }

}  // namespace

void Stream::put(Task task) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (capture_) {
    capture_->tasks.push_back(std::move(task));
    return;
  }
  totals().tasks++;
  if (settings().serial) {
    lock.unlock();
    task();
    return;
  }
  tasks_.push_back(std::move(task));
  if (!started_) {
    started_ = true;
    std::thread([this] { work(); }).detach();
  }
  given_.notify_one();
}

void Stream::work() {
  for (uint64_t number = 1;; number++) {
    Task task;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      given_.wait(lock, [&] { return !tasks_.empty(); });
      task = std::move(tasks_.front());
      tasks_.pop_front();
      busy_ = true;
    }
    delay(number);
    task();
    task = nullptr;  // what it holds is gone before the stream is called idle
    std::lock_guard<std::mutex> lock(mutex_);
    busy_ = false;
    if (tasks_.empty()) idle_.notify_all();
  }
}

void Stream::delay(uint64_t number) const {
  if (settings().delay_us <= 0) return;
  uint64_t key = mix(settings().seed) ^ mix(id * 1000003ull + number);
  if (unit(key) < settings().delayed_share)
    std::this_thread::sleep_for(std::chrono::duration<double, std::micro>(settings().delay_us * unit(key + 1)));
}

void Stream::drain() {
  std::unique_lock<std::mutex> lock(mutex_);
  idle_.wait(lock, [&] { return tasks_.empty() && !busy_; });
}

bool Stream::is_done() {
  std::lock_guard<std::mutex> lock(mutex_);
  return tasks_.empty() && !busy_;
}

std::shared_ptr<Capture> Stream::capture() {
  std::lock_guard<std::mutex> lock(mutex_);
  return capture_;
}

void Stream::set_capture(std::shared_ptr<Capture> capture) {
  std::lock_guard<std::mutex> lock(mutex_);
  capture_ = std::move(capture);
}

Stream& stream_of(cudaStream_t handle) {
  return (uintptr_t)handle <= (uintptr_t)cudaStreamPerThread ? default_stream(current_device()) : *(Stream*)handle;
}

std::vector<Stream*> streams_of(int device) {
  std::lock_guard<std::mutex> lock(all_mutex());
  std::vector<Stream*> streams;
  for (Stream* s : all())
    if (device < 0 || s->device == device) streams.push_back(s);
  return streams;
}

void drain_streams(int device) {
  for (Stream* s : streams_of(device)) s->drain();
}

extern "C" {

cudaError_t cudaDeviceSynchronize() {
  COUNTED();
  for (Stream* s : streams_of(current_device()))
    if (s->capture()) return failed(cudaErrorStreamCaptureUnsupported);
  drain_streams(current_device());
  return after_waiting();
}

// -- streams
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* handle, unsigned, int priority) {
  COUNTED();
  default_stream(current_device());
  *handle = (cudaStream_t)make_stream(current_device(), priority);
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* handle, unsigned flags) {
  return cudaStreamCreateWithPriority(handle, flags, 0);
}
cudaError_t cudaStreamCreate(cudaStream_t* handle) { return cudaStreamCreateWithPriority(handle, 0, 0); }
cudaError_t cudaStreamDestroy(cudaStream_t handle) {
  COUNTED();
  stream_of(handle).drain();
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  COUNTED();
  if (stream_of(handle).capture()) return failed(cudaErrorStreamCaptureUnsupported);
  stream_of(handle).drain();
  return after_waiting();
}
cudaError_t cudaStreamQuery(cudaStream_t handle) {
  COUNTED();
  return stream_of(handle).is_done() ? cudaSuccess : failed(cudaErrorNotReady);
}
cudaError_t cudaStreamGetPriority(cudaStream_t handle, int* priority) {
  COUNTED();
  *priority = stream_of(handle).priority;
  return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event, unsigned) {
  COUNTED();
  if (auto capture = event_of(event).captured()) {  // a stream that waits for a captured event joins the capture
    stream_of(handle).set_capture(capture);
  } else if (auto point = event_of(event).last()) {
    stream_of(handle).put([point] { point->wait(); });
  }
  return cudaSuccess;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t handle, cudaHostFn_t function, void* data) {
  COUNTED();
  stream_of(handle).put([=] { function(data); });
  return cudaSuccess;
}
cudaError_t cudaStreamAddCallback(cudaStream_t handle, cudaStreamCallback_t function, void* data, unsigned) {
  COUNTED();
  stream_of(handle).put([=] { function(handle, cudaSuccess, data); });
  return cudaSuccess;
}

// A task of the operators, in the place of a kernel. `release` is called once it will not be run again: a graph runs it
// at each launch.
void emulated_cuda_enqueue(cudaStream_t handle, void (*run)(void*), void (*release)(void*), void* data) {
  COUNTED_AS("cudaLaunchKernel");
  std::shared_ptr<void> owned(data, release);
  stream_of(handle).put([run, owned] { run(owned.get()); });
}

// -- events
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* handle, unsigned flags) {
  COUNTED();
  *handle = (cudaEvent_t) new Event(flags);
  return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* handle) { return cudaEventCreateWithFlags(handle, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t handle) {
  COUNTED();
  delete &event_of(handle);
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t handle, cudaStream_t stream) {
  COUNTED();
  Event& event = event_of(handle);
  auto capture = stream_of(stream).capture();
  auto point = capture ? nullptr : std::make_shared<Point>();
  {
    std::lock_guard<std::mutex> lock(event.mutex);
    event.point = point;
    event.capture = capture;
  }
  if (point) stream_of(stream).put([point] { point->reach(); });
  return cudaSuccess;
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t handle, cudaStream_t stream, unsigned) {
  return cudaEventRecord(handle, stream);
}
cudaError_t cudaEventQuery(cudaEvent_t handle) {
  COUNTED();
  auto point = event_of(handle).last();
  return !point || point->ready() ? cudaSuccess : failed(cudaErrorNotReady);
}
cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
  COUNTED();
  if (auto point = event_of(handle).last()) point->wait();
  return after_waiting();
}
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t start, cudaEvent_t end) {
  COUNTED();
  if ((event_of(start).flags | event_of(end).flags) & cudaEventDisableTiming)
    return failed(cudaErrorInvalidResourceHandle);
  auto first = event_of(start).last(), second = event_of(end).last();
  if (!first || !second) return failed(cudaErrorInvalidResourceHandle);
  if (!first->ready() || !second->ready()) return failed(cudaErrorNotReady);
  *ms = std::chrono::duration<float, std::milli>(second->at - first->at).count();
  return cudaSuccess;
}
}
