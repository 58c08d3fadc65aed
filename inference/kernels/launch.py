"""Launching a kernel: its code, its counters, and whether it may begin early."""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

LEAST_COUNTERS = 4096
HOPPER = (9, 0)  # compute capability


def triton_kernels(module: str) -> Any:
    """A module of kernels/triton, imported when its first kernel is launched, because Triton may be missing."""
    return import_module(f"accept_head.inference.kernels.triton.{module}")


def power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()


def dense(tensor: Tensor) -> Tensor:
    """The tensor without gaps in its last dimension, as kernels need it."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


_counters: dict[torch.device, list[Tensor]] = {}


def counters(device: torch.device, count: int) -> Tensor:
    """(at least count,) int32 zeros, which every launch sets back to zero.

    All launches on a device share the counters, because they follow each other on one stream. Captured graphs hold the
    address of a tensor from their warm-up, so no tensor is ever freed.
    """
    made = _counters.setdefault(device, [])
    if not made or len(made[-1]) < count:
        made.append(torch.zeros(max(count, LEAST_COUNTERS), dtype=torch.int32, device=device))
    return made[-1]


def reset_counters(device: torch.device) -> None:
    """Set the counters to zero after a failed kernel, which has not done so."""
    for each in _counters.get(device, []):
        each.zero_()


_early: dict[torch.device, bool] = {}  # whether kernels on the device begin before the previous ones have ended


def early_options(device: torch.device) -> dict[str, Any]:
    """Launch options of kernels that can begin early; see kernels/triton/sync.py."""
    if device not in _early:
        _early[device] = _can_start_early(device)
    return {"EARLY": True, "launch_pdl": True} if _early[device] else {"EARLY": False}


def start_late(device: torch.device) -> bool:
    """Make kernels on the device no longer begin early. Returns whether they did before."""
    before, _early[device] = _early.get(device, False), False
    return before


def _can_start_early(device: torch.device) -> bool:
    """Whether kernels can begin early: on NVIDIA's Hopper and later, unless ACCEPT_HEAD_EARLY=0 is set."""
    if device.type != "cuda" or torch.version.cuda is None or os.environ.get("ACCEPT_HEAD_EARLY") == "0":
        return False
    return torch.cuda.get_device_capability(device) >= HOPPER
