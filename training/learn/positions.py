"""What there is to learn in a micro-batch: the positions that heads are judged at, with inputs and labels."""

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
    """The n positions of a micro-batch that some prediction is judged at; prompts and padding are left out.

    states: of (places, hidden_size), in any float dtype, or of (places, channels), where they are standardised; several
    tokens may have been drawn from each. signals: (n, inputs), normalised; None when the head reads none. embedded: of
    (different tokens, hidden_size), as `AcceptanceHead.embedded` gives it; None likewise. accept, reject: (n,
    predictions), the label a and 1 − a, or their sums where several are known; both 0 where that prediction does not
    count.
    """

    states: SharedRows
    signals: Tensor | None
    embedded: SharedRows | None
    accept: Tensor
    reject: Tensor


def positions_of(batch: StateBatch, axes: Sequence[int], head: AcceptanceHead) -> Positions:
    """The positions of a micro-batch, for any head that reads what `head` reads, normalised as `head` does.

    The host finds them while a GPU runs the draft, and sends them behind it. axes: labels that heads are trained on.
    """
    drawn, device = draws(batch, axes), batch.hidden.device
    embedded = None
    if head.config.reads_embedding:
        ids, index = drawn.ids.unique(return_inverse=True)
        embedded = SharedRows(head.embedded(sent(ids, device)), sent(index, device))
    # Without a layer of its own for the state, a head adds to it; else products read it as the draft gave it.
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
