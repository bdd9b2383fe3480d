# SPDX-License-Identifier: Apache-2.0
"""Runs the same tests on a GPU, or without one on the CPU executor."""

import platform
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    import cpu_executor

    cpu_executor.install()


def environment() -> dict[str, str]:
    """What runs the tests, and what is tested."""
    import transformer_engine

    # The version that stands beside the imported files, not another one on sys.path.
    home = Path(transformer_engine.__file__).parent.parent
    found = metadata.distributions(name="transformer_engine", path=[str(home)])
    return {
        "transformer_engine": next((d.version for d in found), "unknown"),
        "torch": str(torch.__version__),
        "cuda": str(torch.version.cuda),
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name(),
    }


def pytest_report_header():
    """Name what runs the tests, and which Transformer Engine is tested."""
    import transformer_engine

    facts = environment()
    where = Path(transformer_engine.__file__).parent
    return [
        f"device: {facts['device']}; torch {facts['torch']}, CUDA {facts['cuda']}",
        f"transformer_engine {facts['transformer_engine']} from {where}",
    ]


@pytest.fixture(autouse=True, scope="session")
def facts_in_junit(record_testsuite_property):
    """JUnit XML says what it was run on."""
    for name, value in environment().items():
        record_testsuite_property(name, value)


@pytest.fixture
def device():
    """Where tests put modules and inputs."""
    return "cuda" if HAS_GPU else "cpu"
