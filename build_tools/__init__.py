# SPDX-License-Identifier: Apache-2.0
"""Tools of the patch set; run `python -m build_tools --help`."""
