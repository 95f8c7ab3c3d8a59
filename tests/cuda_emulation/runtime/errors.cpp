// SPDX-License-Identifier: Apache-2.0
#include "errors.h"

#include <atomic>
#include <cstdio>

namespace {

thread_local cudaError_t last_error = cudaSuccess;
std::atomic<int> of_a_task{cudaSuccess};

struct Text {
  cudaError_t error;
  const char *name, *sentence;
};
const Text TEXTS[] = {
    {cudaSuccess, "cudaSuccess", "no error"},
    {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
    {cudaErrorNotReady, "cudaErrorNotReady", "device not ready"},
    {cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
    {cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {cudaErrorInvalidResourceHandle, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {cudaErrorHostMemoryNotRegistered, "cudaErrorHostMemoryNotRegistered", "pointer is not registered memory"},
    {cudaErrorNotSupported, "cudaErrorNotSupported", "operation not supported by the emulated device"},
    {cudaErrorLaunchFailure, "cudaErrorLaunchFailure", "a task of the emulated device failed; stderr says which"},
    {cudaErrorStreamCaptureUnsupported, "cudaErrorStreamCaptureUnsupported",
     "operation not permitted when stream is capturing"},
    {cudaErrorStreamCaptureInvalidated, "cudaErrorStreamCaptureInvalidated",
     "operation failed due to a previous error during capture"},
    {cudaErrorIllegalState, "cudaErrorIllegalState", "the operation cannot be performed in the present state"},
};
const Text* text_of(cudaError_t error) {
  for (const Text& t : TEXTS)
    if (t.error == error) return &t;
  return nullptr;
}

}  // namespace

cudaError_t failed(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}

cudaError_t after_waiting() { return failed((cudaError_t)of_a_task.load()); }

extern "C" {

// Called by a task that could not be done: every later wait fails, as after a failed kernel.
void emulated_cuda_fail(const char* what) {
  fprintf(stderr, "emulated CUDA: a task failed: %s\n", what);
  of_a_task = cudaErrorLaunchFailure;
}

cudaError_t cudaGetLastError() {
  cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}
cudaError_t cudaPeekAtLastError() { return last_error; }
const char* cudaGetErrorName(cudaError_t error) {
  const Text* text = text_of(error);
  return text ? text->name : "cudaError (another one)";
}
const char* cudaGetErrorString(cudaError_t error) {
  const Text* text = text_of(error);
  return text ? text->sentence : "an error that the emulated device has no text for";
}
}
