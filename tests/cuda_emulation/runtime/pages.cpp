// SPDX-License-Identifier: Apache-2.0
// The driver's virtual memory, for expandable segments: addresses are reserved, pages of the device are mapped there.
// An address without a page cannot be touched: a task that does ends the process, as an illegal access does on a GPU.
// A page is mapped in one place at most, and has lost its contents once it is unmapped.
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <sys/mman.h>

#include <cstring>
#include <map>
#include <mutex>

#include "counters.h"
#include "memory.h"
#include "settings.h"

namespace {

struct Page {
  size_t bytes;
  int device;
  bool released, mapped;
};
std::mutex& pages_mutex() {
  static auto* m = new std::mutex;
  return *m;
}
std::map<CUdeviceptr, Page*>& mapped() {  // by address
  static auto* m = new std::map<CUdeviceptr, Page*>;
  return *m;
}
Page* page_of(CUmemGenericAllocationHandle handle) { return (Page*)(uintptr_t)handle; }

void drop(Page* page) {  // under pages_mutex
  if (!page->released || page->mapped) return;
  give_bytes(page->device, page->bytes);
  delete page;
}

// Gives the addresses no memory.
bool reserve(void* address, size_t bytes, int flags, void** reserved) {
  *reserved = mmap(address, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | flags, -1, 0);
  return *reserved != MAP_FAILED;
}

bool is_aligned(size_t bytes) { return bytes && bytes % DEVICE_PAGE == 0; }

}  // namespace

extern "C" {

CUresult cuMemGetAllocationGranularity(size_t* bytes, const CUmemAllocationProp*, CUmemAllocationGranularity_flags) {
  *bytes = DEVICE_PAGE;
  return CUDA_SUCCESS;
}
CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  if (attribute == CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED) {
    *value = 1;
    return CUDA_SUCCESS;
  }
  return (CUresult)cudaDeviceGetAttribute(value, (cudaDeviceAttr)attribute, device);
}
CUresult cuMemAddressReserve(CUdeviceptr* address, size_t bytes, size_t, CUdeviceptr, unsigned long long) {
  COUNTED();
  if (!is_aligned(bytes)) return CUDA_ERROR_INVALID_VALUE;
  void* reserved;
  if (!reserve(nullptr, bytes + DEVICE_PAGE, 0, &reserved)) return CUDA_ERROR_OUT_OF_MEMORY;
  CUdeviceptr begin = (CUdeviceptr)reserved, aligned = (begin + DEVICE_PAGE - 1) / DEVICE_PAGE * DEVICE_PAGE;
  if (aligned > begin) munmap(reserved, aligned - begin);
  munmap((void*)(aligned + bytes), begin + DEVICE_PAGE - aligned);
  *address = aligned;
  return CUDA_SUCCESS;
}
CUresult cuMemAddressFree(CUdeviceptr address, size_t bytes) {
  COUNTED();
  std::lock_guard<std::mutex> lock(pages_mutex());
  auto next = mapped().lower_bound(address);
  if (next != mapped().end() && next->first < address + bytes) return CUDA_ERROR_INVALID_VALUE;
  return munmap((void*)address, bytes) ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}
CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, size_t bytes, const CUmemAllocationProp* properties,
                     unsigned long long) {
  COUNTED();
  if (!is_aligned(bytes)) return CUDA_ERROR_INVALID_VALUE;
  if (!take_bytes(properties->location.id, bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
  *handle = (CUmemGenericAllocationHandle)(uintptr_t) new Page{bytes, properties->location.id, false, false};
  return CUDA_SUCCESS;
}
CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  COUNTED();
  std::lock_guard<std::mutex> lock(pages_mutex());
  page_of(handle)->released = true;
  drop(page_of(handle));
  return CUDA_SUCCESS;
}
CUresult cuMemMap(CUdeviceptr address, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
                  unsigned long long) {
  COUNTED();
  Page* page = page_of(handle);
  std::lock_guard<std::mutex> lock(pages_mutex());
  if (page->mapped || offset || bytes != page->bytes || mapped().count(address)) return CUDA_ERROR_INVALID_VALUE;
  page->mapped = true;
  mapped()[address] = page;
  add((void*)address, {bytes, Kind::device, page->device});
  return CUDA_SUCCESS;
}
CUresult cuMemSetAccess(CUdeviceptr address, size_t bytes, const CUmemAccessDesc* access, size_t count) {
  COUNTED();
  std::lock_guard<std::mutex> lock(pages_mutex());
  for (auto at = mapped().lower_bound(address); at != mapped().end() && at->first < address + bytes; at++) {
    bool is_own = false;
    for (size_t i = 0; i < count; i++) is_own |= access[i].location.id == at->second->device;
    if (!is_own) continue;  // a peer: host memory is there for it too
    if (mprotect((void*)at->first, at->second->bytes, PROT_READ | PROT_WRITE)) return CUDA_ERROR_OUT_OF_MEMORY;
    if (settings().poison) memset((void*)at->first, 0xff, at->second->bytes);
  }
  return CUDA_SUCCESS;
}
// Waits for nothing: whoever unmaps a page has to wait for what uses it.
CUresult cuMemUnmap(CUdeviceptr address, size_t bytes) {
  COUNTED();
  std::lock_guard<std::mutex> lock(pages_mutex());
  auto at = mapped().find(address);
  if (at == mapped().end() || at->second->bytes != bytes) return CUDA_ERROR_INVALID_VALUE;
  Page* page = at->second;
  mapped().erase(at);
  Region region;
  remove((void*)address, Kind::device, &region);
  void* reserved;
  if (!reserve((void*)address, bytes, MAP_FIXED, &reserved)) return CUDA_ERROR_INVALID_VALUE;
  page->mapped = false;
  drop(page);
  return CUDA_SUCCESS;
}
}
