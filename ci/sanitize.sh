#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# compute-sanitizer on the grouped weight gradient's kernels, with small operands. Needs a
# GPU that the tool knows, and the library: the installed package's, or the one that
# NVTE_GROUPED_WGRAD_LIBRARY names (then no package is needed).
source "$(dirname "$0")/env.sh"
module=${NVTE_GROUPED_WGRAD_LIBRARY:+--module transformer_engine/pytorch/grouped_wgrad.py}
failed=0
for tool in ${*:-memcheck racecheck initcheck synccheck}; do
  echo "== $tool"
  # Without torch's cache every tensor is an allocation of its own, with edges to cross.
  PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool "$tool" --error-exitcode 9 \
    --kernel-name kernel_substring=grouped_wgrad --print-limit 20 \
    "$PYTHON" benchmarks/grouped_wgrad.py --check-only $module || failed=1
done
exit $failed
