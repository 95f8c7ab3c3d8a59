// SPDX-License-Identifier: Apache-2.0
// A tensor of the device seen as a tensor of the CPU (the same memory), as one of no device (its shape), and the way
// back from a shape to memory of the device.
#pragma once
#include <ATen/ATen.h>
#include <ATen/core/ivalue.h>
#include <c10/cuda/CUDAFunctions.h>

namespace emulated {
using at::Tensor;
using c10::IValue;

// A Python number that became a tensor takes no part in the choice of a result's dtype.
inline Tensor with_number_kept(const Tensor& from, Tensor to) {
  if (from.unsafeGetTensorImpl()->is_wrapped_number()) to.unsafeGetTensorImpl()->set_wrapped_number(true);
  return to;
}

// The alias does not hold the memory: what is freed or written too early shows as a wrong number. A number of the CPU
// is copied, as CUDA reads it when the operator is called.
inline Tensor on_cpu(const Tensor& t) {
  if (!t.defined()) return t;
  TORCH_CHECK(t.layout() == at::kStrided, "emulated CUDA: only strided tensors");
  TORCH_CHECK(!t.is_conj() && !t.is_neg(), "emulated CUDA: no lazy conjugate or negative");
  if (!t.is_cuda()) return with_number_kept(t, t.detach().clone());
  void* address = t.numel() ? t.data_ptr() : nullptr;
  auto options = at::TensorOptions().dtype(t.dtype()).device(at::kCPU);
  return with_number_kept(t, at::from_blob(address, t.sizes(), t.strides(), options));
}

inline Tensor on_meta(const Tensor& t) {
  if (!t.defined() || (t.is_cpu() && t.dim() == 0)) return t;
  auto options = at::TensorOptions().dtype(t.dtype()).device(at::kMeta);
  return with_number_kept(t, at::empty_strided(t.sizes(), t.strides(), options));
}

// Fresh memory of torch's allocator.
inline Tensor on_device(const Tensor& shape) {
  if (!shape.defined()) return shape;
  c10::Device device(at::kCUDA, c10::cuda::current_device());
  return at::empty_strided(shape.sizes(), shape.strides(), at::TensorOptions().dtype(shape.dtype()).device(device));
}

// An argument or result with the function applied to its tensors; a CUDA device becomes `device`.
template <class Function>
IValue each(const IValue& value, Function function, c10::DeviceType device) {
  if (value.isTensor()) return IValue(function(value.toTensor()));
  if (value.isTensorList()) {
    c10::List<Tensor> tensors;
    for (const Tensor& t : value.toTensorVector()) tensors.push_back(function(t));
    return tensors;
  }
  if (value.isList()) {
    auto list = value.toList();
    auto type = list.elementType();
    if (type->kind() == c10::TypeKind::OptionalType &&
        type->containedType(0)->kind() == c10::TypeKind::TensorType) {
      c10::List<std::optional<Tensor>> tensors;
      for (const IValue& x : list)
        tensors.push_back(x.isNone() ? std::nullopt : std::optional<Tensor>(function(x.toTensor())));
      return tensors;
    }
  }
  if (value.isDevice() && value.toDevice().is_cuda()) return IValue(c10::Device(device));
  return value;
}

}  // namespace emulated
