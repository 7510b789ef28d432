// What every file of the device needs: its type, how many there are, and what the calling thread has chosen.
#pragma once

#include <c10/core/Device.h>
#include <c10/util/Exception.h>

#include <cstddef>
#include <cstdint>

namespace apart {

using c10::Device;
using c10::DeviceIndex;

constexpr auto kType = c10::DeviceType::PrivateUse1;
constexpr int kDevices = 2;

// As in CUDA, a stream beside the default one comes from a pool and is handed out again after the last one.
constexpr int kPoolStreams = 32;

extern thread_local DeviceIndex current_device;
extern thread_local int64_t current_stream[kDevices];

// The index that is meant: "apart" without an index is the current device.
inline DeviceIndex index_of(DeviceIndex d) { return d < 0 ? current_device : d; }
inline DeviceIndex index_of(Device d) { return index_of(d.index()); }

// The threads that play the streams do not exist in a forked child, and locks may be held there for ever. So a child must
// not use the device; what runs there by itself (tensors that die) does nothing.
bool forked();
void refuse_after_fork();

}  // namespace apart
