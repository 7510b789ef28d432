// Tensor copies, as CUDA does them.
//
// [Note: Which copies the host waits for]
// Without non_blocking the host waits. With it: copies from and to pinned memory are queued; pageable memory is read at
// the call on its way to the device, and waited for on its way from it.
#pragma once

#include "operators/tensors.h"

namespace apart {

Tensor copy_from(const Tensor& self, const Tensor& dst, bool non_blocking);

}  // namespace apart
