// SPDX-License-Identifier: Apache-2.0
//
// The grouped weight gradient on Hopper: dW[g] (+)= dY[g]^T X[g].
//
// A persistent kernel of clusters of two blocks. A block computes 128 (out) x 256
// (in) elements of one group, its cluster 256 x 256; X is multicast to both. One
// warpgroup produces: one thread issues TMA loads, in the first block of a cluster
// another draws tiles from a counter in device memory. Two warpgroups consume, 64 x
// 256 each, the second a few steps behind the first, so that one stores its part while
// the other has the matrix units. Results leave through shared memory and TMA, as
// stores or as reductions that add in the L2 cache; each element is added to once, so
// the result does not depend on the order of the tiles. What is added to is brought
// into the L2 cache shortly before: reductions that miss it wait for memory.
//
// Both operands come with the token dimension outermost: the matrix units read them
// transposed ("MN-major") from boxes of 64 columns and 64 tokens, 128-byte swizzle.

#ifndef TRANSFORMER_ENGINE_PYTORCH_CSRC_WGRAD_KERNELS_GROUPED_WGRAD_SM90_CUH_
#define TRANSFORMER_ENGINE_PYTORCH_CSRC_WGRAD_KERNELS_GROUPED_WGRAD_SM90_CUH_

#include <cuda.h>

#include "grouped_wgrad_common.cuh"

namespace grouped_wgrad {
namespace sm90 {

// The shape of a stage and of what waits to leave; others for measurements only.
#ifndef GROUPED_WGRAD_TILE_N
#define GROUPED_WGRAD_TILE_N 256  // or 192
#endif
#ifndef GROUPED_WGRAD_TILE_K
#define GROUPED_WGRAD_TILE_K 64
#endif
#ifndef GROUPED_WGRAD_STAGES
#define GROUPED_WGRAD_STAGES 4
#endif
#ifndef GROUPED_WGRAD_BUFFERS
#define GROUPED_WGRAD_BUFFERS 2
#endif

constexpr int kTileM = 128;                   // rows of dW (out) of one block
constexpr int kTileN = GROUPED_WGRAD_TILE_N;  // columns of dW (in)
constexpr int kTileK = GROUPED_WGRAD_TILE_K;  // tokens of one stage
constexpr int kStages = GROUPED_WGRAD_STAGES;
constexpr int kBuffers = GROUPED_WGRAD_BUFFERS;  // boxes of results of one warp on their way out
constexpr int kBox = 64;  // columns of one box: 128 bytes, the swizzle's width
constexpr int kConsumerWarps = 8;
constexpr int kThreads = 128 + 32 * kConsumerWarps;
constexpr int kBand = 8;  // rows of cluster tiles drawn together, for the L2 cache

constexpr int kAccumulators = kTileN / 2;  // of one thread
constexpr int kBoxBytes = kBox * kTileK * 2;
constexpr int kBytesA = kTileM / kBox * kBoxBytes;
constexpr int kBytesB = kTileN / kBox * kBoxBytes;
constexpr int kStageBytes = kBytesA + kBytesB;
constexpr int kStagingBytes = 2048;  // one box of results: 16 rows of 128 bytes
constexpr int kStagingOffset = kStages * kStageBytes;
constexpr int kBarrierOffset = kStagingOffset + kConsumerWarps * kBuffers * kStagingBytes;
constexpr int kSharedBytes = kBarrierOffset + 256 + 1024;  // the base is aligned to 1024
static_assert(kSharedBytes <= 227 * 1024, "more shared memory than a block can have");

// How a launch goes about it; none of this changes the result.
struct Tuning {
  int stagger;    // blocks start one after the other, so that not all store at once
  int alternate;  // skewed splits: draw from both ends of the list of tiles
  int skew;       // steps of the first warpgroup before the second starts a long tile
  int lead;       // tokens before a tile's end when dW is brought into the L2 cache; -1 never
};

// From the interface's flags: bit 0, bit 1, bits 4 to 7, bits 8 to 11 (64 tokens, plus one).
inline Tuning tuning(int flags) {
  return {flags & 1, flags >> 1 & 1, flags >> 4 & 15, ((flags >> 8 & 15) - 1) * 64};
}
constexpr int kDefaultFlags = 1 | 2 | (128 / kTileK) << 4 | 3 << 8;

struct Barriers {
  uint64_t full[kStages];
  uint64_t empty[kStages];
  uint64_t tile_full[2];
  uint64_t tile_empty[2];
  uint64_t skew;
  alignas(16) int4 tile[2];  // group, first token, tokens, tile of the group
};

struct Arguments {
  Header *header;
  void *output;
  int out_features;
  int in_features;
  int tiles_m;  // cluster tiles
  int tiles_n;
  int mode;
  Tuning tuning;
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDA_ARCH__)
#define GROUPED_WGRAD_SM90_CODE 1
#endif

#ifdef GROUPED_WGRAD_SM90_CODE

__device__ __forceinline__ uint32_t shared_address(const void *pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// The address of the same variable in another block of the cluster.
__device__ __forceinline__ uint32_t remote_address(uint32_t address, int rank) {
  uint32_t remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
  return remote;
}

__device__ __forceinline__ void barrier_init(uint64_t *barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count)
               : "memory");
}

__device__ __forceinline__ void barrier_expect(uint64_t *barrier, int bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
      "r"(bytes)
      : "memory");
}

