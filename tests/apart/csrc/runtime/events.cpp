#include "runtime/events.h"

namespace apart {

void Record::set() {
  std::lock_guard<std::mutex> lock(mutex_);
  time_ = now();
  done_ = true;
  reached_.notify_all();
}

void Record::wait() {
  refuse_after_fork();
  std::unique_lock<std::mutex> lock(mutex_);
  reached_.wait(lock, [this] { return done_; });
}

bool Record::is_done() {
  refuse_after_fork();
  std::lock_guard<std::mutex> lock(mutex_);
  return done_;
}

double Record::time() {
  std::lock_guard<std::mutex> lock(mutex_);
  return time_;
}

std::shared_ptr<Record> record_on(Queue& queue) {
  auto after = queue.order();
  after[&queue] = queue.submitted();
  auto record = std::make_shared<Record>(std::move(after));
  queue.push_internal([record] { record->set(); });
  return record;
}

void wait_on(Queue& queue, std::shared_ptr<Record> record) {
  queue.run_after(record->after);
  queue.push_internal([record = std::move(record)] { record->wait(); });
}

}  // namespace apart
