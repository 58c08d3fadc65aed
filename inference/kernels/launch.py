"""What launching a kernel takes: its code, counters, and whether it may begin early."""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

LEAST_COUNTERS = 4096
HOPPER = (9, 0)  # compute capability


def triton_kernels(module: str) -> Any:
    """A module of kernels/triton. It is imported when a kernel of it is first launched, as Triton may be missing."""
    return import_module(f"accept_head.inference.kernels.triton.{module}")


def power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()


def dense(tensor: Tensor) -> Tensor:
    """The tensor with no gaps in its last dimension, which is what kernels read."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


_counters: dict[torch.device, list[Tensor]] = {}


def counters(device: torch.device, count: int) -> Tensor:
    """(at least count,) int32 zeros, which every launch sets back to zero.

    All launches on a device share them, as these follow each other on one stream. Captured graphs hold the address of
    a tensor that was made when they were warmed up, so none is ever freed.
    """
    made = _counters.setdefault(device, [])
    if not made or len(made[-1]) < count:
        made.append(torch.zeros(max(count, LEAST_COUNTERS), dtype=torch.int32, device=device))
    return made[-1]


def reset_counters(device: torch.device) -> None:
    """A kernel that broke off has not set them back to zero."""
    for each in _counters.get(device, []):
        each.zero_()


_early: dict[torch.device, bool] = {}  # whether kernels begin there before those ahead of them have ended


def early_options(device: torch.device) -> dict[str, Any]:
    """Launch options of kernels that can begin early; see kernels/triton/signals.py."""
    if device not in _early:
        _early[device] = _can_start_early(device)
    return {"EARLY": True, "launch_pdl": True} if _early[device] else {"EARLY": False}


def start_late(device: torch.device) -> bool:
    """Kernels no longer begin early there. Returns whether they did before."""
    before, _early[device] = _early.get(device, False), False
    return before


def _can_start_early(device: torch.device) -> bool:
    """NVIDIA's Hopper and later can. ACCEPT_HEAD_EARLY=0 in the environment turns it off."""
    if device.type != "cuda" or torch.version.cuda is None or os.environ.get("ACCEPT_HEAD_EARLY") == "0":
        return False
    return torch.cuda.get_device_capability(device) >= HOPPER
