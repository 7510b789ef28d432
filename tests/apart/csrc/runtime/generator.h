// Random numbers: a seed and an offset, as on a GPU. A call takes its draw when it is made, not when its kernel runs.
#pragma once

#include "runtime/device.h"

#include <ATen/core/Generator.h>

#include <optional>

namespace apart {

const at::Generator& default_generator(DeviceIndex d);
at::Generator new_generator(DeviceIndex d);

// The seed of one kernel's random numbers; from the default generator of the device unless one is given.
uint64_t draw(const std::optional<at::Generator>& given, DeviceIndex d);

}  // namespace apart
