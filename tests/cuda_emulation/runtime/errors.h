// SPDX-License-Identifier: Apache-2.0
// The runtime's two kinds of errors: the last one of a thread, and the one that stays once a task has failed.
#pragma once
#include <cuda_runtime_api.h>

// Returns the error, and remembers it as this thread's last.
cudaError_t failed(cudaError_t error);

// What a call that has waited for a stream returns: the error of a task, if one has failed.
cudaError_t after_waiting();
