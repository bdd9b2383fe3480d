#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Formatting and static checks of our own files.
source "$(dirname "$0")/env.sh"
files=$(git ls-files '*.py')
"$PYTHON" -m black -q --check $files || { echo "error: next: $PYTHON -m black $files" | tr '\n' ' ' >&2; exit 1; }
"$PYTHON" -m ruff check -q $files
