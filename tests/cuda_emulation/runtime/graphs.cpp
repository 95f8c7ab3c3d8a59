// SPDX-License-Identifier: Apache-2.0
// Graphs: the tasks that were recorded during a capture, run again in that order at each launch.
#include <atomic>
#include <cstring>

#include "counters.h"
#include "errors.h"
#include "streams.h"

namespace {
std::atomic<unsigned long long> captures{0};
using Held = std::shared_ptr<Capture>;
}  // namespace

extern "C" {

cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode) {
  COUNTED();
  if (stream_of(handle).capture()) return failed(cudaErrorIllegalState);
  stream_of(handle).set_capture(std::make_shared<Capture>(Capture{++captures, {}}));
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* graph) {
  COUNTED();
  auto capture = stream_of(handle).capture();
  if (!capture) return failed(cudaErrorIllegalState);
  for (Stream* s : streams_of(-1))
    if (s->capture() == capture) s->set_capture(nullptr);
  *graph = (cudaGraph_t) new Held(capture);
  return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t handle, cudaStreamCaptureStatus* status) {
  *status = stream_of(handle).capture() ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t handle, cudaStreamCaptureStatus* status, unsigned long long* id,
                                     cudaGraph_t*, const cudaGraphNode_t**, const cudaGraphEdgeData**, size_t*) {
  auto capture = stream_of(handle).capture();
  *status = capture ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  if (id) *id = capture ? capture->id : 0;
  return cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t*, size_t* count) {
  *count = (*(Held*)graph)->tasks.size();
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long) {
  COUNTED();
  *executable = (cudaGraphExec_t) new Held(*(Held*)graph);
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long flags) {
  return cudaGraphInstantiate(executable, graph, flags);
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t handle) {
  COUNTED();
  for (const Task& task : (*(Held*)executable)->tasks) stream_of(handle).put(task);
  return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete (Held*)graph;
  return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
  delete (Held*)executable;
  return cudaSuccess;
}
}
