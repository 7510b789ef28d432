#include "runtime/streams.h"

#include "runtime/gil.h"
#include "runtime/timeline.h"

#include <ATen/Parallel.h>
#include <c10/core/InferenceMode.h>

#include <atomic>
#include <chrono>
#include <thread>

// Of the OpenMP that torch has loaded; found there when this library is loaded.
extern "C" __attribute__((weak)) void omp_set_num_threads(int);

namespace apart {

namespace {

constexpr std::chrono::seconds kPatience(120);

std::atomic<int64_t> delay_us[4];
std::mutex queues_mutex;
Queue* queues[kDevices][kPoolStreams + 1];  // 0 is the default stream; never destroyed, for their threads never end
std::atomic<unsigned> next_stream[kDevices];

// Kernels of a stream run on its worker alone: the result does not depend on the number of cores, and no thread spins.
void compute_alone() {
  at::internal::lazy_init_num_threads();  // else torch sets the number itself, at the first kernel
  if (omp_set_num_threads) omp_set_num_threads(1);
}

}  // namespace

void set_delay(Kind kind, int64_t microseconds) { delay_us[int(kind)] = microseconds; }

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

Queue::Queue(DeviceIndex device, int64_t stream) : device_(device), stream_(stream) {
  std::thread([this] { work(); }).detach();
}

void Queue::work() {
  c10::InferenceMode guard;  // kernels run below autograd, and may write tensors of the caller's inference mode
  compute_alone();
  for (;;) {
    std::unique_lock<std::mutex> lock(mutex_);
    wake_.wait(lock, [this] { return pause_ != Pause::kBefore && !tasks_.empty(); });
    auto [task, queued] = std::move(tasks_.front());
    tasks_.pop_front();
    lock.unlock();
    std::exception_ptr failed;
    try {
      execute(task, queued);
    } catch (...) {
      failed = std::current_exception();
    }
    task = {};  // what it held is freed before anybody hears that it is done
    lock.lock();
    done_++;
    if (failed && !error_) error_ = failed;
    lock.unlock();
    finished_.notify_all();
  }
}

void Queue::execute(Task& task, double queued) {
  double start = now();
  if (task.begin) task.begin();
  if (auto us = delay_us[int(task.kind)].load()) std::this_thread::sleep_for(std::chrono::microseconds(us));
  if (task.kind == Kind::kInternal) return task.run();
  stop_halfway();
  task.run();
  note({device_, stream_, task.kind, task.name, task.bytes, queued, start, now()});
}

std::string Queue::name() const { return c10::str("stream ", stream_, " of device ", int(device_)); }

void Queue::stop_halfway() {
  std::unique_lock<std::mutex> lock(mutex_);
  if (pause_ != Pause::kHalfway) return;
  halfway_ = true;
  finished_.notify_all();
  wake_.wait(lock, [this] { return pause_ != Pause::kHalfway; });
  halfway_ = false;
}

void Queue::wait_halfway() {
  refuse_after_fork();
  GilRelease gil;
  std::unique_lock<std::mutex> lock(mutex_);
  bool in_time = finished_.wait_for(lock, kPatience, [this] { return halfway_; });
  TORCH_CHECK(in_time, "apart: ", name(), " has not begun any work within ", kPatience.count(), " s");
}

uint64_t Queue::push(Task task) {
  refuse_after_fork();
  double queued = now();
  std::lock_guard<std::mutex> lock(mutex_);
  tasks_.emplace_back(std::move(task), queued);
  wake_.notify_one();
  return ++submitted_;
}

void Queue::wait(uint64_t ticket) {
  refuse_after_fork();
  GilRelease gil;
  std::unique_lock<std::mutex> lock(mutex_);
  ticket = std::min(ticket, submitted_);
  bool in_time = finished_.wait_for(lock, kPatience, [&] { return done_ >= ticket; });
  TORCH_CHECK(in_time, "apart: waited longer than ", kPatience.count(), " s for ", name(), pause_ != Pause::kNever ? ", which is paused" : "", "; ",
              ticket - done_, " tasks are not done");
  if (error_) {
    auto error = std::exchange(error_, nullptr);
    lock.unlock();
    std::rethrow_exception(error);
  }
}

bool Queue::idle() {
  refuse_after_fork();
  std::lock_guard<std::mutex> lock(mutex_);
  return done_ == submitted_;
}

Queue::Order Queue::order() {
  std::lock_guard<std::mutex> lock(mutex_);
  return order_;
}

uint64_t Queue::submitted() {
  std::lock_guard<std::mutex> lock(mutex_);
  return submitted_;
}

void Queue::run_after(const Order& order) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto& [queue, ticket] : order) order_[queue] = std::max(order_[queue], ticket);
}

void Queue::pause(Pause where) {
  std::lock_guard<std::mutex> lock(mutex_);
  pause_ = where;
  wake_.notify_one();
}

Queue& queue_of(DeviceIndex device, int64_t stream) {
  refuse_after_fork();
  TORCH_CHECK(device >= 0 && device < kDevices && stream >= 0 && stream <= kPoolStreams, "apart: no stream ", stream, " on device ",
              int(device));
  std::lock_guard<std::mutex> lock(queues_mutex);
  auto& queue = queues[device][stream];
  if (!queue) queue = new Queue(device, stream);
  return *queue;
}

Queue& queue_of(const c10::Stream& stream) { return queue_of(stream.device_index(), stream.id()); }

Queue& current_queue(DeviceIndex device) { return queue_of(device, current_stream[device]); }

int64_t take_pool_stream(DeviceIndex device) { return 1 + next_stream[device]++ % kPoolStreams; }

void synchronize(DeviceIndex device) {
  refuse_after_fork();
  for (int i = 0; i <= kPoolStreams; i++) {
    Queue* queue;
    {
      std::lock_guard<std::mutex> lock(queues_mutex);
      queue = queues[device][i];
    }
    if (queue) queue->wait();
  }
}

}  // namespace apart
