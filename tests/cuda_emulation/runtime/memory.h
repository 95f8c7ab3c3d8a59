// SPDX-License-Identifier: Apache-2.0
// Device memory and pinned memory are host memory; which is which is kept by address.
#pragma once

enum class Kind { pageable, pinned, device };

Kind kind_of(const void* address);
