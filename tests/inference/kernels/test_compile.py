"""The kernels compile for NVIDIA's Hopper. Triton makes this machine code without a GPU.

`make test-vllm` runs it: Triton comes with vLLM.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
from pathlib import Path

import pytest
import torch

from accept_head import AcceptanceHead, HeadConfig, Sampling
from accept_head.head.scorer import make_scorer
from accept_head.inference.kernels import head as head_operation
from accept_head.inference.kernels import launch, rows, sampling, signals, verify
from accept_head.inference.kernels import usable as door
from accept_head.inference.kernels.head import KernelScorer
from accept_head.signals import SIGNALS

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
NVIDIA = importlib.util.find_spec("triton") is not None and importlib.util.find_spec("triton.backends.nvidia")
pytestmark = pytest.mark.skipif(not NVIDIA or INTERPRETED, reason="needs Triton's compiler; `make test-vllm` has it")

HOPPER, AMPERE = 90, 80
SIGNAL_KERNELS = ("logits_signals", "q_signals")
HEAD = ("head_input", "head_block", "head_last", "head_output")
LOOP = ("uniform_numbers", "last_tokens", "after_draw", "accept")
SAMPLING = ("lower_bound", "kth_largest", "write_softmax", "draw_tokens")
VERIFICATION = ("accept_by_ratio", "accept_by_match")
WEIGHTS = {"state", "weight"}  # which no kernel writes
TYPES = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.float64: "*fp64"}
TYPES |= {torch.int32: "*i32", torch.int64: "*i64", torch.bool: "*i1"}
HIDDEN, VOCAB = 2048, 32768


def compile_for(architecture, kernel, arguments, options):
    """What Triton makes of a kernel that is launched with these: its `asm` has every stage by name."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    flags = {name: options.pop(name) for name in ("launch_pdl", "num_stages") if name in options}
    signature, constants, attributes = {}, {}, {}
    for place, (name, value) in enumerate(zip(kernel.arg_names, arguments, strict=False)):
        if isinstance(value, torch.Tensor):
            signature[name], aligned = TYPES[value.dtype], value.data_ptr() % 16 == 0
        elif isinstance(value, float):
            signature[name], aligned = "fp32", False
        else:
            signature[name], aligned = ("constexpr" if value == 1 else "i32"), value % 16 == 0
            constants |= {(place,): 1} if signature[name] == "constexpr" else {}
        attributes |= {(place,): [["tt.divisibility", 16]]} if aligned else {}
    signature |= dict.fromkeys(options, "constexpr")
    constants |= {(kernel.arg_names.index(name),): value for name, value in options.items()}
    source = ASTSource(kernel, signature, constants, attributes)
    return compile(source, target=GPUTarget("cuda", architecture, 32), options=flags)


@pytest.fixture
def launched(monkeypatch):
    """[(name, compiled)] of what would have been launched: nothing is run."""
    made = []

    class Compiled:
        def __init__(self, kernel, architecture):
            self.kernel, self.architecture = kernel, architecture

        def __getitem__(self, grid):
            return self

        def __call__(self, *arguments, **options):
            made.append((self.kernel.__name__, compile_for(self.architecture, self.kernel, arguments, options)))

    def on(architecture, early):
        names_of = {"signals": SIGNAL_KERNELS, "head": HEAD, "rows": LOOP, "sampling": SAMPLING, "verify": VERIFICATION}
        for module, names in names_of.items():
            kernels = launch.triton_kernels(module)
            for name in names:
                monkeypatch.setattr(kernels, name, Compiled(getattr(kernels, name), architecture))
        monkeypatch.setattr(door, "ON_ANY_DEVICE", True)
        monkeypatch.setattr(door, "passes", lambda check, device: True)
        monkeypatch.setattr(door, "_passed", {})
        monkeypatch.setattr(KernelScorer, "_passed", lambda *_: True)
        monkeypatch.setitem(launch._early, torch.device("cpu"), early)
        return made

    return on


def launch_signals(rows, dtype):
    logits, ids = torch.zeros(rows, VOCAB, dtype=dtype), torch.zeros(rows, dtype=torch.long)
    signals.logits_signals_by_kernel(logits, ids, torch.ones(rows))
    signals.logits_signals_by_kernel(logits, None)
    signals.q_signals_by_kernel(logits.float(), ids)


