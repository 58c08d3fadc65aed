"""README.md of a head: its pair, its use and its quality, with the metadata of a model card on the Hub."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from accept_head.files import is_number
from accept_head.head_config import HeadConfig
from accept_head.trace.config import TraceConfig

TAGS = ["speculative-decoding", "acceptance-prediction"]
QUALITY = {  # in metrics.json → on the card
    "binary_kl": "binary KL, nats",
    "constant_kl": "binary KL of the best constant",
    "brier": "Brier",
    "ece": "ECE",
    "auroc": "AUROC",
}
NO_BASE_MODEL = "- no base model is named above, for target and draft were local folders"
RATES = {  # in decoding.json, under `expected` → on the card
    "speedup": "speed-up over the target alone",
    "gain_over_best_fixed": "gain over the best fixed draft length",
    "oracle_gap_closed": "oracle gap closed",
    "discard_rate": "discard rate",
    "verification_rate": "verification rate",
    "block_efficiency": "block efficiency",
}


@dataclass(frozen=True, kw_only=True)
class CardFacts:
    """The facts about a head that its card shows.

    repo: its name on the Hub; None = the card of a local folder. metrics, decoding: metrics.json and decoding.json.
    datasets, license: as the Hub names them.
    """

    config: HeadConfig
    traces: TraceConfig | None = None
    metrics: Mapping[str, Any] | None = None
    decoding: Mapping[str, Any] | None = None
    repo: str | None = None
    datasets: Sequence[str] = ()
    license: str | None = None

    @property
    def eagle3(self) -> bool:
        """Whether the drafter is an EAGLE-3 layer, not a model of its own."""
        return self.traces is not None and self.traces.depths is not None

    @property
    def dev(self) -> dict[str, Mapping[str, Any]]:
        """prediction → its quality on dev traces."""
        dev = (self.metrics or {}).get("dev")
        return {str(k): v for k, v in dev.items() if isinstance(v, Mapping)} if isinstance(dev, Mapping) else {}

    @property
    def expected(self) -> dict[str, float]:
        """The results of replay with the tuned threshold."""
        expected = (self.decoding or {}).get("expected")
        return _numbers(expected, RATES) if isinstance(expected, Mapping) else {}


def base_models(traces: TraceConfig | None) -> list[str]:
    """The names of target and draft on the Hub; empty when one of them has none.

    A recorded revision proves that a name is on the Hub. Older traces record no revision and no dtype. For them, a name
    of the right form counts.
    """
    if traces is None:
        return []
    pair = ((traces.target, traces.target_revision), (traces.draft, traces.draft_revision))
    old = traces.dtype is None
    names = [name for name, revision in pair if revision or (old and _looks_like_a_hub_name(name))]
    return names if len(names) == 2 else []


def _looks_like_a_hub_name(name: str) -> bool:
    return re.fullmatch(r"[\w.-]+/[\w.-]+", name, re.ASCII) is not None and not Path(name).exists()


def model_card(facts: CardFacts) -> ModelCard:
    """The whole card. huggingface_hub checks its metadata."""
    results = _eval_results(facts)
    data = ModelCardData(
        library_name="accept-head",
        tags=TAGS,
        base_model=base_models(facts.traces) or None,
        datasets=list(facts.datasets) or None,
        license=facts.license,
        model_name=(facts.repo or "acceptance-head").rpartition("/")[2] if results else None,
        eval_results=results or None,
    )
    parts = [_title(facts), _pair(facts), _usage(facts), _measured(facts)]
    return ModelCard(f"---\n{data.to_yaml()}\n---\n" + "\n\n".join(part for part in parts if part) + "\n")


def _eval_results(facts: CardFacts) -> list[EvalResult]:
    def result(split: str, metric: str, name: str, value: float) -> EvalResult:
        return EvalResult(
            task_type="text-generation",
            task_name="Speculative decoding",
            dataset_type=facts.datasets[0] if facts.datasets else "coupled-traces",
            dataset_name=", ".join(facts.datasets) or "coupled traces of held-out prompts",
            dataset_split=split,
            metric_type=metric,
            metric_name=name,
            metric_value=value,
        )

    results = []
    for prediction, quality in facts.dev.items():
        for metric, value in _numbers(quality, QUALITY).items():
            results.append(result("dev", f"{prediction}_{metric}", f"{QUALITY[metric]} ({prediction})", value))
    results += [result("tune", metric, RATES[metric], value) for metric, value in facts.expected.items()]
    return results


def _title(facts: CardFacts) -> str:
    config = facts.config
    sources = ["next-token distribution"] if config.base else []
    sources += ["last hidden state"] if config.residual else []
    return f"""# Acceptance prediction head

