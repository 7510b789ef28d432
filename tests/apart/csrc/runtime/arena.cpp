#include "runtime/arena.h"

#include <sys/mman.h>

namespace apart {

namespace {

constexpr size_t kPage = 4096;

char* reserve(int protection) {
  constexpr int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void* p = mmap(nullptr, kSpan * kDevices, protection, flags, -1, 0);
  TORCH_CHECK(p != MAP_FAILED, "apart: cannot reserve ", kSpan * kDevices, " bytes of address space");
  return static_cast<char*>(p);
}

}  // namespace

Arena& Arena::get() {
  static auto* arena = new Arena;  // never destroyed: streams may still run when the process ends
  return *arena;
}

Arena::Arena() : front_(reserve(PROT_NONE)), back_(reserve(PROT_READ | PROT_WRITE)) {
  madvise(back_, kSpan * kDevices, MADV_DONTFORK);  // a child has no device
}

bool Arena::has(const void* front) const {
  auto* p = static_cast<const char*>(front);
  return p >= front_ && p < front_ + kSpan * kDevices;
}

DeviceIndex Arena::device_of(const void* front) const {
  TORCH_CHECK(has(front), "apart: ", front, " is not an address of a device");
  return static_cast<DeviceIndex>((static_cast<const char*>(front) - front_) / kSpan);
}

void Arena::discard(DeviceIndex d, size_t offset, size_t bytes) const {
  size_t from = (offset + kPage - 1) / kPage * kPage;
  size_t to = (offset + bytes) / kPage * kPage;
  if (from < to) madvise(back(d, from), to - from, MADV_DONTNEED);
}

}  // namespace apart
