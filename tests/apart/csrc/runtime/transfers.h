// Bytes between host and device.
//
// [Note: Watched copies]
// An asynchronous copy owns its two ends from the call until it is done. Whoever touches them meanwhile has a race, but on
// a GPU mostly a silent one. Here the bytes are compared, and what differs is recorded as a violation:
// * d2h: the source and the destination must not change from the moment the copy's turn has come (all that was queued on
//   its stream before it is done) until it has run. The delay of copies lies in between, so it widens the window.
// * h2d: the destination likewise; the source must not change from the call on, unless a d2h into it is still under way at
//   the call, for then the order of the streams decides.
// * the device's end must not be given to a stream, as memory that was free, before that stream waits for the copy.
// * host memory must not be unregistered or given back while a copy uses it. A copy through a tensor of pinned memory of
//   torch is known to its allocator, which waits for it; then all is well.
// With poison, the destination of an asynchronous d2h holds NaN from the call until the copy has run: who reads early, sees it.
#pragma once

#include "runtime/streams.h"

#include <memory>

namespace apart {

struct Transfer {
  bool to_device;
  char* device;  // its bytes, in the back
  char* host;
  size_t bytes;
  bool known_to_owner = false;  // the owner of the host memory waits for the copy before it takes it back
};

// A copy that the host does not wait for: checked, and counted as under way until it is done.
void queue_watched(Queue& queue, Transfer transfer);

// A copy that the host waits for, or whose host memory `held` keeps alive and to itself.
uint64_t queue_plain(Queue& queue, Transfer transfer, std::shared_ptr<void> held);

// Records a violation if a copy is using the range. `event`: what happens to it. `owner_waits`: copies that the owner
// knows of are none, for it waits for them.
void leave_alone(const void* host, size_t bytes, const char* event, bool owner_waits);

// Records a violation if a copy that `stream` does not wait for is using the range, which the allocator gives to it.
void taken_on(Queue& stream, const char* device, size_t bytes);

}  // namespace apart
