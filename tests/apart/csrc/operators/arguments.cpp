#include "operators/arguments.h"

namespace apart {

namespace {

template <class T>
void put(std::string& key, const T& x) {
  key.append(reinterpret_cast<const char*>(&x), sizeof x);
}

template <class List>
void put_all(std::string& key, char tag, const List& list) {
  key += tag;
  put(key, list.size());
  for (auto x : list) put(key, x);
}

void put_tensor(std::string& key, const Tensor& t) {
  if (!t.defined()) {
    key += 'u';
    return;
  }
  key += t.unsafeGetTensorImpl()->is_wrapped_number() ? 'w' : on_device(t) ? 't' : 'c';
  put(key, t.scalar_type());
  put_all(key, 's', t.sizes());
  put_all(key, 's', t.strides());
}

}  // namespace

bool spell(std::string& key, const c10::IValue& value) {
  if (value.isTensor()) {
    put_tensor(key, value.toTensor());
  } else if (value.isTensorList()) {
    put_all(key, 'L', std::vector<char>(value.toListRef().size()));
    for (const Tensor& t : value.toTensorVector()) put_tensor(key, t);
  } else if (value.isNone() || value.isGenerator() || value.isDevice()) {
    key += 'n';
  } else if (value.isInt()) {
    key += 'i';
    put(key, value.toInt());
  } else if (value.isBool()) {
    key += 'b';
    put(key, value.toBool());
  } else if (value.isDouble()) {
    key += 'd';
    put(key, value.toDouble());
  } else if (value.isIntList()) {
    put_all(key, 'l', value.toIntVector());
  } else if (value.isBoolList()) {
    put_all(key, 'B', value.toBoolList().vec());
  } else if (value.isString()) {
    put_all(key, 'S', value.toStringRef());
  } else {
    return false;
  }
  return true;
}

}  // namespace apart
