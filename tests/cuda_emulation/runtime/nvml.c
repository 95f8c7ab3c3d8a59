// SPDX-License-Identifier: Apache-2.0
// libnvidia-ml.so.1: torch asks it what a device is connected to, and who else uses it when memory is missing. Nothing,
// and nobody. Without nvml.h, so that nothing here needs its types.

enum { SUCCESS = 0, NOT_SUPPORTED = 3 };

int nvmlInit_v2(void) { return SUCCESS; }
int nvmlDeviceGetHandleByPciBusId_v2(const char* bus, void** device) {
  *device = (void*)1;
  return SUCCESS;
}
int nvmlDeviceGetComputeRunningProcesses(void* device, unsigned* count, void* processes) {
  *count = 0;
  return SUCCESS;
}
int nvmlDeviceGetNvLinkRemoteDeviceType(void* device, unsigned link, int* type) { return NOT_SUPPORTED; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void* device, unsigned link, void* info) { return NOT_SUPPORTED; }
int nvmlSystemGetCudaDriverVersion_v2(int* version) { return NOT_SUPPORTED; }
