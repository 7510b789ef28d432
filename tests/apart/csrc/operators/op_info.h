// What an operator's schema says about how it can be run.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <atomic>
#include <vector>

namespace apart {

struct OpInfo {
  int generator = -1;          // position of the generator; -1: it draws no random numbers
  bool values = false;         // it returns numbers, so the host has to wait
  std::vector<bool> written;   // by argument: it is written in place
  std::vector<bool> out;       // by argument: it is written and may be resized
  std::vector<bool> index;     // by argument: it may not be a number of the host, for it chooses elements
  std::vector<bool> from_host;  // by argument: tensors of the host are brought over (those of x[i])
  std::vector<int> alias;      // by return: the argument that is returned; -1: a new tensor
  std::atomic<bool> no_meta{false};  // there is no meta kernel, as was seen
};

OpInfo& info_of(const c10::OperatorHandle& op);

}  // namespace apart
