// SPDX-License-Identifier: Apache-2.0
// The kernel of nearly every operator. At the call: shapes from torch's Meta kernels, results from torch's own CUDA
// allocator. Later, on the stream: the CPU's kernel on aliases of the addresses. An operator whose results have a shape
// that only the numbers tell (nonzero) waits for the stream, as CUDA's does.
#pragma once
#include <ATen/core/dispatch/Dispatcher.h>

#include <memory>
#include <set>

#include "aliases.h"
#include "random.h"
#include "schemas.h"
#include "tasks.h"
#include "workspaces.h"

namespace emulated {
using Stack = torch::jit::Stack;

inline IValue each_on_cpu(const IValue& value) { return each(value, on_cpu, at::kCPU); }

// CUDA keeps the statistics of 16-bit norms in fp32, the CPU does not: its kernel gets everything in fp32.
inline bool is_norm(const std::string& name) {
  static const std::set<std::string> names = {
      "aten::native_layer_norm",          "aten::native_layer_norm_backward", "aten::native_group_norm",
      "aten::native_group_norm_backward", "aten::_fused_rms_norm",            "aten::_fused_rms_norm_backward"};
  return names.count(name);
}
inline Tensor widened(const Tensor& t) {
  bool is_16_bit = t.defined() && (t.scalar_type() == at::kBFloat16 || t.scalar_type() == at::kHalf);
  return is_16_bit ? t.to(at::kFloat) : t;
}

// What the CPU's kernel gets, where CUDA's takes or gives other dtypes.
inline void suit_the_cpu(const std::string& name, Stack& arguments) {
  if (is_norm(name)) {
    for (IValue& v : arguments) v = each(v, widened, at::kCPU);
  } else if ((name == "aten::_softmax" || name == "aten::_log_softmax") && arguments[2].toBool()) {
    arguments[0] = widened(arguments[0].toTensor());  // from 16 bits to fp32 in one kernel
    arguments[2] = false;
  } else if (name == "aten::_softmax_backward_data" || name == "aten::_log_softmax_backward_data") {
    arguments[3] = arguments[0].toTensor().scalar_type();  // and back: the copy of the result casts
  }
}

inline void copy_results(const Stack& from, const std::vector<IValue>& to) {
  TORCH_CHECK(from.size() == to.size(), "Meta and CPU differ in the number of results");
  auto tensors = [](const IValue& v) {
    return v.isTensor() ? std::vector<Tensor>{v.toTensor()} : v.isTensorList() ? v.toTensorVector()
                                                                               : std::vector<Tensor>{};
  };
  for (size_t i = 0; i < from.size(); i++) {
    auto sources = tensors(from[i]), targets = tensors(to[i]);
    for (size_t k = 0; k < sources.size(); k++) {
      if (!sources[k].defined() || !targets[k].defined() || !targets[k].numel()) continue;
      TORCH_CHECK(sources[k].numel() == targets[k].numel(), "Meta and CPU differ in the size of result ", i, ": ",
                  targets[k].sizes(), " and ", sources[k].sizes());
      targets[k].copy_(sources[k].view_as(targets[k]));
    }
  }
}

// Without arithmetic small whole numbers are computed all the same: models decide by some of them what to do next.
inline bool decides(const std::vector<IValue>& values) {
  constexpr size_t SMALL = 64 << 10;
  auto may = [](const Tensor& t) {
    return !t.defined() || (t.nbytes() <= SMALL && at::isIntegralType(t.scalar_type(), /*includeBool=*/true));
  };
  for (const IValue& v : values) {
    if (v.isTensor() && !may(v.toTensor())) return false;
    if (v.isTensorList())
      for (const Tensor& t : v.toTensorVector())
        if (!may(t)) return false;
  }
  return true;
}

// Runs the operator on shapes. Returns false where it has no Meta kernel.
inline bool infer(const c10::OperatorHandle& op, const Behaviour& b, const std::vector<IValue>& arguments,
                  std::vector<IValue>* results) {
  Stack stack;
  for (size_t i = 0; i < arguments.size(); i++)
    stack.push_back((int)i == b.generator ? IValue() : each(arguments[i], on_meta, at::kMeta));
  try {
    op.callBoxed(&stack);
  } catch (const c10::NotImplementedError&) {
    return false;
  }
  if (b.functional) {
    for (const IValue& v : stack) results->push_back(each(v, on_device, at::kMeta));
    return true;
  }
  for (size_t i = 0; i < b.returned.size(); i++) {  // out=
    int which = b.returned[i];
    if (which < 0 || !arguments[which].isTensor() || !stack[i].isTensor()) continue;
    Tensor out = arguments[which].toTensor();
    if (out.sizes() != stack[i].toTensor().sizes()) out.resize_(stack[i].toTensor().sizes());
  }
  return true;
}

inline void run_in_place(const c10::OperatorHandle& op, const Behaviour& b, const std::vector<IValue>& arguments,
                         const Stack& on_cpu_arguments, Stack* stack) {
  auto run = [op, on_cpu_arguments] {
    Stack s = on_cpu_arguments;
    op.callBoxed(&s);
  };
  enqueue(b.name, run, b.waits || decides(on_cpu_arguments));
  if (b.waits) wait_for_the_stream();
  for (int which : b.returned) {
    TORCH_CHECK(which >= 0, "emulated CUDA: ", b.name, " writes to an argument and returns something new");
    torch::jit::push(*stack, arguments[which]);
  }
}

inline void run_and_wait(const c10::OperatorHandle& op, const Behaviour& b, const Stack& on_cpu_arguments,
                         Stack* stack) {
  auto results = std::make_shared<Stack>(on_cpu_arguments);
  enqueue(b.name, [op, results] { op.callBoxed(results.get()); }, true);
  wait_for_the_stream();
  auto moved = [](const Tensor& t) {
    Tensor there = on_device(t);
    if (t.defined() && t.numel()) on_cpu(there).copy_(t);
    return there;
  };
  for (const IValue& v : *results) torch::jit::push(*stack, each(v, moved, at::kCUDA));
}

inline void run_later(const c10::OperatorHandle& op, const Behaviour& b, const Stack& on_cpu_arguments,
                      const std::vector<IValue>& results, Stack* stack) {
  std::vector<IValue> targets;
  for (const IValue& v : results) targets.push_back(each_on_cpu(v));
  enqueue(b.name, [op, name = b.name, on_cpu_arguments, targets] {
    Stack s = on_cpu_arguments;
    suit_the_cpu(name, s);
    op.callBoxed(&s);
    copy_results(s, targets);
  }, decides(on_cpu_arguments) && decides(targets));
  for (const IValue& v : results) torch::jit::push(*stack, v);
}

// The device of the first tensor on one: what a kernel's own guard sets.
inline std::optional<c10::Device> device_of(const std::vector<IValue>& arguments) {
  for (const IValue& v : arguments) {
    if (v.isTensor() && v.toTensor().defined() && v.toTensor().is_cuda()) return v.toTensor().device();
    if (v.isTensorList())
      for (const Tensor& t : v.toTensorVector())
        if (t.defined() && t.is_cuda()) return t.device();
    if (v.isDevice() && v.toDevice().is_cuda()) return v.toDevice();
  }
  return std::nullopt;
}

inline void emulate(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  const Behaviour& b = behaviour_of(op);
  size_t count = op.schema().arguments().size();
  std::vector<IValue> arguments = torch::jit::last(*stack, count).vec();
  torch::jit::drop(*stack, count);
  c10::OptionalDeviceGuard on_its_device(device_of(arguments));
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  c10::impl::ExcludeDispatchKeyGuard below_autocast(c10::autocast_dispatch_keyset);
  if (is_product(b.name)) take_workspace();

  IValue generator;
  if (b.random) {
    TORCH_CHECK(b.generator >= 0, "emulated CUDA: ", b.name, " draws numbers and takes no generator");
    const IValue& given = arguments[b.generator];
    generator = generator_of(next_seed(given.isNone() ? std::nullopt : std::optional(given.toGenerator())));
  }
  std::vector<IValue> results;
  bool inferred = !b.waits && (!(b.functional || b.resizes) || infer(op, b, arguments, &results));
  Stack on_cpu_arguments;  // after the shapes: out= may have been resized
  for (size_t i = 0; i < count; i++)
    on_cpu_arguments.push_back((int)i == b.generator ? generator : each_on_cpu(arguments[i]));
  if (!b.functional)
    run_in_place(op, b, arguments, on_cpu_arguments, stack);
  else if (!inferred)
    run_and_wait(op, b, on_cpu_arguments, stack);
  else
    run_later(op, b, on_cpu_arguments, results, stack);
}

}  // namespace emulated
