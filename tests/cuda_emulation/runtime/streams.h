// SPDX-License-Identifier: Apache-2.0
// A stream is a queue of tasks that a thread of its own does in order; an event is a point in that order.
#pragma once
#include <cuda_runtime_api.h>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

using Task = std::function<void()>;

// What a capture has recorded: the tasks of all its streams, in the order of their calls.
struct Capture {
  unsigned long long id;
  std::vector<Task> tasks;
};

class Stream {
 public:
  Stream(int id, int device, int priority) : id(id), device(device), priority(priority) {}
  // Enqueues a task; records it where the stream is being captured.
  void put(Task task);
  // Waits until nothing is left.
  void drain();
  bool is_done();
  std::shared_ptr<Capture> capture();
  void set_capture(std::shared_ptr<Capture> capture);

  const int id, device, priority;

 private:
  void work();
  void delay(uint64_t number) const;

  std::mutex mutex_;
  std::condition_variable given_, idle_;
  std::deque<Task> tasks_;
  std::shared_ptr<Capture> capture_;
  bool started_ = false, busy_ = false;
};

// The stream of a handle; the current device's own for the default handles.
Stream& stream_of(cudaStream_t handle);

// Every stream of the device, or of all devices (-1).
std::vector<Stream*> streams_of(int device);
void drain_streams(int device);
