// SPDX-License-Identifier: Apache-2.0
// Kernels are registered and cannot run: a launch fails and names the kernel. Operators go around them (operators/).
// The one exception is torch.cuda._sleep's.
#include <cuda_runtime_api.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <vector>

#include "counters.h"
#include "errors.h"
#include "settings.h"
#include "streams.h"

namespace {

constexpr double CYCLES_PER_S = 1.4e9;

std::mutex& names_mutex() {
  static auto* m = new std::mutex;
  return *m;
}
std::unordered_map<const void*, const char*>& names() {
  static auto* m = new std::unordered_map<const void*, const char*>;
  return *m;
}
const char* name_of(const void* kernel) {
  std::lock_guard<std::mutex> lock(names_mutex());
  auto at = names().find(kernel);
  return at == names().end() ? "a kernel that was not registered" : at->second;
}

cudaError_t launch(const void* kernel, void** arguments, cudaStream_t stream) {
  const char* name = name_of(kernel);
  if (strstr(name, "spin_kernel")) {
    std::chrono::duration<double> takes(*(int64_t*)arguments[0] / CYCLES_PER_S);
    stream_of(stream).put([=] { std::this_thread::sleep_for(takes); });
    return cudaSuccess;
  }
  fprintf(stderr, "emulated CUDA: no kernel runs here: %.300s\n", name);
  return failed(cudaErrorNotSupported);
}

struct LaunchShape {
  dim3 grid, block;
  size_t shared_bytes;
  cudaStream_t stream;
};
std::vector<LaunchShape>& pushed() {
  static thread_local auto* shapes = new std::vector<LaunchShape>;
  return *shapes;
}

}  // namespace

extern "C" {

// -- what nvcc's code calls
void** __cudaRegisterFatBinary(void*) { return (void**)malloc(8); }
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
char __cudaInitModule(void**) { return 1; }
void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, uint3*, uint3*, dim3*, dim3*,
                            int*) {
  std::lock_guard<std::mutex> lock(names_mutex());
  names()[host] = name;
}
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared_bytes, struct CUstream_st* stream) {
  pushed().push_back({grid, block, shared_bytes, stream});
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared_bytes, void* stream) {
  if (pushed().empty()) return cudaErrorMissingConfiguration;
  LaunchShape shape = pushed().back();
  pushed().pop_back();
  *grid = shape.grid;
  *block = shape.block;
  *shared_bytes = shape.shared_bytes;
  *(cudaStream_t*)stream = shape.stream;
  return cudaSuccess;
}
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = (cudaKernel_t)function;
  return cudaSuccess;
}

// -- launches
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3, dim3, void** arguments, size_t, cudaStream_t stream) {
  COUNTED();
  return launch((const void*)kernel, arguments, stream);
}
cudaError_t cudaLaunchKernel(const void* function, dim3, dim3, void** arguments, size_t, cudaStream_t stream) {
  COUNTED();
  return launch(function, arguments, stream);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* configuration, const void* function, void** arguments) {
  COUNTED();
  return launch(function, arguments, configuration->stream);
}
cudaError_t cudaLaunchCooperativeKernel(const void* function, dim3, dim3, void** arguments, size_t,
                                        cudaStream_t stream) {
  COUNTED();
  return launch(function, arguments, stream);
}

// -- what may be asked of a kernel
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  memset(attributes, 0, sizeof *attributes);
  attributes->maxThreadsPerBlock = 1024;
  attributes->binaryVersion = attributes->ptxVersion = settings().major * 10 + settings().minor;
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int, size_t) {
  *blocks = 2;
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int, size_t, unsigned) {
  *blocks = 2;
  return cudaSuccess;
}
}
