// SPDX-License-Identifier: Apache-2.0
// How many devices there are, what they say of themselves, and which one a thread is on.
#pragma once

// The device that the calling thread has set.
int current_device();
