#include "operators/tensors.h"

#include "runtime/allocator.h"
#include "runtime/arena.h"

#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

namespace apart {

Tensor back_view(const Tensor& t, bool resizable) {
  auto options = t.options().device(c10::kCPU).pinned_memory(false);
  if (!t.numel()) return at::empty_strided(t.sizes(), t.strides(), options);
  auto maker = at::for_blob(Arena::get().back(t.const_data_ptr()), t.sizes());
  maker.strides(t.strides()).options(options);
  if (resizable) maker.allocator(c10::GetCPUAllocator()).resizeable_storage();
  Tensor view = maker.make_tensor();
  if (t.unsafeGetTensorImpl()->is_wrapped_number()) view.unsafeGetTensorImpl()->set_wrapped_number(true);
  view._set_conj(t.is_conj());
  view._set_neg(t.is_neg());
  return view;
}

Tensor empty_on(DeviceIndex d, const Tensor& like) {
  return at::empty_strided(like.sizes(), like.strides(), like.options().device(Device(kType, d)).pinned_memory(false));
}

namespace {

using Dtype = std::optional<c10::ScalarType>;
using Layout = std::optional<c10::Layout>;
using AnyDevice = std::optional<Device>;

constexpr auto kKeys = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);

Tensor empty(c10::IntArrayRef size, Dtype dtype, Layout layout, AnyDevice device, std::optional<bool> pin,
             std::optional<c10::MemoryFormat> format) {
  TORCH_CHECK(c10::layout_or_default(layout) == c10::Layout::Strided, "apart: only dense tensors with strides");
  TORCH_CHECK(!c10::pinned_memory_or_default(pin), "Only dense CPU tensors can be pinned");
  const c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_generic(size, &device_allocator(), kKeys, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, Dtype dtype, Layout, AnyDevice device, std::optional<bool> pin) {
  TORCH_CHECK(!c10::pinned_memory_or_default(pin), "Only dense CPU tensors can be pinned");
  const c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_strided_generic(size, stride, &device_allocator(), kKeys, c10::dtype_or_default(dtype));
}

const Tensor& resize_(const Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  if (format && *format != at::MemoryFormat::Preserve) impl->empty_tensor_restride(*format);
  size_t bytes = impl->numel() ? (impl->numel() + impl->storage_offset()) * impl->itemsize() : 0;
  if (bytes > impl->storage().nbytes()) at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(impl->storage(), bytes);
  return self;
}

Tensor& set_to_nothing(Tensor& self) {
  c10::Storage nothing(c10::Storage::use_byte_size_t(), 0, allocate_on(self.device().index(), 0), &device_allocator(), true);
  return at::native::set_storage_cpu_(self, nothing, 0, {0}, {});
}

Tensor view(const Tensor& self, c10::IntArrayRef size) { return at::native::view(self, size); }

bool is_set_to(const Tensor& a, const Tensor& b) {
  return a.storage().unsafeGetStorageImpl() == b.storage().unsafeGetStorageImpl() && a.storage_offset() == b.storage_offset() &&
         a.sizes() == b.sizes() && a.strides() == b.strides();
}

// A parameter on the host may become one of the device by `p.data = ...`, and back, as with CUDA.
bool shallow_copy(const Tensor& a, const Tensor& b) {
  auto plain = [](const Tensor& t) { return t.layout() == c10::kStrided && (on_device(t) || t.is_cpu()); };
  return plain(a) && plain(b);
}

void record_stream(Tensor& t, c10::Stream s) { device_allocator().recordStream(t.storage().data_ptr(), s); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("resize_", resize_);
  m.impl("view", view);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("view_as_real", at::native::view_as_real);
  m.impl("view_as_complex", at::native::view_as_complex);
  m.impl("is_set_to", is_set_to);
  m.impl("set_", set_to_nothing);
  m.impl("set_.source_Tensor", at::native::set_tensor_);
  m.impl("set_.source_Storage", static_cast<Tensor& (*)(Tensor&, at::Storage)>(at::native::set_));
  m.impl("set_.source_Storage_storage_offset", at::native::set_storage_cpu_);
  m.impl("record_stream", record_stream);
  m.impl("_has_compatible_shallow_copy_type", shallow_copy);
}

}  // namespace

}  // namespace apart
