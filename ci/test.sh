#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds and installs when needed (ci/build.sh), checks the patches, runs every
# test. Without a GPU the tests run on the CPU executor. Extra arguments go to
# pytest:  ci/test.sh -k tied
case "${1:-}" in -h | --help) sed -n '3,5{s/^# \{0,1\}//p}' "$0"; exit 0 ;; esac
source "$(dirname "$0")/env.sh"
bash ci/build.sh
bash ci/patches.sh
bash ci/lint.sh
export TE_WGRAD_STOCK=$ROOT/build/stock
exec "$PYTHON" -m pytest tests "$@"
