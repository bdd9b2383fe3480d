#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Everything that needs a GPU, in one go, on a node with this checkout where the fork is
# installed (from a bundle, say). Logs and JSON go to a folder; a table of the steps comes last.
#
#   TE_PYTHON=python ci/gpu.sh OUT [step ...]
#
#   doctor tests matrix sanitize   are right or wrong
#   delayed single grouped example are measurements
#   (no step: all of them)
#
#   JOBS=8       test files and matrix cells side by side (default: half of the cores)
#   LIMIT=600    seconds a step may take; it has failed then, its logs stay
set -u
case "${1:---help}" in -h | --help) sed -n '3,14s/^# \{0,1\}//p' "$0"; exit 0 ;; esac
cd "$(dirname "$0")/.."
mkdir -p "$1"
out=$(cd "$1" && pwd)
shift
steps=("$@")
[ ${#steps[@]} -gt 0 ] ||
  steps=(doctor tests matrix sanitize delayed single grouped example)
PYTHON=${TE_PYTHON:-.venv/bin/python}
command -v "$PYTHON" >/dev/null || {
  echo "error: there is no $PYTHON" >&2
  echo "  next: set TE_PYTHON to a Python with the fork, or run ci/build.sh" >&2
  exit 1
}
export TE_PYTHON=$PYTHON JOBS=${JOBS:-$((($(nproc) + 1) / 2))} LIMIT=${LIMIT:-600}
TE_WGRAD_COMMIT=${TE_WGRAD_COMMIT:-$(git describe --always --abbrev=12 --dirty=+edits \
  '--exclude=*' 2>/dev/null || echo unknown)}
export TE_WGRAD_COMMIT
"$PYTHON" - <<'EOF' || exit 1
import sys
try:
    import torch
    import transformer_engine.pytorch
except Exception as error:
    sys.exit(f"error: {error}\n  next: install the fork where TE_PYTHON points (README, Install)")
if not torch.cuda.is_available():
    sys.exit("error: torch sees no GPU here\n  next: ci/test.sh runs the tests without one")
EOF

run() { # one step
  case $1 in
    doctor) "$PYTHON" transformer_engine/pytorch/wgrad_doctor.py --json "$out/doctor.json" ;;
    tests) XML_LOG_DIR=$out/xml FILE_LIMIT=$LIMIT bash ci/pytorch.sh ;;
    matrix) "$PYTHON" tests/pytorch/single_weight_matrix.py --jobs "$JOBS" --json "$out/matrix.json" ;;
    sanitize) bash ci/sanitize.sh ;;
    delayed) "$PYTHON" benchmarks/delayed_wgrad.py --json "$out/delayed_wgrad.json" ;;
    single) "$PYTHON" benchmarks/single_grouped_weight.py --json "$out/single_grouped_weight.json" ;;
    grouped) "$PYTHON" benchmarks/grouped_wgrad.py --json "$out/grouped_wgrad.json" ;;
    example) "$PYTHON" examples/moe_single_weight.py --json "$out/moe_single_weight.json" ;;
    *) echo "error: no step $1; ci/gpu.sh --help lists them" && return 2 ;;
  esac
}
export -f run
export out PYTHON

table=() failed=0
for step in "${steps[@]}"; do
  echo "[gpu] $step: $out/$step.log" >&2
  start=$SECONDS rc=0
  timeout "$LIMIT" bash -c "run $step" >"$out/$step.log" 2>&1 || rc=$?
  [ $rc -eq 0 ] || failed=1
  table+=("$(printf '%-9s %4d s  exit %3d  %s' "$step" $((SECONDS - start)) $rc \
    "$(tail -n1 "$out/$step.log" | cut -c1-90)")")
done
printf '%s\n' "${table[@]}"
exit $failed