BASE = {"base": True, "signal_mean": (0.0,) * 9, "signal_std": (1.0,) * 9}
HEADS = {
    "default": {"depth": 2, "width": 128, "embedding_std": 0.02, "standardised": True, **BASE},
    "no base": {"depth": 3, "width": 256, "embedding_std": 0.02},
    "base": {"depth": 0, "residual": False, **BASE},
    "paper": {"depth": 3, "signals": ()},
    "wide, both": {"depth": 1, "width": 1024, "embedding_std": 0.02, "predicts": "both"},
    "linear": {"depth": 0, "width": 256},
    "narrow": {"depth": 2, "width": 24},
}


def head(name, rows, dtype, monkeypatch):
    if name == "wide, both":  # its tokens are multiplied, as of a vocabulary too large for a table
        monkeypatch.setattr(head_operation, "TABLE_BYTES", 0)
    options = {"signals": SIGNALS, "predicts": "token"} | HEADS[name]
    numbers = {"signal_mean": (0.0,) * 3, "signal_std": (1.0,) * 3} if options["signals"] else {}
    made = AcceptanceHead(HeadConfig(hidden_size=HIDDEN, reads="before", **numbers | options))
    if "embedding_std" in options:
        made.attach(torch.zeros(VOCAB, HIDDEN, dtype=dtype))
    fused = KernelScorer(made, options["predicts"], make_scorer(made, options["predicts"]))
    fused(torch.zeros(rows, HIDDEN, dtype=dtype), torch.zeros(rows, 3), torch.zeros(rows, dtype=torch.long))


def stack_bytes(compiled, folder):
    """What does not fit into registers."""
    import triton.backends.nvidia

    (folder / "kernel.cubin").write_bytes(compiled.asm["cubin"])
    tool = Path(triton.backends.nvidia.__file__ or "").parent / "bin" / "cuobjdump"
    done = subprocess.run([tool, "-res-usage", folder / "kernel.cubin"], capture_output=True, text=True, check=True)
    found = re.findall(r"(?:STACK|LOCAL):(\d+)", done.stdout + done.stderr)
    assert found
    return sum(map(int, found))


def touched_too_early(compiled):
    """Names of what is read or written ahead of the wait for the kernel before, but for weights."""
    roots, waited, found = {}, False, set()
    for line in compiled.asm["ttir"].splitlines():
        if "grid_dependency_wait" in line or "griddepcontrol.wait" in line:
            waited = True
        if match := re.match(r"\s*(%[\w#]+) = tt\.(?:addptr|splat|broadcast|expand_dims) (%[\w#]+)", line):
            roots[match[1]] = roots.get(match[2], match[2])
        if (match := re.search(r"tt\.(?:load|store|atomic_\w+)[^%]*(%[\w#]+)", line)) and not waited:
            found.add(roots.get(match[1], match[1]).removeprefix("%"))
    return found if waited else {"it never waits"}


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", [1, 8, 64])
def test_signals_fit_into_registers(rows, dtype, early, launched, tmp_path):
    made = launched(HOPPER, early)
    launch_signals(rows, dtype)
    check(made, early, {"logits_signals", "q_signals"}, tmp_path)


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", [1, 2, 64])
@pytest.mark.parametrize("name", HEADS)
def test_heads_fit_into_registers(name, rows, dtype, early, launched, tmp_path, monkeypatch):
    made = launched(HOPPER, early)
    head(name, rows, dtype, monkeypatch)
    names = {"head_output" if HEADS[name]["depth"] == 0 else "head_last"}
    names |= {"head_input"} if HEADS[name].get("residual", True) else set()
    check(made, early, names | ({"head_block"} if HEADS[name]["depth"] > 1 else set()), tmp_path)


def check(made, early, names, folder):
    assert {name for name, _ in made} == names
    for name, compiled in made:
        assert stack_bytes(compiled, folder) == 0, name
        waits = len(re.findall(r"griddepcontrol\.wait", compiled.asm["ptx"]))
        if early:
            assert waits == 1 and touched_too_early(compiled) <= WEIGHTS, name
            assert len(re.findall(r"griddepcontrol\.launch_dependents", compiled.asm["ptx"])) == 1
        else:
            assert waits == 0 and "griddepcontrol" not in compiled.asm["ptx"]


