# SPDX-License-Identifier: Apache-2.0
"""Command line: python -m build_tools <verb>."""

from __future__ import annotations

import argparse
import importlib
import signal
import subprocess
import sys
from pathlib import Path

from .common import BUILD, DISK_FULL, ToolError, no_space, require_python

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


def os_problem(error: OSError) -> ToolError:
    """An error of the system, such as a file that cannot be written, with a next step."""
    return ToolError(str(error), "check that it exists and that you may read and write it.")


def main(argv: list[str] | None = None) -> int:
    """Run one verb.

    Returns
    -------
    int
        0 when it did its work, 1 with a message and a next step, 130 when it was
        interrupted. argparse exits with 2 on wrong arguments.
    """
    try:
        require_python()
        args = make_parser().parse_args(argv)
        args.main(args)
    except ToolError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as error:
        problem = ToolError(
            " ".join(map(str, error.cmd)) + f"\n{error.stderr or ''}{error.output or ''}".rstrip(),
            "mend what it names; `python -m build_tools status` shows where things stand.",
        )
        print(f"error: {problem}", file=sys.stderr)
        return 1
    except OSError as error:
        where = Path(error.filename or BUILD)
        problem = no_space(error, where) if error.errno in DISK_FULL else os_problem(error)
        print(f"error: {problem}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(
            "\ninterrupted; nothing half-written was kept. Run it again to go on.", file=sys.stderr
        )
        return 130
    return 0


if __name__ == "__main__":
    # CI stops a job with SIGTERM; what is half-done is cleaned up as after Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
