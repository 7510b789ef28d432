#include "runtime/device.h"

#include <pthread.h>

namespace apart {

thread_local DeviceIndex current_device = 0;
thread_local int64_t current_stream[kDevices] = {};

namespace {

bool in_child = false;
[[maybe_unused]] const int watching = pthread_atfork(nullptr, nullptr, [] { in_child = true; });

}  // namespace

bool forked() { return in_child; }

void refuse_after_fork() {
  TORCH_CHECK(!in_child, "Cannot re-initialize apart in forked subprocess. To use apart with multiprocessing, you must use the "
                         "'spawn' start method");
}

}  // namespace apart
