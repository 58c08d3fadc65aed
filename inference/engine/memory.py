"""Plans the memory of a batch before it is allocated: weights + caches + logits + head + waiting states.

weights  every parameter and buffer, once (allocated already)
caches   rows × (longest row + 1) tokens × bytes a token, of both models
logits   rows × vocabulary × (bytes a verified slot × (k + 1) + bytes a drafted slot × k + bytes a row)
head     what its kernels pack in their first round: weights, and a row for each token of the vocabulary
scoring  rows × vocabulary × positions that are scored together × logits of both models and a copy, when traces are
         collected
waiting  states that wait for an EAGLE-3 drafter while nothing is drafted

The activations of the forward that fills the cache with prompts replace the logits if they are larger: tokens at once ×
((3 × intermediate + 4 × hidden + 2 × head) × bytes + a row of the mask). With CUDA graphs a round's memory stays
allocated while prompts are fed, so both count. The logits of each captured width stay allocated too. Graphs of further
policies share this memory and add none.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import psutil
import torch
from transformers import PreTrainedModel

from accept_head.eagle3.network import Eagle3Drafter
from accept_head.errors import InputError
from accept_head.files import readable_size
from accept_head.inference.engine.attention.choice import Attention, choose
from accept_head.inference.engine.cache import FILL_TOKENS, GRAPH_WIDTHS
from accept_head.inference.engine.proof import check_served

# The most tokens that a draft model is fed in the forward that yields the first draw: hardly dearer than one.
FED_TOGETHER = 3
# Bytes of a target's states that wait for an EAGLE-3 drafter while nothing is drafted: 1300 tokens of a 70B target.
# vLLM has planned no memory for them.
WAITING_STATES = 64 << 20
# Tensors alive at the same time in a round. Greedy: logits alone. Sampling, in float32: logits, filtered scores, p and
# the sorted values of a filter at each verified slot; q and its copy in the stack at each drafted slot. In float64: the
# sums and thresholds of the one draw of a row.
FLOAT, DOUBLE = 4, 8
VERIFIED_COPIES, DRAFTED_COPIES, DRAW_COPIES = 3, 2, 3
SCORED_COPIES = 4  # the logits of both models, and those of the real positions


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Sizes in bytes. batch: number of rows. max_length: tokens of the longest row. max_draft_tokens: k.
    cache_per_token: of both models."""

    weights: int
    batch: int
    max_length: int
    cache_per_token: int
    vocab_size: int
    max_draft_tokens: int
    logit_bytes: int
    greedy: bool
    fill: int = 0
    slots: int = 0  # of a row's cache, if more than its tokens and one
    graphs: bool = False
    head: int = 0
    scored: int = 0  # positions of a row that are scored together
    fed_together: int = FED_TOGETHER
    waiting: int = 0  # states that wait for an EAGLE-3 drafter

    @property
    def scoring(self) -> int:
        return SCORED_COPIES * self.batch * self.vocab_size * self.logit_bytes * self.scored

    @property
    def row_slots(self) -> int:
        return max(self.slots, self.max_length + 1)

    @property
    def caches(self) -> int:
        return self.batch * self.row_slots * self.cache_per_token

    @property
    def logits(self) -> int:
        slot = self.logit_bytes
        if self.greedy:
            return self.batch * self.vocab_size * slot * (self.max_draft_tokens + 1)
        verified = (slot + VERIFIED_COPIES * FLOAT) * (self.max_draft_tokens + 1)
        drafted = DRAFTED_COPIES * FLOAT * self.max_draft_tokens
        return self.batch * self.vocab_size * (verified + drafted + DRAW_COPIES * DOUBLE)

    @property
    def kept(self) -> int:
        """Bytes of the logits that captured forwards keep: one tensor a width, for the draft of 1 to fed_together."""
        if not self.graphs:
            return 0
        widest = next((width for width in GRAPH_WIDTHS if width > self.max_draft_tokens), self.max_draft_tokens + 1)
        slots = sum(width for width in {*GRAPH_WIDTHS, widest} if width <= widest) + sum(range(self.fed_together + 1))
        return self.batch * self.vocab_size * self.logit_bytes * slots

    @property
    def total(self) -> int:
        transient = self.logits + self.fill if self.graphs else max(self.logits, self.fill)
        return self.weights + self.caches + transient + self.kept + self.head + self.scoring + self.waiting

    def __str__(self) -> str:
        return (
            f"memory {readable_size(self.total)} = weights {readable_size(self.weights)}"
            f" + caches {readable_size(self.caches)} ({self.batch} rows x {self.row_slots} tokens x"
            f" {readable_size(self.cache_per_token)})"
            f"{self._transient}"
            + (f" + kept by graphs {readable_size(self.kept)}" if self.graphs else "")
            + (f" + head {readable_size(self.head)}" if self.head else "")
            + (f" + scoring {readable_size(self.scoring)}" if self.scored else "")
            + (f" + waiting states {readable_size(self.waiting)}" if self.waiting else "")
        )

    @property
    def _transient(self) -> str:
        shape = f"{self.batch} rows x {self.vocab_size} ids, k = {self.max_draft_tokens}"
        fill = f" + prompt activations {readable_size(self.fill)}"
        logits = f" + logits {readable_size(self.logits)} ({shape})"
        return logits + fill if self.graphs else fill if self.fill > self.logits else logits

    def fits(self, device: torch.device) -> bool:
        """Whether the device has room for what is not allocated yet."""
        return self.total - self.weights <= available_bytes(device)

    def check_fits(self, device: torch.device) -> None:
        """Raises InputError naming the needed and the available memory when the plan does not fit."""
        if not self.fits(device):
            needed, available = self.total - self.weights, available_bytes(device)
            raise InputError(
                f"this generation needs {readable_size(needed)} on {device} next to the weights, but "
                f"{readable_size(available)} are available ({self}); use a smaller batch size, or shorter prompts and "
                "responses"
            )


