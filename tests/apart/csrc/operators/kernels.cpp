#include "operators/kernels.h"

#include "operators/copies.h"
#include "operators/counters.h"
#include "operators/foresight.h"
#include "runtime/generator.h"
#include "runtime/streams.h"
#include "runtime/timeline.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

namespace apart {

namespace {

// One call of an operator.
struct Call {
  const c10::OperatorHandle& op;
  OpInfo& info;
  Values args;
  DeviceIndex device = -1;
  uint64_t seed = 0;

  const std::string& name() const { return op.schema().name(); }
  void find_device();
  void check_devices();
  size_t bytes(const Values& outputs) const;
  Values run_ahead(const Outcome& outcome);
  Values run_and_wait();
};

[[noreturn]] void refuse(const Call& call, Device found, const std::string& where) {
  TORCH_CHECK(false, "Expected all tensors to be on the same device, but found at least two devices, ", Device(kType, call.device),
              " and ", found, "! (", where, call.name(), ")");
}

void Call::find_device() {
  for (auto& value : args) {
    visit_tensors(value, [&](const Tensor& t) {
      if (!on_device(t)) return;
      if (device >= 0 && device != t.device().index()) refuse(*this, t.device(), "");
      device = t.device().index();
    });
  }
  for (auto& value : args) {
    if (value.isDevice() && device < 0 && value.toDevice().type() == kType) device = index_of(value.toDevice());
  }
  device = index_of(device);
}

void Call::check_devices() {
  for (size_t i = 0; i < args.size(); i++) {
    if (info.from_host[i]) {
      args[i] = each_tensor(args[i], [&](const Tensor& t) { return t.is_cpu() ? t.to(Device(kType, device)) : t; });
    }
    visit_tensors(args[i], [&](const Tensor& t) {
      bool number = t.is_cpu() && t.dim() == 0 && !info.written[i] && !info.index[i];
      if (!on_device(t) && !number) refuse(*this, t.device(), "argument " + op.schema().arguments()[i].name() + " of ");
    });
  }
}

size_t Call::bytes(const Values& outputs) const {  // every argument and every new result once
  if (!listening()) return 0;
  size_t sum = 0;
  auto add = [&](const Tensor& t) { sum += t.nbytes(); };
  for (auto& value : args) visit_tensors(value, add);
  for (size_t i = 0; i < outputs.size(); i++) {
    if (info.alias[i] < 0) visit_tensors(outputs[i], add);
  }
  return sum;
}

Tensor read_number(const Tensor& t) {  // now: the host may change it before the kernel runs
  Tensor copy = t.clone();
  if (t.unsafeGetTensorImpl()->is_wrapped_number()) copy.unsafeGetTensorImpl()->set_wrapped_number(true);
  return copy;
}

// The arguments for the CPU's kernel; `to_cpu` says what becomes of a tensor of the device that is argument i.
template <class F>
Values for_cpu(const Call& call, F to_cpu) {
  Values values;
  for (size_t i = 0; i < call.args.size(); i++) {
    if (call.args[i].isDevice()) {
      values.emplace_back(Device(c10::kCPU));
    } else if (int(i) == call.info.generator) {
      values.emplace_back(at::detail::createCPUGenerator(call.seed));
    } else {
      values.push_back(each_tensor(call.args[i], [&](const Tensor& t) { return on_device(t) ? to_cpu(t, i) : read_number(t); }));
    }
  }
  return values;
}

// The CPU's kernel has made its own results; they go where the host was told that they are.
void deliver(const c10::OperatorHandle& op, const c10::IValue& result, std::vector<Tensor>& places) {
  size_t k = 0;
  visit_tensors(result, [&](const Tensor& t) {
    TORCH_CHECK(k < places.size() && places[k].sizes() == t.sizes() && places[k].dtype() == t.dtype(), "apart: ",
                op.schema().operator_name(), " gave ", t.sizes(), " ", t.dtype(), " where its meta kernel said otherwise");
    places[k++].copy_(t);
  });
}

Values Call::run_ahead(const Outcome& outcome) {
  for (size_t i = 0; i < args.size(); i++) {
    if (info.out[i] && args[i].isTensor()) at::native::resize_output(args[i].toTensor(), outcome.out_sizes[i]);
  }
  Values outputs;
  std::vector<std::vector<Tensor>> places(info.alias.size());
  for (size_t i = 0; i < info.alias.size(); i++) {
    if (info.alias[i] >= 0) {
      outputs.push_back(args[info.alias[i]]);
      continue;
    }
    outputs.push_back(each_tensor(outcome.returns[i], [&](const Tensor& meta) { return empty_on(device, meta); }));
    visit_tensors(outputs[i], [&](const Tensor& t) { places[i].push_back(back_view(t)); });
  }

  struct Out {
    Tensor place, used;  // the kernel may have moved to other memory
  };
  std::vector<Out> outs;
  auto stack = for_cpu(*this, [&](const Tensor& t, size_t i) {
    if (!info.out[i]) return back_view(t);
    outs.push_back({back_view(t), back_view(t, true)});
    return outs.back().used;
  });
  auto run = [op = op, alias = info.alias, stack = std::move(stack), places = std::move(places), outs = std::move(outs)]() mutable {
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
    for (auto& out : outs) {
      if (out.place.numel() && out.used.const_data_ptr() != out.place.const_data_ptr()) out.place.copy_(out.used);
    }
    for (size_t i = 0; i < alias.size(); i++) {
      if (alias[i] < 0) deliver(op, stack[i], places[i]);
    }
  };
  counters.async_kernels++;
  current_queue(device).push({Kind::kKernel, name(), bytes(outputs), std::move(run), {}});
  return outputs;
}

Values Call::run_and_wait() {
  std::vector<std::pair<Tensor, Tensor>> outs;  // of the device, and what the kernel has filled
  auto stack = for_cpu(*this, [&](const Tensor& t, size_t i) {
    if (!info.out[i]) return back_view(t);
    outs.emplace_back(t, at::empty({0}, t.options().device(c10::kCPU)));
    return outs.back().second;
  });
  counters.sync_kernels++;
  auto& queue = current_queue(device);
  auto run = [&stack, op = op] { op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack); };
  queue.wait(queue.push({Kind::kKernel, name(), bytes({}), run, {}}));