__device__ __forceinline__ void barrier_arrive(uint64_t *barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier))
               : "memory");
}

// Arrives at the barrier of block `rank` of the cluster. Not with cluster scope: that
// would be a fence over all of memory, which waits for results on their way out. What
// these barriers guard is read by wgmma or written by TMA.
__device__ __forceinline__ void barrier_arrive_remote(uint64_t *barrier, int rank) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(
                   remote_address(shared_address(barrier), rank))
               : "memory");
}

__device__ __forceinline__ void barrier_wait(uint64_t *barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}\n" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}

__device__ __forceinline__ void load_box(void *target, const CUtensorMap *map, int column, int row,
                                         uint64_t *barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3}], [%4];" ::"r"(shared_address(target)),
      "l"(map), "r"(column), "r"(row), "r"(shared_address(barrier))
      : "memory");
}

__device__ __forceinline__ void load_box_multicast(void *target, const CUtensorMap *map, int column,
                                                   int row, uint64_t *barrier, uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(shared_address(target)),
      "l"(map), "r"(column), "r"(row), "r"(shared_address(barrier)), "h"(blocks)
      : "memory");
}

__device__ __forceinline__ void store_box(const void *source, const CUtensorMap *map, int column,
                                          int row, int group, bool add) {
  if (add) {
    asm volatile(
        "cp.reduce.async.bulk.tensor.3d.global.shared::cta.add.bulk_group "
        "[%0, {%1, %2, %3}], [%4];" ::"l"(map),
        "r"(column), "r"(row), "r"(group), "r"(shared_address(source))
        : "memory");
  } else {
    asm volatile(
        "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group "
        "[%0, {%1, %2, %3}], [%4];" ::"l"(map),
        "r"(column), "r"(row), "r"(group), "r"(shared_address(source))
        : "memory");
  }
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

__device__ __forceinline__ void cluster_sync() {
  asm volatile(
      "barrier.cluster.arrive.release.aligned;\n"
      "barrier.cluster.wait.acquire.aligned;\n" ::
          : "memory");
}

// How wgmma finds a 64-column box with 64 tokens: 128-byte swizzle, 1024 bytes
// between groups of 8 tokens, kBoxBytes between boxes.
__device__ __forceinline__ uint64_t descriptor(uint32_t address) {
  return static_cast<uint64_t>((address & 0x3ffff) >> 4) |
         static_cast<uint64_t>(kBoxBytes >> 4) << 16 | static_cast<uint64_t>(1024 >> 4) << 32 |
         1ull << 62;
}
constexpr int kDescriptorStep = 16 * kBox * 2 >> 4;  // 16 tokens further

#define GROUPED_WGRAD_ACC4(i) "+f"(acc[i]), "+f"(acc[i + 1]), "+f"(acc[i + 2]), "+f"(acc[i + 3])
#define GROUPED_WGRAD_ACC16(i)                                                 \
  GROUPED_WGRAD_ACC4(i), GROUPED_WGRAD_ACC4(i + 4), GROUPED_WGRAD_ACC4(i + 8), \
      GROUPED_WGRAD_ACC4(i + 12)
#if GROUPED_WGRAD_TILE_N == 256
#define GROUPED_WGRAD_WGMMA(TYPE)                                                  \
  asm volatile(                                                                    \
      "{\n"                                                                        \
      ".reg .pred p;\n"                                                            \
      "setp.ne.b32 p, %130, 0;\n"                                                  \
      "wgmma.mma_async.sync.aligned.m64n256k16.f32." TYPE "." TYPE                 \
      " "                                                                          \
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, "                        \
      "%12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, "               \
      "%24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, "               \
      "%36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "               \
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, "               \
      "%60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, "               \
      "%72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, "               \
      "%84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "               \
      "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, "       \
      "%108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, "   \
      "%120, %121, %122, %123, %124, %125, %126, %127}, "                          \
      "%128, %129, p, 1, 1, 1, 1;\n"                                               \
      "}\n"                                                                        \
      : GROUPED_WGRAD_ACC16(0), GROUPED_WGRAD_ACC16(16), GROUPED_WGRAD_ACC16(32),  \
        GROUPED_WGRAD_ACC16(48), GROUPED_WGRAD_ACC16(64), GROUPED_WGRAD_ACC16(80), \
        GROUPED_WGRAD_ACC16(96), GROUPED_WGRAD_ACC16(112)                          \
      : "l"(a), "l"(b), "r"(add))
#else
#define GROUPED_WGRAD_WGMMA(TYPE)                                                 \
  asm volatile(                                                                   \
      "{\n"                                                                       \
      ".reg .pred p;\n"                                                           \
      "setp.ne.b32 p, %98, 0;\n"                                                  \
      "wgmma.mma_async.sync.aligned.m64n192k16.f32." TYPE "." TYPE                \
      " "                                                                         \
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, "                       \
      "%12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, "              \
      "%24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, "              \
      "%36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "              \
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, "              \
      "%60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, "              \
      "%72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, "              \
      "%84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95}, "             \
      "%96, %97, p, 1, 1, 1, 1;\n"                                                \
      "}\n"                                                                       \
      : GROUPED_WGRAD_ACC16(0), GROUPED_WGRAD_ACC16(16), GROUPED_WGRAD_ACC16(32), \
        GROUPED_WGRAD_ACC16(48), GROUPED_WGRAD_ACC16(64), GROUPED_WGRAD_ACC16(80) \
      : "l"(a), "l"(b), "r"(add))
#endif

// acc (+)= A^T B over 16 tokens.
__device__ __forceinline__ void wgmma(__nv_bfloat16, float (&acc)[kAccumulators], uint64_t a,
                                      uint64_t b, int add) {
  GROUPED_WGRAD_WGMMA("bf16");
}
__device__ __forceinline__ void wgmma(__half, float (&acc)[kAccumulators], uint64_t a, uint64_t b,
                                      int add) {
  GROUPED_WGRAD_WGMMA("f16");
}

__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

__device__ __forceinline__ void fence_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// A place in a ring of kCount slots.
template <int kCount>
struct Place {
  int slot = 0;
  uint32_t phase = 0;
  __device__ __forceinline__ void advance() {
    if (++slot == kCount) {
      slot = 0;
      phase ^= 1;
    }
  }
};

// Draws tiles for both blocks of the cluster. One thread of the first block.
__device__ __forceinline__ void draw_tiles(const Arguments &args, Barriers *shared) {
  const Entry *table = reinterpret_cast<const Entry *>(args.header + 1);
  const int per_group = args.tiles_m * args.tiles_n;
  const int total = args.header->entries * per_group;
  const bool alternate = args.header->alternate && args.tuning.alternate;
  const int cluster = blockIdx.x / 2, clusters = gridDim.x / 2;
  if (args.tuning.stagger && total >= 8 * clusters) {
    // Spread over about the cycles of one tile of the median group.
    const int64_t cycles = table[args.header->entries / 2].rows * 16LL + 4000;
    const int64_t begin = clock64();
    while (clock64() - begin < cycles * cluster / clusters) __nanosleep(100);
  }
  Place<2> place;
  while (true) {
    barrier_wait(&shared->tile_empty[place.slot], place.phase ^ 1);
    const int drawn = atomicAdd(&args.header->counter, 1);
    int4 tile = make_int4(-1, 0, 0, 0);
    if (drawn < total) {
      int position = drawn;
      if (alternate) position = drawn % 2 ? total - 1 - drawn / 2 : drawn / 2;
      const int4 entry = reinterpret_cast<const int4 *>(table)[position / per_group];
      // Bands of kBand rows, column by column.
      int in_group = position % per_group;
      const int band = in_group / (kBand * args.tiles_n);
      const int height = min(kBand, args.tiles_m - band * kBand);
      in_group -= band * kBand * args.tiles_n;
      const int m = band * kBand + in_group % height, n = in_group / height;
      tile = make_int4(entry.x, entry.y, entry.z, m << 16 | n);
    }
    for (int rank = 0; rank < 2; ++rank) {
      const uint32_t address = remote_address(shared_address(&shared->tile[place.slot]), rank);
      const uint32_t full = remote_address(shared_address(&shared->tile_full[place.slot]), rank);
      asm volatile("mbarrier.arrive.expect_tx.shared::cluster.b64 _, [%0], 16;" ::"r"(full)
                   : "memory");
      asm volatile(
          "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 "
          "[%0], {%1, %2, %3, %4}, [%5];" ::"r"(address),
          "r"(tile.x), "r"(tile.y), "r"(tile.z), "r"(tile.w), "r"(full)
          : "memory");
    }
    if (tile.x < 0) return;
    place.advance();
  }
}

__device__ __forceinline__ int4 read_tile(Barriers *shared, const Place<2> &place) {
  barrier_wait(&shared->tile_full[place.slot], place.phase);
  int4 tile;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(tile.x), "=r"(tile.y), "=r"(tile.z), "=r"(tile.w)
               : "r"(shared_address(&shared->tile[place.slot]))
               : "memory");
  return tile;
}

