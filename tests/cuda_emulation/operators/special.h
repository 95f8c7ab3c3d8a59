// SPDX-License-Identifier: Apache-2.0
// Operators that are a copy of the runtime in part, or that the CPU and CUDA compute differently.
#pragma once
#include <ATen/ATen.h>
#include <ATen/ops/copy_native.h>

#include "aliases.h"
#include "random.h"
#include "tasks.h"

namespace emulated {

// Torch's own, which calls cudaMemcpyAsync, but for what it would start a kernel for: another dtype or order.
inline Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
  bool within = self.is_cuda() && source.is_cuda() && !self.is_same(source);
  bool plain = self.dtype() == source.dtype() && self.sizes() == source.sizes() &&
               self.strides() == source.strides() && self.is_non_overlapping_and_dense();
  if (!within || plain) return at::native::copy_(self, source, non_blocking);
  c10::DeviceGuard on_its_device(self.device());
  Tensor to = on_cpu(self), from = on_cpu(source);
  enqueue("aten::copy_", [to, from]() mutable { to.copy_(from); });
  return self;
}

// CUDA's counts integers too.
inline Tensor histc(const Tensor& self, int64_t bins, const at::Scalar& least, const at::Scalar& most) {
  Tensor counts = at::empty({bins}, self.options());
  Tensor to = on_cpu(counts), from = on_cpu(self);
  enqueue("aten::histc", [=]() mutable {
    to.copy_(at::histc(from.is_floating_point() ? from : from.to(at::kDouble), bins, least, most));
  });
  return counts;
}

// CUDA's returns a mask of its own shape and dtype, and draws from the device's generator.
inline std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double p, std::optional<bool> train) {
  c10::DeviceGuard on_its_device(input.device());
  uint64_t seed = next_seed();
  bool drops = train.value_or(true) && p > 0;
  Tensor output = at::empty_like(input), mask = at::empty_like(input, input.options().dtype(at::kBool));
  Tensor to = on_cpu(output), kept = on_cpu(mask), from = on_cpu(input);
  enqueue("aten::native_dropout", [=]() mutable {
    if (!drops) {
      to.copy_(from);
      kept.fill_(true);
      return;
    }
    kept.copy_(at::empty(from.sizes(), at::kFloat).uniform_(0, 1, generator_of(seed)).ge(p));
    to.copy_(p == 1 ? at::zeros_like(from) : from * kept * (1.0 / (1.0 - p)));
  });
  return {output, mask};
}

}  // namespace emulated
