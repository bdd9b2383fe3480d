# SPDX-License-Identifier: Apache-2.0
"""pip's entry: fetch, patch, compile and pack one wheel. The work is in build_tools."""

import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.build_ext import build_ext

sys.path.insert(0, str(Path(__file__).resolve().parent))

from build_tools import build, common, environment, fetch  # noqa: E402


class BuildWgrad(build_ext):
    """Stages the whole package; there are no setuptools extensions."""

    def run(self) -> None:
        """Fill the folder that the wheel is made from."""
        if self.inplace:
            raise common.ToolError(
                "An editable install is not supported: the package is made from patches.",
                "edit patches/ or transformer_engine/, then pip install --no-build-isolation .",
            )
        build.stage_fork(Path(self.build_lib))


class BinaryDistribution(Distribution):
    """Marks the wheel as not pure, which is what TE expects of a source install."""

    def has_ext_modules(self) -> bool:
        """There is compiled code in it."""
        return True


def main() -> None:
    """Check the environment before anything is made, then hand over to setuptools."""
    try:
        environment.torch_facts()
        environment.refuse_stock()
        setup(
            name="transformer_engine",
            version=common.fork_version(fetch.load_lock()["version"]),
            description="Transformer Engine with right and fast weight gradients",
            long_description=(common.REPO / "README.md").read_text(encoding="utf-8"),
            long_description_content_type="text/markdown",
            license="Apache-2.0",
            license_files=("LICENSE", "NOTICE"),
            python_requires=">=3.10",
            install_requires=list(build.REQUIRES),
            packages=[],
            py_modules=[],
            cmdclass={"build_ext": BuildWgrad},
            distclass=BinaryDistribution,
        )
    except common.ToolError as error:
        sys.exit(f"error: {error}")
    except OSError as error:
        if error.errno not in common.DISK_FULL:
            raise
        sys.exit(f"error: {common.no_space(error, common.BUILD)}")


main()