// Loads operands, and waits for nothing but free stages. One thread.
__device__ __forceinline__ void produce(const CUtensorMap *map_a, const CUtensorMap *map_b,
                                        uint8_t *smem, Barriers *shared, int rank) {
  Place<2> place;
  Place<kStages> stage;
  while (true) {
    const int4 tile = read_tile(shared, place);
    if (tile.x < 0) break;
    barrier_arrive_remote(&shared->tile_empty[place.slot], 0);
    place.advance();
    const int m = (tile.w >> 16) * 2 * kTileM + rank * kTileM;
    const int n = (tile.w & 0xffff) * kTileN;
    for (int k = 0; k < tile.z; k += kTileK) {
      barrier_wait(&shared->empty[stage.slot], stage.phase ^ 1);
      uint64_t *full = &shared->full[stage.slot];
      uint8_t *a = smem + stage.slot * kStageBytes;
      uint8_t *b = a + kBytesA + rank * (kBoxBytes / 2);
      barrier_expect(full, kStageBytes);
      const int row = tile.y + k;
#pragma unroll
      for (int i = 0; i < kTileM / kBox; ++i) {
        load_box(a + i * kBoxBytes, map_a, m + i * kBox, row, full);
      }
#pragma unroll
      for (int i = 0; i < kTileN / kBox; ++i) {  // half of the tokens
        load_box_multicast(b + i * kBoxBytes, map_b, n + i * kBox, row + rank * (kTileK / 2), full,
                           3);
      }
      stage.advance();
    }
  }
}

