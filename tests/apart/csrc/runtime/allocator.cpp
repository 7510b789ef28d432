#include "runtime/allocator.h"

#include "runtime/arena.h"
#include "runtime/events.h"
#include "runtime/transfers.h"

#include <atomic>
#include <algorithm>
#include <cstring>
#include <map>
#include <set>
#include <vector>

namespace apart {

namespace {

constexpr size_t kGrain = 512;  // as CUDA's: sizes and addresses are multiples of it
constexpr size_t kDefaultCapacity = size_t(8) << 30;

std::atomic<Poison> poison{Poison::kNever};

struct Block {
  DeviceIndex device;
  size_t offset, size;
  int64_t stream;              // it was taken on
  std::set<int64_t> used_by;  // other streams, from record_stream
};

void free_block(void* context);

// What a device has: unused addresses, cached blocks, and blocks that some stream may still use.
struct Pool {
  std::mutex mutex;
  std::map<size_t, size_t> gaps{{kGrain, kSpan - kGrain}};  // offset -> size; offset 0 would look like a null pointer
  std::map<std::pair<int64_t, size_t>, std::vector<size_t>> cached;  // (stream, size) -> offsets
  std::deque<std::pair<Block, std::vector<std::shared_ptr<Record>>>> pending;
  size_t capacity = kDefaultCapacity, reserved = 0;
  c10::CachingDeviceAllocator::DeviceStats stats;

  void fill_with_poison(DeviceIndex d, int64_t stream, size_t offset, size_t size) {
    char* at = Arena::get().back(d, offset);
    queue_of(d, stream).push_internal([at, size] { std::memset(at, 0xff, size); });
  }

  void give_back(const Block& b) {
    cached[{b.stream, b.size}].push_back(b.offset);
    if (poison == Poison::kFreed) fill_with_poison(b.device, b.stream, b.offset, b.size);
  }

  void collect_pending() {
    for (auto it = pending.begin(); it != pending.end();) {
      bool done = std::all_of(it->second.begin(), it->second.end(), [](auto& record) { return record->is_done(); });
      if (!done) {
        ++it;
        continue;
      }
      give_back(it->first);
      it = pending.erase(it);
    }
  }

  void add_gap(size_t offset, size_t size) {
    auto next = gaps.upper_bound(offset);
    if (next != gaps.end() && offset + size == next->first) {
      size += next->second;
      next = gaps.erase(next);
    }
    if (next != gaps.begin()) {
      auto before = std::prev(next);
      if (before->first + before->second == offset) {
        before->second += size;
        return;
      }
    }
    gaps[offset] = size;
  }

  void release_cached(DeviceIndex d) {
    for (auto& [key, offsets] : cached) {
      for (size_t offset : offsets) {
        Arena::get().discard(d, offset, key.second);
        reserved -= key.second;
        stats.reserved_bytes[0].decrease(key.second);
        add_gap(offset, key.second);
      }
    }
    cached.clear();
  }

  size_t take_cached(DeviceIndex d, int64_t stream, size_t size) {  // 0: none
    auto hit = cached.find({stream, size});
    if (hit == cached.end() || hit->second.empty()) return 0;
    size_t offset = hit->second.back();
    hit->second.pop_back();
    if (poison == Poison::kTaken) fill_with_poison(d, stream, offset, size);
    return offset;
  }

  size_t take_fresh(DeviceIndex d, size_t size) {
    auto gap = std::find_if(gaps.begin(), gaps.end(), [&](auto& g) { return g.second >= size; });
    TORCH_CHECK(gap != gaps.end(), "apart: no ", size, " addresses in a row are left on device ", int(d));
    size_t offset = gap->first, rest = gap->second - size;
    gaps.erase(gap);
    if (rest) gaps[offset + size] = rest;
    reserved += size;
    stats.reserved_bytes[0].increase(size);
    if (poisoning()) std::memset(Arena::get().back(d, offset), 0xff, size);  // at once: no stream has it, and any may be first
    return offset;
  }

