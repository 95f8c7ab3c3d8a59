// SPDX-License-Identifier: Apache-2.0
// libcuda.so.1: what torch asks of the driver itself. Without cuda.h, so that nothing here needs its types.

int cuDevicePrimaryCtxGetState(int device, unsigned* flags, int* active) {
  *flags = 0;
  *active = 1;
  return 0;
}
int cuCtxGetCurrent(void** context) {
  *context = (void*)1;
  return 0;
}
int cuCtxSetCurrent(void* context) { return 0; }
int cuDeviceGet(int* device, int ordinal) {
  *device = ordinal;
  return 0;
}
int cuGetErrorString(int error, const char** text) {
  *text = "the emulated device does not have this call of the driver";
  return 0;
}
// cuBLAS and cuDNN have a runtime of their own inside, which would go to the driver: they are told that it has no
// device (CUDA_ERROR_NO_DEVICE).
int cuInit(unsigned flags) { return 100; }
