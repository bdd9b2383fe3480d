// SPDX-License-Identifier: Apache-2.0
//
// Grouped weight gradients, dW[g] (+)= dY[g]^T X[g], as a library with a C interface
// that needs CUDA alone:
//
//   nvcc -O3 -std=c++17 -shared -Xcompiler -fPIC,-fvisibility=hidden -lineinfo
//     -gencode arch=compute_90a,code=sm_90a -gencode arch=compute_80,code=[sm_80,compute_80]
//     -o libte_grouped_wgrad.so grouped_wgrad.cu
//
// Nothing here allocates, synchronizes or reads device memory from the host: a call
// is two kernel launches, which a CUDA graph can capture.

#include <algorithm>
#include <atomic>
#include <cstdarg>
#include <cstdio>

#include "grouped_wgrad_common.cuh"
#include "grouped_wgrad_portable.cuh"
#include "grouped_wgrad_sm90.cuh"

namespace grouped_wgrad {
namespace {

constexpr int kMaxDevices = 64;
constexpr int kForcePortable = 1 << 16;  // a flag: the kernel for other GPUs

thread_local char error_text[512];

__attribute__((format(printf, 1, 2))) int fail(const char *format, ...) {
  va_list values;
  va_start(values, format);
  vsnprintf(error_text, sizeof(error_text), format, values);
  va_end(values);
  return 1;
}

#define GROUPED_WGRAD_CUDA(call)                                               \
  do {                                                                         \
    const cudaError_t status = (call);                                         \
    if (status != cudaSuccess) {                                               \
      cudaGetLastError();                                                      \
      return fail("grouped wgrad: %s: %s", #call, cudaGetErrorString(status)); \
    }                                                                          \
  } while (false)

// What is asked of a device once.
struct Device {
  std::atomic<bool> ready{false};
  int major = 0;
  int multiprocessors = 0;
};
Device devices[kMaxDevices];

using Encode = decltype(&cuTensorMapEncodeTiled);
std::atomic<Encode> encode_function{nullptr};

int find_encode() {
  if (encode_function.load(std::memory_order_acquire) != nullptr) return 0;
  void *function = nullptr;
  cudaDriverEntryPointQueryResult found;
#if CUDART_VERSION >= 12050
  GROUPED_WGRAD_CUDA(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                                      cudaEnableDefault, &found));
#else
  GROUPED_WGRAD_CUDA(
      cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &function, cudaEnableDefault, &found));
#endif
  if (found != cudaDriverEntryPointSuccess || function == nullptr) {
    return fail("grouped wgrad: the driver has no cuTensorMapEncodeTiled");
  }
  encode_function.store(reinterpret_cast<Encode>(function), std::memory_order_release);
  return 0;
}

int find_device(int index, Device **device) {
  if (index < 0 || index >= kMaxDevices) return fail("grouped wgrad: device %d", index);
  *device = &devices[index];
  if ((*device)->ready.load(std::memory_order_acquire)) return 0;
  int major, multiprocessors;
  GROUPED_WGRAD_CUDA(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, index));
  GROUPED_WGRAD_CUDA(
      cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, index));
  if (major == 9) {
    if (find_encode() != 0) return 1;
    GROUPED_WGRAD_CUDA(cudaFuncSetAttribute(sm90::kernel<__nv_bfloat16>,
                                            cudaFuncAttributeMaxDynamicSharedMemorySize,
                                            sm90::kSharedBytes));
    GROUPED_WGRAD_CUDA(cudaFuncSetAttribute(
        sm90::kernel<__half>, cudaFuncAttributeMaxDynamicSharedMemorySize, sm90::kSharedBytes));
  }
  (*device)->major = major;
  (*device)->multiprocessors = multiprocessors;
  (*device)->ready.store(true, std::memory_order_release);
  return 0;
}

int make_map(CUtensorMap *map, const char *name, CUtensorMapDataType type, int bytes,
             const void *base, int dimensions, const cuuint64_t *sizes, const cuuint32_t *box) {
  cuuint64_t strides[2] = {sizes[0] * bytes, sizes[0] * bytes * sizes[1]};
  const cuuint32_t steps[3] = {1, 1, 1};
  const CUresult status = encode_function.load(std::memory_order_relaxed)(
      map, type, dimensions, const_cast<void *>(base), sizes, strides, box, steps,
      CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS) {
    return fail("grouped wgrad: cuTensorMapEncodeTiled of %s: error %d", name,
                static_cast<int>(status));
  }
  return 0;
}

