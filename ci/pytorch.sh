#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs tests/pytorch as upstream's harness does: one pytest process a file, JUnit
# XML into XML_LOG_DIR, every file runs even when one fails.
#
#   XML_LOG_DIR=logs TE_PYTHON=python ci/pytorch.sh [pytest options]
set -u
cd "$(dirname "$0")/.."
PYTHON=${TE_PYTHON:-.venv/bin/python}
XML_LOG_DIR=${XML_LOG_DIR:-build/xml}
mkdir -p "$XML_LOG_DIR"
failed=()
for file in tests/pytorch/test_*.py; do
  name=$(basename "$file" .py)
  "$PYTHON" -m pytest -p no:cacheprovider -q --junitxml="$XML_LOG_DIR/$name.xml" "$@" "$file" ||
    failed+=("$file")
done
if [ ${#failed[@]} -gt 0 ]; then
  echo "failed: ${failed[*]}"
  exit 1
fi
echo "all files passed"
