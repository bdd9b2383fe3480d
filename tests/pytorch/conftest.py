# SPDX-License-Identifier: Apache-2.0
"""Runs the same tests on a GPU, or without one on the CPU executor."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    import cpu_executor

    cpu_executor.install()


def pytest_report_header():
    """Name what runs the tests, and which Transformer Engine is tested."""
    import transformer_engine

    device = torch.cuda.get_device_name()
    return [
        f"device: {device}; torch {torch.__version__}, CUDA {torch.version.cuda}",
        f"transformer_engine {transformer_engine.__version__} from {transformer_engine.__file__}",
    ]


@pytest.fixture
def device():
    """Where tests put modules and inputs."""
    return "cuda" if HAS_GPU else "cpu"
