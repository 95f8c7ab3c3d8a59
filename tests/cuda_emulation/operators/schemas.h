// SPDX-License-Identifier: Apache-2.0
// What an operator's schema says of how it has to be run.
#pragma once
#include <ATen/core/dispatch/Dispatcher.h>

#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

namespace emulated {

struct Behaviour {
  std::string name;
  bool functional = true;     // writes to no argument
  bool resizes = false;       // has an out= argument, which takes the result's shape
  bool waits = false;         // the caller needs a number, or a shape that depends on numbers
  bool random = false;
  int generator = -1;         // position of that argument
  std::vector<int> returned;  // per result: the argument that it is, -1 for something new
};

inline Behaviour read_schema(const c10::OperatorHandle& op) {
  Behaviour b;
  const auto& schema = op.schema();
  const auto& arguments = schema.arguments();
  b.name = schema.name() + (schema.overload_name().empty() ? "" : "." + schema.overload_name());
  for (size_t i = 0; i < arguments.size(); i++) {
    if (arguments[i].alias_info() && arguments[i].alias_info()->isWrite()) {
      b.functional = false;
      b.resizes |= arguments[i].is_out();
    }
    if (arguments[i].name() == "generator") b.generator = (int)i;
  }
  for (const auto& result : schema.returns()) {
    auto kind = result.type()->kind();
    bool of_tensors = kind == c10::TypeKind::TensorType ||
                      (kind == c10::TypeKind::ListType &&
                       result.type()->containedType(0)->kind() == c10::TypeKind::TensorType);
    b.waits |= !of_tensors;
    int which = -1;
    for (size_t i = 0; result.alias_info() && which < 0 && i < arguments.size(); i++)
      if (arguments[i].alias_info() && arguments[i].alias_info()->beforeSets() == result.alias_info()->beforeSets())
        which = (int)i;
    b.returned.push_back(which);
  }
  b.random = b.generator >= 0;
  for (auto tag : op.getTags()) {
    b.random |= tag == at::Tag::nondeterministic_seeded;
    b.waits |= tag == at::Tag::dynamic_output_shape || tag == at::Tag::data_dependent_output;
  }
  return b;
}

inline const Behaviour& behaviour_of(const c10::OperatorHandle& op) {
  static auto* mutex = new std::mutex;
  static auto* read = new std::unordered_map<c10::OperatorName, Behaviour>;
  std::lock_guard<std::mutex> lock(*mutex);
  auto at = read->find(op.operator_name());
  if (at == read->end()) at = read->emplace(op.operator_name(), read_schema(op)).first;
  return at->second;
}

}  // namespace emulated
