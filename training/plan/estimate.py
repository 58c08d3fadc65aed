"""The cost of a run, estimated from shapes and counts alone. docs/scale.md derives each formula and lists omissions.

Units: seconds, bytes, floating-point operations. Times are device-seconds, summed over all devices.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from accept_head.training.plan.model_shape import ModelShape

UTILIZATION = 0.4  # share of peak operations that prefill, scoring and training reach
STREAMING = 0.6  # share of memory bandwidth that decoding reaches
USABLE = 0.9  # share of a device's memory
# Per response position in a shard: two ids, seven float32 and a bit, 36.1 bytes. Parquet's dictionaries add a quarter.
POSITION_BYTES = 46
ALTERNATIVE_BYTES = 11  # per alternative at a position: an id and two float32, some of which compress
WIDTH = 16  # response positions of a row that our decode loop scores together
PROMPT_BYTES = 4  # per prompt token in a shard
ADAM_BYTES = 16  # per parameter in training: weight, gradient and two moments, float32


@dataclass(frozen=True)
class Device:
    """One device. peak: operations per second of dense matrix products. bandwidth: bytes per second. memory: bytes."""

    name: str
    peak: dict[int, float]  # by bytes per number
    bandwidth: float
    memory: float


# From the data sheets of the SXM modules. 4-byte products are without TF32, torch's default.
DEVICES = (
    Device("A100 80 GB", {2: 312e12, 4: 19.5e12}, 2.039e12, 80e9),
    Device("H100 80 GB", {2: 989e12, 4: 67e12}, 3.35e12, 80e9),
    Device("H200 141 GB", {2: 989e12, 4: 67e12}, 4.8e12, 141e9),
)


@dataclass(frozen=True)
class CollectCost:
    """The cost of `collect`.

    number: bytes per weight. prompt_tokens: sum over all prompts. new_tokens: most tokens of a response. batch_size:
    prompts scored together. generating: responses generated together. backend: as in `collect`. alternatives: further
    draws at each position.
    """

    target: ModelShape
    draft: ModelShape
    number: int
    prompts: int
    prompt_tokens: int
    new_tokens: int
    batch_size: int
    generating: int
    backend: str
    alternatives: int = 0

    @property
    def positions(self) -> int:
        """An upper bound: a response with an end token is shorter."""
        return self.prompts * self.new_tokens

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.positions

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights in this process. vLLM has a second copy of the target; a server's copy is elsewhere."""
        copies = 2 if self.backend == "vllm" else 1
        return self.number * (copies * self.target.parameters + self.draft.parameters)

    @property
    def cache_bytes(self) -> float:
        """Bytes of the KV cache for the responses that are generated together, in this process or elsewhere. Our own
        loop has a cache of the draft as well."""
        length = self.prompt_tokens / self.prompts + self.new_tokens
        values = self.target.cache_values + (self.draft.cache_values if self.backend == "loop" else 0)
        return self.generating * length * values * self.number

    @property
    def logit_bytes(self) -> float:
        """Bytes of both models' logits, and a copy, at the positions that are scored at a time: WIDTH of each row in
        our own loop, the whole responses of a batch elsewhere."""
        positions = self.generating * WIDTH if self.backend == "loop" else self.batch_size * self.new_tokens
        return 2 * positions * (self.target.vocab_size + self.draft.vocab_size) * self.number

    @property
    def memory(self) -> float:
        """Bytes in this process."""
        here = self.cache_bytes if self.backend != "openai" else 0.0
        return self.weight_bytes + here + self.logit_bytes

    @property
    def disk(self) -> float:
        position = POSITION_BYTES + self.alternatives * ALTERNATIVE_BYTES
        return self.positions * position + self.prompt_tokens * PROMPT_BYTES

    def devices(self, device: Device) -> int:
        return math.ceil(self.memory / (USABLE * device.memory))

    def generate_seconds(self, device: Device) -> float:
        """Time of generation. Prefill is bound by operations.

        A decode step is bound by operations or by reading weights and cache, whichever is slower. With device_map, one
        device works while the others wait.
        """
        operations = 2 * self.target.parameters / (UTILIZATION * device.peak[self.number])
        context = self.prompt_tokens / self.prompts + self.new_tokens / 2
        read = self.number * (self.target.parameters + self.generating * context * self.target.cache_values)
        step = max(read / (STREAMING * device.bandwidth), self.generating * operations)
        idle = self.devices(device) if self.backend == "loop" else 1
        return idle * (self.prompt_tokens * operations + self.positions / self.generating * step)

    def score_seconds(self, device: Device) -> float:
        """Time of the forwards that score. In our own loop the target's have been run already."""
        target = 0 if self.backend == "loop" else self.target.parameters
        operations = 2 * (target + self.draft.parameters) * self.tokens
        return self.devices(device) * operations / (UTILIZATION * device.peak[self.number])


@dataclass(frozen=True)
class TrainCost:
    """The cost of `train`.

    number: bytes per number of the draft. forwards: draft tokens per trace token, 2 with exact packing.
    head_parameters: sum over all heads of a sweep. alternatives: number that heads learn from at each position.
    """

    draft: ModelShape
    head_parameters: int
    number: int
    traces: int
    prompt_tokens: int
    positions: int
    epochs: int
    forwards: int
    micro_batch_size: int
    alternatives: int = 0

    @property
    def memory(self) -> float:
        length = self.forwards * (self.prompt_tokens + self.positions) / self.traces
        activations = self.micro_batch_size * length * (8 * self.draft.hidden_size * self.number + length)
        return self.number * self.draft.parameters + ADAM_BYTES * self.head_parameters + activations

    @property
    def disk(self) -> float:
        """Bytes of the heads, and of a checkpoint of all heads with Adam's moments."""
        return 4 * self.head_parameters * 4

    def devices(self, device: Device) -> int:
        return math.ceil(self.memory / (USABLE * device.memory))

    def seconds(self, device: Device) -> float:
        draft = 2 * self.draft.parameters * self.forwards * (self.prompt_tokens + self.positions)
        peak = UTILIZATION * device.peak[self.number]
        judged = self.positions * (1 + self.alternatives)  # an upper bound: equal draws count once
        return self.epochs * (draft / peak + 6 * self.head_parameters * judged / (UTILIZATION * device.peak[4]))
