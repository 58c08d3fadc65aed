"""One record of a trace: a target response, and at each position the draft's proposal and whether it is accepted."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from datasets import Features

# One value for each position i of the response:
POSITION_COLUMNS = {
    "response_ids": "int32",  # X_i, the target's token
    "draft_ids": "int32",  # Y_i ∼ q, coupled with X_i
    "accepted": "bool",  # whether Y_i is accepted; then Y_i = X_i. In scored text: whether Y_i = X_i
    "acceptance": "float32",  # a(Y_i) = min(1, p(Y_i)/q(Y_i)), the label
    "overlap": "float32",  # β_i = Σ min(p, q), the expected acceptance before Y_i is drawn
    "target_logprob": "float32",  # log p(X_i)
    # KL(p ‖ q), nats, of both models' softmax at this temperature (1 when greedy), before top-k, top-p and min-p, which
    # would make it infinite. A policy may use it only at verified positions (DSDE).
    "divergence": "float32",
    # The draft signals (signals.py), from the plain softmax when decoding is greedy:
    "draft_logprob": "float32",  # log q(Y_i)
    "draft_entropy": "float32",  # −Σ q log q, nats
    "draft_max_prob": "float32",  # max_y q(y)
}

# Those of the draft. With TraceConfig.depths, K, they have K values for each position, of depth 1 to K. Where no round
# can have begun so early, the value of the first position's round stands.
DRAFT_COLUMNS = tuple(name for name in POSITION_COLUMNS if name not in ("response_ids", "target_logprob"))

# Other draws of the draft (alternatives.py): TraceConfig.alternatives draws for each position, position after position.
# These columns exist only if the config names a number.
ALTERNATIVE_COLUMNS = {
    "alternative_ids": "int32",  # Y' ∼ q
    "alternative_logprob": "float32",  # log q(Y')
    "alternative_acceptance": "float32",  # a(Y')
}


def trace_features(*, alternatives: bool = False) -> Features:
    """The schema of one record, as `datasets.Features`."""
    from datasets import Features, List, Value

    kinds = POSITION_COLUMNS | (ALTERNATIVE_COLUMNS if alternatives else {})
    columns = {name: List(Value(kind)) for name, kind in kinds.items()}
    return Features(
        {
            "index": Value("int64"),  # the prompt's line in the prompts file
            "id": Value("string"),
            "domain": Value("string"),  # "" when the prompts name none
            "finished": Value("bool"),  # whether the response ended with an end-of-sequence token
            "prompt_ids": List(Value("int32")),
            **columns,
        }
    )
