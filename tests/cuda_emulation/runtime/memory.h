// SPDX-License-Identifier: Apache-2.0
// Device memory and pinned memory are host memory; which is which is kept by address.
#pragma once
#include <cstddef>

constexpr size_t DEVICE_PAGE = 2 << 20;  // what the driver rounds to

enum class Kind { pageable, pinned, device };

Kind kind_of(const void* address);

struct Region {
  size_t bytes;
  Kind kind;
  int device;
};
void add(void* address, Region region);
// Takes the region that begins there out; false if there is none of that kind.
bool remove(void* address, Kind kind, Region* removed);

// Counts bytes as taken of the device's memory; false if it has none left.
bool take_bytes(int device, size_t bytes);
void give_bytes(int device, size_t bytes);
