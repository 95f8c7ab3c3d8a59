// SPDX-License-Identifier: Apache-2.0
// libnccl.so.2: collectives between processes over shared memory. A call enqueues a task on the stream; the tasks of all
// ranks meet in a barrier. Sums are made in the order of the ranks. A rank that waits goes on when its communicator is
// aborted, as NCCL's kernels do.
#include <cuda_runtime_api.h>
#include <fcntl.h>
#include <nccl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>

extern "C" void emulated_cuda_enqueue(cudaStream_t, void (*run)(void*), void (*release)(void*), void* data);

namespace {

constexpr size_t SLOT_BYTES = 4 << 20;  // of a rank: what a round of a collective carries

struct Header {  // at the beginning of the shared memory, which is zeros at first
  std::atomic<uint32_t> arrived, round;
};

}  // namespace

struct ncclComm {
  int ranks, rank, device;
  Header* header;
  char* slots;
  std::atomic<bool> aborted{false};

  char* slot(int r) { return slots + r * SLOT_BYTES; }

  // Returns false once the communicator is aborted.
  bool meet() {
    uint32_t round = header->round;
    if (++header->arrived == (uint32_t)ranks) {
      header->arrived = 0;
      header->round++;
      return !aborted;
    }
    while (header->round == round) {
      if (aborted) return false;
      usleep(20);
    }
    return true;
  }
};

namespace {

// -- numbers
float from_bf16(uint16_t bits) {
  uint32_t wide = (uint32_t)bits << 16;
  float value;
  memcpy(&value, &wide, sizeof value);
  return value;
}
uint16_t to_bf16(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  if (std::isnan(value)) return (uint16_t)(bits >> 16 | 0x40);
  return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);  // to the nearest, halves to even
}

struct Bf16 {
  uint16_t bits;
  operator float() const { return from_bf16(bits); }
  Bf16& operator=(float value) {
    bits = to_bf16(value);
    return *this;
  }
};

size_t size_of(ncclDataType_t type) {
  switch (type) {
    case ncclInt8: case ncclUint8: return 1;
    case ncclFloat16: case ncclBfloat16: return 2;
    case ncclInt32: case ncclUint32: case ncclFloat32: return 4;
    default: return 8;
  }
}

// The elements of all ranks' slots, from an offset on, into one; Sum is what the sum is kept in.
template <class Number, class Sum>
void reduce_as(ncclComm& comm, void* to, size_t offset, size_t count, ncclRedOp_t op) {
  for (size_t i = 0; i < count; i++) {
    auto of = [&](int r) { return (Sum)((Number*)(comm.slot(r) + offset))[i]; };
    Sum value = of(0);
    for (int r = 1; r < comm.ranks; r++) {
      Sum other = of(r);
      switch (op) {
        case ncclProd: value *= other; break;
        case ncclMax: value = std::max(value, other); break;
        case ncclMin: value = std::min(value, other); break;
        default: value += other;
      }
    }
    if (op == ncclAvg) value = value / (Sum)comm.ranks;
    ((Number*)to)[i] = value;
  }
}

void reduce(ncclComm& comm, void* to, size_t offset, size_t count, ncclDataType_t type, ncclRedOp_t op) {
  switch (type) {
    case ncclFloat32: return reduce_as<float, float>(comm, to, offset, count, op);
    case ncclFloat64: return reduce_as<double, double>(comm, to, offset, count, op);
    case ncclBfloat16: return reduce_as<Bf16, float>(comm, to, offset, count, op);
    case ncclFloat16: return reduce_as<_Float16, float>(comm, to, offset, count, op);
    case ncclInt8: return reduce_as<int8_t, int8_t>(comm, to, offset, count, op);
    case ncclUint8: return reduce_as<uint8_t, uint8_t>(comm, to, offset, count, op);
    case ncclInt32: return reduce_as<int32_t, int32_t>(comm, to, offset, count, op);
    case ncclInt64: return reduce_as<int64_t, int64_t>(comm, to, offset, count, op);
    default: fprintf(stderr, "emulated NCCL: no sums of type %d\n", (int)type);
  }
}

// -- rounds
using Round = std::function<void(size_t first, size_t count)>;

// Carries `count` elements in rounds of what fits: all put theirs down, meet, take what they want, and meet again.
ncclResult_t enqueue(ncclComm* comm, cudaStream_t stream, size_t count, size_t most, Round put, Round take) {
  auto* work = new std::function<void()>([=] {
    for (size_t first = 0; first < count; first += most) {
      size_t now = std::min(most, count - first);
      put(first, now);
      if (!comm->meet()) return;
      take(first, now);
      if (!comm->meet()) return;
    }
  });
  emulated_cuda_enqueue(
      stream, [](void* data) { (*(std::function<void()>*)data)(); },
      [](void* data) { delete (std::function<void()>*)data; }, work);
  return ncclSuccess;
}

// The memory is a file without a name, of the process that made the id. It goes with the last process that has it.
ncclResult_t join(ncclComm_t* handle, int ranks, const ncclUniqueId& id, int rank) {
  size_t bytes = 4096 + ranks * SLOT_BYTES;
  int file = open(id.internal, O_RDWR | O_CLOEXEC);
  if (file < 0) return ncclSystemError;  // that process has ended
  void* memory = ftruncate(file, bytes) ? MAP_FAILED : mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (memory == MAP_FAILED) return ncclSystemError;
  auto* comm = new ncclComm{ranks, rank, 0, (Header*)memory, (char*)memory + 4096};
  cudaGetDevice(&comm->device);
  *handle = comm;
  return ncclSuccess;
}

}  // namespace

