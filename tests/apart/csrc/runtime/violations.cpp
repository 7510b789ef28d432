#include "runtime/violations.h"

#include <cstring>
#include <mutex>
#include <utility>

namespace apart {

namespace {

std::mutex seen_mutex;
std::vector<std::string> seen;

uint64_t mix(uint64_t sum, uint64_t word) {
  sum = (sum ^ word) * 0x9e3779b97f4a7c15ull;
  return sum ^ (sum >> 29);
}

}  // namespace

void violate(std::string text) {
  std::lock_guard<std::mutex> lock(seen_mutex);
  seen.push_back(std::move(text));
}

std::vector<std::string> take_violations() {
  std::lock_guard<std::mutex> lock(seen_mutex);
  return std::exchange(seen, {});
}

std::vector<std::string> violations() {
  std::lock_guard<std::mutex> lock(seen_mutex);
  return seen;
}

uint64_t checksum(const void* data, size_t bytes) {
  auto* p = static_cast<const char*>(data);
  uint64_t sum = bytes, word;
  for (; bytes >= sizeof word; bytes -= sizeof word, p += sizeof word) {
    std::memcpy(&word, p, sizeof word);
    sum = mix(sum, word);
  }
  word = 0;
  std::memcpy(&word, p, bytes);
  return mix(sum, word);
}

}  // namespace apart
