"""Question: what could a head read besides the draft's signals, and what would it be worth, on a published pair?

On the traces of real_pair.py. The base, a logistic regression on nine functions of the signals, gets further columns.
It is fitted to the first PARTS train parts; its ridge is chosen on dev prompts, and its binary KL is taken there.
`difference` is to the base alone, with a 95 % bootstrap interval over prompts; below 0 is better. Choosing the ridge on
the prompts that are judged helps wide inputs a little. `depth`: how many positions back an input is known that only the
target can tell.

python benchmarks/further_inputs.py [--temperature 1]
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from real_pair import DRAFT, HOME, TRACES, TRAIN_PARTS, draft_model, is_collected
from record import RESULTS, write_result
from scipy.special import xlogy
from sklearn.linear_model import LogisticRegression
from transformers import AutoTokenizer

from accept_head.base import base_functions
from accept_head.command.libraries import quiet_libraries
from accept_head.files import read_json
from accept_head.inference.replay.bootstrap import draws, interval
from accept_head.signals import SIGNALS
from accept_head.trace.shards import read_traces

RIDGES = (1.0, 10.0, 100.0, 1000.0)
LAYERS = {"state": -1, "layer 16": 16, "layer 8": 8}
COMPONENTS = (32, 128)
DEPTHS = (1, 2, 4, 8)
PARTS = 4  # of 100 prompts


class Text(NamedTuple):
    """n positions of a split. known: (n, columns) by name; prompts: (n,) which prompt; steps: (n,) place in it."""

    known: dict[str, np.ndarray]
    prompts: np.ndarray
    steps: np.ndarray


def main() -> None:
    quiet_libraries()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--temperature", type=float, choices=(1.0, 0.0), default=1.0)
    temperature = parser.parse_args().temperature
    folder = TRACES / f"t{temperature:g}"
    parts = [part for part in TRAIN_PARTS if is_collected(folder / part)][:PARTS]
    train, dev = joined([text_of(temperature, part) for part in parts]), text_of(temperature, "dev")
    rows: list[dict[str, Any]] = []
    base = None
    for name, depth, of_train, of_dev in inputs_of(train, dev):
        losses = dev_losses(train, dev, of_train, of_dev)
        base = losses if base is None else base
        rows.append({"temperature": temperature, "inputs": name, "depth": depth, **judged(dev, losses, base)})
        print(rows[-1], flush=True)
    path = RESULTS / "further_inputs.json"
    others = [row for row in read_json(path)["rows"] if row["temperature"] != temperature] if path.is_file() else []
    positions = {"train_positions": len(train.steps), "dev_positions": len(dev.steps)}
    write_result("further_inputs", {"rows": others + [row | positions for row in rows]})
    print(f"wrote {path}")


# --- what is known ---------------------------------------------------------------------------------------------------


def text_of(temperature: float, split: str) -> Text:
    """From one draft forward over the split, kept under runs/."""
    kept = HOME / "inputs" / f"t{temperature:g}_{split}.npz"
    if not kept.is_file():
        kept.parent.mkdir(parents=True, exist_ok=True)
        _, traces = read_traces(TRACES / f"t{temperature:g}" / split)
        texts = [_of_trace(trace, temperature or 1.0) for trace in traces]
        known = {name: np.concatenate([text[name] for text in texts]) for name in texts[0]}
        np.savez(kept, lengths=[len(text["base"]) for text in texts], **known)
    with np.load(kept) as file:
        known = dict(file)
    lengths = known.pop("lengths")
    return Text(known, np.repeat(np.arange(len(lengths)), lengths), np.concatenate([np.arange(n) for n in lengths]))


@torch.no_grad()
def _of_trace(trace: dict[str, Any], temperature: float) -> dict[str, np.ndarray]:
    prompt, response, drawn = trace["prompt_ids"], trace["response_ids"], torch.tensor(trace["draft_ids"])
    output = draft_model()(
        input_ids=torch.tensor([prompt + response]),
        output_hidden_states=True,
        use_cache=False,
        logits_to_keep=len(response) + 1,
    )
    logprob = (output.logits[0, :-1].float() / temperature).log_softmax(-1)
    of_drawn = logprob.gather(-1, drawn[:, None])
    signals = torch.tensor([trace[name] for name in SIGNALS]).t()
    largest = logprob.topk(10).values
    more_of_q = [
        largest[:, :4],
        largest[:, :1] - largest[:, 1:2],
        largest.exp().sum(-1, keepdim=True),
        (logprob > of_drawn).sum(-1, keepdim=True).float().log1p(),  # its rank
        logprob.exp().square().sum(-1, keepdim=True).log(),
        (logprob.exp() * logprob.square()).sum(-1, keepdim=True),
    ]
    found = {
        "base": base_functions(signals.double()),
        "more of q": torch.cat(more_of_q, dim=-1),
        "class of the drawn token": torch.tensor([token_class(token) for token in drawn.tolist()]),
        "class of the token before": torch.tensor([token_class(token) for token in [*prompt[-1:], *response[:-1]]]),
        "target's last distribution": torch.stack(
            [
                torch.tensor(trace["target_logprob"]).clamp(min=-10),
                torch.tensor(trace["target_logprob"]).exp(),
                torch.tensor(trace["divergence"]).clamp(0, 20).sqrt(),
                torch.tensor(trace["overlap"]),
            ],
            dim=-1,
        ),
        "acceptance": torch.tensor(trace["acceptance"])[:, None],
        "accepted": torch.tensor(trace["accepted"])[:, None],
    }
    before = slice(len(prompt) - 1, len(prompt) + len(response) - 1)
    found |= {name: output.hidden_states[layer][0, before].float() for name, layer in LAYERS.items()}
    return {name: values.float().numpy() for name, values in found.items()}


@cache
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(DRAFT)


@cache
def token_class(token: int) -> list[float]:
    text = tokenizer().decode([token])
    bare = text.strip()
    classes = (
        text.startswith(" "),
        "\n" in text,
        not bare,
        bare.isdigit(),
        bool(bare) and not any(letter.isalnum() for letter in bare),
        bare.isalpha() and text.startswith(" "),
        bare.isalpha() and not text.startswith(" "),
        bare[:1].isupper(),
    )
    return [float(each) for each in classes]


def joined(texts: Sequence[Text]) -> Text:
    firsts = np.cumsum([0, *(text.prompts.max() + 1 for text in texts)])
    return Text(
        {name: np.concatenate([text.known[name] for text in texts]) for name in texts[0].known},
        np.concatenate([text.prompts + first for text, first in zip(texts, firsts, strict=False)]),
        np.concatenate([text.steps for text in texts]),
    )


# --- inputs ----------------------------------------------------------------------------------------------------------


def inputs_of(train: Text, dev: Text) -> Iterator[tuple[str, int | None, np.ndarray, np.ndarray]]:
    """(name, depth, columns of train, of dev); first the base alone."""
    yield "base", None, train.known["base"], dev.known["base"]
    plain = {name: (train.known[name], dev.known[name]) for name in train.known if "of" in name}
    plain["place in the response"] = tuple(
        np.stack([text.steps / 96, np.log1p(text.steps), text.steps == 0], -1) for text in (train, dev)
    )  # type: ignore[assignment]
    for name, columns in plain.items():
        yield name, None, *beside_base(train, dev, *columns)
    for depth in DEPTHS:
        columns = tuple(earlier(text, text.known["target's last distribution"], depth) for text in (train, dev))
        yield "target's last distribution", depth, *beside_base(train, dev, *columns)
        columns = tuple(running(text, depth) for text in (train, dev))
        yield "running acceptance", depth, *beside_base(train, dev, *columns)
    for name in LAYERS:
        for count in COMPONENTS:
            columns = components(train.known[name], dev.known[name], count)
            yield f"{name}, {count} components", None, *beside_base(train, dev, *columns)


def beside_base(train: Text, dev: Text, of_train: np.ndarray, of_dev: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return np.hstack([train.known["base"], of_train]), np.hstack([dev.known["base"], of_dev])


def earlier(text: Text, values: np.ndarray, depth: int) -> np.ndarray:
    """What was so many positions before; the mean where there was none."""
    shifted = np.roll(values, depth, axis=0)
    return np.where((text.steps < depth)[:, None], values.mean(0), shifted)


def running(text: Text, depth: int) -> np.ndarray:
    """Means of a(Y), and of whether it was accepted, over what is known of the prompt by then, older ones counting
    less."""
    columns = []
    for name in ("acceptance", "accepted"):
        values = text.known[name][:, 0]
        for memory in (0.9, 0.98):
            mean, total, weight = np.empty(len(values)), 0.0, 0.0
            for place, step in enumerate(text.steps):
                if step == 0:  # worth four tokens of the mean
                    total, weight = 4 * values.mean(), 4.0
                if step >= depth:
                    total, weight = memory * total + values[place - depth], memory * weight + 1
                mean[place] = total / weight
            columns.append(mean)
    return np.stack(columns, axis=-1)


def components(train: np.ndarray, dev: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The largest principal components, standardised."""
    train, dev = train.astype(float), dev.astype(float)
    mean = train.mean(0)
    variance, axes = np.linalg.eigh((train - mean).T @ (train - mean) / len(train))
    scaled = axes[:, -count:] / np.sqrt(variance[-count:])
    return (train - mean) @ scaled, (dev - mean) @ scaled


