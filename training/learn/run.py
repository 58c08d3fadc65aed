"""`accept-head train`: traces → a head. Plain python, torchrun and accelerate launch all run this."""

from __future__ import annotations

from dataclasses import asdict
from functools import cache as cache_results
from pathlib import Path
from typing import Any, Literal

import lightning as L
import numpy as np
import torch
from datasets import Dataset
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only

from accept_head.errors import InputError
from accept_head.head.network import AcceptanceHead
from accept_head.head_config import HeadConfig, Predicts
from accept_head.pair import checkpoint_fingerprint, context_tokens, hidden_size, input_embeddings, load_model
from accept_head.signals import SIGNALS
from accept_head.trace.config import check_scored
from accept_head.trace.values import check_context
from accept_head.training.launch import local_device, set_cpu_threads, trainer_options, use_cpu_only
from accept_head.training.learn.base import Labelled, fit_base, qualities, train_quality
from accept_head.training.learn.data import PackedTraces, StepSampler, TraceData
from accept_head.training.learn.feature_cache import FeatureCache, check_cacheable
from accept_head.training.learn.mixing import Packing
from accept_head.training.learn.module import LOG_EVERY, Base, Candidate, HeadTraining, Outcome, label_axes
from accept_head.training.learn.output import check_out, prepare_run, print_quality, save_heads
from accept_head.training.learn.progress import EpochProgress
from accept_head.training.learn.recipe import RECIPES, Keep, Recipe, variants
from accept_head.training.learn.splits import Splits, read_splits
from accept_head.training.learn.start import start_heads
from accept_head.training.threads import Count, Threads, settled
from accept_head.version import VERSION


