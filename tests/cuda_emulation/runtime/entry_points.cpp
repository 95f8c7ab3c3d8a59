// SPDX-License-Identifier: Apache-2.0
// How torch finds functions of the driver: by name, through the runtime.
#include <cuda_runtime_api.h>
#include <dlfcn.h>

namespace {
int not_emulated() { return cudaErrorNotSupported; }
}  // namespace

extern "C" cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned,
                                                        unsigned long long, cudaDriverEntryPointQueryResult* result) {
  *function = dlsym(RTLD_DEFAULT, name);
  if (!*function) *function = (void*)not_emulated;
  if (result) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
