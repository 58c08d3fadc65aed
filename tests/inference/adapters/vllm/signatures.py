"""The methods of vLLM that our plugin overrides, calls or is called by: their signatures, read from source.

    python tests/inference/adapters/vllm/signatures.py FOLDER VERSION

FOLDER: an unpacked wheel or source archive of vLLM. Its signatures are added to signatures.json, and what is not as in
the version before is printed. Nothing of vLLM is imported.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import json
import sys
from pathlib import Path

RECORD = Path(__file__).with_name("signatures.json")
SPEC = "v1/worker/gpu/spec_decode"
# Their file and class, "" for a function of the module → methods.
HOOKED = {
    ("v1/spec_decode/llm_base_proposer.py", "SpecDecodeBaseProposer"): (
        "__init__", "load_model", "propose", "_sample_draft_tokens", "_sample_from_logits", "prepare_inputs_padded",
        "take_last_draft_probs",
    ),
    ("v1/spec_decode/draft_model.py", "DraftModelProposer"): ("__init__",),
    ("v1/spec_decode/eagle.py", "EagleProposer"): ("__init__",),
    (f"{SPEC}/speculator.py", "DraftModelSpeculator"): (
        "__init__", "load_model", "sample_draft", "compute_draft_logits", "_maybe_predict_acceptance",
    ),
    (f"{SPEC}/standalone_ar/speculator.py", "StandaloneARSpeculator"): ("propose", "init_cudagraph_manager"),
    (f"{SPEC}/target_dependent_ar/speculator.py", "TargetDependentARSpeculator"): ("propose", "init_cudagraph_manager"),
    (f"{SPEC}/acceptance_estimator.py", "OnlineAcceptanceEstimator"): ("__init__", "predict", "step"),
    (f"{SPEC}/utils.py", "DraftTokensHandler"): ("set_draft_tokens", "get_draft_tokens"),
    ("utils/gpu_sync_debug.py", ""): ("gpu_sync_allowed",),
    ("v1/sample/rejection_sampler.py", ""): ("expand_kernel",),
    ("v1/sample/rejection_sampler.py", "RejectionSampler"): ("__init__", "forward"),
    ("utils/cpu_triton_utils.py", ""): ("_expand_kernel_impl",),
    ("config/vllm.py", "VllmConfig"): ("__post_init__",),
    ("v1/attention/backend.py", "CommonAttentionMetadata"): ("__init__",),
}  # fmt: skip


def read(folder: Path) -> dict[str, str]:
    """`file Class.method` → its parameters. folder: with `vllm` in it. A method that is not there is left out."""
    found = {}
    for (file, owner), methods in HOOKED.items():
        path = folder / "vllm" / file
        there = functions(path, owner) if path.is_file() else {}
        found |= {f"{file} {owner}.{name}": there[name] for name in methods if name in there}
    return found


def functions(path: Path, owner: str) -> dict[str, str]:
    """Name → parameters of the functions that a class, wherever in the file, or without one the whole file defines."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    if owner:
        nodes = next((list(each.body) for each in nodes if isinstance(each, ast.ClassDef) and each.name == owner), [])
    found = {each.name: parameters(each.args) for each in nodes if isinstance(each, ast.FunctionDef)}
    fields = [each for each in nodes if isinstance(each, ast.AnnAssign)] if owner else []
    return {"__init__": of_dataclass(fields), **found} if fields else found


def of_dataclass(fields: list[ast.AnnAssign]) -> str:
    return ", ".join(["self", *(f"{ast.unparse(each.target)}{'=None' * bool(each.value)}" for each in fields)])


def parameters(args: ast.arguments) -> str:
    """As in source, without types, and with None for every default."""
    for each in ast.walk(args):
        if isinstance(each, ast.arg):
            each.annotation = None
    args.defaults = [ast.Constant(None) for _ in args.defaults]
    args.kw_defaults = [each and ast.Constant(None) for each in args.kw_defaults]
    return ast.unparse(args)


def signature(parameters: str) -> inspect.Signature:
    read = ast.parse(f"def it({parameters}): ...").body[0]
    assert isinstance(read, ast.FunctionDef)
    args, kind = read.args, inspect.Parameter
    placed = [*args.posonlyargs, *args.args]
    needed = len(placed) - len(args.defaults)
    found = [
        kind(each.arg, kind.POSITIONAL_OR_KEYWORD, default=kind.empty if place < needed else None)
        for place, each in enumerate(placed)
    ]
    found += [kind(args.vararg.arg, kind.VAR_POSITIONAL)] if args.vararg else []
    found += [
        kind(each.arg, kind.KEYWORD_ONLY, default=None if default else kind.empty)
        for each, default in zip(args.kwonlyargs, args.kw_defaults, strict=True)
    ]
    found += [kind(args.kwarg.arg, kind.VAR_KEYWORD)] if args.kwarg else []
    return inspect.Signature(found)


def accepts(ours: str, theirs: str) -> bool:
    """Whether ours can be called with every parameter of theirs: each by its name, or each at its place."""
    its = signature(theirs).parameters.values()
    named_only = [each.name for each in its if each.kind is each.KEYWORD_ONLY]
    placed = [each.name for each in its if each.kind is not each.KEYWORD_ONLY]
    for places in (1, len(placed)):
        with contextlib.suppress(TypeError):
            signature(ours).bind(*placed[:places], **dict.fromkeys([*placed[places:], *named_only]))
            return True
    return False


def changes(before: dict[str, str], now: dict[str, str]) -> list[str]:
    """A line for each method that is new, gone or has other parameters."""
    return [
        f"{name}: {before.get(name, 'not there')} → {now.get(name, 'gone')}"
        for name in sorted(before.keys() | now.keys())
        if before.get(name) != now.get(name)
    ]


def main() -> None:
    folder, version = sys.argv[1:]
    record = json.loads(RECORD.read_text()) if RECORD.is_file() else {}
    found = read(Path(folder))
    for line in changes(list(record.values())[-1] if record else {}, found):
        print(line)
    RECORD.write_text(json.dumps(record | {version: found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
