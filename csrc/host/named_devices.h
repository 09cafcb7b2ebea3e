// Facts of GPUs by name, for explain() and tests without that GPU. Choices never ask for a name.
#pragma once

#include <cstring>

#include "common/dtype.h"

namespace warpwright {

struct NamedDevice {
  const char* name;
  DeviceInfo info;
};

// From the vendor's data sheets. Clusters: as many as the number of SMs allows.
inline const NamedDevice kNamedDevices[] = {
    {"h100", {}},
    {"h200", {.l2_bytes = 60 << 20, .memory_clock_khz = 3201000, .memory_bus_bits = 6144}},
    {"h100-pcie",
     {.num_sms = 114,
      .clock_khz = 1755000,
      .memory_clock_khz = 1593000,
      .clusters = {114, 57, 28, 14}}},
    {"gh200", {.l2_bytes = 60 << 20, .memory_bus_bits = 6144}},
};

// Null: no such name.
inline const DeviceInfo* find_named_device(const char* name) {
  for (const NamedDevice& device : kNamedDevices) {
    if (std::strcmp(device.name, name) == 0) return &device.info;
  }
  return nullptr;
}

}  // namespace warpwright