// Where one warp leaves its 16 x 256 results.
struct Target {
  int group, row, column, lane;
};

// fp32: boxes of 16 x 32 through kBuffers buffers of swizzled rows of 128 bytes,
// buffer i in the care of lane i. A thread holds two neighbours of row lane / 4 and two
// of the row 8 below. Odd rows write the box's parts in another order, so that no two
// lanes meet in a bank.
__device__ __forceinline__ void write_float(const float (&acc)[kAccumulators], uint8_t *staging,
                                            const CUtensorMap *map, const Target &to, bool add) {
  const int r = to.lane / 4, q = to.lane % 4, odd = r & 1;
  const uint32_t base = shared_address(staging) + r * 128 + 32 * ((2 * odd) ^ (r >> 1)) +
                        16 * ((q >> 1) ^ odd) + 8 * (q & 1);
  constexpr int kBatch = kBuffers >= 4 ? 2 : 1;  // boxes between fences
#pragma unroll
  for (int first = 0; first < kTileN / 32; first += kBatch) {
    // The box of this batch that this lane stores, if any.
    int mine = -1;
#pragma unroll
    for (int box = first; box < first + kBatch; ++box) {
      if (to.lane == box % kBuffers) mine = box;
    }
    if (mine >= 0) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
    __syncwarp();
#pragma unroll
    for (int box = first; box < first + kBatch; ++box) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const uint32_t address = (base ^ (j << 5)) + box % kBuffers * kStagingBytes;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int even_at = (box * 4 + j) * 4 + half * 2;
          const int odd_at = (box * 4 + (j ^ 2)) * 4 + half * 2;
          asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address + half * 1024),
                       "f"(odd ? acc[odd_at] : acc[even_at]),
                       "f"(odd ? acc[odd_at + 1] : acc[even_at + 1])
                       : "memory");
        }
      }
    }
    fence_async();
    __syncwarp();
    if (mine >= 0) {
      store_box(staging + to.lane * kStagingBytes, map, to.column + mine * 32, to.row, to.group,
                add);
    }
  }
}

