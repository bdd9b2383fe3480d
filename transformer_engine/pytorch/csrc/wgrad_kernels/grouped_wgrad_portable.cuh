// SPDX-License-Identifier: Apache-2.0
//
// The grouped weight gradient on any GPU from compute capability 8.0: mma.sync on
// tiles of 128 x 128, operands through cp.async. Right rather than fast.

#ifndef TRANSFORMER_ENGINE_PYTORCH_CSRC_WGRAD_KERNELS_GROUPED_WGRAD_PORTABLE_CUH_
#define TRANSFORMER_ENGINE_PYTORCH_CSRC_WGRAD_KERNELS_GROUPED_WGRAD_PORTABLE_CUH_

#include "grouped_wgrad_common.cuh"

namespace grouped_wgrad {
namespace portable {

constexpr int kTile = 128;  // rows and columns of dW of one block
constexpr int kTileK = 32;  // tokens of one stage
constexpr int kStages = 2;
constexpr int kThreads = 256;  // 2 x 4 warps of 64 x 32
constexpr int kPitch = kTile + 8;

struct Arguments {
  const Header *header;
  const void *dy;
  const void *x;
  void *output;
  int out_features;
  int in_features;
  int mode;
};

__device__ __forceinline__ uint32_t shared_address(const void *pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// 16 bytes to shared memory; zeros where `inside` is false.
__device__ __forceinline__ void copy16(void *target, const void *source, bool inside) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(target)),
               "l"(source), "r"(inside ? 16 : 0)
               : "memory");
}

// Four 8 x 8 matrices, transposed.
__device__ __forceinline__ void load_transposed(uint32_t (&to)[4], const void *line) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(shared_address(line))
               : "memory");
}

#define GROUPED_WGRAD_MMA(TYPE)                                                       \
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE                 \
               ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
               : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])               \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))

__device__ __forceinline__ void mma(__nv_bfloat16, float (&acc)[4], const uint32_t (&a)[4],
                                    uint32_t b0, uint32_t b1) {
  GROUPED_WGRAD_MMA("bf16");
}
__device__ __forceinline__ void mma(__half, float (&acc)[4], const uint32_t (&a)[4], uint32_t b0,
                                    uint32_t b1) {
  GROUPED_WGRAD_MMA("f16");
}

template <typename T>
__device__ __forceinline__ void load_stage(T (*a)[kPitch], T (*b)[kPitch], const Arguments &args,
                                           const Entry &entry, int m, int n, int k) {
  const T *dy = static_cast<const T *>(args.dy), *x = static_cast<const T *>(args.x);
  for (int i = threadIdx.x; i < kTileK * kTile / 8; i += kThreads) {
    const int row = i / (kTile / 8), column = i % (kTile / 8) * 8;
    const bool row_inside = k + row < entry.rows;
    const int64_t token = entry.first_row + (row_inside ? k + row : 0);
    const bool a_inside = row_inside && m + column < args.out_features;
    const bool b_inside = row_inside && n + column < args.in_features;
    copy16(&a[row][column], dy + (a_inside ? token * args.out_features + m + column : 0), a_inside);
    copy16(&b[row][column], x + (b_inside ? token * args.in_features + n + column : 0), b_inside);
  }
  asm volatile("cp.async.commit_group;" ::: "memory");
}

template <typename T>
__device__ __forceinline__ void write_pair(const Arguments &args, int64_t at, float low,
                                           float high) {
  if (args.mode == kStoreFloat || args.mode == kAddFloat) {
    float2 *target = reinterpret_cast<float2 *>(static_cast<float *>(args.output) + at);
    if (args.mode == kAddFloat) {
      low += target->x;
      high += target->y;
    }
    *target = make_float2(low, high);
  } else {
    T *target = static_cast<T *>(args.output) + at;
    if (args.mode == kAddInput) {
      low += static_cast<float>(target[0]);
      high += static_cast<float>(target[1]);
    }
    target[0] = T(low);
    target[1] = T(high);
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads) kernel(const Arguments args) {
  __shared__ __align__(16) T a_stage[kStages][kTileK][kPitch];
  __shared__ __align__(16) T b_stage[kStages][kTileK][kPitch];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int warp_m = warp / 4 * 64, warp_n = warp % 4 * 32;
  const Entry *table = reinterpret_cast<const Entry *>(args.header + 1);
  const int tiles_m = (args.out_features + kTile - 1) / kTile;
  const int tiles_n = (args.in_features + kTile - 1) / kTile;
  const int64_t total = static_cast<int64_t>(args.header->entries) * tiles_m * tiles_n;

  for (int64_t tile = blockIdx.x; tile < total; tile += gridDim.x) {
    const Entry entry = table[tile / (tiles_m * tiles_n)];
    const int in_group = tile % (tiles_m * tiles_n);
    const int m = in_group / tiles_n * kTile, n = in_group % tiles_n * kTile;
    float acc[4][4][4] = {};
    const int blocks = (entry.rows + kTileK - 1) / kTileK;
    if (blocks > 0) load_stage<T>(a_stage[0], b_stage[0], args, entry, m, n, 0);
    for (int block = 0; block < blocks; ++block) {
      const int now = block % kStages;
      if (block + 1 < blocks) {
        load_stage<T>(a_stage[now ^ 1], b_stage[now ^ 1], args, entry, m, n, (block + 1) * kTileK);
        asm volatile("cp.async.wait_group 1;" ::: "memory");
      } else {
        asm volatile("cp.async.wait_group 0;" ::: "memory");
      }
      __syncthreads();
#pragma unroll
      for (int k = 0; k < kTileK; k += 16) {
        uint32_t a[4][4], b[2][4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          load_transposed(
              a[i],
              &a_stage[now][k + lane / 16 * 8 + lane % 8][warp_m + i * 16 + lane / 8 % 2 * 8]);
        }
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          load_transposed(
              b[j],
              &b_stage[now][k + lane / 8 % 2 * 8 + lane % 8][warp_n + j * 16 + lane / 16 * 8]);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            mma(T(), acc[i][j], a[i], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
          }
        }
      }
      __syncthreads();
    }
    const int64_t base = static_cast<int64_t>(entry.group) * args.out_features;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int row = m + warp_m + i * 16 + lane / 4;
        const int column = n + warp_n + j * 8 + lane % 4 * 2;
        if (column >= args.in_features) continue;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          if (row + half * 8 >= args.out_features) continue;
          write_pair<T>(args, (base + row + half * 8) * args.in_features + column,
                        acc[i][j][half * 2], acc[i][j][half * 2 + 1]);
        }
      }
    }
  }
}

}  // namespace portable
}  // namespace grouped_wgrad

#endif  // TRANSFORMER_ENGINE_PYTORCH_CSRC_WGRAD_KERNELS_GROUPED_WGRAD_PORTABLE_CUH_
