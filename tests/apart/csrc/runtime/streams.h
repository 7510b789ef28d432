// Streams: one worker thread each, first in first out. The host queues work and runs ahead.
#pragma once

#include "runtime/device.h"

#include <c10/core/Stream.h>

#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <mutex>
#include <string>

namespace apart {

enum class Kind { kKernel, kH2D, kD2H, kInternal };  // internal: events and poison, neither delayed nor in the timeline

// Where a stream stops: nowhere, before its next task, or when its next kernel or copy has begun and would do its work.
enum class Pause { kNever, kBefore, kHalfway };

struct Task {
  Kind kind;
  std::string name;             // the operator, for the timeline
  size_t bytes = 0;             // what it moves
  std::function<void()> run;    // the work, after the delay of its kind
  std::function<void()> begin;  // before that delay, when all earlier work of the stream is done; may be empty
};

class Queue {
 public:
  Queue(DeviceIndex device, int64_t stream);

  // Returns a ticket to wait for.
  uint64_t push(Task task);
  uint64_t push_internal(std::function<void()> run) { return push({Kind::kInternal, "", 0, std::move(run), {}}); }

  // Blocks until the ticket's task is done (without one: until all are), and throws what a task has thrown.
  void wait(uint64_t ticket = ~uint64_t(0));
  bool idle();
  void pause(Pause where);
  void wait_halfway();  // until a task has stopped there
  std::string name() const;  // for messages

  // Tasks of other streams that this one's next task runs after: by stream, the ticket of the last of them.
  using Order = std::map<const Queue*, uint64_t>;
  Order order();
  uint64_t submitted();  // the ticket of its own last task
  void run_after(const Order& order);

 private:
  void work();
  void execute(Task& task, double queued);
  void stop_halfway();

  const DeviceIndex device_;
  const int64_t stream_;
  std::mutex mutex_;
  std::condition_variable wake_, finished_;
  std::deque<std::pair<Task, double>> tasks_;  // with the time they were queued
  uint64_t submitted_ = 0, done_ = 0;
  Order order_;
  Pause pause_ = Pause::kNever;
  bool halfway_ = false;
  std::exception_ptr error_;
};

Queue& queue_of(DeviceIndex device, int64_t stream);
Queue& queue_of(const c10::Stream& stream);
Queue& current_queue(DeviceIndex device);
int64_t take_pool_stream(DeviceIndex device);
void synchronize(DeviceIndex device);

// Slows every task of a kind down, so that a missing wait shows every time.
void set_delay(Kind kind, int64_t microseconds);

// Seconds on the clock of Python's time.perf_counter().
double now();

}  // namespace apart
