#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# From a fresh clone to an installed fork: sets up Python, builds the patched
# Transformer Engine with CUDA, installs it, and shows the public reports before
# (stock) and after (fork) in one table.
#
#   ci/build.sh                 makes .venv in the checkout
#   TE_PYTHON=python ci/build.sh   uses an environment that has a CUDA torch
#   NVTE_CUDA_ARCHS=90 ...      keeps only those GPU architectures
#   MAX_JOBS=2 ...              limits the parallel compilers
case "${1:-}" in -h | --help) sed -n '3,12s/^# \{0,1\}//p' "$0"; exit 0 ;; esac
source "$(dirname "$0")/env.sh"

"$PYTHON" -m build_tools fetch >/dev/null
"$PYTHON" -m build_tools apply
wheel=$("$PYTHON" -m build_tools build)
stock=$("$PYTHON" -m build_tools stock)

# Install only when this very wheel is not installed yet.
site=$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
sum=$(sha256sum "$wheel" | cut -d' ' -f1)
if [ "$(cat "$site"/transformer_engine-*.dist-info/wgrad_wheel_sha256 2>/dev/null)" != "$sum" ]; then
  say "installing $(basename "$wheel")"
  "$PYTHON" -m pip install -q --disable-pip-version-check --no-deps --force-reinstall "$wheel"
  info=$(echo "$site"/transformer_engine-*.dist-info)
  echo "$sum" >"$info/wgrad_wheel_sha256"
fi

# Stock and fork run the same doctor, each in a process of its own.
doctor=$ROOT/transformer_engine/pytorch/wgrad_doctor.py
executor=()
"$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' ||
  executor=(--executor "$ROOT/tests/pytorch/cpu_executor.py")
mkdir -p build/report
report() { # $1 name, $2 PYTHONPATH, then more options
  local name=$1 path=$2 rc=0
  shift 2
  (cd build/report && PYTHONPATH=$path "$PYTHON" "$doctor" "${executor[@]}" "$@") || rc=$?
  [ "$rc" -le 1 ] || { echo "error: the doctor could not run on $name (exit code $rc)" >&2; exit "$rc"; }
}
say "running the doctor on stock, then on the fork"
report stock "$stock" --json "$ROOT/build/report/before.json" >/dev/null
report fork "" --json "$ROOT/build/report/after.json" --compare "$ROOT/build/report/before.json"
