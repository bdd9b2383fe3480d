#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The series applies without fuzz, exports byte-identically, and passes lint.
case "${1:-}" in -h | --help) sed -n '3,3{s/^# \{0,1\}//p}' "$0"; exit 0 ;; esac
source "$(dirname "$0")/env.sh"
"$PYTHON" -m build_tools apply
"$PYTHON" -m build_tools export --check
"$PYTHON" -m build_tools lint
# The tables in the documents are those of results/, and each patch's tests tell stock from fork.
"$PYTHON" ci/results.py tables --check
"$PYTHON" ci/results.py prove
