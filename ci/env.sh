# SPDX-License-Identifier: Apache-2.0
# Sourced by the other scripts: sets $PYTHON to an environment with a CUDA torch
# and the build's needs. TE_PYTHON=<python> reuses one that has torch already.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
ROOT=$PWD

say() { echo "[ci] $*" >&2; }

if [ -n "${TE_PYTHON:-}" ]; then
  PYTHON=$TE_PYTHON
  "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
    { echo "error: TE_PYTHON=$TE_PYTHON does not run, or is older than 3.10" >&2
      echo "  next: name a Python with a CUDA torch, or unset it to make .venv" >&2; exit 1; }
else
  PYTHON=$ROOT/.venv/bin/python
  if [ ! -x "$PYTHON" ]; then
    base=${PYTHON_BASE:-python3}
    "$base" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
      { echo "error: $base is older than 3.10; set PYTHON_BASE to a newer Python" >&2; exit 1; }
    say "making .venv"
    "$base" -m venv .venv
  fi
fi

# What is installed is recorded by the content of the list, so a second run is quick.
want=$(sha256sum ci/requirements.txt | cut -c1-16)
mark=$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/te_wgrad_ci_$want
if [ ! -e "$mark" ]; then
  if ! "$PYTHON" -c 'import torch' 2>/dev/null; then
    torch=$(grep '^torch==' ci/requirements.txt)
    say "installing $torch (5.5 GB on disk)"
    "$PYTHON" -m pip install -q --disable-pip-version-check "$torch"
  fi
  say "installing the other packages of ci/requirements.txt"
  grep -v '^torch==' ci/requirements.txt >"${TMPDIR:-/tmp}/te_wgrad_requirements_$$.txt"
  "$PYTHON" -m pip install -q --disable-pip-version-check -r "${TMPDIR:-/tmp}/te_wgrad_requirements_$$.txt"
  rm -f "${TMPDIR:-/tmp}/te_wgrad_requirements_$$.txt"
  touch "$mark"
fi
