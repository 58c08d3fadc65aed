"""The one place that decides whether an operation runs its kernels or torch.

Kernels need a GPU and Triton. Before an operation first uses them on a device, they must agree with torch there: a
compiler may be missing, or the GPU too old. If they fail, the log says so and torch does the work.
ACCEPT_HEAD_KERNELS=0 in the environment turns all kernels off.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import Tensor

from accept_head.errors import one_line
from accept_head.inference.kernels.launch import reset_counters, start_late

# Tests set this to run the kernels in Triton's interpreter (TRITON_INTERPRET=1) on a CPU.
ON_ANY_DEVICE = False


class Check(NamedTuple):
    """The check that the kernels of an operation must pass.

    operation: its name in the log. compare: raises when the kernels and torch differ on a device.
    """

    operation: str
    compare: Callable[[torch.device], None]


_passed: dict[tuple[str, torch.device], bool] = {}


def usable(tensor: Tensor, check: Check) -> bool:
    """Whether kernels can run on this tensor and have passed the check on its device."""
    if not (tensor.is_cuda or ON_ANY_DEVICE) or not _enabled():
        return False
    key = check.operation, tensor.device
    if key not in _passed:
        _passed[key] = passes(check, tensor.device)
    return _passed[key]


@cache
def _enabled() -> bool:
    return os.environ.get("ACCEPT_HEAD_KERNELS") != "0" and find_spec("triton") is not None


def passes(check: Check, device: torch.device) -> bool:
    """Run the check now. If it fails with kernels that begin early on this device, it is tried again without that."""
    return _agrees(check, device) or (start_late(device) and _agrees(check, device))


def _agrees(check: Check, device: torch.device) -> bool:
    try:
        check.compare(device)
    except Exception as error:  # after any failure torch can do the work
        reason = f"{type(error).__name__}: {one_line(error)}"
        log = logging.getLogger(__name__)
        log.warning("accept-head: no kernels for %s on %s (%s), hence slower", check.operation, device, reason)
        reset_counters(device)
        return False
    return True
