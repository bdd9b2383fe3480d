# SPDX-License-Identifier: Apache-2.0
"""Command line: python -m build_tools <verb>."""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys

from .common import ToolError, require_python

VERBS = ("fetch", "tree", "apply", "export", "lint", "status", "build", "stock", "prune", "bundle")


def make_parser() -> argparse.ArgumentParser:
    """The parser with one sub-command a verb."""
    parser = argparse.ArgumentParser(
        prog="python -m build_tools",
        description="Pinned Transformer Engine packages in, a patched wheel out.",
    )
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="verb")
    for name in VERBS:
        module = importlib.import_module(f".{name}", __package__)
        text = module.__doc__.strip()
        verb = verbs.add_parser(
            name,
            help=text.splitlines()[0],
            description=text,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(verb)
        verb.set_defaults(main=module.main)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run one verb; 0 when it did its work, 1 with a message and a next step otherwise."""
    try:
        require_python()
        args = make_parser().parse_args(argv)
        args.main(args)
    except ToolError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as error:
        print(
            f"error: {' '.join(map(str, error.cmd))}\n{error.output}\n{error.stderr}",
            file=sys.stderr,
        )
        return 1
    except KeyboardInterrupt:
        print(
            "\ninterrupted; nothing half-written was kept. Run it again to go on.", file=sys.stderr
        )
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
