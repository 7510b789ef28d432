// Operators that need more than the CPU's kernel of the same name.
#include "operators/kernels.h"
#include "operators/tensors.h"

#include <ATen/TensorOperators.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/bernoulli.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/ones_like.h>
#include <torch/library.h>

namespace apart {

namespace {

// The CPU has none, and composes it of parts that hold random numbers on the host.
std::tuple<Tensor, Tensor> native_dropout(const Tensor& x, double p, std::optional<bool> train) {
  auto bools = x.options().dtype(at::kBool);
  if (train && !*train) return {x.clone(), at::ones_like(x, bools)};
  Tensor mask = at::empty_like(x, bools).bernoulli_(1 - p);
  return {x * mask * (p < 1 ? 1 / (1 - p) : 0.), mask};
}

// CUDA counts whole numbers, too (mixtures of experts ask for it); the CPU only real ones. Bins are exact in double.
Tensor histc(const Tensor& x, int64_t bins, const at::Scalar& low, const at::Scalar& high) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::histc", "");
  bool whole = at::isIntegralType(x.scalar_type(), /*includeBool=*/false);
  torch::jit::Stack stack{whole ? x.to(at::kDouble) : x, bins, low, high};
  run_boxed(op, &stack);
  return stack[0].toTensor().to(x.scalar_type());
}

// Attention is taken apart into matrix products.
int64_t choose_attention(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool,
                         std::optional<double>, bool) {
  return 0;  // sdp::SDPBackend::math; its header is for CUDA
}

auto boxed() { return torch::CppFunction::makeFromBoxedFunction<&run_boxed>(); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("native_dropout", native_dropout);
  m.impl("histc", histc);
  m.impl("_fused_sdp_choice", choose_attention);
  // torch would take these apart or look for a backend's own kernel before the fallback is asked
  m.impl("native_layer_norm", boxed());
  m.impl("convolution", boxed());
  m.impl("convolution_backward", boxed());
}

}  // namespace

}  // namespace apart

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &apart::choose_attention);
}
