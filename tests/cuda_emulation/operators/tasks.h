// SPDX-License-Identifier: Apache-2.0
// A task on the current stream.
#pragma once
#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include <functional>
#include <string>

extern "C" void emulated_cuda_fail(const char* what);
extern "C" void emulated_cuda_enqueue(cudaStream_t, void (*run)(void*), void (*release)(void*), void* data);

namespace emulated {

// Without arithmetic, memory and order alone are emulated, at sizes that no CPU could train.
inline bool arithmetic() {
  static const bool on = [] {
    const char* text = getenv("EMULATED_CUDA_ARITHMETIC");
    return !text || !*text || *text != '0';
  }();
  return on;
}

struct NamedTask {
  std::string name;
  std::function<void()> run;
};

inline void run_task(void* data) {
  auto* task = (NamedTask*)data;
  try {
    c10::InferenceMode inference(false);
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    task->run();
  } catch (const std::exception& error) {
    emulated_cuda_fail((task->name + ": " + std::string(error.what()).substr(0, 600)).c_str());
  }
}

// `always`: even without arithmetic, because a value that the caller waits for depends on it.
inline void enqueue(const std::string& name, std::function<void()> run, bool always = false) {
  if (!arithmetic() && !always) run = [] {};
  emulated_cuda_enqueue(c10::cuda::getCurrentCUDAStream().stream(), run_task,
                        [](void* data) { delete (NamedTask*)data; }, new NamedTask{name, std::move(run)});
}

inline void wait_for_the_stream() { c10::cuda::getCurrentCUDAStream().synchronize(); }

}  // namespace emulated
