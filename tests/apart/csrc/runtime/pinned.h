// Host memory that copies may use asynchronously: pinned memory of torch, and memory that its owner has registered.
//
// [Note: Whose host memory]
// As with CUDA, torch's allocator of pinned memory learns of copies (record_event) and takes a freed block back only when
// they are done; registered memory is its owner's affair.
#pragma once

#include <ATen/core/CachingHostAllocator.h>

namespace apart {

at::HostAllocator& host_allocator();
bool is_pinned(const void* p);

// Whether a copy to or from `p`, in a storage with that context, can be made known to the allocator by record_event.
bool owned_by_allocator(void* p, void* context);

// They return the codes of cudaHostRegister and cudaHostUnregister: 0, 1 (invalid value), 712 (already registered), 713.
int64_t register_host(const void* p, int64_t bytes);
int64_t unregister_host(const void* p);

struct HostUsage {
  int64_t registrations, registered_bytes;
  int64_t pinned_blocks, pinned_bytes;  // of torch's allocator, in use
  int64_t waiting_blocks;               // freed, but copies use them
};
HostUsage host_usage();

}  // namespace apart
