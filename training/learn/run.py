"""A training run from its settings to the saved heads, for plain python, torchrun and accelerate launch."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only
from transformers import PreTrainedModel

from accept_head.checkpoint import checkpoint_fingerprint
from accept_head.errors import InputError
from accept_head.pair import context_tokens, hidden_size, input_embeddings, load_draft
from accept_head.trace.config import check_scored
from accept_head.trace.values import check_context
from accept_head.training.launch import local_device, set_cpu_threads, trainer_options, use_cpu_only
from accept_head.training.learn.candidates import Outcome, fit_bases, make_candidates
from accept_head.training.learn.data import StepSampler, TraceData
from accept_head.training.learn.depth_states import DepthStates
from accept_head.training.learn.feature_cache import FeatureCache
from accept_head.training.learn.module import LOG_EVERY, HeadTraining
from accept_head.training.learn.output import check_out, prepare_run, print_quality, save_heads
from accept_head.training.learn.progress import epoch_progress
from accept_head.training.learn.recipe import Recipe, variants
from accept_head.training.learn.splits import Splits, read_splits
from accept_head.training.threads import Count, Threads, thread_count
from accept_head.version import VERSION


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """The checked options of `accept-head train`. verb.py describes them.

    recipe: the name of a recipe. chosen: this recipe with the given options. Values that depend on the draft and the
    traces are fixed after reading these: lr, and embedding and batch_size unless given.
    """

    traces: list[Path]
    dev_traces: Path | None
    draft: str
    out: Path
    recipe: str
    chosen: Recipe
    depth: int | list[int] | None
    w_rej: float | list[float] | None
    lr: float | None
    embedding_is_given: bool
    batch_size_is_given: bool
    micro_batch_size: int
    precision: Literal["fp32", "bf16"]
    seed: int
    checkpoint_every: int
    cache: bool | str
    workers: int
    threads: Count
    trust_remote_code: bool


def run_training(settings: TrainSettings) -> None:
    """Train the heads and write them, or continue an interrupted run."""
    set_cpu_threads(1)  # for each product; several threads use the other cores (threads.py)
    options = trainer_options(settings.precision)
    dtype = "bfloat16" if settings.precision == "bf16" else "auto"
    draft = load_draft(
        settings.draft,
        "--draft",
        dtype=dtype,
        device=local_device(),
        trust_remote_code=settings.trust_remote_code,
    )
    splits = _checked_splits(settings, draft)
    processes = options["devices"] * options["num_nodes"]
    recipe = _for_run(settings, draft, splits, processes)
    threads = thread_count(settings.threads, processes=options["devices"]) if use_cpu_only() else 1  # one feeds a GPU
    data = TraceData(
        splits.train,
        splits.dev,
        packing=recipe.packing,
        r=recipe.r,
        epochs=recipe.epochs,
        batch_size=int(recipe.batch_size),
        micro_batch_size=settings.micro_batch_size,
        seed=settings.seed,
        alternatives=int(recipe.alternatives),
        workers=settings.workers,
        threads=Threads(threads),
    )
    recipes = variants(recipe, settings.depth, settings.w_rej)
    sweep = list(recipes) != [""]
    states = DepthStates(splits.parts) if splits.configs[0].depths else None
    bases = fit_bases(recipes, splits, hidden_size(draft), states) if recipe.base and recipe.signals else {}
    if not recipe.residual:
        check_out(settings.out, sweep=sweep)
        _save(settings, list(bases.values()), recipes, splits, 0)
        return
    sampler = data.sampler(rank=0, world=processes)
    module = HeadTraining(
        make_candidates(recipes, bases, draft, splits.train, settings.seed),
        draft,
        lr=recipe.lr,
        total_steps=sampler.total_steps,
        steps_per_epoch=sampler.steps_per_epoch,
        warmup_share=recipe.warmup_share,
        keep=recipe.keep,
        w_acc=recipe.w_acc,
        threads=data.threads,
    )
    data.cache = states
    if settings.cache:
        data.cache = FeatureCache(
            splits.parts,
            None if settings.cache is True else Path(settings.cache),
            draft,
            packing=recipe.packing,
            axes=module.axes,
            precision=settings.precision,
            alternatives=int(recipe.alternatives),
        )
    run = {
        # Older runs do not name alternatives. Such a run can still be continued, without any.
        **{name: value for name, value in asdict(recipe).items() if name != "alternatives" or value},
        **{name: _swept(name, recipes, sweep) for name in ("depth", "w_rej")},
        **{"precision": settings.precision, "seed": settings.seed, "traces": splits.content()},
    }
    folder = prepare_run(settings.out, run, sweep=sweep)
    trainer = _fit(module, data, sampler, options, folder, settings.checkpoint_every)
    _save(settings, module.outcomes(), recipes, splits, trainer.global_step)
    trainer.strategy.barrier("saved")


def _checked_splits(settings: TrainSettings, draft: PreTrainedModel) -> Splits:
    """The training and dev traces.

    Raises InputError for traces of another draft, for traces longer than the draft's context, and for traces without
    the overlap when the recipe needs it.
    """
    splits = read_splits(
        settings.traces,
        settings.dev_traces,
        draft_fingerprint=checkpoint_fingerprint(settings.draft),
        seed=settings.seed,
    )
    if splits.configs[0].depths:
        _check_of_depths(settings)
    if settings.chosen.predicts != "token":
        for config, folder in zip(splits.configs, splits.folders, strict=True):
            check_scored(config, folder)
    for part in splits.parts:
        check_context(part.folder, part.traces, context_tokens(draft))
    return splits


def _check_of_depths(settings: TrainSettings) -> None:
    """Raises InputError for settings that traces with depths cannot serve."""
    of_drafter = f"{settings.traces[0]} is of a drafter that reads the target's states"
    if settings.chosen.packing != "prefix":
        raise InputError(
            f"packing is {settings.chosen.packing!r}, but {of_drafter}, and holds the states before its tokens: leave "
            "it out, and take --recipe default or signals"
        )
    if settings.cache:
        raise InputError(f"--cache: {of_drafter}, and already has its states beside it; leave --cache out")


def _for_run(settings: TrainSettings, draft: PreTrainedModel, splits: Splits, processes: int) -> Recipe:
    """The chosen recipe after fixing all values that depend on the draft, the traces and the number of processes."""
    recipe = settings.chosen
    if draft.get_input_embeddings() is None:
        if settings.embedding_is_given and recipe.embedding:
            raise InputError(f"embedding is true, but --draft {settings.draft} has no embeddings of its own")
        recipe = recipe.override(embedding=False)
    elif not settings.embedding_is_given and input_embeddings(draft).shape[-1] != hidden_size(draft):
        recipe = recipe.override(embedding=False)  # for example OPT-350m, whose embeddings are narrower
    if recipe.alternatives == "all" and recipe.knows_alternatives:
        _say_unused_alternatives(splits)
    recipe = recipe.for_alternatives(min(config.alternatives or 0 for config in splits.configs))
    if not settings.batch_size_is_given:
        recipe = recipe.for_traces(len(splits.train), processes)
    return recipe.for_hidden_size(hidden_size(draft)).override(lr=settings.lr)


@rank_zero_only
def _say_unused_alternatives(splits: Splits) -> None:
    """Tell the user when the folder with the fewest alternatives limits how many are used from the others."""
    counts = {folder: config.alternatives or 0 for folder, config in zip(splits.folders, splits.configs, strict=True)}
    least = min(counts, key=lambda folder: counts[folder])
    if counts[least] < max(counts.values()):
        print(f"{least} has {counts[least]} alternatives to each token, so of the other traces no more are used either")


def _fit(
    module: HeadTraining,
    data: TraceData,
    sampler: StepSampler,
    options: dict[str, Any],
    run_folder: Path,
    checkpoint_every: int,
) -> L.Trainer:
    """Train to the end, from the last checkpoint in `run_folder` if any, and judge the heads on dev traces."""
    loggers: list[Logger] = [CSVLogger(run_folder, name="csv")]  # a resumed run logs to a new version_N
    loggers.append(TensorBoardLogger(run_folder, name="tensorboard", version=""))
    checkpoints = ModelCheckpoint(
        run_folder, save_last=True, save_top_k=0, every_n_train_steps=checkpoint_every, enable_version_counter=False
    )
    trainer = L.Trainer(
        **options,
        max_steps=sampler.total_steps,
        accumulate_grad_batches=sampler.accumulate,
        val_check_interval=sampler.steps_per_epoch * sampler.accumulate,
        logger=loggers,
        log_every_n_steps=LOG_EVERY,
        callbacks=[checkpoints, epoch_progress(steps_per_epoch=sampler.steps_per_epoch, epochs=sampler.epochs)],
        enable_progress_bar=sys.stderr.isatty(),
        num_sanity_val_steps=0,
    )
    last = run_folder / "last.ckpt"
    trainer.fit(module, data, ckpt_path=str(last) if last.exists() else None, weights_only=True)
    if module.best.take() or not all(module.dev_quality):  # a finished run that is run again has nothing left to fit
        trainer.validate(module, data, verbose=False)
    return trainer


def _swept(name: str, recipes: dict[str, Recipe], sweep: bool) -> Any:
    """The value of a setting in these recipes. For a sweep: the list of its values, in order."""
    values = list(dict.fromkeys(getattr(recipe, name) for recipe in recipes.values()))
    return values if sweep else values[0]


@rank_zero_only
def _save(
    settings: TrainSettings, outcomes: list[Outcome], recipes: dict[str, Recipe], splits: Splits, steps: int
) -> None:
    """Write the heads and print their quality. steps: optimizer steps."""
    training = {"recipe": settings.recipe, "precision": settings.precision, "seed": settings.seed}
    save_heads(
        settings.out,
        outcomes,
        recipes,
        metrics={"train_traces": len(splits.train), "dev_traces": len(splits.dev), "steps": steps},
        training={"accept_head": VERSION} | training | splits.record(),
        traces=splits.configs[0],
    )
    print_quality(settings.out, outcomes)
