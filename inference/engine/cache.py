"""A key/value cache in which every row has its own length, and a rollback only lowers that length.

Keys and values are written at each row's own positions. The attention mask lets a query at position i see slots 0..i. A
slot beyond a row's length is empty or holds a rejected token, and is overwritten before any query can see it. So a
rollback starts the next write at an earlier position. Feeding a token again at its own position changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from accept_head.inference.engine.attention import grouped
from accept_head.inference.engine.attention.backend import Attended, with_attention
from accept_head.inference.engine.attention.choice import Attention, choose
from accept_head.inference.engine.attention.kinds import AttentionKinds, check_rotary
from accept_head.inference.engine.call import compiled_call, make_call
from accept_head.inference.engine.cuda import GraphBackend, check_one_device, graph_backend
from accept_head.inference.engine.graphs import Graphs
from accept_head.inference.engine.layer import RaggedLayer, WritePlace
from accept_head.inference.engine.packing import Packing, packed_call, packs, pays
from accept_head.pair import Forward, base_model, context_tokens

Compile = Literal["none", "steps", "default", "max-autotune", "graphs"]

# The most tokens of a forward that only fills the cache: bounds the memory for long prompts.
FILL_TOKENS = 2048
# Widths of compiled forwards, each of which takes half a minute, and of captured ones, which take a fifth of a second.
WIDTHS = (1, 2, 3, 5, 9, 17, 33, 65)
GRAPH_WIDTHS = (*range(1, 10), 17, 33, 65)
# Caches of compiled forwards are a multiple of this, so that decoders for prompts of other lengths share the graphs.
CAPACITY_STEP = 64
# A captured forward reads the slots in use, rounded up to 1, 1.5, 2, 3, 4, 6, … times this number.
LEAST_EXTENT = 128


class Group(NamedTuple):
    """Rows that are fed together. spans: (rows, 3), row, start and end of each. width: of the forward. longest_start:
    the largest start."""

    spans: Tensor
    width: int
    longest_start: int


class CachedModel:
    """A model with a ragged cache for a batch of rows. The caller keeps the positions.

    compile: with `none` and `steps` a forward has the width it needs and reads the slots in use. Otherwise shapes are
    static, with widths from a short list. `graphs`: the model's own kernels, captured as a CUDA graph at the first use
    of a width and extent (see `graphs.py`); the cache keeps its address. `default`, `max-autotune`: torch.compile, over
    all slots; the latter also tunes kernels (on a CPU with packed copies of the weights, on a GPU with CUDA graphs).
    graphs: what captures; CUDA when left out.

    Raises InputError through `AttentionKinds` for a model whose layers this cache does not support.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        batch: int,
        max_length: int,
        *,
        with_hidden: bool | tuple[int, ...] = False,
        compile: Compile = "none",
        attention: Attention = "sdpa",
        graphs: GraphBackend | None = None,
    ):
        """max_length: longest row, in tokens. with_hidden: also return the last hidden state; layer numbers: the
        residual stream before those layers, side by side. attention: attention/choice.py, tested by `check_served`."""
        self.model = model
        self.static = compile not in ("none", "steps")
        self.graphs = Graphs(graphs or graph_backend(model.device)) if compile == "graphs" else None
        if self.graphs is not None:
            check_one_device(model)
        compiles = self.static and self.graphs is None
        if compiles:
            max_length = min(-(-max_length // CAPACITY_STEP) * CAPACITY_STEP, context_tokens(model))
        self.max_length = max_length
        self.kinds = AttentionKinds.of(model)
        check_rotary(model, max_length)
        self.place = place = WritePlace(torch.zeros(batch, 1, dtype=torch.long, device=model.device))
        # One more slot than tokens, for the padding of a ragged forward; no query sees it.
        self.slots = max_length + 1
        backend = choose(model, attention, traced=compile in ("default", "max-autotune"))
        self.attended = Attended(model, backend) if backend else None
        if backend:  # static widths need room for padding at a row's end
            self.slots = backend.slots(self.slots + (WIDTHS[-1] if self.static else 0))
        self.layers = [RaggedLayer(batch, self.slots, self.place) for _ in range(self.kinds.layers)]
        self.cache = Cache(layers=list(self.layers))
        self._call = make_call(model, self.cache, max_length, with_hidden)
        self._run: Callable[..., Any] = self._call
        if compiles:
            self._run = compiled_call(self._call.__call__, model.device, tuned=compile == "max-autotune")
        self._base: Callable[..., Any] = base_model(model)
        self.packs = not self.static and self.attended is None and packs(model)
        self._run_packed: Callable[..., Any] = packed_call(model, self._call) if self.packs else self._call
        if self.attended:
            whole = partial(getattr, place, "whole")
            self._run, self._base = (self.attended.around(run, whole) for run in (self._run, self._base))
        elif not compiles and grouped.is_grouped(model):
            self._run, self._base = (with_attention(model, grouped.NAME, run) for run in (self._run, self._base))

    def padded(self, width: int) -> int:
        """The width of a forward of so many tokens."""
        widths = () if not self.static else WIDTHS if self.graphs is None else GRAPH_WIDTHS
        return next((each for each in widths if each >= width), width)

    def forward(
        self,
        input_ids: Tensor,
        starts: Tensor,
        longest_start: int,
        *,
        wanted: Tensor | None = None,
        states: Tensor | None = None,
        last: Tensor | None = None,
        copy: bool = True,
    ) -> Forward:
        """Feed tokens (batch, new), row r at positions starts[r], starts[r] + 1, … → logits and hidden states.

        longest_start: the largest of `starts`, on the host, so that no sync is needed to read only the slots in use.
        Logits and hidden are (batch, new, …); hidden is empty without `with_hidden`. copy: False returns the graph's
        own tensors, if there are graphs; the next forward of this width overwrites them. wanted: (batch, new) bool, the
        tokens whose results count; others need not be fed. states: (batch, new, hidden), of a drafter.
        last: (batch,) the place of each row's only token that a drafter is to predict from → (batch, 1, …).
        """
        if wanted is not None and self.packs and pays(wanted):
            return self.forward_packed(Packing.of(wanted), input_ids, starts, longest_start, states)
        width = input_ids.shape[1]
        if (padded := self.padded(width)) > width:
            input_ids = torch.nn.functional.pad(input_ids, (0, padded - width))
            states = None if states is None else torch.nn.functional.pad(states, (0, 0, 0, padded - width))
        reach = (self.max_length if self.static else longest_start) + padded
        given = input_ids, starts, self._extent(longest_start + width), reach, states, last
        if self.graphs is None or not self.layers[0].is_initialized:  # the cache is allocated outside of graphs
            outputs = self._forward(*given)
        else:
            outputs = self.graphs("forward", self._forward, *given, copy=True)
            if copy:
                outputs = tuple(output.clone() for output in outputs)
        return Forward(*(output[:, :width] for output in outputs))

    def _forward(
        self, input_ids: Tensor, starts: Tensor, extent: int, reach: int, *of_drafter: Tensor | None
    ) -> tuple[Tensor, ...]:
        self._call.states, self._call.last = of_drafter
        positions = self._write_at(starts, input_ids.shape[1], extent, reach)
        asking = positions if self._call.last is None else positions.gather(1, self._call.last[:, None])
        return self._run(input_ids, positions, self._masks(asking))

    def forward_packed(
        self, packing: Packing, input_ids: Tensor, starts: Tensor, longest_start: int, states: Tensor | None
    ) -> Forward:
        self._call.states, self._call.last = None if states is None else packing.pack(states), None
        reach = longest_start + packing.width
        positions = self._write_at(starts, packing.width, self._extent(reach), reach)
        self.place.packed, masks = packing.of_tokens(self.place.slots), self._masks(positions)
        try:
            outputs = self._run_packed(packing, packing.pack(input_ids), packing.pack(positions), masks)
        finally:
            self.place.packed = None
        return Forward(*(packing.pad(output) for output in outputs))

    def _extent(self, slots: int) -> int:
        """How many slots a forward reads that needs the first `slots`."""
        if self.graphs is None or self.attended:
            return self.max_length if self.static else min(slots, self.max_length)
        extent = LEAST_EXTENT
        while extent < slots:
            extent = extent * 3 // 2 if extent * 3 // 2 >= slots else 2 * extent
        return min(extent, self.max_length)

    def fill(
        self,
        tokens: Tensor,
        rows: Sequence[int],
        starts: Sequence[int],
        ends: Sequence[int],
        heard: Callable[[Group, Tensor], None] | None = None,
    ) -> None:
        """Feed tokens[row, start:end] of the given rows for their keys and values alone. tokens: (batch, capacity).

        A forward has at most FILL_TOKENS tokens, or one row. heard: called after each with the states that
        `with_hidden` asks for, (rows, width, …).
        """
        todo = sorted(zip(rows, starts, ends, strict=True), key=lambda item: item[1] - item[2])  # longest first
        todo = [item for item in todo if item[2] > item[1]]
        while todo:
            width = min(todo[0][2] - todo[0][1], FILL_TOKENS)
            group = todo[: max(1, FILL_TOKENS // width)]
            spans, longest_start = torch.tensor(group, device=tokens.device), max(start for _, start, _ in group)
            states = self.fill_group(tokens, Group(spans, width, longest_start), read=heard is not None)
            if heard is not None:
                heard(Group(spans, width, longest_start), states)
            rest = [(row, start + width, end) for row, start, end in group if start + width < end]
            todo = rest + todo[len(group) :]

    def fill_group(self, tokens: Tensor, group: Group, *, read: bool = False) -> Tensor:
        """Feed one group → hidden states (rows, width, hidden). read: those that `with_hidden` asks for, in place of
        the last ones."""
        reader = self._call.hidden if read else None
        inputs = self._call.inputs(*self._ragged(tokens, *group))
        if reader is None:
            return self._base(**inputs)[0]
        reader.wanted = True
        self._base(**inputs)
        reader.wanted = False
        last = reader.last
        del reader.last
        return last

    def fill_drafter(self, tokens: Tensor, group: Group, states: Tensor) -> None:
        """Feed a drafter one group. states: as in `forward`, (rows, width, hidden)."""
        rows, starts, _ = group.spans.unbind(-1)
        positions = self._write_at(starts, group.width, 0, 0, rows)  # it reads no slots
        ids = tokens[rows].gather(1, positions.clamp(max=tokens.shape[1] - 1))
        drafter: Any = base_model(self.model)
        drafter.fill(ids, states, positions.clamp(max=self.max_length - 1), self.cache)

    def read(self, tokens: Tensor, rows: Sequence[int], starts: Sequence[int], ends: Sequence[int]) -> Forward:
        """Feed tokens[row, start:end] of the given rows → logits and hidden states, (rows, longest, …). Those beyond a
        row's end mean nothing. Not for static shapes."""
        width = max(end - start for start, end in zip(starts, ends, strict=True))
        group = torch.tensor([*zip(rows, starts, ends, strict=True)], device=tokens.device)
        return Forward(*self._run(*self._ragged(tokens, group, width, max(starts))))

    def _ragged(self, tokens: Tensor, group: Tensor, width: int, longest_start: int) -> tuple[Tensor, Tensor, Any]:
        """The inputs of a forward of some rows: ids, positions and masks. group: (rows, 3), row, start and end."""
        rows, starts = group[:, 0], group[:, 1]
        reach = longest_start + width
        positions = self._write_at(starts, width, min(reach, self.max_length), reach, rows)
        ids = tokens[rows].gather(1, positions.clamp(max=tokens.shape[1] - 1))
        return ids, positions, self._masks(positions)

    def _write_at(self, starts: Tensor, width: int, extent: int, reach: int, rows: Tensor | None = None) -> Tensor:
        """Set where the cache writes the next tokens → their positions (rows, width). reach: slots that they may take,
        padding included."""
        positions = starts[:, None] + torch.arange(width, device=starts.device)
        self.place.extent = extent
        self.place.slots = positions.clamp(max=self.max_length)
        self.place.rows = rows
        # A kernel that takes row lengths needs that many slots. Near the end, padding can exceed them: use the mask.
        self.place.whole = self.attended is not None and reach <= self.slots
        return positions

    def _masks(self, positions: Tensor) -> Tensor | dict[str, Tensor]:
        """The model's attention mask, or the plan that replaces it."""
        if self.attended is None or not self.place.whole:
            return self.kinds.masks(positions, self.place.extent)
        plan = self.attended.plan(positions, self.place.rows, self.slots)
        return self.kinds.named(plan, plan)

    def select(self, rows: Tensor) -> None:
        """Row i becomes what row rows[i] was. The batch may shrink."""
        for layer in self.layers:
            layer.select(rows)
        self._moved()

    def copy(self, rows: Tensor) -> CachedModel:
        """Another cache of the same model, in which row i is a copy of row rows[i]. A row may be copied many times."""
        other = CachedModel(self.model, len(rows), self.max_length, with_hidden=True)
        for mine, theirs in zip(self.layers, other.layers, strict=True):
            assert mine.keys is not None and mine.values is not None
            theirs.keys, theirs.values = (t.index_select(0, rows.to(t.device)) for t in (mine.keys, mine.values))
            theirs.is_initialized = True
        return other

    def restore(self, batch: int) -> None:
        """Make room for `batch` rows, if there is another number. The rows' content may be lost."""
        if any(layer.batch != batch for layer in self.layers):
            self._drop(batch)
            self._moved()

    def free(self) -> None:
        """Release the memory of keys, values, graphs and their outputs. The next forward allocates it again."""
        self._drop(self.layers[0].batch)
        if self.graphs is not None:
            self.graphs.free()

    def _drop(self, batch: int) -> None:
        """Drop all old keys and values before new ones are made, so that there are never two caches."""
        for layer in self.layers:
            layer.batch, layer.is_initialized, layer.keys, layer.values = batch, False, None, None

    def _moved(self) -> None:
        """Drop the graphs, as keys and values have new addresses."""
        if self.graphs is not None:
            self.graphs.forget()

    @property
    def bytes(self) -> int:
        """Bytes of keys and values."""
        tensors = [tensor for layer in self.layers for tensor in (layer.keys, layer.values) if tensor is not None]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
