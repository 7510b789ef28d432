// How torch chooses devices and streams, and uses events: everything that torch.Stream, torch.Event and
// torch.accelerator do goes through here.
#include "runtime/allocator.h"
#include "runtime/events.h"
#include "runtime/gil.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace apart {

namespace {

using c10::Stream;

Event* event_of(void* event) { return static_cast<Event*>(event); }

std::shared_ptr<Record> last_record(void* event) { return event ? event_of(event)->last : nullptr; }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr auto static_type = kType;

  Guard() = default;
  explicit Guard(c10::DeviceType) {}

  c10::DeviceType type() const override { return kType; }
  DeviceIndex deviceCount() const noexcept override { return kDevices; }

  Device exchangeDevice(Device d) const override {
    auto before = getDevice();
    setDevice(d);
    return before;
  }
  Device getDevice() const override { return Device(kType, current_device); }
  void setDevice(Device d) const override {
    TORCH_CHECK(d.index() < kDevices, "apart: there is no device ", d, "; there are ", kDevices);
    uncheckedSetDevice(d);
  }
  void uncheckedSetDevice(Device d) const noexcept override {
    if (d.index() >= 0 && d.index() < kDevices) current_device = d.index();
  }
  c10::DeviceCapability getDeviceCapability(Device) const override { return {}; }  // every dtype
  void synchronizeDevice(const DeviceIndex d) const override { synchronize(index_of(d)); }

  static Stream stream(Device d, int64_t id) { return Stream(Stream::UNSAFE, Device(kType, index_of(d)), id); }
  Stream getStream(Device d) const override { return stream(d, current_stream[index_of(d)]); }
  Stream getDefaultStream(Device d) const override { return stream(d, 0); }
  Stream getNewStream(Device d, int = 0) const override { return stream(d, take_pool_stream(index_of(d))); }
  Stream getStreamFromGlobalPool(Device d, bool = false) const override { return getNewStream(d); }
  Stream exchangeStream(Stream s) const override {
    auto before = getStream(s.device());
    current_stream[s.device_index()] = s.id();
    return before;
  }
  void* getStreamNativeHandle(const Stream s) const override { return &queue_of(s); }
  bool queryStream(const Stream& s) const override { return queue_of(s).idle(); }
  void synchronizeStream(const Stream& s) const override { queue_of(s).wait(); }

  void record(void** event, const Stream& s, const DeviceIndex, const c10::EventFlag flag) const override {
    if (!*event) *event = new Event{flag == c10::EventFlag::BACKEND_DEFAULT, nullptr};
    event_of(*event)->last = record_on(queue_of(s));
  }
  void block(void* event, const Stream& s) const override {
    if (auto record = last_record(event)) wait_on(queue_of(s), record);
  }
  bool queryEvent(void* event) const override {
    auto record = last_record(event);
    return !record || record->is_done();
  }
  void synchronizeEvent(void* event) const override {
    GilRelease gil;
    if (auto record = last_record(event)) record->wait();
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete event_of(event); }

  double elapsedTime(void* first, void* second, const DeviceIndex) const override {
    for (auto* event : {first, second}) {
      TORCH_CHECK(event && event_of(event)->timing, "apart: elapsed_time needs events made with enable_timing=True and recorded");
      TORCH_CHECK(queryEvent(event), "apart: elapsed_time needs events that have completed");
    }
    return (last_record(second)->time() - last_record(first)->time()) * 1e3;
  }

  void recordDataPtrOnStream(const c10::DataPtr& data, const Stream& s) const override { device_allocator().recordStream(data, s); }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

}  // namespace

}  // namespace apart