extern "C" {

ncclResult_t ncclGetVersion(int* version) {
  *version = NCCL_VERSION_CODE;
  return ncclSuccess;
}
ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  int file = memfd_create("emulated_nccl", MFD_CLOEXEC);
  if (file < 0) return ncclSystemError;
  memset(id, 0, sizeof *id);
  snprintf(id->internal, sizeof id->internal, "/proc/%d/fd/%d", getpid(), file);
  return ncclSuccess;
}
const char* ncclGetErrorString(ncclResult_t result) {
  return result == ncclSuccess ? "no error" : "an error of the emulated NCCL";
}
const char* ncclGetLastError(ncclComm_t) { return ""; }

// -- communicators
ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank, ncclConfig_t*) {
  return join(comm, ranks, id, rank);
}
ncclResult_t ncclCommInitRank(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank) {
  return join(comm, ranks, id, rank);
}
ncclResult_t ncclCommInitRankScalable(ncclComm_t* comm, int ranks, int rank, int, ncclUniqueId* ids, ncclConfig_t*) {
  return join(comm, ranks, ids[0], rank);
}
ncclResult_t ncclCommCount(const ncclComm_t comm, int* count) {
  *count = comm->ranks;
  return ncclSuccess;
}
ncclResult_t ncclCommUserRank(const ncclComm_t comm, int* rank) {
  *rank = comm->rank;
  return ncclSuccess;
}
ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int* device) {
  *device = comm->device;
  return ncclSuccess;
}
// Shared memory stays mapped until the process ends: a task may still look at it.
ncclResult_t ncclCommFinalize(ncclComm_t) { return ncclSuccess; }
ncclResult_t ncclCommDestroy(ncclComm_t) { return ncclSuccess; }
ncclResult_t ncclCommAbort(ncclComm_t comm) {
  comm->aborted = true;
  return ncclSuccess;
}
ncclResult_t ncclCommGetAsyncError(ncclComm_t, ncclResult_t* error) {
  *error = ncclSuccess;
  return ncclSuccess;
}
ncclResult_t ncclCommRegister(const ncclComm_t, void*, size_t, void** handle) {
  *handle = nullptr;
  return ncclSuccess;
}
ncclResult_t ncclCommDeregister(const ncclComm_t, void*) { return ncclSuccess; }
ncclResult_t ncclGroupStart() { return ncclSuccess; }
ncclResult_t ncclGroupEnd() { return ncclSuccess; }

// -- collectives
ncclResult_t ncclAllReduce(const void* from, void* to, size_t count, ncclDataType_t type, ncclRedOp_t op,
                           ncclComm_t comm, cudaStream_t stream) {
  size_t size = size_of(type);
  return enqueue(
      comm, stream, count, SLOT_BYTES / size,
      [=](size_t first, size_t n) { memcpy(comm->slot(comm->rank), (char*)from + first * size, n * size); },
      [=](size_t first, size_t n) { reduce(*comm, (char*)to + first * size, 0, n, type, op); });
}
ncclResult_t ncclReduceScatter(const void* from, void* to, size_t count, ncclDataType_t type, ncclRedOp_t op,
                               ncclComm_t comm, cudaStream_t stream) {
  size_t size = size_of(type), most = SLOT_BYTES / size / comm->ranks;
  return enqueue(
      comm, stream, count, most,
      [=](size_t first, size_t n) {
        for (int r = 0; r < comm->ranks; r++)
          memcpy(comm->slot(comm->rank) + r * most * size, (char*)from + (r * count + first) * size, n * size);
      },
      [=](size_t first, size_t n) {
        reduce(*comm, (char*)to + first * size, comm->rank * most * size, n, type, op);
      });
}
ncclResult_t ncclAllGather(const void* from, void* to, size_t count, ncclDataType_t type, ncclComm_t comm,
                           cudaStream_t stream) {
  size_t size = size_of(type);
  return enqueue(
      comm, stream, count, SLOT_BYTES / size,
      [=](size_t first, size_t n) { memcpy(comm->slot(comm->rank), (char*)from + first * size, n * size); },
      [=](size_t first, size_t n) {
        for (int r = 0; r < comm->ranks; r++)
          memcpy((char*)to + (r * count + first) * size, comm->slot(r), n * size);
      });
}
ncclResult_t ncclBroadcast(const void* from, void* to, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                           cudaStream_t stream) {
  size_t size = size_of(type);
  return enqueue(
      comm, stream, count, SLOT_BYTES / size,
      [=](size_t first, size_t n) {
        if (comm->rank == root) memcpy(comm->slot(root), (char*)from + first * size, n * size);
      },
      [=](size_t first, size_t n) { memcpy((char*)to + first * size, comm->slot(root), n * size); });
}
ncclResult_t ncclBcast(void* data, size_t count, ncclDataType_t type, int root, ncclComm_t comm, cudaStream_t stream) {
  return ncclBroadcast(data, data, count, type, root, comm, stream);
}
}
