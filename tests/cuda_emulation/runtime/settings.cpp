// SPDX-License-Identifier: Apache-2.0
#include "settings.h"

#include <cstdio>
#include <cstdlib>
#include <string>

namespace {

double number(const char* name, double otherwise) {
  const char* text = getenv((std::string("EMULATED_CUDA_") + name).c_str());
  return text && *text ? atof(text) : otherwise;
}

Settings read() {
  Settings s;
  s.devices = (int)number("DEVICES", 1);
  const char* name = getenv("EMULATED_CUDA_NAME");
  s.name = name && *name ? name : "Emulated CUDA device";
  s.memory_bytes = (size_t)number("MEMORY_BYTES", 4.0 * (1ull << 30));
  s.context_bytes = (size_t)number("CONTEXT_BYTES", 300.0 * (1 << 20));
  s.major = 8;
  s.minor = 0;
  if (const char* text = getenv("EMULATED_CUDA_CAPABILITY")) sscanf(text, "%d.%d", &s.major, &s.minor);
  s.seed = (uint64_t)number("SEED", 0);
  s.delay_us = number("DELAY_US", 0);
  s.delayed_share = number("DELAYED_SHARE", 0.3);
  s.link_bytes_per_s = number("LINK_BYTES_PER_S", 0);
  s.serial = number("SERIAL", 0) != 0;
  s.poison = number("POISON", 0) != 0;
  s.arithmetic = number("ARITHMETIC", 1) != 0;
  return s;
}

}  // namespace

const Settings& settings() {
  static const Settings read_once = read();
  return read_once;
}