template <typename T>
__device__ __forceinline__ uint32_t pack(float low, float high) {
  T pair[2] = {T(low), T(high)};
  return *reinterpret_cast<uint32_t *>(pair);
}

// The input's type: boxes of 16 x 64.
template <typename T>
__device__ __forceinline__ void write_input_type(const float (&acc)[kAccumulators],
                                                 uint8_t *staging, const CUtensorMap *map,
                                                 const Target &to) {
  const int r = to.lane / 4, q = to.lane % 4;
  const uint32_t base = shared_address(staging) + r * 128 + q * 4;
#pragma unroll
  for (int box = 0; box < kTileN / 64; ++box) {
    const bool mine = to.lane == box % kBuffers;
    if (mine) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
    __syncwarp();
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const uint32_t address = base + ((j ^ r) << 4) + box % kBuffers * kStagingBytes;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int at = (box * 8 + j) * 4 + half * 2;
        asm volatile("st.shared.b32 [%0], %1;" ::"r"(address + half * 1024),
                     "r"(pack<T>(acc[at], acc[at + 1]))
                     : "memory");
      }
    }
    fence_async();
    __syncwarp();
    if (mine) {
      store_box(staging + to.lane * kStagingBytes, map, to.column + box * 64, to.row, to.group,
                false);
    }
  }
}

// Brings a warp's part of dW (fp32) into the L2 cache: lane i a line of it.
__device__ __forceinline__ void prefetch(const Arguments &args, const Target &to) {
  if (to.lane >= 16 || to.row + to.lane >= args.out_features) return;
  const int64_t row = static_cast<int64_t>(to.group) * args.out_features + to.row + to.lane;
  const float *line = static_cast<const float *>(args.output) + row * args.in_features + to.column;
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(line),
               "r"(min(kTileN, args.in_features - to.column) * 4)
               : "memory");
}