Predicts, from the {"EAGLE-3 drafter" if facts.eagle3 else "draft model"}'s {" and ".join(sources)}, whether the target will accept a drafted token, so that speculative decoding stops drafting in time
([SpecDec++](https://arxiv.org/abs/2405.19715)). It changes how fast text comes, never which: the output keeps exactly the target's distribution. For the
library `accept-head`."""  # noqa: E501


def _pair(facts: CardFacts) -> str:
    config, traces = facts.config, facts.traces
    state = {"before": "the state before the token", "drawn": "the state at the token"}[config.reads]
    reads = [state] if config.residual else []
    reads += config.signals
    reads += ["the token's embedding"] if config.reads_embedding else []
    shape = f"depth {config.depth}, hidden size {config.hidden_size}"
    if config.base:
        shape = f"a base and a residual of {shape}" if config.residual else "a base alone"
    lines = [f"- head: {shape}, predicts {config.predicts}", f"- it reads: {', '.join(reads)}"]
    if traces is None:
        return "\n".join([*lines, "- the pair that it was trained on is not recorded"])
    sampling = traces.sampling
    models = [
        f"- {role}: `{name}`" + (f" at `{revision}`" if revision else "")
        for role, name, revision in (
            ("EAGLE-3 drafter" if facts.eagle3 else "draft", traces.draft, traces.draft_revision),
            ("target", traces.target, traces.target_revision),
        )
    ]
    settings = f"top-k {sampling.top_k}, top-p {sampling.top_p}, min-p {sampling.min_p}"
    lines[:0] = [*models, f"- sampling: temperature {sampling.temperature}, {settings}"]
    if traces.dtype:
        lines.append(f"- trained on the draft in {traces.dtype}")
    lines.append(f"- tokenizer: SHA-256 of its token → id map `{traces.vocabulary_fingerprint}`")
    if not base_models(traces):
        lines.append(NO_BASE_MODEL)
    return "\n".join(lines)


def _usage(facts: CardFacts) -> str:
    traces, greedy = facts.traces, facts.traces is not None and facts.traces.sampling.greedy
    target, draft = (traces.target, traces.draft) if traces else ("TARGET", "DRAFT")
    name = facts.repo or "path/of/this/folder"
    # Without a tuned threshold the example needs one.
    policy = f"head:{name}" if facts.decoding else f"head:{name}:0.5"
    speculation = {
        "method": "eagle3" if facts.eagle3 else "draft_model",
        "model": draft,
        "num_speculative_tokens": (facts.decoding or {}).get("k_max", (traces and traces.depths) or 8),
        "draft_sample_method": "greedy" if greedy else "probabilistic",
    }
    plugin = json.dumps({"accept_head": {"policy": f"{policy},costs=auto"}})  # it serves any number of requests
    temperature = "" if traces is None else f" --temperature {traces.sampling.temperature:g}"
    in_transformers = (
        f"""

```python
from accept_head import load_pair

pair = load_pair({target!r}, {draft!r})
inputs = pair.tokenizer("Once upon a time", return_tensors="pt").to(pair.target.device)
pair.target.generate(**inputs, custom_generate={name!r}, trust_remote_code=True, draft=pair.draft)  # any batch size
```"""
        if facts.repo
        else ""
    )
    return f"""## Use

With the package `accept-head` installed:

```
accept-head generate --target {target} --draft {draft} --prompts prompts.jsonl --out out.jsonl --policy {policy}{temperature}
```{in_transformers}

```
vllm serve {target} --no-async-scheduling \\
    --speculative-config '{json.dumps(speculation)}' \\
    --additional-config '{plugin}'
```"""  # noqa: E501


def _measured(facts: CardFacts) -> str:
    parts = []
    if facts.dev:
        rows = [
            f"| {prediction} | {_shown(quality, 'count', '')} | "
            + " | ".join(_shown(quality, name, ".4f") for name in QUALITY)
            + f" | {_shown(quality, 'mean_predicted', '.3f')} / {_shown(quality, 'mean_observed', '.3f')} |"
            for prediction, quality in facts.dev.items()
        ]
        head = f"| prediction | dev positions | {' | '.join(QUALITY.values())} | predicted / observed |"
        parts.append("\n".join([head, "|---|" + "--:|" * (len(QUALITY) + 2), *rows]))
    if facts.expected:
        decoding = facts.decoding or {}
        said = [f"| {RATES[name]} | {value:.4f} |" for name, value in facts.expected.items()]
        parts.append(
            f"With threshold {_shown(decoding, 'threshold', 'g')}, by replay on the {_described(decoding)} that it was "
            "chosen on, for the forward times of the machine in `decoding.json`:"
        )
        parts.append("\n".join(["| | |", "|---|--:|", *said]))
    return "\n\n".join(["## Measured", *parts]) if parts else ""


def _described(decoding: Mapping[str, Any]) -> str:
    traces = decoding.get("traces")
    count = traces.get("prompts") if isinstance(traces, Mapping) else None
    return f"{count} prompts" if isinstance(count, int) else "prompts"


def _numbers(values: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, float]:
    """The entries of `values` in `names` that are finite numbers, with the card's names."""
    return {name: values[name] for name in names if is_number(values.get(name))}


def _shown(values: Mapping[str, Any], name: str, form: str) -> str:
    return format(values[name], form) if is_number(values.get(name)) else "–"