  void count(const Block& b, bool taken) {
    auto change = [&](auto& stat, int64_t by) { taken ? stat.increase(by) : stat.decrease(by); };
    change(stats.allocated_bytes[0], b.size);
    change(stats.active_bytes[0], b.size);
    change(stats.allocation[0], 1);
  }
};

Pool& pool_of(DeviceIndex d) {
  static auto* pools = new Pool[kDevices];
  return pools[d];
}

void free_block(void* context) {
  if (!context || forked()) return;
  std::unique_ptr<Block> b(static_cast<Block*>(context));
  auto& pool = pool_of(b->device);
  std::lock_guard<std::mutex> lock(pool.mutex);
  pool.count(*b, false);
  if (b->used_by.empty()) return pool.give_back(*b);
  std::vector<std::shared_ptr<Record>> records;
  for (auto stream : b->used_by) records.push_back(record_on(queue_of(b->device, stream)));
  pool.pending.emplace_back(*b, std::move(records));
}

class Allocator final : public c10::DeviceAllocator {
 public:
  at::DataPtr allocate(size_t bytes) override {
    DeviceIndex d = current_device;
    if (!bytes) return {nullptr, nullptr, &free_block, Device(kType, d)};
    refuse_after_fork();
    size_t size = (bytes + kGrain - 1) / kGrain * kGrain;
    int64_t stream = current_stream[d];
    auto& pool = pool_of(d);
    std::unique_lock<std::mutex> lock(pool.mutex);
    pool.collect_pending();
    size_t offset = pool.take_cached(d, stream, size);
    if (!offset) {
      if (pool.reserved + size > pool.capacity) {  // wait until everything that could be free is, and try again
        lock.unlock();
        synchronize(d);
        lock.lock();
        pool.collect_pending();
        pool.release_cached(d);
        pool.stats.num_alloc_retries++;
      }
      if (pool.reserved + size > pool.capacity) {
        pool.stats.num_ooms++;
        TORCH_CHECK_WITH(OutOfMemoryError, false, "apart out of memory. Tried to allocate ", bytes, " bytes on device ", int(d), "; ",
                         pool.reserved, " of ", pool.capacity, " bytes are in use.");
      }
      offset = pool.take_fresh(d, size);
    }
    taken_on(queue_of(d, stream), Arena::get().back(d, offset), size);
    auto* b = new Block{d, offset, size, stream, {}};
    pool.count(*b, true);
    return {Arena::get().front(d, offset), b, &free_block, Device(kType, d)};
  }

  at::DeleterFnPtr raw_deleter() const override { return nullptr; }

  void copy_data(void* to, const void* from, size_t bytes) const override {
    char *there = Arena::get().back(to), *here = Arena::get().back(from);
    current_queue(current_device).push({Kind::kKernel, "copy_data", bytes, [=] { std::memcpy(there, here, bytes); }, {}});
  }

  bool initialized() override { return true; }

  void emptyCache(c10::MempoolId_t = {0, 0}) override {
    for (DeviceIndex d = 0; d < kDevices; d++) {
      synchronize(d);
      auto& pool = pool_of(d);
      std::lock_guard<std::mutex> lock(pool.mutex);
      pool.collect_pending();
      pool.release_cached(d);
    }
  }

  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    if (data.get_deleter() != &free_block || !data.get_context() || forked()) return;
    auto* b = static_cast<Block*>(data.get_context());
    std::lock_guard<std::mutex> lock(pool_of(b->device).mutex);
    if (stream.id() != b->stream) b->used_by.insert(stream.id());
  }

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex d) override {
    refuse_after_fork();
    auto& pool = pool_of(d);
    std::lock_guard<std::mutex> lock(pool.mutex);
    return pool.stats;
  }

  void resetAccumulatedStats(DeviceIndex d) override {
    for_each_stat(d, [](auto& stat) { stat.reset_accumulated(); });
    pool_of(d).stats.num_alloc_retries = pool_of(d).stats.num_ooms = 0;
  }

  void resetPeakStats(DeviceIndex d) override {
    for_each_stat(d, [](auto& stat) { stat.reset_peak(); });
  }

  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex d) override {
    auto& pool = pool_of(d);
    std::lock_guard<std::mutex> lock(pool.mutex);
    return {pool.capacity - pool.reserved, pool.capacity};
  }

 private:
  template <class F>
  void for_each_stat(DeviceIndex d, F change) {
    refuse_after_fork();
    auto& pool = pool_of(d);
    std::lock_guard<std::mutex> lock(pool.mutex);
    auto& stats = pool.stats;
    for (auto* stat : {&stats.allocated_bytes[0], &stats.reserved_bytes[0], &stats.active_bytes[0], &stats.allocation[0]}) change(*stat);
  }
};

Allocator allocator;
REGISTER_ALLOCATOR(kType, &allocator);

}  // namespace

c10::DeviceAllocator& device_allocator() { return allocator; }

c10::DataPtr allocate_on(DeviceIndex device, size_t bytes) {
  auto before = std::exchange(current_device, device);
  struct Restore {
    DeviceIndex device;
    ~Restore() { current_device = device; }
  } restore{before};
  return allocator.allocate(bytes);
}

void set_poison(Poison when) { poison = when; }

bool poisoning() { return poison != Poison::kNever; }

void set_capacity(DeviceIndex device, size_t bytes) {
  TORCH_CHECK(bytes > 0 && bytes < kSpan, "apart: capacity of ", bytes, " bytes; it must be above 0 and below ", kSpan);
  auto& pool = pool_of(device);
  std::lock_guard<std::mutex> lock(pool.mutex);
  pool.capacity = bytes;
}

size_t capacity_of(DeviceIndex device) {
  auto& pool = pool_of(device);
  std::lock_guard<std::mutex> lock(pool.mutex);
  return pool.capacity;
}

}  // namespace apart
