// SPDX-License-Identifier: Apache-2.0
//
// What the kernels of the grouped weight gradient share: the parameters, the
// table of groups, and the kernel that makes it from the splits.

#ifndef TRANSFORMER_ENGINE_PYTORCH_CSRC_WGRAD_KERNELS_GROUPED_WGRAD_COMMON_CUH_
#define TRANSFORMER_ENGINE_PYTORCH_CSRC_WGRAD_KERNELS_GROUPED_WGRAD_COMMON_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace grouped_wgrad {

constexpr int kMaxGroups = 4096;

// What the kernel writes.
enum Output : int {
  kStoreFloat = 0,  // fp32, overwrite
  kAddFloat = 1,    // fp32, accumulate
  kStoreInput = 2,  // the input's type, overwrite
  kAddInput = 3,    // the input's type, accumulate
};

// One group that has work to do. Entries are sorted by rows, most first.
struct Entry {
  int group;
  int first_row;
  int rows;
  int unused;
};

// The workspace: this header, then one Entry a group.
struct Header {
  int counter;    // the next tile to be drawn
  int entries;    // groups with work
  int alternate;  // draw from both ends of the list
  int unused;
};

constexpr size_t workspace_bytes(int groups) {
  return sizeof(Header) + static_cast<size_t>(groups) * sizeof(Entry);
}

// One block. Splits that make no sense (negative, past the last row) are cut, so
// that no later access is out of bounds; the host cannot look at them.
template <typename Split>
__global__ void __launch_bounds__(1024)
    prepare_kernel(const Split *splits, int groups, long long total_rows, bool keep_empty,
                   Header *header) {
  __shared__ int rows[kMaxGroups];
  __shared__ long long warp_sums[32];
  __shared__ int empty_groups;
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const int per_thread = (groups + blockDim.x - 1) / blockDim.x;
  const int first = thread * per_thread;
  if (thread == 0) empty_groups = 0;

  long long sum = 0;
  for (int i = first; i < first + per_thread && i < groups; ++i) {
    const long long split = static_cast<long long>(splits[i]);
    sum += split > 0 ? min(split, total_rows) : 0;
  }
  // Sums of all earlier threads: within the warp, then over the warps.
  long long before = sum;
  for (int offset = 1; offset < 32; offset *= 2) {
    const long long other = __shfl_up_sync(~0u, before, offset);
    if (lane >= offset) before += other;
  }
  if (lane == 31) warp_sums[warp] = before;
  before -= sum;
  __syncthreads();
  for (int i = 0; i < warp; ++i) before += warp_sums[i];

  int starts[(kMaxGroups + 1023) / 1024];
  int empty = 0;
  for (int j = 0; j < per_thread; ++j) {
    const int i = first + j;
    if (i >= groups) break;
    const long long start = min(before, total_rows);
    long long split = static_cast<long long>(splits[i]);
    split = split > 0 ? min(split, total_rows) : 0;
    before += split;
    rows[i] = static_cast<int>(min(before, total_rows) - start);
    starts[j] = static_cast<int>(start);
    empty += rows[i] == 0;
  }
  if (empty) atomicAdd(&empty_groups, empty);
  __syncthreads();

  Entry *table = reinterpret_cast<Entry *>(header + 1);
  const int entries = keep_empty ? groups : groups - empty_groups;
  for (int j = 0; j < per_thread; ++j) {
    const int i = first + j;
    if (i >= groups) break;
    const int mine = rows[i];
    int rank = 0;
#pragma unroll 8
    for (int other = 0; other < groups; ++other) {
      rank += rows[other] > mine || (rows[other] == mine && other < i);
    }
    if (rank < entries) table[rank] = Entry{i, starts[j], mine, 0};
    if (rank == entries / 2) {  // skewed: the median group well under the mean
      header->alternate = 4LL * mine * groups < 3 * total_rows;
    }
  }
  if (thread == 0) {
    header->counter = 0;
    header->entries = entries;
  }
}

}  // namespace grouped_wgrad

#endif  // TRANSFORMER_ENGINE_PYTORCH_CSRC_WGRAD_KERNELS_GROUPED_WGRAD_COMMON_CUH_
