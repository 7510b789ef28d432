#include "operators/op_info.h"

#include <mutex>
#include <unordered_map>

namespace apart {

namespace {

void read_arguments(const c10::FunctionSchema& schema, OpInfo& info) {
  for (auto& argument : schema.arguments()) {
    auto type = argument.type()->str();
    if (type == "Generator?" || type == "Generator") info.generator = int(info.written.size());
    bool written = argument.alias_info() && argument.alias_info()->isWrite();
    info.written.push_back(written);
    info.out.push_back(written && argument.kwarg_only());
    info.index.push_back(argument.name() == "index" || argument.name() == "indices");
    info.from_host.push_back(type == "Tensor?[]");
  }
}

int returned_argument(const c10::FunctionSchema& schema, const c10::Argument& ret, const OpInfo& info) {
  if (!ret.alias_info()) return -1;
  TORCH_CHECK(ret.alias_info()->isWrite(), "apart: no kernel for the view operator ", schema.operator_name());
  for (size_t i = 0; i < info.written.size(); i++) {
    if (info.written[i] && *schema.arguments()[i].alias_info() == *ret.alias_info()) return int(i);
  }
  return -1;
}

void read_returns(const c10::FunctionSchema& schema, OpInfo& info) {
  for (auto& ret : schema.returns()) {
    info.alias.push_back(returned_argument(schema, ret, info));
    auto type = ret.type()->str();
    if (!ret.alias_info() && type != "Tensor" && type != "Tensor[]" && type != "Tensor?") info.values = true;
  }
}

}  // namespace

OpInfo& info_of(const c10::OperatorHandle& op) {
  static std::mutex mutex;
  static auto* known = new std::unordered_map<c10::OperatorName, OpInfo>;
  std::lock_guard<std::mutex> lock(mutex);
  auto [it, fresh] = known->try_emplace(op.operator_name());
  if (fresh) {
    try {
      read_arguments(op.schema(), it->second);
      read_returns(op.schema(), it->second);
    } catch (...) {
      known->erase(it);
      throw;
    }
  }
  return it->second;
}

}  // namespace apart
