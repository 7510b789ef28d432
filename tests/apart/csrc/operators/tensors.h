// Tensors of the device: how they are made, and what a kernel sees of them.
#pragma once

#include "runtime/device.h"

#include <ATen/core/Tensor.h>

namespace apart {

using at::Tensor;

inline bool on_device(const Tensor& t) { return t.defined() && t.device().type() == kType; }

// A CPU tensor over the bytes of a device tensor, for work queued on a stream. It owns nothing, as a kernel on a GPU owns
// nothing of its arguments: memory that is given back too early is seen as it is. `resizable`: some CPU kernels resize
// their output for a while (mse_loss); then the result may lie elsewhere.
Tensor back_view(const Tensor& t, bool resizable = false);

// Like a tensor, on the device.
Tensor empty_on(DeviceIndex d, const Tensor& like);

}  // namespace apart
