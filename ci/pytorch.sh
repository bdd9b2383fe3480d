#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs tests/pytorch as upstream's harness does: one pytest process a file, JUnit
# XML into XML_LOG_DIR, every file runs even when one fails.
#
#   XML_LOG_DIR=logs TE_PYTHON=python ci/pytorch.sh [pytest options]
#   JOBS=8 ...        runs so many files side by side, each one's output beside its XML
#   FILE_LIMIT=300 ...   ends a file that takes longer, in seconds (then it has failed)
set -u
case "${1:-}" in -h | --help) sed -n '3,8s/^# \{0,1\}//p' "$0"; exit 0 ;; esac
cd "$(dirname "$0")/.."
export PYTHON=${TE_PYTHON:-.venv/bin/python} XML_LOG_DIR=${XML_LOG_DIR:-build/xml}
export FILE_LIMIT=${FILE_LIMIT:-0} JOBS=${JOBS:-1}
command -v "$PYTHON" >/dev/null || {
  echo "error: there is no $PYTHON" >&2
  echo "  next: set TE_PYTHON to a Python with the fork, or run ci/build.sh" >&2
  exit 1
}
mkdir -p "$XML_LOG_DIR"
rm -f "$XML_LOG_DIR"/test_*.xml "$XML_LOG_DIR"/test_*.log "$XML_LOG_DIR"/failed

one() { # a test file, then pytest options
  local file=$1 name rc=0
  name=$(basename "$file" .py)
  shift
  [ "$JOBS" = 1 ] || exec >"$XML_LOG_DIR/$name.log" 2>&1
  timeout "$FILE_LIMIT" "$PYTHON" -m pytest -p no:cacheprovider -q \
    --junitxml="$XML_LOG_DIR/$name.xml" "$@" "$file" || rc=$?
  # 5: the options left no test of this file.
  [ $rc -eq 0 ] || [ $rc -eq 5 ] || echo "$file (exit code $rc)" >>"$XML_LOG_DIR/failed"
}
export -f one
# shellcheck disable=SC2016
printf '%s\0' tests/pytorch/test_*.py |
  xargs -0 -P "$JOBS" -I{} bash -c 'one "$@"' one {} "$@"
if [ "$JOBS" != 1 ]; then tail -qn1 "$XML_LOG_DIR"/test_*.log; fi
if [ -s "$XML_LOG_DIR/failed" ]; then
  echo "failed:" && cat "$XML_LOG_DIR/failed"
  exit 1
fi
echo "all files passed"
