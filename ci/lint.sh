#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Formatting and static checks of our own files.
case "${1:-}" in -h | --help) sed -n '3,3{s/^# \{0,1\}//p}' "$0"; exit 0 ;; esac
source "$(dirname "$0")/env.sh"
files=$(git ls-files '*.py')
"$PYTHON" -m black -q --check $files || { echo "error: next: $PYTHON -m black $files" | tr '\n' ' ' >&2; exit 1; }
"$PYTHON" -m ruff check -q $files
