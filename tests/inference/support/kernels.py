"""Where Triton's kernels can be run: on a GPU, or in Triton's interpreter (TRITON_INTERPRET=1)."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
TRITON = importlib.util.find_spec("triton") is not None
DEVICE = torch.device("cpu") if INTERPRETED else torch.device("cuda", 0)
runs = pytest.mark.skipif(
    not TRITON or not (INTERPRETED or torch.cuda.is_available()),
    reason="needs Triton, and a GPU or TRITON_INTERPRET=1; `make test-vllm` has the latter",
)
