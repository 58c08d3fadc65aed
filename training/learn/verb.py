"""`accept-head train`: traces → a head."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from accept_head.errors import InputError
from accept_head.head_config import Predicts
from accept_head.training.learn.dry_run import train_plan
from accept_head.training.learn.feature_cache import check_cacheable
from accept_head.training.learn.mixing import Packing
from accept_head.training.learn.recipe import RECIPES, Keep, variants
from accept_head.training.learn.run import TrainSettings, run_training
from accept_head.training.threads import Count


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
    if predicts == "next":  # signals and embedding describe a drawn token, which such a head does not know
        signals, embedding = signals or False, embedding or False
    given: dict[str, Any] = {
        "predicts": predicts, "signals": signals, "embedding": embedding, "width": width, "w_acc": w_acc,
        "packing": packing, "alternatives": alternatives, "r": r, "epochs": epochs, "batch_size": batch_size,
        "decay": decay, "warmup_share": warmup_share, "keep": keep,
    }  # fmt: skip
    if not RECIPES[recipe].residual:
        _check_of_base(recipe, given | {"depth": depth, "lr": lr, "cache": cache or None})
    chosen = RECIPES[recipe].override(**given)
    if r not in (None, RECIPES[recipe].r) and chosen.packing != "mixing":
        raise InputError(f"r is {r}, which is of packing 'mixing', but packing is {chosen.packing!r}")
    heads = variants(chosen, depth, w_rej)  # refuses wrong values before anything is loaded
    if micro_batch_size < 1 or checkpoint_every < 1 or workers < 0:
        raise InputError("micro_batch_size and checkpoint_every must be at least 1, workers at least 0")
    if threads != "auto" and threads < 1:
        raise InputError(f"threads is {threads}, expected a number from 1 on, or auto")
    if cache:
        check_cacheable(chosen.packing)
    folders = [Path(folder) for folder in (traces if isinstance(traces, list) else [traces])]
    if dry_run:
        plan = train_plan(
            draft, folders, chosen, heads, precision=precision,
            micro_batch_size=micro_batch_size, model_shapes=model_shapes, trust_remote_code=trust_remote_code,
        )  # fmt: skip
        print(plan)
        return
    if model_shapes is not None:
        raise InputError("--model_shapes is given, but only --dry_run true reads it")
    run_training(
        TrainSettings(
            traces=folders,
            dev_traces=Path(dev_traces) if dev_traces is not None else None,
            draft=draft,
            out=Path(out),
            recipe=recipe,
            chosen=chosen,
            depth=depth,
            w_rej=w_rej,
            lr=lr,
            embedding_is_given=embedding is not None,
            batch_size_is_given=isinstance(batch_size, int),
            micro_batch_size=micro_batch_size,
            precision=precision,
            seed=seed,
            checkpoint_every=checkpoint_every,
            cache=cache,
            workers=workers,
            threads=threads,
            trust_remote_code=trust_remote_code,
        )
    )


def _check_of_base(recipe: str, given: dict[str, Any]) -> None:
    """Raises InputError for options that a base alone does not have."""
    for name, value in (("predicts", "next"), ("signals", False)):
        if given[name] == value:
            raise InputError(f"{name} is {value!r}, but recipe {recipe!r} reads nothing but signals of a drawn token")
    for name, value in given.items():
        if value is not None and name not in ("predicts", "signals", "w_acc", "alternatives", "r"):
            raise InputError(
                f"{name} is {value!r}, but recipe {recipe!r} fits a base alone, to convergence: leave it out"
            )
