#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# compute-sanitizer on the grouped weight gradient's kernels, with small operands. Needs a
# GPU that the tool knows, and the library: the installed package's, or the one that
# NVTE_GROUPED_WGRAD_LIBRARY names (then no package is needed).
#   ci/sanitize.sh [memcheck racecheck initcheck synccheck]
case "${1:-}" in -h | --help) sed -n '3,7{s/^# \{0,1\}//p}' "$0"; exit 0 ;; esac
source "$(dirname "$0")/env.sh"
command -v compute-sanitizer >/dev/null || {
  echo "error: compute-sanitizer is not on PATH" >&2
  echo "  next: add the CUDA toolkit's bin folder to PATH" >&2
  exit 1
}
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
