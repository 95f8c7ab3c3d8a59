// SPDX-License-Identifier: Apache-2.0
// Replaces the CUDA kernels of torch's dispatcher. Loaded after torch (autoload/emulated_cuda.py).
#include <torch/library.h>

#include <set>
#include <string>

#include "attention.h"
#include "boxed.h"
#include "special.h"

namespace {

// These start no kernel, or get a function of their own below.
const std::set<std::string> KEPT = {
    "aten::empty.memory_format",
    "aten::empty_strided",
    "aten::resize_",
    "aten::record_stream",
    "aten::_local_scalar_dense",
    "aten::is_pinned",
    "aten::_pin_memory",
    "aten::is_set_to",
    "aten::_efficientzerotensor",
    "aten::_has_compatible_shallow_copy_type",
    "aten::_fused_sdp_choice",
    "aten::copy_",
    "aten::histc",
    "aten::native_dropout",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_efficient_attention_backward",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_backward",
};

bool is_replaced(const c10::OperatorName& name) {
  if (name.name.rfind("aten::", 0) != 0 || name.name == "aten::set_") return false;
  if (KEPT.count(name.overload_name.empty() ? name.name : name.name + "." + name.overload_name)) return false;
  auto op = c10::Dispatcher::singleton().findOp(name);
  if (!op || !op->hasSchema() || !op->hasKernelForDispatchKey(c10::DispatchKey::CUDA)) return false;
  for (const auto& result : op->schema().returns())
    if (result.alias_info() && !result.alias_info()->isWrite()) return false;  // a view
  return true;
}

// That a kernel is replaced is a warning.
struct NoWarnings : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

struct Replacements {
  torch::Library aten{torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__};

  Replacements() {
    NoWarnings none;
    c10::WarningUtils::WarningHandlerGuard quiet(&none);
    for (const auto& name : c10::Dispatcher::singleton().getAllOpNames())
      if (is_replaced(name))
        boxed(name.name.substr(6) + (name.overload_name.empty() ? "" : "." + name.overload_name));
    boxed("convolution");  // whole, so that cuDNN is never asked
    boxed("convolution_backward");
    aten.impl("copy_", TORCH_FN(emulated::copy_));
    aten.impl("histc", TORCH_FN(emulated::histc));
    aten.impl("native_dropout", TORCH_FN(emulated::native_dropout));
    aten.impl("_scaled_dot_product_efficient_attention", TORCH_FN(emulated::efficient_attention));
    aten.impl("_scaled_dot_product_efficient_attention_backward", TORCH_FN(emulated::efficient_attention_backward));
    aten.impl("_scaled_dot_product_flash_attention", TORCH_FN(emulated::flash_attention));
    aten.impl("_scaled_dot_product_flash_attention_backward", TORCH_FN(emulated::flash_attention_backward));
  }

  void boxed(const std::string& name) {
    aten.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&emulated::emulate>());
  }
};

}  // namespace

extern "C" void emulated_cuda_install() {
  static auto* replacements = new Replacements;
  (void)replacements;
}
