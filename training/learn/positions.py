"""The positions of a micro-batch that heads learn from, with inputs and labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from accept_head.head.network import AcceptanceHead
from accept_head.training.learn.batches import StateBatch, sent
from accept_head.training.learn.draws import draws
from accept_head.training.learn.shared_rows import SharedRows


@dataclass
class Positions:
    """The n positions of a micro-batch with a label for some prediction. Prompts and padding have none.

    states: rows of (places, hidden_size), any float dtype, or of (places, channels) when standardised. Several tokens
    may have been drawn from one state. signals: (n, inputs), normalised; None when the head reads none. embedded: rows
    of (different tokens, hidden_size), from `AcceptanceHead.embedded`; None when the head reads none. accept, reject:
    (n, predictions), the label a and 1 − a, or their sums when several labels are known. Both are 0 where the
    prediction has no label.
    """

    states: SharedRows
    signals: Tensor | None
    embedded: SharedRows | None
    accept: Tensor
    reject: Tensor


def positions_of(batch: StateBatch, axes: Sequence[int], head: AcceptanceHead) -> Positions:
    """The positions of a micro-batch, for any head with the inputs and normalisation of `head`.

    The host selects them while a GPU runs the draft, and queues their copies behind it. axes: labels that heads are
    trained on.
    """
    drawn, device = draws(batch, axes), batch.hidden.device
    embedded = None
    if head.config.reads_embedding:
        ids, index = drawn.ids.unique(return_inverse=True)
        embedded = SharedRows(head.embedded(sent(ids, device)), sent(index, device))
    # A head without an input layer for the state adds to the state, in float32. Such a layer takes the draft's dtype.
    hidden = batch.hidden.float() if head.config.width is None else batch.hidden
    if head.config.standardised:
        hidden = head.state_input(batch.hidden.float())
    return Positions(
        states=SharedRows(hidden, None if drawn.place is None else sent(drawn.place, device)),
        signals=head.normalised(sent(drawn.signals, device)) if head.config.signals else None,
        embedded=embedded,
        accept=sent(drawn.accept, device),
        reject=sent(drawn.reject, device),
    )
