"""What the package does today, to the bit: the net under a change that must not change behaviour.

    python tests/golden/behaviour.py write     # tests/golden/behaviour.json, from this tree
    python tests/golden/behaviour.py compare   # says each line that is different now; or of parts: compare decoded

It goes by public names alone, so that modules may move. Tokens and files stand in it as digests, counts as they are.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import io
import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

from accept_head import AcceptanceHead, HeadConfig, Sampling, load_pair
from accept_head.cli import VERBS, main
from accept_head.inference import generate, make_policy

ROOT = Path(__file__).parents[2]
TINY = ROOT / "checkpoints" / "tiny"
FILE = Path(__file__).with_suffix(".json")
SIGNALS = {"signal_mean": (-1.0, 1.0, 0.5), "signal_std": (1.0, 0.5, 0.2)}
COSTS = {
    "draft": {"alpha": 1e-5, "beta": 0.001, "gamma": 0.01, "r_squared": 1.0},
    "target": {"alpha": 1e-5, "beta": 0.02, "gamma": 0.4, "r_squared": 1.0},
}


def digest(value) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def save_head(folder: Path, seed: int, **config) -> str:
    torch.manual_seed(seed)
    signals = {"signals": ("draft_logprob", "draft_entropy", "draft_max_prob"), **SIGNALS}
    head = AcceptanceHead(HeadConfig(hidden_size=128, **signals, **config))
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    head.save_pretrained(folder)
    return str(folder)


def specs(work: Path) -> list[str]:
    costs = work / "costs.json"
    costs.write_text(json.dumps({"batch": COSTS, "t_draft": 0.02, "t_target": 0.4}))
    table = work / "table.json"
    table.write_text(json.dumps({"num_speculative_tokens_per_batch_size": [[1, 2, 6], [3, 4, 3], [5, 16, 1]]}))
    drawn, shipped = save_head(work / "drawn", 1, depth=1), str(TINY / "heads" / "sampled")
    both, greedy = str(TINY / "heads" / "greedy_both"), str(TINY / "heads" / "greedy")
    plain = [
        "none",
        "fixed:4",
        "leviathan:0.1",
        "hf-heuristic",
        "hf-confidence",
        "confidence",
        "confidence:0.2,k_min=2",
    ]
    plain += ["cumulative-confidence", "max-prob:0.4", "max-prob-mean", "entropy", "svip", "adaedl", "online-logistic"]
    plain += ["dsde", "bandit:5", f"batch-map:{table}", f"goodput:{costs}", f"adaspec:{costs}", f"budget:{costs}"]
    plain += ["online-signals", f"head:{shipped}:0.5", f"head:{both}:0.5", f"head:{both}:0.5,rule=product"]
    plain += [f"head:{greedy}", f"head:{drawn}:0.5", f"head:{drawn}:0.5,lag=0,k_min=2", f"head:{drawn}:0.5,lag=1"]
    plain += [f"head:{shipped}:0.5,online=true", f"head:{shipped}:0.5,online=true,train=true"]
    plain += [f"head:{shipped}:0.5,costs={costs}", f"head:{both}:0.5,costs=0.1", "max-prob:0.3,costs=0.1"]
    plain += ["fixed:6,costs=0.1", "online-signals,costs=0.1", "adaedl,costs=0.05", f"budget:{costs},cap=true"]
    return plain


def with_told_seconds(policy):
    """Policies that learn from the clock are told of one that counts tokens."""
    observe = policy.observe

    def told(outcome):
        if outcome.seconds is not None:
            outcome = replace(outcome, seconds=0.01 * float(outcome.drafted.max()) + 0.05)
        observe(outcome)

    policy.observe = told
    return policy


def decoded(work: Path) -> dict[str, object]:
    pair = load_pair(str(TINY / "target"), str(TINY / "draft"))
    lines = [json.loads(line) for line in (next((TINY / "prompts").glob("*test*"))).open()][:5]
    prompts = [pair.tokenizer(line["prompt"]).input_ids[:60] for line in lines]
    found: dict[str, object] = {}
    for spec in specs(work):
        for temperature in (0.0, 1.0):
            for batch in (1, 5):
                for verifier in ("ratio", "match") if temperature and batch == 5 else ("ratio",):
                    name = (
                        f"{spec.replace(str(work), 'WORK').replace(str(ROOT), '')} T={temperature} B={batch} {verifier}"
                    )
                    torch.manual_seed(0)
                    found[name] = one(pair, prompts, spec, temperature, batch, verifier)
    return found


def one(pair, prompts, spec, temperature, batch, verifier):
    sampling = Sampling(temperature=temperature, top_k=50 if temperature else 0)
    try:
        done = generate(
            pair.target,
            pair.draft,
            prompts,
            policy=with_told_seconds(make_policy(spec, pair)),
            sampling=sampling,
            max_new_tokens=32,
            batch_size=batch,
            seed=3,
            verifier=verifier,
        )
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    names = ("drafted", "submitted", "accepted", "rounds", "draft_forwards", "wasted")
    return [digest(done.tokens), *[[getattr(stats, name) for stats in done.stats] for name in names]]


def captured(arguments: list[str]) -> tuple[int, str]:
    out = io.StringIO()
    code = 0
    error = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        try:
            code = main(arguments)
        except SystemExit as stopped:
            code = int(stopped.code or 0)
    if code:
        print(arguments, error.getvalue()[-300:], file=sys.stderr)
    return code, out.getvalue()


def helps() -> dict[str, object]:
    found = {f"{verb} --help": digest(captured([verb, "--help"])[1]) for verb in VERBS}
    return found | {"--help": captured(["--help"])[1], "--list-policies": captured(["--list-policies"])[1]}


def flow(work: Path) -> dict[str, object]:
    """collect, train, tune and calibrate, as the demo has them, at costs that are given."""
    lines = [line for line in (TINY / "prompts" / "test.jsonl").open()][:72]
    for part, chosen in (("train", lines[:24]), ("dev", lines[24:])):
        (work / f"{part}.jsonl").write_text("".join(chosen))
    pair = ["--target", str(TINY / "target"), "--draft", str(TINY / "draft")]
    found: dict[str, object] = {}
    for name, temperature in (("sampled", "1.0"), ("greedy", "0")):
        text = ["--max_new_tokens", "32", "--temperature", temperature, "--batch_size", "8"]
        for part in ("train", "dev"):
            out = ["--prompts", str(work / f"{part}.jsonl"), "--out", str(work / f"{part}-{name}")]
            found[f"collect {part} {name}"] = captured(["collect", *pair, *text, *out])[0]
        draft, head, tuned = ["--draft", pair[3]], work / f"head-{name}", work / f"tuned-{name}.json"
        train = ["--traces", str(work / f"train-{name}"), *draft, "--out", str(head), "--epochs", "1", "--width", "32"]
        found[f"train {name}"] = captured(["train", *train])[0]
        found[f"head {name}"] = hashlib.sha256((head / "model.safetensors").read_bytes()).hexdigest()[:16]
        dev = ["--traces", str(work / f"dev-{name}"), *draft, "--head", str(head)]
        costs = ["--t_draft", "0.1", "--t_target", "1.0"]
        found[f"calibrate {name}"] = captured(["calibrate", *dev])[0]
        found[f"tune {name}"] = captured(["tune", *dev, *costs, "--k_max", "8", "--out", str(tuned)])[0]
        for policy in json.loads(tuned.read_text())["policies"]:
            found[f"tune {name} {policy['name']} {policy.get('params')}"] = policy
    return json.loads(json.dumps(found).replace(str(work), "WORK"))


def enumerated(work: Path) -> dict[str, object]:
    for name in (
        "accept_head.inference.replay.lossless",
        "accept_head.inference.decode.lossless",
    ):
        with contextlib.suppress(ImportError):
            module = importlib.import_module(name)
            break
    module.HIDDEN = 128  # the heads' own
    pair = load_pair(str(TINY / "target"), str(TINY / "draft"))
    found = {}
    for spec in specs(work):
        if (spec.startswith("head") and "drawn" not in spec) or "train=true" in spec:
            continue
        torch.manual_seed(0)
        shape = module.Shape(rows=2, depth=2, history=4)
        try:
            result = module.enumerate_rounds(lambda spec=spec: make_policy(spec, pair), pairs=6, shape=shape)
        except Exception as error:
            found[spec.replace(str(work), "WORK")] = f"{type(error).__name__}"
            continue
        parts = [result.ratio.tolist(), result.match.tolist(), result.drafted.tolist(), result.submitted.tolist()]
        found[spec.replace(str(work), "WORK")] = parts
    return found


def behaviour(names=()) -> dict[str, object]:
    torch.set_num_threads(1)
    parts = {"decoded": decoded, "helps": lambda _: helps(), "flow": flow, "enumerated": enumerated}
    with tempfile.TemporaryDirectory() as folder:
        return {name: make(Path(folder)) for name, make in parts.items() if name in (names or parts)}


def differences(before, now, where=""):
    if isinstance(before, dict) and isinstance(now, dict):
        for key in sorted({*before, *now}):
            yield from differences(before.get(key), now.get(key), f"{where} / {key}" if where else key)
    elif before != now:
        yield f"{where}\n    was {str(before)[:600]}\n    is  {str(now)[:600]}"


if __name__ == "__main__":
    now = json.loads(json.dumps(behaviour(sys.argv[2:])))
    if sys.argv[1] == "write":
        FILE.write_text(json.dumps(now, indent=0, sort_keys=True))
    else:
        before = {name: part for name, part in json.loads(FILE.read_text()).items() if name in now}
        found = list(differences(before, now))
        print("\n".join(found) or "equal to the bit")
        raise SystemExit(bool(found))