// Calls work(pointer, index of acc) for each pair of neighbours that lies in dW.
template <typename Element, typename Work>
__device__ __forceinline__ void for_pairs(const Arguments &args, const Target &to, Work work) {
  Element *output = static_cast<Element *>(args.output);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = to.row + half * 8 + to.lane / 4;
    const bool inside = row < args.out_features;
    Element *line = output +
                    (static_cast<int64_t>(to.group) * args.out_features + row) * args.in_features +
                    to.column + to.lane % 4 * 2;
#pragma unroll
    for (int j = 0; j < kTileN / 8; ++j) {
      if (inside && to.column + j * 8 < args.in_features) work(line + j * 8, j * 4 + half * 2);
    }
  }
}

template <typename T>
__device__ __forceinline__ void consume(const CUtensorMap *map_out, const Arguments &args,
                                        uint8_t *smem, Barriers *shared, int rank) {
  const int warp = threadIdx.x / 32 - 4, lane = threadIdx.x % 32;
  const int warpgroup = warp / 4, thread = threadIdx.x % 128;
  uint8_t *staging = smem + kStagingOffset + warp * kBuffers * kStagingBytes;
  const int lead = args.tuning.lead, skew = min(args.tuning.skew, kStages - 1);
  Place<2> place;
  Place<kStages> stage;
  uint32_t skew_phase = 0;
  const uint32_t smem_base = shared_address(smem);
  // A stage is free when all warps of both blocks have read it: lanes 0 and 1 tell
  // one block each.
  auto release = [&](int slot) {
    if (lane < 2) barrier_arrive_remote(&shared->empty[slot], lane);
  };

  auto target = [&](const int4 &tile) {
    return Target{tile.x, (tile.w >> 16) * 2 * kTileM + rank * kTileM + warp * 16,
                  (tile.w & 0xffff) * kTileN, lane};
  };
  const bool ahead = args.mode == kAddFloat && lead >= 0;
  int4 tile = read_tile(shared, place);
  while (tile.x >= 0) {
    const int blocks = tile.z / kTileK, tail = tile.z % kTileK;
    const bool skewed = skew > 0 && blocks >= 2 * kStages;
    if (skewed) {
      if (warpgroup == 1) barrier_wait(&shared->skew, skew_phase);
      skew_phase ^= 1;
    }
    const Target to = target(tile);
    // Short tiles were asked for at the end of the one before.
    const int prefetch_at = ahead && tile.z > lead ? (tile.z - lead) / kTileK : -1;
    float acc[kAccumulators];
    int last = -1;
    for (int block = 0; block < blocks; ++block) {
      if (block == prefetch_at) prefetch(args, to);
      barrier_wait(&shared->full[stage.slot], stage.phase);
      const uint32_t address = smem_base + stage.slot * kStageBytes;
      const uint64_t a = descriptor(address + warpgroup * kBoxBytes);
      const uint64_t b = descriptor(address + kBytesA);
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < kTileK / 16; ++step) {
        wgmma(T(), acc, a + step * kDescriptorStep, b + step * kDescriptorStep,
              step > 0 || block > 0);
      }
      wgmma_commit();
      wgmma_wait<1>();
      if (last >= 0) release(last);
      last = stage.slot;
      stage.advance();
      if (skewed && warpgroup == 0 && block == skew - 1 && thread == 0) {
        barrier_arrive(&shared->skew);
      }
    }
    if (tail > 0) {
      if (blocks == prefetch_at) prefetch(args, to);
      barrier_wait(&shared->full[stage.slot], stage.phase);
      // Rows that belong to the next group, up to a multiple of 16. Both warpgroups
      // clear X's part; they write the same.
      const int steps = (tail + 15) / 16;
      uint8_t *a_box = smem + stage.slot * kStageBytes + warpgroup * kBoxBytes;
      uint8_t *b_boxes = smem + stage.slot * kStageBytes + kBytesA;
      const int chunks = (steps * 16 - tail) * 8;  // of 16 bytes, in one box
      for (int i = thread; i < chunks * (1 + kTileN / kBox); i += 128) {
        const int box = i / chunks;
        uint8_t *line = box == 0 ? a_box : b_boxes + (box - 1) * kBoxBytes;
        *reinterpret_cast<uint4 *>(line + tail * 128 + i % chunks * 16) = make_uint4(0, 0, 0, 0);
      }
      fence_async();
      asm volatile("bar.sync %0, 128;" ::"r"(1 + warpgroup) : "memory");
      const uint32_t address = smem_base + stage.slot * kStageBytes;
      uint64_t a = descriptor(address + warpgroup * kBoxBytes);
      uint64_t b = descriptor(address + kBytesA);
      for (int step = 0; step < steps; ++step) {
        wgmma_fence();
        wgmma(T(), acc, a, b, step > 0 || blocks > 0);
        wgmma_commit();
        a += kDescriptorStep;
        b += kDescriptorStep;
      }
    }
    wgmma_wait<0>();
#pragma unroll
    for (int i = 0; i < kAccumulators; ++i) asm volatile("" : "+f"(acc[i])::"memory");
    if (last >= 0) release(last);
    if (tail > 0) {
      release(stage.slot);
      stage.advance();
    }
    __syncwarp();
    if (lane == 0) barrier_arrive_remote(&shared->tile_empty[place.slot], 0);
    place.advance();
    const bool empty = tile.z == 0;
    tile = read_tile(shared, place);
    if (ahead && tile.x >= 0 && tile.z <= lead) prefetch(args, target(tile));
    if (empty) {
#pragma unroll
      for (int i = 0; i < kAccumulators; ++i) acc[i] = 0.f;
    }

    if (args.mode == kStoreInput) {
      write_input_type<T>(acc, staging, map_out, to);
    } else if (args.mode == kAddInput) {
      for_pairs<T>(args, to, [&](T *at, int i) {
        uint32_t *word = reinterpret_cast<uint32_t *>(at);
        uint32_t old = *word;
        const T *pair = reinterpret_cast<const T *>(&old);
        *word =
            pack<T>(acc[i] + static_cast<float>(pair[0]), acc[i + 1] + static_cast<float>(pair[1]));
      });
    } else {
      write_float(acc, staging, map_out, to, args.mode == kAddFloat);
    }
  }
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

