// What Python calls: the operators torch.ops.apart.*
#include "runtime/allocator.h"
#include "operators/counters.h"
#include "runtime/generator.h"
#include "runtime/pinned.h"
#include "runtime/timeline.h"
#include "runtime/transfers.h"
#include "runtime/violations.h"

#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <torch/library.h>

namespace apart {

namespace {

using at::Tensor;

std::vector<int64_t> read_counters() {  // in the order of Counters
  auto& c = counters;
  return {c.async_kernels, c.sync_kernels, c.h2d_bytes, c.d2h_bytes, c.h2d_async, c.d2h_async, c.h2d_staged, c.no_meta};
}

std::vector<int64_t> read_host_usage() {  // in the order of HostUsage
  auto u = host_usage();
  return {u.registrations, u.registered_bytes, u.pinned_blocks, u.pinned_bytes, u.waiting_blocks};
}

using Columns = std::tuple<std::vector<std::string>, std::vector<int64_t>, std::vector<double>>;

Columns read_timeline() {  // per entry 1 name, 4 whole numbers, 3 times
  Columns columns;
  auto& [names, numbers, times] = columns;
  for (auto& e : take_entries()) {
    names.push_back(e.name);
    numbers.insert(numbers.end(), {e.device, e.stream, int64_t(e.kind), int64_t(e.bytes)});
    times.insert(times.end(), {e.queued, e.start, e.end});
  }
  return columns;
}

template <class F>
auto with_generator(int64_t device, F f) {
  auto generator = default_generator(DeviceIndex(device));
  std::lock_guard<std::mutex> lock(generator.mutex());
  return f(generator);
}

TORCH_LIBRARY(apart, m) {
  // until then torch takes no memory for pinned
  m.def("init() -> ()", [] { at::globalContext().lazyInitDevice(kType); });
  m.def("device_count() -> int", []() -> int64_t { return kDevices; });
  m.def("is_forked() -> bool", [] { return forked(); });

  m.def("set_delay(int kind, int microseconds) -> ()", [](int64_t kind, int64_t us) { set_delay(Kind(kind), us); });
  m.def("pause(int device, int stream, int where) -> ()", [](int64_t d, int64_t s, int64_t where) { queue_of(d, s).pause(Pause(where)); });
  m.def("wait_halfway(int device, int stream) -> ()", [](int64_t d, int64_t s) { queue_of(d, s).wait_halfway(); });
  m.def("set_poison(int when) -> ()", [](int64_t when) { set_poison(Poison(when)); });
  m.def("set_capacity(int device, int bytes) -> ()", [](int64_t d, int64_t bytes) { set_capacity(d, bytes); });
  m.def("capacity(int device) -> int", [](int64_t d) -> int64_t { return capacity_of(d); });

  m.def("counters() -> int[]", read_counters);
  m.def("host_usage() -> int[]", read_host_usage);
  m.def("violations() -> str[]", [] { return violations(); });
  m.def("take_violations() -> str[]", [] { return take_violations(); });
  m.def("listen(bool yes) -> ()", [](bool yes) { listen(yes); });
  m.def("take_timeline() -> (str[], int[], float[])", read_timeline);

  m.def("host_register(int address, int bytes) -> int",
        [](int64_t p, int64_t bytes) { return register_host(reinterpret_cast<void*>(p), bytes); });
  m.def("host_unregister(int address) -> int", [](int64_t p) { return unregister_host(reinterpret_cast<void*>(p)); });

  m.def("get_rng_state(int device) -> Tensor", [](int64_t d) {
    return with_generator(d, [](auto& g) { return Tensor(g.unsafeGetGeneratorImpl()->get_state()); });
  });
  m.def("set_rng_state(Tensor state, int device) -> ()",
        [](const Tensor& state, int64_t d) { with_generator(d, [&](auto& g) { g.set_state(state); }); });
  m.def("manual_seed(int device, int seed) -> ()",
        [](int64_t d, int64_t seed) { with_generator(d, [&](auto& g) { g.set_current_seed(uint64_t(seed)); }); });
}

}  // namespace

}  // namespace apart