  for (auto& [place, filled] : outs) {
    at::native::resize_output(place, filled.sizes());
    copy_from(filled, place, false);
  }
  Values outputs;
  for (size_t i = 0; i < info.alias.size(); i++) {
    if (info.alias[i] >= 0) {
      outputs.push_back(args[info.alias[i]]);
      continue;
    }
    outputs.push_back(each_tensor(stack[i], [&](const Tensor& t) {
      Tensor result = empty_on(device, t);
      copy_from(t, result, false);
      return result;
    }));
  }
  return outputs;
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_boxed>()); }

}  // namespace

void run_boxed(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  size_t n = op.schema().arguments().size();
  Call call{op, info_of(op), Values(stack->end() - n, stack->end())};
  call.find_device();
  const c10::DeviceGuard guard(Device(kType, call.device));
  call.check_devices();
  if (call.info.generator >= 0) {
    auto& given = call.args[call.info.generator];
    call.seed = draw(given.isGenerator() ? std::optional(given.toGenerator()) : std::nullopt, call.device);
  }
  std::shared_ptr<const Outcome> outcome;
  if (!call.info.values && !call.info.no_meta) outcome = foresee(op, call.info, call.args);
  Values outputs = outcome ? call.run_ahead(*outcome) : call.run_and_wait();
  torch::jit::drop(*stack, n);
  stack->insert(stack->end(), outputs.begin(), outputs.end());
}

}  // namespace apart
