// What ran when: every kernel and copy of every stream, while somebody listens.
#pragma once

#include "runtime/streams.h"

#include <vector>

namespace apart {

struct Entry {
  DeviceIndex device;
  int64_t stream;
  Kind kind;
  std::string name;
  size_t bytes;
  double queued, start, end;  // the delay of its kind counts as part of the work
};

bool listening();
void listen(bool yes);
void note(Entry entry);  // nothing while nobody listens
std::vector<Entry> take_entries();

}  // namespace apart
