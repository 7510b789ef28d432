// What torch asks a backend for: devices, pinned memory, generators, storages that grow.
#include "runtime/allocator.h"
#include "runtime/arena.h"
#include "runtime/generator.h"
#include "runtime/pinned.h"
#include "runtime/streams.h"

#include <ATen/detail/PrivateUse1HooksInterface.h>

#include <cstring>

namespace apart {

namespace {

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }

  DeviceIndex deviceCount() const override { return kDevices; }
  DeviceIndex getCurrentDevice() const override { return current_device; }
  void setCurrentDevice(DeviceIndex d) const override {
    TORCH_CHECK(d >= 0 && d < kDevices, "apart: there is no device ", int(d), "; there are ", kDevices);
    current_device = d;
  }
  DeviceIndex exchangeDevice(DeviceIndex d) const override {
    auto before = current_device;
    setCurrentDevice(d);
    return before;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex d) const override {
    auto before = current_device;
    if (d >= 0) setCurrentDevice(d);
    return before;
  }

  bool isPinnedPtr(const void* p) const override { return is_pinned(p); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &host_allocator(); }
  Device getDeviceFromPtr(void* p) const override { return Device(kType, Arena::get().device_of(p)); }

  const at::Generator& getDefaultGenerator(DeviceIndex d) const override { return default_generator(d); }
  at::Generator getNewGenerator(DeviceIndex d) const override { return new_generator(d); }

  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto* impl = storage.unsafeGetStorageImpl();
    auto d = impl->device().index();
    auto fresh = allocate_on(d, bytes);
    if (size_t kept = std::min(bytes, impl->nbytes())) {
      char *to = Arena::get().back(fresh.get()), *from = Arena::get().back(impl->data());
      current_queue(d).push({Kind::kKernel, "resize_", kept, [=] { std::memcpy(to, from, kept); }, {}});
    }
    impl->set_data_ptr_noswap(std::move(fresh));
    impl->set_nbytes(bytes);
  }
};

[[maybe_unused]] const bool registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  at::setHostAllocator(kType, &host_allocator());
  return true;
}();

}  // namespace

}  // namespace apart