@pytest.mark.parametrize("batch", [1, 8, 128])
def test_the_loops_bookkeeping_fits_into_registers(batch, launched, tmp_path):
    made = launched(HOPPER, False)
    with pytest.raises(AssertionError):  # nothing is computed
        rows.compare(torch.device("cpu"), batch, slots=9, tries=1)
    assert [name for name, _ in made] == list(LOOP)
    assert all(stack_bytes(compiled, tmp_path) == 0 for _, compiled in made)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", [1, 40])
def test_sampling_fits_into_registers(rows, dtype, launched, tmp_path):
    made = launched(HOPPER, False)
    scores, numbers = torch.zeros(rows, 4 * VOCAB, dtype=dtype), torch.zeros(rows, dtype=torch.float64)
    for top_k in (50, 0):
        sampling.probabilities_by_kernels(scores, Sampling(temperature=0.7, top_k=top_k))
    sampling.draw_by_kernel(scores.float(), numbers)
    names = ["lower_bound", "kth_largest", "write_softmax", "logits_signals", "write_softmax", "draw_tokens"]
    assert [name for name, _ in made] == names
    assert {name: stack_bytes(compiled, tmp_path) for name, compiled in made} == dict.fromkeys(names, 0)


@pytest.mark.parametrize("slots", [1, 4, 9])
@pytest.mark.parametrize("rows", [1, 40])
def test_verification_fits_into_registers(rows, slots, launched, tmp_path):
    made = launched(HOPPER, False)
    p, ids, drafted = (
        torch.zeros(rows, slots + 1, 4 * VOCAB),
        torch.zeros(rows, slots + 1).long(),
        torch.zeros(rows).long(),
    )
    numbers = torch.zeros(2, rows, slots, dtype=torch.float64)
    verify.ratio_by_kernel(p, p[:, 1:], ids[:, 1:], drafted, numbers[0], numbers[1, :, 0])
    verify.match_by_kernel(ids, ids[:, 1:], drafted)
    assert [name for name, _ in made] == list(VERIFICATION)
    assert {name: stack_bytes(compiled, tmp_path) for name, compiled in made} == dict.fromkeys(VERIFICATION, 0)


def test_what_does_not_fit_is_seen(launched, tmp_path, monkeypatch):
    monkeypatch.setattr(head_operation, "PRODUCTS_AT_ONCE", 1 << 16)
    made = launched(HOPPER, True)
    head("linear", 1, torch.bfloat16, monkeypatch)
    assert stack_bytes(dict(made)["head_input"], tmp_path) > 0


def test_weights_are_read_ahead(launched, monkeypatch):
    """Or there would be little use in it. Of many rows, which tensor cores multiply, they only come to the cache."""
    made = launched(HOPPER, True)
    head("default", 1, torch.bfloat16, monkeypatch)
    ahead = {name: touched_too_early(compiled) for name, compiled in made}
    assert ahead == {"head_input": {"state"}, "head_block": {"weight"}, "head_last": {"weight"}}
    made.clear()
    head("default", 2, torch.bfloat16, monkeypatch)
    for name, compiled in made:
        before, after = re.split(r"griddepcontrol\.wait", compiled.asm["ptx"])
        assert "prefetch.global.L2" in before and "ld.global" not in before, name
        assert "mma.sync" in after and "cp.async" in after and "prefetch" not in after, name


def test_older_gpus_get_kernels_too(launched, monkeypatch):
    made = launched(AMPERE, False)
    launch_signals(2, torch.bfloat16)
    head("no base", 2, torch.bfloat16, monkeypatch)
    assert len(made) == 3 + 4


def test_a_kernel_that_does_not_wait_is_seen():
    from tests.inference.support import hasty_kernels

    found = {}
    for name in ("never", "too_late", "in_time"):
        arguments = (torch.zeros(4), torch.zeros(4), torch.zeros(4))
        found[name] = touched_too_early(compile_for(HOPPER, getattr(hasty_kernels, name), arguments, {}))
    assert found == {"never": {"it never waits"}, "too_late": {"x", "weight"}, "in_time": {"weight"}}
