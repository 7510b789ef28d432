#include "runtime/pinned.h"

#include "runtime/allocator.h"
#include "runtime/events.h"
#include "runtime/transfers.h"

#include <algorithm>
#include <cstring>
#include <map>

namespace apart {

namespace {

constexpr size_t kHostAlignment = 4096;

struct Range {
  size_t bytes;
  bool registered;                              // else a block of the allocator
  bool in_use = true;                           // a free block stays pinned until the cache is emptied
  std::vector<std::shared_ptr<Record>> users;  // of a block: copies that the allocator knows of
};

using Ranges = std::map<char*, Range>;

void free_pinned(void* p);

class HostAllocator final : public at::HostAllocator {
 public:
  at::DataPtr allocate(size_t bytes) override {
    if (!bytes) return {nullptr, nullptr, &free_pinned, Device(c10::kCPU)};
    refuse_after_fork();
    std::lock_guard<std::mutex> lock(mutex_);
    take_back_waiting();
    char* p = take_cached(bytes);
    if (!p) {
      void* fresh = nullptr;
      TORCH_CHECK(!posix_memalign(&fresh, kHostAlignment, bytes), "apart: no ", bytes, " bytes of host memory to pin");
      p = static_cast<char*>(fresh);
      ranges_.emplace(p, Range{bytes, false});
    }
    return {p, p, &free_pinned, Device(c10::kCPU)};
  }

  at::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }

  bool record_event(void* p, void* context, c10::Stream stream) override {
    std::lock_guard<std::mutex> lock(mutex_);
    auto* block = find_block(p, context);
    if (block) block->users.push_back(record_on(queue_of(stream)));
    return block;
  }

  bool owns(void* p, void* context) {
    std::lock_guard<std::mutex> lock(mutex_);
    return find_block(p, context);
  }

  void empty_cache() override {
    std::lock_guard<std::mutex> lock(mutex_);
    take_back_waiting();
    for (auto& [bytes, blocks] : cached_) {
      for (char* p : blocks) {
        ranges_.erase(p);
        std::free(p);
      }
    }
    cached_.clear();
  }

  at::HostStats get_stats() override {
    auto usage = host_usage();
    at::HostStats stats;
    stats.active_requests.current = usage.pinned_blocks;
    stats.active_bytes.current = usage.pinned_bytes;
    return stats;
  }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}

  void free(char* p) {
    if (!p || forked()) return;
    std::lock_guard<std::mutex> lock(mutex_);
    auto& range = ranges_.at(p);
    leave_alone(p, range.bytes, "freed", true);
    range.in_use = false;
    waiting_.push_back(p);
    take_back_waiting();
  }

  bool contains(const void* p) {
    std::lock_guard<std::mutex> lock(mutex_);
    return find(p) != ranges_.end();
  }

  int64_t add(char* p, size_t bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto next = ranges_.lower_bound(p);
    if (find(p) != ranges_.end() || (next != ranges_.end() && next->first < p + bytes)) return 712;
    ranges_.emplace(p, Range{bytes, true});
    return 0;
  }

  int64_t remove(char* p) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto it = ranges_.find(p);
    if (it == ranges_.end() || !it->second.registered) return 713;
    leave_alone(p, it->second.bytes, "unregistered", false);
    ranges_.erase(it);
    return 0;
  }

  HostUsage usage() {
    std::lock_guard<std::mutex> lock(mutex_);
    take_back_waiting();
    HostUsage sum{};
    for (auto& [p, range] : ranges_) {
      if (!range.in_use) continue;
      (range.registered ? sum.registrations : sum.pinned_blocks)++;
      (range.registered ? sum.registered_bytes : sum.pinned_bytes) += range.bytes;
    }
    sum.waiting_blocks = waiting_.size();
    return sum;
  }

 private:
  Range* find_block(void* p, void* context) {  // as CUDA looks: by the storage, else by the start of a block
    for (void* key : {context, p}) {
      auto it = ranges_.find(static_cast<char*>(key));
      if (it != ranges_.end() && !it->second.registered) return &it->second;
    }
    return nullptr;
  }

  Ranges::iterator find(const void* address) {
    auto* p = static_cast<char*>(const_cast<void*>(address));
    auto it = ranges_.upper_bound(p);
    if (it == ranges_.begin()) return ranges_.end();
    --it;
    return p < it->first + it->second.bytes ? it : ranges_.end();
  }

  char* take_cached(size_t bytes) {
    auto hit = cached_.find(bytes);
    if (hit == cached_.end() || hit->second.empty()) return nullptr;
    char* p = hit->second.back();  // last in first out, so that who still uses a freed block meets its next owner soon
    hit->second.pop_back();
    ranges_.at(p).in_use = true;
    return p;
  }

  void take_back_waiting() {
    auto done = [this](char* p) {
      auto& range = ranges_.at(p);
      auto& users = range.users;
      if (!std::all_of(users.begin(), users.end(), [](auto& record) { return record->is_done(); })) return false;
      users.clear();
      if (poisoning()) std::memset(p, 0xff, range.bytes);
      cached_[range.bytes].push_back(p);
      return true;
    };
    waiting_.erase(std::remove_if(waiting_.begin(), waiting_.end(), done), waiting_.end());
  }

  std::mutex mutex_;
  Ranges ranges_;
  std::map<size_t, std::vector<char*>> cached_;  // bytes -> free blocks
  std::vector<char*> waiting_;                   // freed blocks that copies may still use
};

HostAllocator& the_host_allocator() {
  static auto* a = new HostAllocator;
  return *a;
}

void free_pinned(void* p) { the_host_allocator().free(static_cast<char*>(p)); }

}  // namespace

at::HostAllocator& host_allocator() { return the_host_allocator(); }

bool owned_by_allocator(void* p, void* context) { return the_host_allocator().owns(p, context); }

bool is_pinned(const void* p) { return p && !forked() && the_host_allocator().contains(p); }

int64_t register_host(const void* p, int64_t bytes) {
  refuse_after_fork();
  if (!p || bytes <= 0) return 1;
  return the_host_allocator().add(static_cast<char*>(const_cast<void*>(p)), bytes);
}

int64_t unregister_host(const void* p) {
  refuse_after_fork();
  return the_host_allocator().remove(static_cast<char*>(const_cast<void*>(p)));
}

HostUsage host_usage() {
  refuse_after_fork();
  return the_host_allocator().usage();
}

}  // namespace apart