def train(
    traces: str | list[str],
    draft: str,
    out: str,
    dev_traces: str | None = None,
    recipe: Literal["default", "signals", "specdecpp"] = "default",
    depth: int | list[int] | None = None,
    predicts: Predicts | None = None,
    signals: bool | None = None,
    embedding: bool | None = None,
    width: int | Literal["auto"] | None = None,
    w_acc: float | None = None,
    w_rej: float | list[float] | None = None,
    packing: Packing | None = None,
    alternatives: int | Literal["all"] | None = None,
    r: float | None = None,
    epochs: int | None = None,
    batch_size: int | Literal["auto"] | None = None,
    micro_batch_size: int = 8,
    lr: float | None = None,
    decay: float | Literal["auto"] | None = None,
    warmup_share: float | None = None,
    keep: Keep | None = None,
    precision: Literal["fp32", "bf16"] = "fp32",
    seed: int = 0,
    checkpoint_every: int = 50,
    cache: bool | str = False,
    workers: int = 0,
    threads: Count = "auto",
    dry_run: bool = False,
    model_shapes: str | None = None,
    trust_remote_code: bool = False,
) -> None:
    """Train an acceptance prediction head on traces and save it to a folder.

    Checkpoints and logs go to `OUT-run`, beside the head; the same command continues an interrupted run from there.
    A setting that is left out comes from the recipe. A list for `depth` or `w_rej` is a sweep: the heads of all
    combinations are trained on the same draft forwards, each as if it were alone.

    metrics.json has the quality on the dev traces, and the binary KL on the training traces, unweighted, measured by
    the way during the steps of the last epoch.

    Args:
        traces: Folder made by `accept-head collect`; or a list of them, like [A,B], of one pair and sampling.
        draft: The draft that the traces were made with.
        out: Folder for the head; of a sweep, for a folder a head, named like depth3-w_rej6.
        dev_traces: Traces to evaluate on; a tenth of the prompts of `traces` when left out.
        recipe: `default`: a base, fitted to the draft signals, and a residual to it, which reads the state before the
            drawn token and its embedding, and is left out where dev traces say that it does not pay; `signals`: the
            base alone, which takes some dozen prompts and seconds; or `specdecpp` as in the paper (hidden state only,
            token mixing, w_rej 6, 3 epochs, 32 traces a step).
        depth: Residual blocks of the head, 0 to 4; or a list, like [0,1,2,3,4].
        predicts: `token`, the acceptance of the drawn token; `next`, of the one to be drawn after it; or `both`.
        signals: Whether the head also reads the draft signals: log q(Y), entropy and max q.
        embedding: Whether the head also reads the draft's input embedding of the drawn token.
        width: Channels of the head. With a base these are principal components of the state; `auto` is the draft's
            hidden size, but at most 128. Of other heads, `auto` is at most 1024.
        w_acc: Loss weight of acceptance.
        w_rej: Loss weight of rejection; or a list, like [1,3,6,12].
        packing: `exact`, or `mixing` (the paper's token mixing), for a head that reads the state at the drawn token;
            `prefix` for one that reads the state before it and so needs no draft forward on the token it judges.
        alternatives: Alternatives to each drawn token that the head learns of, too, with `prefix`; `all` that every
            folder of traces has. See `collect --alternatives`.
        r: Share of target tokens, with packing `mixing`.
        epochs: Passes over the traces.
        batch_size: Traces an optimizer step, over all processes and accumulated micro-batches. `auto` is an 800th of
            the traces, as a power of two a process, but at least 4 and at most 32. The paper's 32 is cut to the number
            of traces.
        micro_batch_size: Traces one process feeds to the draft at once.
        lr: Peak learning rate of Adam; 0.384 / (channels that the state goes in with) when left out.
        decay: Rate an epoch at which the weights shrink at that peak, if nothing else moves them; against learning by
            heart what holds for these prompts alone. `auto` tries 8 and none, and takes none only where it saves a
            further 1 % of the divergence on dev traces.
        warmup_share: Share of all steps spent warming up; the rest is a cosine to zero.
        keep: Weights of the `best` epoch by the dev traces, or of the `last`. With `best` a base stays alone where its
            residual does not pay.
        precision: fp32, or bf16 (mixed; the draft itself in bfloat16).
        seed: Seed of the head's first weights, of the order of traces and of the mixing masks.
        checkpoint_every: Optimizer steps between checkpoints.
        cache: Keep the draft's states on disk, so that the draft runs over the traces once, not in every epoch, and not
            again in later runs: a folder, or true for `features` in each folder of traces. Not with token mixing.
        workers: Processes that prepare batches.
        threads: Threads of each process on a CPU: one runs the draft for the next batch while heads learn, and all of
            them share the heads of a sweep. `auto`: the process's share of cores, at most 8 or OMP_NUM_THREADS. Changes
            no bit of a head.
        dry_run: Load no weights and write nothing: resolve every name and print what the run would cost.
        model_shapes: With dry_run: folder with a `NAME/config.json` for a draft that cannot be reached from here.
        trust_remote_code: Run model code that comes with the draft.
    """
    if predicts == "next":  # they describe a drawn token, which such a head does not know
        signals, embedding = signals or False, embedding or False
    if not RECIPES[recipe].residual:
        _check_of_base(
            recipe, predicts=predicts, signals=signals, depth=depth, embedding=embedding, width=width, packing=packing,
            epochs=epochs, batch_size=batch_size, lr=lr, decay=decay, warmup_share=warmup_share, keep=keep,
            cache=cache or None,
        )  # fmt: skip
    chosen = RECIPES[recipe].override(
        predicts=predicts, signals=signals, embedding=embedding, width=width, w_acc=w_acc, packing=packing,
        alternatives=alternatives, r=r, epochs=epochs, batch_size=batch_size, decay=decay, warmup_share=warmup_share,
        keep=keep,
    )  # fmt: skip
    if r not in (None, RECIPES[recipe].r) and chosen.packing != "mixing":
        raise InputError(f"r is {r}, which is of packing 'mixing', but packing is {chosen.packing!r}")
    variants(chosen, depth, w_rej)  # refuses wrong values before anything is loaded
    if micro_batch_size < 1 or checkpoint_every < 1 or workers < 0:
        raise InputError("micro_batch_size and checkpoint_every must be at least 1, workers at least 0")
    if threads != "auto" and threads < 1:
        raise InputError(f"threads is {threads}, expected a number from 1 on, or auto")
    if cache:
        check_cacheable(chosen.packing)
    folders = [Path(folder) for folder in (traces if isinstance(traces, list) else [traces])]
    if dry_run:
        from accept_head.training.plan.dry_run import train_plan

        plan = train_plan(
            draft, folders, chosen, variants(chosen, depth, w_rej), precision=precision,
            micro_batch_size=micro_batch_size, model_shapes=model_shapes, trust_remote_code=trust_remote_code,
        )  # fmt: skip
        print(plan)
        return
    if model_shapes is not None:
        raise InputError("--model_shapes is given, but only --dry_run true reads it")
    set_cpu_threads(1)  # more cores are used by threads that have products of their own (threads.py)
    options = trainer_options(precision)
    dtype = "bfloat16" if precision == "bf16" else "auto"
    draft_model = load_model(draft, "--draft", dtype=dtype, device=local_device(), trust_remote_code=trust_remote_code)
    splits = _checked_splits(folders, dev_traces, chosen, draft, draft_model, seed)
    processes = options["devices"] * options["num_nodes"]
    if embedding is None and input_embeddings(draft_model).shape[-1] != hidden_size(draft_model):
        chosen = chosen.override(embedding=False)  # as of OPT-350m, whose embeddings are narrower
    chosen = _for_splits(chosen, splits, processes if not isinstance(batch_size, int) else None)
    chosen = chosen.for_hidden_size(hidden_size(draft_model)).override(lr=lr)
    working = Threads(settled(threads, processes=options["devices"]) if use_cpu_only() else 1)  # one keeps a GPU busy
    data = TraceData(
        splits.train,
        splits.dev,
        packing=chosen.packing,
        r=chosen.r,
        epochs=chosen.epochs,
        batch_size=int(chosen.batch_size),
        micro_batch_size=micro_batch_size,
        seed=seed,
        alternatives=int(chosen.alternatives),
        workers=workers,
        threads=working,
    )
    recipes = variants(chosen, depth, w_rej)
    bases = _bases(recipes, splits, data, hidden_size(draft_model)) if chosen.base and chosen.signals else {}
    if not chosen.residual:
        check_out(Path(out), sweep=list(recipes) != [""])
        outcomes, steps = [base.outcome(name) for name, base in bases.items()], 0
        _save(Path(out), outcomes, recipes, splits, steps, recipe, precision, seed)
        return
    sampler = data.sampler(rank=0, world=processes)
    module = _module(recipes, bases, draft_model, data, sampler, seed, working)
    if cache:
        data.cache = FeatureCache(
            splits.parts,
            None if cache is True else Path(cache),
            draft_model,
            packing=chosen.packing,
            axes=module.axes,
            precision=precision,
            alternatives=int(chosen.alternatives),
        )
    sweep = list(recipes) != [""]
    run = {
        # An older run has no word of alternatives, and goes on without.
        **{name: value for name, value in asdict(chosen).items() if name != "alternatives" or value},
        **{name: _swept(name, recipes, sweep) for name in ("depth", "w_rej")},
        **{"precision": precision, "seed": seed, "traces": splits.content()},
    }
    trainer = _fit(module, data, sampler, options, prepare_run(Path(out), run, sweep=sweep), checkpoint_every)
    _save(Path(out), module.outcomes(), recipes, splits, trainer.global_step, recipe, precision, seed)
    trainer.strategy.barrier("saved")


