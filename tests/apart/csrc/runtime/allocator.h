// The caching allocator of the devices.
//
// [Note: When a block is free]
// A block that the host gives back returns to the cache of the stream it was taken on at once: the order of that stream
// makes reuse right, and the host need not wait. It waits only for streams that were named in record_stream. Reuse is
// last in first out, so that a missing record_stream or wait meets its block again soon, and a free block can be poisoned
// with NaN in stream order.
#pragma once

#include "runtime/device.h"

#include <c10/core/CachingDeviceAllocator.h>

namespace apart {

c10::DeviceAllocator& device_allocator();

// Memory of a device that is not the current one, or the current one.
c10::DataPtr allocate_on(DeviceIndex device, size_t bytes);

// When a block is filled with NaN: never, when it is free, or when it is taken again. On a GPU only the latter overwrites
// it, so code that knows what comes next may still read what it has given back.
enum class Poison { kNever, kFreed, kTaken };
void set_poison(Poison when);
bool poisoning();
void set_capacity(DeviceIndex device, size_t bytes);
size_t capacity_of(DeviceIndex device);

}  // namespace apart
