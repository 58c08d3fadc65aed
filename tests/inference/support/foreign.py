"""A foreign draft loop around a policy's host."""

from __future__ import annotations

import torch

from accept_head.inference.adapters.vllm.host import PolicyHost

VOCAB, HIDDEN = 7, 16


class Engine:
    """A foreign draft loop: it feeds, draws for every row, and asks. Its numbers are made beforehand.

    hidden: (forwards, batch, hidden), the first at the last verified token. q: (forwards, batch, vocab). places:
    (forwards, batch), what was drawn from q. ids: its tokens, the same places of all tokens from number `first` on.
    """

    def __init__(self, batch, depth, seed, first=0):
        generator = torch.Generator().manual_seed(seed)
        self.hidden = torch.randn(depth + 1, batch, HIDDEN, generator=generator)
        self.q = (3 * torch.randn(depth + 1, batch, VOCAB, generator=generator)).softmax(-1)
        self.places = torch.stack([torch.multinomial(q, 1, generator=generator)[:, 0] for q in self.q])
        self.first, self.ids = first, self.places + first

    def round(self, host, names, live=None, verdict=None, limit=99, ends=None):
        """→ (batch,) lengths, and the number of forwards."""
        live = [True] * len(names) if live is None else live
        host.begin(names, live, self.texts(host, names, verdict), limit, verdict, ends)
        forwards = 0
        while True:
            hidden, q, places, ids = (each[forwards] for each in (self.hidden, self.q, self.places, self.ids))
            forwards += 1
            given = {"places": places} if self.first else {}
            if not host.advance(hidden) or not host.drawn(ids, q if host.reads_q else None, **given):
                return host.end(), forwards

    @staticmethod
    def texts(host, names, verdict):
        """Tokens of each request: one more than was accepted since the last round; a new one has 9."""
        before = getattr(host, "texts", {})
        accepted = [0] * len(names) if verdict is None else verdict.accepted
        known = {name: before[name] + 1 + count for name, count in zip(names, accepted, strict=True) if name in before}
        host.texts = {name: known.get(name, 9) for name in names}
        return list(host.texts.values())


def host_of(policy, *, rows=8, limit=8, greedy=False, **options):
    return PolicyHost(policy, rows=rows, limit=limit, device=torch.device("cpu"), greedy=greedy, **options)


def names(count):
    return [f"request-{number}" for number in range(count)]