def plan_memory(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    *,
    batch: int,
    max_length: int,
    max_draft_tokens: int,
    vocab_size: int,
    greedy: bool,
    longest_prompt: int = 1,
    attention: Attention = "auto",
    graphs: bool = False,
    head: int = 0,
    scored: int = 0,
) -> MemoryPlan:
    """The plan of a batch. Without drafting or scoring the draft needs no cache. longest_prompt: in tokens. head:
    further bytes that heads will take, see `kernels.head.bytes_to_pack`. scored: positions of a row that are scored
    together."""
    models = [target, *([draft] if max_draft_tokens or scored else [])]
    cache_per_token = sum(check_served(model, attention) for model in models)
    backends, eagle3 = [choose(model, attention) for model in models], isinstance(draft, Eagle3Drafter)
    return MemoryPlan(
        weights=weight_bytes([target, draft]),
        batch=batch,
        max_length=max_length,
        cache_per_token=cache_per_token,
        vocab_size=vocab_size,
        max_draft_tokens=max_draft_tokens,
        logit_bytes=target.dtype.itemsize,
        greedy=greedy,
        fill=_fill_bytes(target, min(FILL_TOKENS, batch * (longest_prompt - 1)), min(FILL_TOKENS, longest_prompt)),
        slots=max(backend.slots(max_length + 1) if backend else 0 for backend in backends),
        graphs=graphs,
        head=head,
        scored=scored,
        fed_together=1 if eagle3 else FED_TOGETHER,
        waiting=WAITING_STATES if eagle3 and max_draft_tokens else 0,
    )


def _fill_bytes(model: PreTrainedModel, tokens: int, extent: int) -> int:
    """Bytes at the peak of a layer: three tensors of its feed-forward part, four of the hidden size, the rotary cosines
    and sines, and the mask."""
    text = model.config.get_text_config(decoder=True)
    hidden = text.hidden_size
    inner = getattr(text, "intermediate_size", None) or 4 * hidden
    head = getattr(text, "head_dim", None) or hidden // text.num_attention_heads
    return tokens * ((3 * inner + 4 * hidden + 2 * head) * model.dtype.itemsize + extent)


def weight_bytes(models: Iterable[PreTrainedModel]) -> int:
    """Bytes of all parameters and buffers; shared ones count once."""
    storages = {}
    for model in models:
        for tensor in (*model.parameters(), *model.buffers()):
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def available_bytes(device: torch.device) -> int:
    """Free memory of the device, with torch's unused reserve."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return psutil.virtual_memory().available
