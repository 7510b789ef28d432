#include "runtime/transfers.h"

#include "runtime/allocator.h"
#include "runtime/violations.h"

#include <c10/util/StringUtil.h>

#include <cstring>
#include <list>
#include <optional>

namespace apart {

namespace {

// A watched copy: its ends, and what they held when they were looked at last.
struct Watched {
  Transfer transfer;
  std::string where;
  Queue* queue;
  uint64_t ticket = 0;
  std::optional<uint64_t> source_at_call;
  uint64_t source = 0, destination = 0;

  const char* from() const { return transfer.to_device ? transfer.host : transfer.device; }
  char* to() const { return transfer.to_device ? transfer.device : transfer.host; }

  std::string name() const {
    return c10::str(transfer.to_device ? "h2d" : "d2h", " of ", transfer.bytes, " bytes on ", where, ", host memory at ",
                    static_cast<const void*>(transfer.host));
  }

  void its_turn() {
    source = checksum(from(), transfer.bytes);
    if (source_at_call && *source_at_call != source) violate(name() + ": its source changed between the call and the copy's turn");
    destination = checksum(to(), transfer.bytes);
  }

  void copy() {
    if (checksum(from(), transfer.bytes) != source) violate(name() + ": its source changed while it was copied");
    if (checksum(to(), transfer.bytes) != destination) violate(name() + ": its destination changed while it was copied");
    std::memcpy(to(), from(), transfer.bytes);
  }
};

std::mutex under_way_mutex;
std::list<std::shared_ptr<Watched>> under_way;

bool overlaps(const Transfer& t, const void* host, size_t bytes) {
  auto* p = static_cast<const char*>(host);
  return t.host < p + bytes && p < t.host + t.bytes;
}

template <class F>
const Watched* find_under_way(const void* host, size_t bytes, F accept) {  // with the lock held
  for (auto& watched : under_way) {
    if (overlaps(watched->transfer, host, bytes) && accept(watched->transfer)) return watched.get();
  }
  return nullptr;
}

Kind kind_of(const Transfer& t) { return t.to_device ? Kind::kH2D : Kind::kD2H; }

}  // namespace

void queue_watched(Queue& queue, Transfer t) {
  auto watched = std::make_shared<Watched>();
  watched->transfer = t;
  watched->where = queue.name();
  watched->queue = &queue;
  auto run = [watched] {
    watched->copy();
    std::lock_guard<std::mutex> lock(under_way_mutex);
    under_way.remove(watched);
  };
  std::lock_guard<std::mutex> lock(under_way_mutex);
  auto writes = [](const Transfer& other) { return !other.to_device; };
  auto any = [](const Transfer&) { return true; };
  if (t.to_device && !find_under_way(t.host, t.bytes, writes)) watched->source_at_call = checksum(t.host, t.bytes);
  if (!t.to_device && poisoning() && !find_under_way(t.host, t.bytes, any)) std::memset(t.host, 0xff, t.bytes);
  under_way.push_back(watched);
  watched->ticket = queue.push({kind_of(t), "copy_", t.bytes, run, [watched] { watched->its_turn(); }});
}

uint64_t queue_plain(Queue& queue, Transfer t, std::shared_ptr<void> held) {
  auto run = [t, held = std::move(held)] { t.to_device ? std::memcpy(t.device, t.host, t.bytes) : std::memcpy(t.host, t.device, t.bytes); };
  return queue.push({kind_of(t), "copy_", t.bytes, std::move(run), {}});
}

void taken_on(Queue& stream, const char* device, size_t bytes) {
  std::string text;
  {
    auto order = stream.order();
    std::lock_guard<std::mutex> lock(under_way_mutex);
    for (auto& watched : under_way) {
      auto& t = watched->transfer;
      bool meet = t.device < device + bytes && device < t.device + t.bytes;
      if (!meet || watched->queue == &stream || order[watched->queue] >= watched->ticket) continue;
      text = c10::str(watched->name(), ": its device memory was given to ", stream.name(), ", which does not wait for the copy");
      break;
    }
  }
  if (!text.empty()) violate(std::move(text));
}

void leave_alone(const void* host, size_t bytes, const char* event, bool owner_waits) {
  std::string text;
  {
    std::lock_guard<std::mutex> lock(under_way_mutex);
    auto* user = find_under_way(host, bytes, [&](const Transfer& t) { return !(owner_waits && t.known_to_owner); });
    if (!user) return;
    text = c10::str("host memory at ", host, " (", bytes, " bytes) was ", event, " while it is used: ", user->name());
  }
  violate(std::move(text));
}

}  // namespace apart
