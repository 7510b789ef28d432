// Events: an event remembers its last record, and a wait takes the record that there is when it is called.
#pragma once

#include "runtime/streams.h"

#include <memory>

namespace apart {

class Record {
 public:
  explicit Record(Queue::Order after) : after(std::move(after)) {}

  const Queue::Order after;  // what is done when this is reached

  void set();
  void wait();
  bool is_done();
  double time();  // seconds; when it was reached

 private:
  std::mutex mutex_;
  std::condition_variable reached_;
  bool done_ = false;
  double time_ = 0;
};

struct Event {
  bool timing;
  std::shared_ptr<Record> last;
};

std::shared_ptr<Record> record_on(Queue& queue);
void wait_on(Queue& queue, std::shared_ptr<Record> record);

}  // namespace apart
