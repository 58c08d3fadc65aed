"""`train --dry_run true`: what the run would cost, without loading weights (compare collect/dry_run.py)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from accept_head.alternatives import DRAWS
from accept_head.base import places_of
from accept_head.checkpoint import reads_target
from accept_head.errors import InputError
from accept_head.files import readable_size
from accept_head.head_config import HeadConfig
from accept_head.signals import SIGNALS
from accept_head.trace.shards import read_traces
from accept_head.training.learn.recipe import Recipe
from accept_head.training.plan.estimate import DEVICES, TrainCost
from accept_head.training.plan.lines import ASSUMED_PROMPT_TOKENS, devices_text, shape_lines
from accept_head.training.plan.model_shape import ModelShape

ASSUMED_TRACES, ASSUMED_NEW_TOKENS = 1000, 512


def train_plan(
    draft: str,
    folders: list[Path],
    common: Recipe,
    recipes: Mapping[str, Recipe],
    *,
    precision: str,
    micro_batch_size: int,
    model_shapes: str | None,
    trust_remote_code: bool,
) -> str:
    """What `train` would do and cost, as text. recipes: of the heads. common: the recipe that they share."""
    if reads_target(draft):  # its states are in the traces, with several for each position
        raise InputError(f"--dry_run does not work with an EAGLE-3 drafter yet (--draft {draft})")
    shape = ModelShape.of(draft, "--draft", model_shapes=model_shapes, trust_remote_code=trust_remote_code)
    traces, prompt_tokens, positions, there, traces_line = _traces(folders, stand_ins=model_shapes is not None)
    alternatives = int(common.for_alternatives(there).alternatives)
    parameters = sum(_head_parameters(recipe, shape) for recipe in recipes.values())
    cost = TrainCost(
        draft=shape,
        head_parameters=parameters * len(common.decays),
        number=2 if precision == "bf16" else 4,
        traces=traces,
        prompt_tokens=prompt_tokens,
        positions=positions,
        epochs=common.epochs if common.residual else 0,
        forwards=2 if common.packing == "exact" else 1,
        micro_batch_size=micro_batch_size,
        alternatives=alternatives,
    )
    heads = f"{len(recipes)} heads, {parameters:,} parameters" if len(recipes) > 1 else f"{parameters:,} parameters"
    how = f"{common.packing} packing, {common.epochs} epochs" if common.residual else "a base alone, no draft forward"
    lines = [
        "dry run of train: no weights are loaded, nothing is written",
        *shape_lines([("draft", shape)]),
        f"  traces     {traces_line}",
        f"  head       {heads}; {how}" + (f", {alternatives} alternatives to each token" if alternatives else ""),
        f"estimate, in {precision}, without a feature cache (docs/scale.md):",
        f"  disk       {readable_size(cost.disk)}; "
        f"the draft's checkpoint {readable_size(2 * shape.parameters)} in bfloat16",
        f"  memory     {readable_size(cost.memory)} a process",
    ]
    for device in DEVICES:
        hours = cost.seconds(device) / 3600
        lines.append(f"  {device.name:11}{hours:9.2f} GPU-hours, {devices_text(cost.devices(device))} a process")
    return "\n".join(lines)


def _traces(folders: list[Path], *, stand_ins: bool) -> tuple[int, int, int, int, str]:
    """(traces, prompt tokens, positions, alternatives to each token that all traces have, a line about them)."""
    if stand_ins and not any(folder.exists() for folder in folders):
        prompts, positions = ASSUMED_TRACES * ASSUMED_PROMPT_TOKENS, ASSUMED_TRACES * ASSUMED_NEW_TOKENS
        said = (
            f"{', '.join(map(str, folders))}: NOT THERE YET; reckoned with {ASSUMED_TRACES:,} of "
            f"{ASSUMED_PROMPT_TOKENS} + {ASSUMED_NEW_TOKENS} tokens, so multiply by your thousands"
        )
        return ASSUMED_TRACES, prompts, positions, DRAWS, said
    counts, alternatives = [], []
    for folder in folders:
        config, dataset = read_traces(folder)
        columns = (dataset.data.column(name).combine_chunks() for name in ("prompt_ids", "response_ids"))
        counts.append((len(dataset), *(len(column.flatten()) for column in columns)))
        alternatives.append(config.alternatives or 0)
    traces, prompts, positions = map(sum, zip(*counts, strict=True))
    said = f"{', '.join(map(str, folders))}: {traces:,} with {positions:,} positions"
    return traces, prompts, positions, min(alternatives), said


def _head_parameters(recipe: Recipe, shape: ModelShape) -> int:
    fitted = recipe.for_hidden_size(shape.hidden_size)
    with_base = fitted.base and fitted.signals
    names: tuple[str, ...] = SIGNALS if fitted.signals else ()
    numbers = len(places_of(names)) if with_base else len(names)
    config = HeadConfig(
        hidden_size=shape.hidden_size,
        depth=fitted.depth,
        predicts=fitted.predicts,
        reads="before" if fitted.packing == "prefix" else "drawn",
        width=fitted.width if isinstance(fitted.width, int) and fitted.residual else None,
        embedding_std=1.0 if fitted.embedding else None,
        signals=names,
        signal_mean=(0.0,) * numbers,
        signal_std=(1.0,) * numbers,
        base=with_base,
        standardised=fitted.base and fitted.residual,
        residual=fitted.residual,
    )
    return sum(math.prod(each) for each in config.tensor_shapes().values())
