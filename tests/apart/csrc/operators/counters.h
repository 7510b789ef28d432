// What the host has asked of the devices so far.
#pragma once

#include <atomic>
#include <cstdint>

namespace apart {

struct Counters {
  std::atomic<int64_t> async_kernels;  // queued while the host went on
  std::atomic<int64_t> sync_kernels;   // the host waited for them
  std::atomic<int64_t> h2d_bytes, d2h_bytes;
  std::atomic<int64_t> h2d_async, d2h_async;  // copies from and to pinned memory that the host did not wait for
  std::atomic<int64_t> h2d_staged;            // non_blocking ones of pageable memory, which is read at the call
  std::atomic<int64_t> no_meta;               // calls for which no meta kernel could say what comes out
};

inline Counters counters;

}  // namespace apart
