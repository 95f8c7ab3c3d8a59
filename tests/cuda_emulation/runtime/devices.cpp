// SPDX-License-Identifier: Apache-2.0
#include "devices.h"

#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstring>

#include "counters.h"
#include "errors.h"
#include "settings.h"

namespace {
thread_local int current = 0;
bool is_device(int device) { return device >= 0 && device < settings().devices; }
}  // namespace

int current_device() { return current; }

extern "C" {

cudaError_t cudaGetDeviceCount(int* count) {
  COUNTED();
  *count = settings().devices;
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  COUNTED();
  *device = current;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  COUNTED();
  if (!is_device(device)) return failed(cudaErrorInvalidDevice);
  current = device;
  return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* version) {
  COUNTED();
  *version = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* version) {
  COUNTED();
  *version = CUDART_VERSION;
  return cudaSuccess;
}

// An A100's figures where torch asks for them; few multiprocessors.
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int device) {
  COUNTED();
  if (!is_device(device)) return failed(cudaErrorInvalidDevice);
  memset(p, 0, sizeof *p);
  snprintf(p->name, sizeof p->name, "%s", settings().name);
  p->uuid.bytes[0] = (char)(device + 1);
  p->totalGlobalMem = settings().memory_bytes;
  p->major = settings().major;
  p->minor = settings().minor;
  p->multiProcessorCount = 8;
  p->maxThreadsPerBlock = 1024;
  p->maxThreadsPerMultiProcessor = 2048;
  p->warpSize = 32;
  p->sharedMemPerBlock = 48 << 10;
  p->sharedMemPerBlockOptin = 160 << 10;
  p->sharedMemPerMultiprocessor = 164 << 10;
  p->regsPerBlock = p->regsPerMultiprocessor = 65536;
  p->l2CacheSize = 40 << 20;
  p->asyncEngineCount = 2;
  p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
  p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 2147483647;
  p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->unifiedAddressing = p->canMapHostMemory = p->concurrentKernels = p->streamPrioritiesSupported = 1;
  p->memoryBusWidth = 5120;
  p->totalConstMem = 65536;
  p->textureAlignment = 512;
  p->pciBusID = device + 1;
  p->cooperativeLaunch = 1;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  COUNTED();
  cudaDeviceProp p;
  if (cudaError_t error = cudaGetDeviceProperties(&p, device)) return error;
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: *value = p.major; break;
    case cudaDevAttrComputeCapabilityMinor: *value = p.minor; break;
    case cudaDevAttrMultiProcessorCount: *value = p.multiProcessorCount; break;
    case cudaDevAttrMaxThreadsPerBlock: *value = p.maxThreadsPerBlock; break;
    case cudaDevAttrWarpSize: *value = p.warpSize; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = (int)p.sharedMemPerBlock; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = (int)p.sharedMemPerBlockOptin; break;
    default: *value = 0;
  }
  return cudaSuccess;
}
cudaError_t cudaDeviceGetPCIBusId(char* text, int length, int device) {
  COUNTED();
  snprintf(text, length, "0000:%02x:00.0", device + 1);
  return cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
  COUNTED();
  *can = 0;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  COUNTED();
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}
cudaError_t cudaProfilerStart() { return cudaSuccess; }
cudaError_t cudaProfilerStop() { return cudaSuccess; }
}
