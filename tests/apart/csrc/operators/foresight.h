// What an operator will return, known before it has run.
#pragma once

#include "operators/arguments.h"
#include "operators/op_info.h"

#include <memory>

namespace apart {

struct Outcome {
  Values returns;                              // meta tensors; None where an argument is returned
  std::vector<std::vector<int64_t>> out_sizes;  // by argument, of those that may be resized
};

// Asks the operator's meta kernel. None: there is none, or the outcome depends on data.
std::shared_ptr<const Outcome> foresee(const c10::OperatorHandle& op, OpInfo& info, const Values& args);

}  // namespace apart