def _check_of_base(recipe: str, *, predicts: Predicts | None, signals: bool | None, **given: Any) -> None:
    """Raises InputError for what a base alone does not have."""
    if predicts == "next" or signals is False:
        name, value = ("predicts", predicts) if predicts == "next" else ("signals", False)
        raise InputError(f"{name} is {value!r}, but recipe {recipe!r} reads nothing but signals of a drawn token")
    for name, value in given.items():
        if value is not None:
            raise InputError(
                f"{name} is {value!r}, but recipe {recipe!r} fits a base alone, to convergence: leave it out"
            )


@rank_zero_only
def _save(
    out: Path,
    outcomes: list[Outcome],
    recipes: dict[str, Recipe],
    splits: Splits,
    steps: int,
    recipe: str,
    precision: str,
    seed: int,
) -> None:
    save_heads(
        out,
        outcomes,
        recipes,
        metrics={"train_traces": len(splits.train), "dev_traces": len(splits.dev), "steps": steps},
        training={"accept_head": VERSION, "recipe": recipe, "precision": precision, "seed": seed} | splits.record(),
        traces=splits.configs[0],
    )
    print_quality(out, outcomes)


def _checked_splits(
    folders: list[Path], dev_traces: str | None, chosen: Recipe, draft: str, draft_model: Any, seed: int
) -> Splits:
    """Raises InputError for traces of another draft, for such as were scored where the recipe needs more than that, and
    for such as are longer than the draft reads."""
    splits = read_splits(
        folders,
        Path(dev_traces) if dev_traces is not None else None,
        draft_fingerprint=checkpoint_fingerprint(draft),
        seed=seed,
    )
    if chosen.predicts != "token":
        for config, folder in zip(splits.configs, splits.folders, strict=True):
            check_scored(config, folder)
    for part in splits.parts:
        check_context(part.folder, part.traces, context_tokens(draft_model))
    return splits


def _for_splits(chosen: Recipe, splits: Splits, processes: int | None) -> Recipe:
    """Its alternatives settled by those that the traces have, and its batch size by how many traces there are for so
    many processes; None: it was given."""
    if chosen.alternatives == "all" and chosen.knows_alternatives:
        _say_unused_alternatives(splits)
    chosen = chosen.for_alternatives(min(config.alternatives or 0 for config in splits.configs))
    return chosen if processes is None else chosen.for_traces(len(splits.train), processes)


