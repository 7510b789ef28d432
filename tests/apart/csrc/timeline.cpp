#include "timeline.h"

#include <atomic>

namespace apart {

namespace {

std::atomic<bool> on{false};
std::mutex mutex;
std::vector<Entry> entries;

}  // namespace

bool listening() { return on; }

void listen(bool yes) { on = yes; }

void note(Entry entry) {
  if (!on) return;
  std::lock_guard<std::mutex> lock(mutex);
  entries.push_back(std::move(entry));
}

std::vector<Entry> take_entries() {
  std::lock_guard<std::mutex> lock(mutex);
  return std::exchange(entries, {});
}

}  // namespace apart
