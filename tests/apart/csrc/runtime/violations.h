// What went wrong on the device without an error: races that were seen. Tests assert that there are none.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace apart {

void violate(std::string text);
std::vector<std::string> take_violations();
std::vector<std::string> violations();

// Of bytes; two different contents have the same one with a chance of about 1 in 2^64.
uint64_t checksum(const void* data, size_t bytes);

}  // namespace apart