struct Call {
  const void *dy, *x;
  void *output;
  const void *splits;
  bool wide_splits, half, accumulate, float_output;
  int groups;
  long long rows;
  int out_features, in_features;
  Header *header;
  int sm_budget, flags;
  cudaStream_t stream;
};

template <typename T>
int launch_sm90(const Call &call, const Device &device, int mode) {
  const CUtensorMapDataType type =
      call.half ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  CUtensorMap map_a, map_b, map_out;
  const cuuint64_t out = call.out_features, in = call.in_features;
  const cuuint64_t rows = call.rows;
  const cuuint64_t sizes_a[2] = {out, rows}, sizes_b[2] = {in, rows};
  const cuuint64_t sizes_out[3] = {in, out, static_cast<cuuint64_t>(call.groups)};
  const cuuint32_t box_a[2] = {sm90::kBox, sm90::kTileK};
  const cuuint32_t box_b[2] = {sm90::kBox, sm90::kTileK / 2};
  const cuuint32_t box_out[3] = {call.float_output ? 32u : 64u, 16, 1};
  if (make_map(&map_a, "grad_output", type, 2, call.dy, 2, sizes_a, box_a) != 0) return 1;
  if (make_map(&map_b, "input", type, 2, call.x, 2, sizes_b, box_b) != 0) return 1;
  if (make_map(&map_out, "output", call.float_output ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32 : type,
               call.float_output ? 4 : 2, call.output, 3, sizes_out, box_out) != 0) {
    return 1;
  }
  sm90::Arguments args = {};
  args.header = call.header;
  args.output = call.output;
  args.out_features = call.out_features;
  args.in_features = call.in_features;
  args.tiles_m = (call.out_features + 2 * sm90::kTileM - 1) / (2 * sm90::kTileM);
  args.tiles_n = (call.in_features + sm90::kTileN - 1) / sm90::kTileN;
  args.mode = mode;
  args.tuning = sm90::tuning(call.flags);
  const int all = device.multiprocessors;
  const int limit = call.sm_budget > 0 ? std::min(call.sm_budget, all) : all;
  const long long clusters =
      std::min<long long>(std::max(1, limit / 2), 1LL * args.tiles_m * args.tiles_n * call.groups);
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim.x = 2;
  attributes[0].val.clusterDim.y = 1;
  attributes[0].val.clusterDim.z = 1;
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(2 * clusters));
  config.blockDim = dim3(sm90::kThreads);
  config.dynamicSmemBytes = sm90::kSharedBytes;
  config.stream = call.stream;
  config.attrs = attributes;
  config.numAttrs = 2;
  GROUPED_WGRAD_CUDA(cudaLaunchKernelEx(&config, sm90::kernel<T>, map_a, map_b, map_out, args));
  return 0;
}

template <typename T>
int launch_portable(const Call &call, const Device &device, int mode) {
  const portable::Arguments args = {call.header,       call.dy,          call.x, call.output,
                                    call.out_features, call.in_features, mode};
  const int limit = call.sm_budget > 0 ? std::min(call.sm_budget, device.multiprocessors)
                                       : 2 * device.multiprocessors;
  portable::kernel<T><<<limit, portable::kThreads, 0, call.stream>>>(args);
  GROUPED_WGRAD_CUDA(cudaGetLastError());
  return 0;
}

