// SPDX-License-Identifier: Apache-2.0
// cuBLAS: a matrix product takes a workspace from torch's allocator, one for each handle (a thread's) and stream.
#pragma once
#include <ATen/cuda/CUDAContextLight.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAStream.h>

#include <mutex>
#include <set>
#include <shared_mutex>
#include <string>
#include <vector>

namespace emulated {

// A thread's handle goes to another thread when it ends, as in torch's pool of handles.
class CublasHandle {
 public:
  CublasHandle() {
    std::lock_guard<std::mutex> lock(mutex());
    if (spare().empty()) {
      id = malloc(16);
    } else {
      id = spare().back();
      spare().pop_back();
    }
  }
  ~CublasHandle() {
    std::lock_guard<std::mutex> lock(mutex());
    spare().push_back(id);
  }
  void* id;

 private:
  static std::vector<void*>& spare() {
    static auto* ids = new std::vector<void*>;
    return *ids;
  }
  static std::mutex& mutex() {
    static auto* m = new std::mutex;
    return *m;
  }
};

inline bool is_product(const std::string& name) {
  static const std::set<std::string> names = {
      "aten::mm",          "aten::mm.out",    "aten::addmm",  "aten::addmm.out",        "aten::addmm_",
      "aten::bmm",         "aten::bmm.out",   "aten::baddbmm", "aten::baddbmm.out",     "aten::baddbmm_",
      "aten::addmv",       "aten::addmv.out", "aten::dot",    "aten::_addmm_activation", "aten::_scaled_mm"};
  return names.count(name);
}

inline void take_workspace() {
  thread_local CublasHandle handle;
  auto& workspaces = at::cuda::cublas_handle_stream_to_workspace();
  auto key = std::make_tuple(handle.id, (void*)c10::cuda::getCurrentCUDAStream().stream());
  {
    std::shared_lock<std::shared_mutex> lock(workspaces.mutex);
    if (workspaces.map.count(key)) return;
  }
  size_t bytes = at::cuda::getChosenWorkspaceSize();
  auto memory = c10::cuda::CUDACachingAllocator::get()->allocate(bytes);
  std::unique_lock<std::shared_mutex> lock(workspaces.mutex);
  workspaces.map.emplace(key, std::make_pair(std::move(memory), bytes));
}

}  // namespace emulated