def _fit(
    module: HeadTraining,
    data: TraceData,
    sampler: StepSampler,
    options: dict[str, Any],
    run_folder: Path,
    checkpoint_every: int,
) -> L.Trainer:
    """Train to the end, from the last checkpoint in `run_folder` if there is one, and judge the heads on dev traces."""
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
        callbacks=[checkpoints, EpochProgress(steps_per_epoch=sampler.steps_per_epoch, epochs=sampler.epochs)],
        num_sanity_val_steps=0,
    )
    last = run_folder / "last.ckpt"
    trainer.fit(module, data, ckpt_path=str(last) if last.exists() else None, weights_only=True)
    if module.take_best() or not all(module.dev_quality):  # a finished run that is run again has nothing left to fit
        trainer.validate(module, data, verbose=False)
    return trainer


@rank_zero_only
def _say_unused_alternatives(splits: Splits) -> None:
    """Where one folder of traces has fewer than others, no more are used of any."""
    counts = {folder: config.alternatives or 0 for folder, config in zip(splits.folders, splits.configs, strict=True)}
    least = min(counts, key=lambda folder: counts[folder])
    if counts[least] < max(counts.values()):
        print(f"{least} has {counts[least]} alternatives to each token, so of the other traces no more are used either")


def _swept(name: str, recipes: dict[str, Recipe], sweep: bool) -> Any:
    """The value of a setting in these recipes; of a sweep, the list of its values in order."""
    values = list(dict.fromkeys(getattr(recipe, name) for recipe in recipes.values()))
    return values if sweep else values[0]


def _bases(recipes: dict[str, Recipe], splits: Splits, data: TraceData, channels: int) -> dict[str, Base]:
    """The base of each head, by the head's name; heads with the same loss weights share one."""
    common = next(iter(recipes.values()))
    packing: Packing = "prefix" if common.packing == "prefix" else "exact"
    axes = label_axes(common.predicts, sees_drawn=True)
    train, dev = (
        Labelled.of((packed[0, row] for row in range(len(packed))), axes)
        for packed in (
            PackedTraces(splits.train, packing, r=0, seed=0, alternatives=int(common.alternatives)),
            PackedTraces(splits.dev, packing, r=0, seed=0),
        )
    )

    @cache_results
    def fitted(w_rej: float) -> Base:
        head = fit_base(
            train, dev, hidden_size=channels, signals=SIGNALS, predicts=common.predicts, w_acc=common.w_acc, w_rej=w_rej
        )
        return Base(head, qualities(head, dev), train_quality(head, train))

    return {name: fitted(recipe.w_rej) for name, recipe in recipes.items()}


def _module(
    recipes: dict[str, Recipe],
    bases: dict[str, Base],
    draft: Any,
    data: TraceData,
    sampler: StepSampler,
    seed: int,
    threads: Threads,
) -> HeadTraining:
    common = next(iter(recipes.values()))
    more: dict[str, Any] = {"standardised": common.base}
    if bases:
        of_base = next(iter(bases.values())).head.config  # all bases read the same
        names = ("signals", "signal_mean", "signal_std", "base")
        more |= {name: getattr(of_base, name) for name in names}
    elif common.signals:
        more |= _signal_statistics(data.train.traces)
    embeddings = input_embeddings(draft) if common.embedding else None
    if embeddings is not None:
        more["embedding_std"] = float(embeddings.float().square().mean().sqrt())
    candidates = []
    for name, recipe in recipes.items():
        config = HeadConfig(
            hidden_size=hidden_size(draft),
            depth=recipe.depth,
            predicts=recipe.predicts,
            reads="before" if recipe.packing == "prefix" else "drawn",
            width=recipe.width if isinstance(recipe.width, int) else None,
            **more,
        )
        for decay in recipe.decays:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)  # each head starts as it would alone
                head = AcceptanceHead(config).attach(embeddings)
            tried = [f"decay{decay:g}"] if len(recipe.decays) > 1 else []
            label = "-".join([name, *tried] if name else tried)
            candidates.append(Candidate(name, head, recipe.w_rej, bases.get(name), decay, label))
    module = HeadTraining(
        candidates,
        draft,
        lr=common.lr,
        total_steps=sampler.total_steps,
        steps_per_epoch=sampler.steps_per_epoch,
        warmup_share=common.warmup_share,
        keep=common.keep,
        w_acc=common.w_acc,
        threads=threads,
    )
    if common.base:
        start_heads([one.head for one in candidates], [one.base.head for one in candidates if one.base])
    return module


def _signal_statistics(traces: Dataset) -> dict[str, Any]:
    """The head config's fields about signals, from all positions of the training traces."""
    columns = {name: np.concatenate(traces.with_format("numpy")[name][:]).astype(np.float64) for name in SIGNALS}
    return {
        "signals": SIGNALS,
        "signal_mean": tuple(float(values.mean()) for values in columns.values()),
        "signal_std": tuple(max(float(values.std()), 1e-6) for values in columns.values()),
    }
