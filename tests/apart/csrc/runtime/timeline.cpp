#include "runtime/timeline.h"

#include <atomic>

namespace apart {

namespace {

std::atomic<bool> heard{false};
std::mutex entries_mutex;
std::vector<Entry> entries;

}  // namespace

bool listening() { return heard; }

void listen(bool yes) { heard = yes; }

void note(Entry entry) {
  if (!heard) return;
  std::lock_guard<std::mutex> lock(entries_mutex);
  entries.push_back(std::move(entry));
}

std::vector<Entry> take_entries() {
  std::lock_guard<std::mutex> lock(entries_mutex);
  return std::exchange(entries, {});
}

}  // namespace apart
