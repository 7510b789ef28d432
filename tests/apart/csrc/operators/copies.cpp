#include "operators/copies.h"

#include "runtime/arena.h"
#include "operators/counters.h"
#include "runtime/events.h"
#include "runtime/pinned.h"
#include "runtime/transfers.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

namespace apart {

namespace {

// Bytes as they are: same dtype, same strides, no gaps.
void copy_bytes(const Tensor& host, const Tensor& device, bool to_device, bool non_blocking) {
  DeviceIndex d = device.device().index();
  auto& queue = current_queue(d);
  void* here = const_cast<void*>(host.const_data_ptr());
  Transfer transfer{to_device, Arena::get().back(device.const_data_ptr()), static_cast<char*>(here), device.nbytes()};
  (to_device ? counters.h2d_bytes : counters.d2h_bytes) += transfer.bytes;

  if (non_blocking && is_pinned(here)) {
    (to_device ? counters.h2d_async : counters.d2h_async)++;
    void* context = host.storage().data_ptr().get_context();
    transfer.known_to_owner = owned_by_allocator(here, context);
    queue_watched(queue, transfer);
    if (transfer.known_to_owner) {
      host_allocator().record_event(here, context, c10::Stream(c10::Stream::UNSAFE, Device(kType, d), current_stream[d]));
    }
  } else if (non_blocking && to_device) {
    counters.h2d_staged++;
    auto staged = std::make_shared<Tensor>(host.clone());
    transfer.host = static_cast<char*>(staged->data_ptr());
    queue_plain(queue, transfer, staged);
  } else {
    queue.wait(queue_plain(queue, transfer, nullptr));
  }
}

void copy_on_device(const Tensor& from, const Tensor& to) {
  DeviceIndex s = from.device().index(), d = to.device().index();
  auto &queue = current_queue(s), &other = current_queue(d);
  if (s != d) wait_on(queue, record_on(other));
  auto run = [from = back_view(from), to = back_view(to)]() mutable { to.copy_(from); };
  queue.push({Kind::kKernel, "copy_", to.nbytes(), std::move(run), {}});
  if (s != d) wait_on(other, record_on(queue));
}

bool same_bytes(const Tensor& a, const Tensor& b) {
  return a.dtype() == b.dtype() && a.is_conj() == b.is_conj() && a.is_neg() == b.is_neg() && a.strides() == b.strides() &&
         a.is_non_overlapping_and_dense();
}

void copy_to_device(const Tensor& host, const Tensor& device, bool non_blocking) {
  if (same_bytes(host, device)) return copy_bytes(host, device, true, non_blocking);
  Tensor plain = host.contiguous().resolve_conj().resolve_neg();
  Tensor there = at::empty_like(plain, plain.options().device(device.device()).pinned_memory(false));
  copy_bytes(plain, there, true, non_blocking && !plain.is_same(host));
  copy_on_device(there, device);
  if (!non_blocking) current_queue(device.device().index()).wait();
}

void copy_to_host(const Tensor& device, const Tensor& host, bool non_blocking) {
  if (same_bytes(device, host)) return copy_bytes(host, device, false, non_blocking);
  Tensor there = at::empty(device.sizes(), device.options().dtype(host.dtype()));
  copy_on_device(device, there);
  if (same_bytes(there, host)) return copy_bytes(host, there, false, non_blocking);
  Tensor plain = at::empty(device.sizes(), host.options().pinned_memory(false));
  copy_bytes(plain, there, false, false);
  const_cast<Tensor&>(host).copy_(plain);
}

at::Scalar local_scalar(const Tensor& self) {
  auto& queue = current_queue(self.device().index());
  at::Scalar value;
  auto run = [&value, view = back_view(self)] { value = view.item(); };
  queue.wait(queue.push({Kind::kD2H, "_local_scalar_dense", self.nbytes(), run, {}}));
  return value;
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_copy_from", copy_from);
  m.impl("_local_scalar_dense", local_scalar);
}

// Copies resolve conjugates and negatives themselves; else torch would make a copy of the source first, for ever.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

}  // namespace

Tensor copy_from(const Tensor& self, const Tensor& dst, bool non_blocking) {
  TORCH_CHECK(self.sizes() == dst.sizes(), "apart: copy of ", self.sizes(), " to ", dst.sizes());
  if (!self.numel()) return dst;
  const c10::DeviceGuard guard(on_device(self) ? self.device() : dst.device());
  if (on_device(self) && on_device(dst)) {
    copy_on_device(self, dst);
  } else if (on_device(dst)) {
    copy_to_device(self, dst, non_blocking);
  } else {
    copy_to_host(self, dst, non_blocking);
  }
  return dst;
}

}  // namespace apart
