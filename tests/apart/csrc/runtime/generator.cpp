#include "runtime/generator.h"

#include <ATen/core/GeneratorForPrivateuseone.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <c10/core/GeneratorImpl.h>

#include <array>
#include <cstring>
#include <mutex>

namespace apart {

namespace {

class Generator final : public c10::GeneratorImpl {
 public:
  explicit Generator(DeviceIndex d) : GeneratorImpl(Device(kType, d), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}

  void set_current_seed(uint64_t seed) override {
    seed_ = seed;
    offset_ = 0;
  }
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_;
  }

  uint64_t draw() {  // splitmix64
    uint64_t z = seed_ + 0x9e3779b97f4a7c15ull * ++offset_;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
  }

  void set_state(const c10::TensorImpl& state) override {
    at::detail::check_rng_state(state);
    TORCH_CHECK(state.numel() == sizeof seed_ + sizeof offset_, "apart: an RNG state of ", state.numel(), " bytes, expected 16");
    auto* p = static_cast<const char*>(state.data());
    std::memcpy(&seed_, p, sizeof seed_);
    std::memcpy(&offset_, p + sizeof seed_, sizeof offset_);
  }

  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto state = at::detail::empty_cpu({sizeof seed_ + sizeof offset_}, c10::kByte);
    auto* p = state.data_ptr<uint8_t>();
    std::memcpy(p, &seed_, sizeof seed_);
    std::memcpy(p + sizeof seed_, &offset_, sizeof offset_);
    return state.getIntrusivePtr();
  }

 private:
  Generator* clone_impl() const override {
    auto* copy = new Generator(device().index());
    copy->seed_ = seed_;
    copy->offset_ = offset_;
    return copy;
  }

  uint64_t seed_ = c10::default_rng_seed_val;
  uint64_t offset_ = 0;
};

}  // namespace

at::Generator new_generator(DeviceIndex d) { return at::make_generator<Generator>(index_of(d)); }

const at::Generator& default_generator(DeviceIndex d) {
  static_assert(kDevices == 2);
  static auto* generators = new std::array<at::Generator, kDevices>{new_generator(0), new_generator(1)};
  return generators->at(index_of(d));
}

uint64_t draw(const std::optional<at::Generator>& given, DeviceIndex d) {
  at::Generator generator = given && given->defined() ? *given : default_generator(d);
  TORCH_CHECK(generator.device().type() == kType, "Expected a 'apart' device type for generator but found '",
              generator.device().type(), "'");
  std::lock_guard<std::mutex> lock(generator.mutex());
  return static_cast<Generator*>(generator.unsafeGetGeneratorImpl())->draw();
}

}  // namespace apart
