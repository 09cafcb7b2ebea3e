// Facts of GPUs by name, for explain() and tests without that GPU. Choices never ask for a name.
#pragma once

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
    {"a100",
     {.sm_arch = 80,
      .num_sms = 108,
      .smem_per_block = 163 * 1024,
      .l2_bytes = 40 << 20,
      .clock_khz = 1410000,
      .memory_clock_khz = 1215000,
      .clusters = {108, 54, 27, 13}}},
    {"l40s",
     {.sm_arch = 89,
      .num_sms = 142,
      .smem_per_block = 99 * 1024,
      .l2_bytes = 96 << 20,
      .clock_khz = 2520000,
      .memory_clock_khz = 9001000,
      .memory_bus_bits = 384,
      .clusters = {142, 71, 35, 17}}},
};

}  // namespace warpwright
