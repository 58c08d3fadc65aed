"""Recorded acceptance: what every round of real traces would draft, what of it is accepted, and what the head says.

A pair of random weights accepts nothing, so its lengths would be nobody's. These tables are of Qwen2.5-Coder-Instruct,
0.5B drafting for 1.5B, and its shipped heads, on unseen prompts. They hold all that a round's lengths depend on, from
whatever position it starts and whatever the policy. The extracts that are committed here were made with

    python benchmarks/gpu/recorded_rounds.py --traces benchmarks/traces/qwen2.5-coder/t1/test \\
        --head checkpoints/qwen2.5-coder/sampled:0.4993 --out benchmarks/gpu/recorded/sampled.npz
    python benchmarks/gpu/recorded_rounds.py --traces benchmarks/traces/qwen2.5-coder/t0/test \\
        --head checkpoints/qwen2.5-coder/greedy:0.5026 --out benchmarks/gpu/recorded/greedy.npz

with the thresholds that `accept-head tune --t_draft 0.18 --t_target 1 --k_max 8` finds on the dev traces beside them:
0.18 is about what the bytes of a 1B and an 8B model say.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cells import REPOSITORY
from torch import Tensor

from accept_head.checkpoint import checkpoint_fingerprint
from accept_head.files import atomic_path
from accept_head.inference.policies.head import HeadPolicy
from accept_head.inference.policies.registry import make_policy
from accept_head.inference.replay.coupled import CoupledTraces, load_coupled
from accept_head.inference.replay.scores import score_tokens
from accept_head.pair import load_model

K_MAX = 8  # tokens of the longest round
RESPONSES = 200
RECORDED = Path(__file__).resolve().parent / "recorded"


@dataclass(frozen=True, kw_only=True)
class RecordedRounds:
    """R responses of L tokens each; a round can start at any of the R·L positions.

    leading: (R·L,) of the K tokens that it can draft, how many are accepted before the first that is not. scores:
    (R·L, K) float32, P̂ of the head for the token that it drafts at each depth.
    about: where they are from, and the head's threshold and bounds.
    """

    tokens: int
    leading: Tensor
    scores: Tensor
    about: dict[str, Any]

    @property
    def responses(self) -> int:
        return len(self.leading) // self.tokens

    def to(self, device: torch.device) -> RecordedRounds:
        moved = {name: getattr(self, name).to(device) for name in ("leading", "scores")}
        return replace(self, **moved)

    def shuffled(self, seed: int = 0) -> RecordedRounds:
        """The same responses in random order: traces have theirs by domain, and a batch should be of all."""
        order = torch.randperm(self.responses, generator=torch.Generator().manual_seed(seed))
        places = (order[:, None] * self.tokens + torch.arange(self.tokens)).reshape(-1)
        return replace(self, leading=self.leading[places], scores=self.scores[places])

    def save(self, path: Path) -> None:
        arrays = {
            "tokens": np.array(self.tokens),
            "leading": self.leading.numpy().astype(np.uint8),
            "scores": self.scores.numpy(),
            "about": np.array(json.dumps(self.about)),
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(path) as temporary, open(temporary, "wb") as file:
            np.savez_compressed(file, **arrays)

    @classmethod
    def load(cls, path: Path) -> RecordedRounds:
        with np.load(path, allow_pickle=False) as arrays:
            return cls(
                tokens=int(arrays["tokens"]),
                leading=torch.from_numpy(arrays["leading"].astype(np.int64)),
                scores=torch.from_numpy(arrays["scores"]),
                about=json.loads(str(arrays["about"])),
            )


def extract(traces: CoupledTraces, policy: HeadPolicy, *, responses: int, about: dict[str, Any]) -> RecordedRounds:
    """The first responses that nothing but their budget ends, nor anything that is drafted in them: a loop with other
    models has no end tokens at these places. Where the rule has stopped already, whoever asks, scores are 0.
    """
    tokens = traces.config.max_new_tokens
    full = torch.tensor(endless(traces)[:responses])
    places = (traces.starts[full][:, None] + torch.arange(tokens)).reshape(-1)
    scores = score_tokens(traces, policy)
    scores = torch.cat([scores, scores.new_zeros(1)])[traces.path[places, :K_MAX]]
    return RecordedRounds(
        tokens=tokens,
        leading=traces.leading[places].clamp(max=K_MAX),
        scores=scores.float(),
        about={
            **about,
            "responses": len(full),
            "threshold": policy.threshold,
            "k_min": policy.k_min,
            "k_max": min(policy.max_draft_tokens, K_MAX),
            "sampling": traces.config.sampling.to_dict(),
        },
    )


def endless(traces: CoupledTraces) -> list[int]:
    """The responses without an end token, and without one in what any of their rounds drafts."""
    tokens = traces.config.max_new_tokens
    room = torch.arange(tokens - 1, -1, -1).clamp(max=K_MAX)  # a round emits one token more than it accepts
    spans = zip(traces.starts.tolist(), traces.lengths.tolist(), strict=True)
    return [
        index
        for index, (start, length) in enumerate(spans)
        if length == tokens
        and not traces.traces[index]["finished"]
        and bool((traces.drafts[start : start + length].clamp(max=K_MAX) == room).all())
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, required=True)
    parser.add_argument("--head", required=True, help="PATH:THRESHOLD")
    parser.add_argument("--draft", type=Path, default=REPOSITORY / "runs" / "models" / "qwen" / "draft")
    parser.add_argument("--responses", type=int, default=RESPONSES)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    draft = load_model(options.draft, "--draft", device="cpu", dtype="bfloat16")
    policy = make_policy(f"head:{options.head}", draft)
    assert isinstance(policy, HeadPolicy)
    traces = load_coupled(options.traces, draft, checkpoint_fingerprint(options.draft), k_max=K_MAX, max_prompts=None)
    about = {
        "traces": _shown(options.traces),
        "fingerprint": traces.config.fingerprint(),
        "head": _shown(Path(options.head.rpartition(":")[0])),
    }
    record = extract(traces, policy, responses=options.responses, about=about)
    record.save(options.out)
    print(f"wrote {options.out}: {record.responses} responses of {record.tokens} tokens, {record.about}")


def _shown(path: Path) -> str:
    """Without what only this machine has in front of it."""
    whole = path.resolve()
    return str(whole.relative_to(REPOSITORY) if whole.is_relative_to(REPOSITORY) else path)


if __name__ == "__main__":
    main()
