// Memory of the devices: addresses that fault, and the bytes behind them.
//
// [Note: Front and back]
// A tensor's data_ptr lies in the front, address space without any access right: whoever touches it on the host dies of
// SIGSEGV, as a program that follows a GPU pointer does. The bytes lie in a second mapping, the back, at a constant
// distance. Only work queued on a stream uses the back.
#pragma once

#include "runtime/device.h"

namespace apart {

constexpr size_t kSpan = size_t(64) << 30;  // addresses of one device; memory is taken where it is written

class Arena {
 public:
  static Arena& get();

  bool has(const void* front) const;
  DeviceIndex device_of(const void* front) const;
  char* front(DeviceIndex d, size_t offset) const { return front_ + d * kSpan + offset; }
  char* back(DeviceIndex d, size_t offset) const { return back_ + d * kSpan + offset; }
  char* back(const void* front) const { return back_ + (static_cast<const char*>(front) - front_); }

  // Gives the whole pages in a range back to the system; neighbours may share the first and the last one.
  void discard(DeviceIndex d, size_t offset, size_t bytes) const;

 private:
  Arena();

  char* front_;
  char* back_;
};

}  // namespace apart
