// SPDX-License-Identifier: Apache-2.0
// What a run of the emulated devices may choose: environment variables, read once.
#pragma once
#include <cstddef>
#include <cstdint>

struct Settings {
  int devices;               // EMULATED_CUDA_DEVICES, 1
  const char* name;          // EMULATED_CUDA_NAME, Emulated CUDA device
  size_t memory_bytes;       // EMULATED_CUDA_MEMORY_BYTES, of each device: 4 GiB
  size_t context_bytes;      // EMULATED_CUDA_CONTEXT_BYTES, what a context takes of it: 300 MiB
  int major, minor;          // EMULATED_CUDA_CAPABILITY, 8.0
  uint64_t seed;             // EMULATED_CUDA_SEED, of the delays: 0
  double delay_us;           // EMULATED_CUDA_DELAY_US, the longest delay of a task: 0, none is delayed
  double delayed_share;      // EMULATED_CUDA_DELAYED_SHARE, of the tasks: 0.3
  double link_bytes_per_s;   // EMULATED_CUDA_LINK_BYTES_PER_S, each way: 0, as fast as memcpy
  bool serial;               // EMULATED_CUDA_SERIAL=1: a task ends before the call that enqueues it returns
  bool poison;               // EMULATED_CUDA_POISON=1: fresh device memory is 0xFF, which is NaN in every float
  bool arithmetic;           // EMULATED_CUDA_ARITHMETIC=0: only small whole numbers are computed, large copies copy nothing
};

const Settings& settings();
