#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Formatting and static checks of our own files.
case "${1:-}" in -h | --help) sed -n '3,3{s/^# \{0,1\}//p}' "$0"; exit 0 ;; esac
source "$(dirname "$0")/env.sh"
files=$(git ls-files '*.py')
"$PYTHON" -m black -q --check $files || { echo "error: next: $PYTHON -m black $files" | tr '\n' ' ' >&2; exit 1; }
"$PYTHON" -m ruff check -q $files
sources=$(git ls-files '*.cpp' '*.h' '*.cu' '*.cuh')
bin=$(dirname "$("$PYTHON" -c 'import sys; print(sys.executable)')")
"$bin/clang-format" --dry-run --Werror $sources ||
  { echo "error: next: $bin/clang-format -i" $sources >&2; exit 1; }
"$PYTHON" -m cpplint --quiet --linelength=100 --extensions=cpp,h,cu,cuh \
  --filter=-legal/copyright,-build/include_subdir,-build/include_what_you_use,-runtime/int,-whitespace/indent_namespace \
  $sources