int run(const Call &call, int device_index) {
  if (call.groups == 0) return 0;
  if (call.rows == 0) {
    if (call.accumulate) return 0;
    const size_t bytes = static_cast<size_t>(call.groups) * call.out_features * call.in_features *
                         (call.float_output ? 4 : 2);
    GROUPED_WGRAD_CUDA(cudaMemsetAsync(call.output, 0, bytes, call.stream));
    return 0;
  }
  Device *device;
  if (find_device(device_index, &device) != 0) return 1;
  if (device->major < 8) return fail("grouped wgrad: needs compute capability 8.0 or newer");
  const int threads = std::min(1024, (call.groups + 31) / 32 * 32);
  if (call.wide_splits) {
    prepare_kernel<int64_t>
        <<<1, threads, 0, call.stream>>>(static_cast<const int64_t *>(call.splits), call.groups,
                                         call.rows, !call.accumulate, call.header);
  } else {
    prepare_kernel<int32_t>
        <<<1, threads, 0, call.stream>>>(static_cast<const int32_t *>(call.splits), call.groups,
                                         call.rows, !call.accumulate, call.header);
  }
  GROUPED_WGRAD_CUDA(cudaGetLastError());
  const int mode = (call.float_output ? 0 : 2) + (call.accumulate ? 1 : 0);
  const bool hopper = device->major == 9 && !(call.flags & kForcePortable);
  if (call.half) {
    return hopper ? launch_sm90<__half>(call, *device, mode)
                  : launch_portable<__half>(call, *device, mode);
  }
  return hopper ? launch_sm90<__nv_bfloat16>(call, *device, mode)
                : launch_portable<__nv_bfloat16>(call, *device, mode);
}

}  // namespace
}  // namespace grouped_wgrad

#define GROUPED_WGRAD_API extern "C" __attribute__((visibility("default")))

// Why the last call of this thread failed.
GROUPED_WGRAD_API const char *te_grouped_wgrad_error() { return grouped_wgrad::error_text; }

// The version of this interface.
GROUPED_WGRAD_API int te_grouped_wgrad_version() { return 1; }

// Device memory a call needs; its contents do not matter.
GROUPED_WGRAD_API size_t te_grouped_wgrad_workspace_bytes(int groups) {
  return grouped_wgrad::workspace_bytes(groups);
}

// output[g] (+)= dy[rows of g]^T x[rows of g], 0 on success. Types: 0 bf16, 1 fp16 for
// the inputs; the output is fp32 or the inputs' type. Splits are int32 or int64 in
// device memory. `sm_budget` 0 is all multiprocessors; `flags` -1 is the default.
GROUPED_WGRAD_API int te_grouped_wgrad(const void *dy, const void *x, void *output,
                                       const void *splits, int splits_are_int64, int input_type,
                                       int output_is_float, int accumulate, int groups,
                                       long long rows, int out_features, int in_features,
                                       void *workspace, int device, int sm_budget, int flags,
                                       void *stream) {
  using grouped_wgrad::fail;
  if (groups < 0 || groups > grouped_wgrad::kMaxGroups) {
    return fail("grouped wgrad: %d groups, at most %d", groups, grouped_wgrad::kMaxGroups);
  }
  if (out_features <= 0 || in_features <= 0 || out_features % 8 != 0 || in_features % 8 != 0) {
    return fail("grouped wgrad: out %d and in %d must be positive multiples of 8", out_features,
                in_features);
  }
  if (rows < 0 || rows > (1LL << 31) - 128) return fail("grouped wgrad: %lld rows", rows);
  if (input_type != 0 && input_type != 1) return fail("grouped wgrad: type %d", input_type);
  int previous;
  GROUPED_WGRAD_CUDA(cudaGetDevice(&previous));
  if (previous != device) GROUPED_WGRAD_CUDA(cudaSetDevice(device));
  grouped_wgrad::Call call = {};
  call.dy = dy;
  call.x = x;
  call.output = output;
  call.splits = splits;
  call.wide_splits = splits_are_int64 != 0;
  call.half = input_type == 1;
  call.accumulate = accumulate != 0;
  call.float_output = output_is_float != 0;
  call.groups = groups;
  call.rows = rows;
  call.out_features = out_features;
  call.in_features = in_features;
  call.header = static_cast<grouped_wgrad::Header *>(workspace);
  call.sm_budget = sm_budget;
  call.flags = flags < 0 ? grouped_wgrad::sm90::kDefaultFlags : flags;
  call.stream = static_cast<cudaStream_t>(stream);
  const int status = grouped_wgrad::run(call, device);
  if (previous != device) GROUPED_WGRAD_CUDA(cudaSetDevice(previous));
  return status;
}
