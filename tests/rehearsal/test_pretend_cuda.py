"""The simulated device refuses what a GPU refuses, counts waits, and computes the same as a CPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from accept_head.pair import default_device
from tests.rehearsal.far import MixedDevices
from tests.rehearsal.pretend_cuda import pretend_cuda


def test_it_is_there_only_where_it_is_pretended():
    with pretend_cuda():
        assert default_device() == torch.device("cuda", 0)
    assert default_device() == torch.device("cpu") and not torch.cuda.is_available()


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.arange(2, 7, device="cuda"),
        lambda: torch.tensor([3, 4]).to("cuda"),
        lambda: torch.zeros(2, device=torch.device("cuda")) + 1,
        lambda: torch.ones(2, 3, device="cuda:0").new_full((2,), 4.0),
        lambda: nn.Linear(2, 3).to("cuda").weight,
        lambda: torch.rand(3, device="cuda", generator=torch.Generator("cuda").manual_seed(0)),
        lambda: torch.arange(12, device="cuda").view(3, 4)[1:, 2],
        lambda: torch.arange(3.0, device="cuda") @ torch.eye(3, device="cuda"),
        lambda: torch.zeros(1, 3, device="cuda").squeeze_(0).unsqueeze_(1),
    ],
)
def test_what_is_made_there_says_so(make, waits):
    made = make()
    assert made.device == torch.device("cuda", 0) and made.is_cuda
    assert made.cpu().device == torch.device("cpu") and made.cpu().tolist() == made.tolist()


def test_it_learns_as_a_cpu_does(waits):
    torch.manual_seed(0)
    x, here = torch.randn(4, 3), nn.Sequential(nn.Linear(3, 5), nn.SiLU(), nn.Linear(5, 1))
    there = nn.Sequential(nn.Linear(3, 5), nn.SiLU(), nn.Linear(5, 1))
    there.load_state_dict(here.state_dict())
    there.to("cuda")
    for model, inputs in ((here, x), (there, x.to("cuda"))):
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
    for one, other in zip(here.parameters(), there.parameters(), strict=True):
        torch.testing.assert_close(one, other.cpu(), rtol=1e-5, atol=1e-6)  # a GPU's Adam goes over all at once


@pytest.mark.parametrize(
    "mix",
    [
        lambda here, there: here + there,
        lambda here, there: torch.where(there > 0, there, here),
        lambda here, there: nn.functional.linear(there, here.expand(2, 3)),
        lambda here, there: torch.cat([there, here]),
        lambda here, there: there.gather(0, here.long()),
        lambda here, there: there.index_copy(0, torch.tensor([0, 1, 2]), there),
        lambda here, there: torch.rand(3, device="cuda", generator=torch.Generator()),
        lambda here, there: torch.multinomial(here, 1, generator=torch.Generator("cuda")),
    ],
)
def test_tensors_of_two_devices_do_not_meet(mix, waits):
    here = torch.ones(3)
    with pytest.raises(MixedDevices, match=r"test_pretend_cuda\.py"):
        mix(here, here.to("cuda"))


def test_a_number_of_the_host_may_meet_them(waits):
    there = torch.ones(3, device="cuda")
    assert (there * torch.tensor(2.0) + 1).tolist() == [3, 3, 3]


WAITS = {
    "a number": lambda x: x.sum().item(),
    "truth": lambda x: bool((x > 0).any()),
    "int": lambda x: int(x[0]),
    "a list": lambda x: x.tolist(),
    "to the host": lambda x: x.cpu(),
    "to the device": lambda x: torch.zeros(2).to("cuda"),
    "to the device, not pinned": lambda x: torch.zeros(2).to("cuda", non_blocking=True),
    "to the device, blocking": lambda x: torch.zeros(2).pin_memory().to("cuda"),
    "made of a list": lambda x: torch.tensor([1, 2], device="cuda"),
    "places": lambda x: x.nonzero(),
    "a mask": lambda x: x[x > 1],
    "set by a mask": lambda x: x.index_put_((x > 1,), torch.zeros((), device="cuda")),
    "into the host": lambda x: torch.zeros(3).copy_(x),
    "into the device": lambda x: x.copy_(torch.zeros(3)),
    "indices of the host": lambda x: x[[0, 2]],
    "different ones": lambda x: x.unique(),
    "counts": lambda x: x.long().bincount(),
    "equal": lambda x: torch.equal(x, x + 1),
    "repeats": lambda x: x.repeat_interleave(x.long()),
}


@pytest.mark.parametrize("name", WAITS)
def test_what_the_host_waits_for_is_counted(name, waits):
    x = torch.arange(3.0, device="cuda")
    waits.clear()
    WAITS[name](x)
    assert sum(waits.values()) >= 1
    assert all(place.startswith("tests/rehearsal/test_pretend_cuda.py") for _, place in waits)


@pytest.mark.parametrize(
    "work",
    [
        lambda x: x * 2 + x.sum(),
        lambda x: x.argmax(),
        lambda x: torch.zeros(2).pin_memory().to("cuda", non_blocking=True),
        lambda x: x.masked_fill(x > 1, 0.0),
        lambda x: x[:, None] + torch.arange(3, device=x.device),
        lambda x: x.index_select(0, x.long()),
        lambda x: torch.where(x > 1, x, 0.0),
        lambda x: x.sort().values.cumsum(0),
    ],
)
def test_what_it_does_not_wait_for_is_not(work, waits):
    x = torch.arange(3.0, device="cuda")
    waits.clear()
    work(x)
    assert not waits


def test_a_graph_does_again_what_was_captured(waits):
    x, out = torch.arange(3.0, device="cuda"), torch.zeros(3, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out.copy_(x * 2 + torch.ones(3, device="cuda"))
    assert out.tolist() == [0, 0, 0]  # nothing is done while it is captured
    for start in (0, 5):
        x.copy_(torch.arange(start, start + 3.0, device="cuda"))
        graph.replay()
        assert out.tolist() == [2 * (start + i) + 1 for i in range(3)]


def test_a_graph_refuses_to_wait(waits):
    x = torch.arange(3.0, device="cuda")
    with pytest.raises(RuntimeError, match=r"synchronizing|waits"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        x.sum().item()
    assert x.sum().item() == 3  # and afterwards it may again
