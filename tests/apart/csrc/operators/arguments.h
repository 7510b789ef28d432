// The arguments of an operator call, whatever they are.
#pragma once

#include "operators/tensors.h"

#include <ATen/core/ivalue.h>

#include <string>
#include <vector>

namespace apart {

using Values = std::vector<c10::IValue>;

// The same value with every tensor in it replaced by f(tensor).
template <class F>
c10::IValue each_tensor(const c10::IValue& value, F f) {
  if (value.isTensor()) return value.toTensor().defined() ? c10::IValue(f(value.toTensor())) : value;
  if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& t : value.toTensorVector()) list.push_back(t.defined() ? f(t) : t);
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> list;
    for (std::optional<Tensor> t : value.toOptionalTensorList().vec()) {
      list.push_back(t && t->defined() ? std::optional<Tensor>(f(*t)) : t);
    }
    return list;
  }
  return value;
}

template <class F>
void visit_tensors(const c10::IValue& value, F f) {
  each_tensor(value, [&](const Tensor& t) {
    f(t);
    return t;
  });
}

// Appends to `key` what decides the outcome's shapes; false if the value is of a kind that is not known here.
bool spell(std::string& key, const c10::IValue& value);

}  // namespace apart