# --- fits ------------------------------------------------------------------------------------------------------------


def dev_losses(train: Text, dev: Text, of_train: np.ndarray, of_dev: np.ndarray) -> np.ndarray:
    """(n,) binary KL of each dev position, by the ridge with the smallest mean."""
    mean, deviation = of_train.mean(0), of_train.std(0)
    scale = np.where(deviation < 1e-4, 1.0, deviation)
    x, x_dev = (of_train - mean) / scale, (of_dev - mean) / scale
    label, label_dev = (text.known["acceptance"][:, 0] for text in (train, dev))
    found = []
    for ridge in RIDGES:
        model = LogisticRegression(C=1 / ridge, solver="newton-cholesky", max_iter=100)
        weight = np.concatenate([label, 1 - label])
        model.fit(np.concatenate([x, x]), np.repeat([1, 0], len(x)), sample_weight=weight)
        predicted = model.predict_proba(x_dev)[:, 1].clip(1e-6, 1 - 1e-6)
        entropy = xlogy(label_dev, label_dev) + xlogy(1 - label_dev, 1 - label_dev)
        found.append(entropy - xlogy(label_dev, predicted) - xlogy(1 - label_dev, 1 - predicted))
    return min(found, key=np.mean)


def judged(dev: Text, losses: np.ndarray, base: np.ndarray) -> dict[str, Any]:
    per_prompt = np.bincount(dev.prompts, losses - base)
    counts = np.bincount(dev.prompts)
    times = draws(len(counts))
    difference = (times @ per_prompt) / (times @ counts)
    return {"dev_kl": float(losses.mean()), "difference": float((losses - base).mean()), "ci95": interval(difference)}


if __name__ == "__main__":
    main()
