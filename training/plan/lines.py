"""Lines that the dry runs of `collect` and `train` share."""

from __future__ import annotations

from collections.abc import Iterable

from accept_head.training.plan.model_shape import ModelShape

ASSUMED_PROMPT_TOKENS = 64  # when the prompts cannot be read


def shape_lines(shapes: Iterable[tuple[str, ModelShape]]) -> list[str]:
    """One line per model, and one more when its shape is a stand-in. shapes: (role, shape)."""
    lines = []
    for role, shape in shapes:
        lines.append(f"  {role:10} {shape}")
        if shape.unreached:
            lines.append(f"  {'':10} NOT RESOLVED: shapes are those of --model_shapes ({shape.unreached})")
    return lines


def devices_text(count: int) -> str:
    return "1 device" if count == 1 else f"{count} devices"