#endif  // GROUPED_WGRAD_SM90_CODE

template <typename T>
__global__ void __launch_bounds__(kThreads, 1)
    kernel(const __grid_constant__ CUtensorMap map_a, const __grid_constant__ CUtensorMap map_b,
           const __grid_constant__ CUtensorMap map_out, const Arguments args) {
#ifdef GROUPED_WGRAD_SM90_CODE
  extern __shared__ uint8_t dynamic[];
  uint8_t *smem = reinterpret_cast<uint8_t *>((reinterpret_cast<uintptr_t>(dynamic) + 1023) &
                                              ~static_cast<uintptr_t>(1023));
  Barriers *shared = reinterpret_cast<Barriers *>(smem + kBarrierOffset);
  int rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      barrier_init(&shared->full[i], 1);
      barrier_init(&shared->empty[i], 2 * kConsumerWarps);
    }
    for (int i = 0; i < 2; ++i) {
      barrier_init(&shared->tile_full[i], 1);
      barrier_init(&shared->tile_empty[i], 2 * (kConsumerWarps + 1));
    }
    barrier_init(&shared->skew, 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map_a) : "memory");
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map_b) : "memory");
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map_out) : "memory");
  }
  cluster_sync();
  asm volatile("griddepcontrol.wait;" ::: "memory");

  if (warp < 4) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (warp == 0 && lane == 0) {
      produce(&map_a, &map_b, smem, shared, rank);
    } else if (warp == 1 && lane == 0 && rank == 0) {
      draw_tiles(args, shared);
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    consume<T>(&map_out, args, smem, shared, rank);
  }
  __syncwarp();
  // No block leaves while the other may still signal it.
  cluster_sync();
#endif
}

}  // namespace sm90
}  // namespace grouped_wgrad

#endif  // TRANSFORMER_ENGINE_PYTORCH_CSRC_WGRAD_KERNELS_GROUPED_WGRAD_SM90_CUH_
