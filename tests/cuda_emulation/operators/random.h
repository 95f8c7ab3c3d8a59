// SPDX-License-Identifier: Apache-2.0
// Random numbers: the state of torch's CUDA generator, advanced as a kernel would, seeds a generator of the CPU. So
// what torch saves and restores (recomputation, checkpoints) decides the numbers; they are not the ones of a GPU.
#pragma once
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <c10/cuda/CUDAFunctions.h>

#include <optional>

namespace emulated {

inline uint64_t next_seed(const std::optional<at::Generator>& given = std::nullopt) {
  auto generator = given && given->defined()
                       ? *given
                       : at::cuda::detail::getDefaultCUDAGenerator(c10::cuda::current_device());
  auto* cuda = at::check_generator<at::CUDAGeneratorImpl>(generator);
  std::lock_guard<std::mutex> lock(cuda->mutex_);
  auto state = cuda->philox_cuda_state(4);
  uint64_t mixed = state.seed_.val * 0x9e3779b97f4a7c15ull + state.offset_.val * 0xbf58476d1ce4e5b9ull;
  return mixed ^ (mixed >> 31);
}

inline at::Generator generator_of(uint64_t seed) { return at::detail::createCPUGenerator(seed); }

}  // namespace emulated
