// SPDX-License-Identifier: Apache-2.0
#include "memory.h"

#include <cuda_runtime_api.h>
#include <sys/mman.h>

#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <vector>

#include "counters.h"
#include "devices.h"
#include "errors.h"
#include "settings.h"
#include "streams.h"

namespace {

constexpr size_t HOST_PAGE = 4096;

std::mutex& regions_mutex() {
  static auto* m = new std::mutex;
  return *m;
}
std::map<uintptr_t, Region>& regions() {
  static auto* m = new std::map<uintptr_t, Region>;
  return *m;
}
std::vector<size_t>& taken_bytes() {  // of each device, beside the context; under regions_mutex
  static auto* taken = new std::vector<size_t>(settings().devices, 0);
  return *taken;
}

size_t rounded_up(size_t bytes, size_t page) { return ((bytes ? bytes : 1) + page - 1) / page * page; }

void* map_pages(size_t bytes) {
  void* address =
      mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return address == MAP_FAILED ? nullptr : address;
}

bool region_of(const void* address, Region* region) {
  std::lock_guard<std::mutex> lock(regions_mutex());
  auto next = regions().upper_bound((uintptr_t)address);
  if (next == regions().begin()) return false;
  auto at = std::prev(next);
  if ((uintptr_t)address >= at->first + at->second.bytes) return false;
  *region = at->second;
  return true;
}

}  // namespace

Kind kind_of(const void* address) {
  Region region;
  return region_of(address, &region) ? region.kind : Kind::pageable;
}

void add(void* address, Region region) {
  std::lock_guard<std::mutex> lock(regions_mutex());
  regions()[(uintptr_t)address] = region;
  if (region.kind == Kind::pinned)
    raise_to(totals().pinned_peak_bytes, totals().pinned_bytes += region.bytes);
}

bool remove(void* address, Kind kind, Region* removed) {
  std::lock_guard<std::mutex> lock(regions_mutex());
  auto at = regions().find((uintptr_t)address);
  if (at == regions().end() || at->second.kind != kind) return false;
  *removed = at->second;
  regions().erase(at);
  if (kind == Kind::pinned) totals().pinned_bytes -= removed->bytes;
  return true;
}

bool take_bytes(int device, size_t bytes) {
  std::lock_guard<std::mutex> lock(regions_mutex());
  if (taken_bytes()[device] + bytes + settings().context_bytes > settings().memory_bytes) return false;
  taken_bytes()[device] += bytes;
  raise_to(totals().device_peak_bytes, totals().device_bytes += bytes);
  return true;
}

void give_bytes(int device, size_t bytes) {
  std::lock_guard<std::mutex> lock(regions_mutex());
  taken_bytes()[device] -= bytes;
  totals().device_bytes -= bytes;
}

extern "C" {

cudaError_t cudaMalloc(void** address, size_t bytes) {
  COUNTED();
  *address = nullptr;
  int device = current_device();
  size_t rounded = rounded_up(bytes, DEVICE_PAGE);
  if (!take_bytes(device, rounded)) return failed(cudaErrorMemoryAllocation);
  *address = map_pages(rounded);
  if (!*address) return failed(cudaErrorMemoryAllocation);
  if (settings().poison) memset(*address, 0xff, rounded);
  add(*address, {rounded, Kind::device, device});
  return cudaSuccess;
}
cudaError_t cudaFree(void* address) {
  COUNTED();
  if (!address) return cudaSuccess;
  drain_streams(current_device());  // as the driver does
  Region region;
  if (!remove(address, Kind::device, &region)) return failed(cudaErrorInvalidValue);
  give_bytes(region.device, region.bytes);
  munmap(address, region.bytes);
  return cudaSuccess;
}
cudaError_t cudaHostAlloc(void** address, size_t bytes, unsigned) {
  COUNTED();
  size_t rounded = rounded_up(bytes, HOST_PAGE);
  *address = map_pages(rounded);
  if (!*address) return failed(cudaErrorMemoryAllocation);
  add(*address, {rounded, Kind::pinned, -1});
  return cudaSuccess;
}
cudaError_t cudaFreeHost(void* address) {
  COUNTED();
  if (!address) return cudaSuccess;
  drain_streams(-1);
  Region region;
  if (!remove(address, Kind::pinned, &region)) return failed(cudaErrorInvalidValue);
  munmap(address, region.bytes);
  return cudaSuccess;
}
cudaError_t cudaHostRegister(void* address, size_t bytes, unsigned) {
  COUNTED();
  add(address, {bytes, Kind::pinned, -1});
  return cudaSuccess;
}
cudaError_t cudaHostUnregister(void* address) {
  COUNTED();
  Region region;
  return remove(address, Kind::pinned, &region) ? cudaSuccess : failed(cudaErrorHostMemoryNotRegistered);
}
cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total_bytes) {
  COUNTED();
  std::lock_guard<std::mutex> lock(regions_mutex());
  size_t taken = taken_bytes()[current_device()] + settings().context_bytes;
  *total_bytes = settings().memory_bytes;
  *free_bytes = *total_bytes > taken ? *total_bytes - taken : 0;
  return cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* address) {
  COUNTED();
  memset(attributes, 0, sizeof *attributes);
  Region region{0, Kind::pageable, -2};
  region_of(address, &region);
  attributes->device = region.kind == Kind::pinned ? 0 : region.device;
  switch (region.kind) {
    case Kind::device: attributes->type = cudaMemoryTypeDevice; break;
    case Kind::pinned: attributes->type = cudaMemoryTypeHost; break;
    case Kind::pageable: attributes->type = cudaMemoryTypeUnregistered; return cudaSuccess;
  }
  attributes->devicePointer = (void*)address;
  if (region.kind == Kind::pinned) attributes->hostPointer = (void*)address;
  return cudaSuccess;
}
}
