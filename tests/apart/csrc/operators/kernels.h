// Kernels: every operator of the CPU, queued.
//
// [Note: Running ahead]
// The outputs' shapes come from the operator on meta tensors, their memory from our allocator, and the CPU's kernel runs
// later on the stream's worker. Operators whose shapes depend on data, or that have no meta kernel, run on the worker too,
// but the host waits for them, as a GPU backend does.
//
// [Note: Tensors of the host in calls]
// As with CUDA, a call takes tensors of one device. From the host it takes numbers (0-dim tensors, read at the call), but
// not as an output or as an index, and the indices of x[i], which are brought over. Everything else is refused.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace apart {

void run_boxed(const c10::OperatorHandle& op, torch::jit::Stack* stack);

}  // namespace apart
