"""The entry point that vLLM calls in each of its processes (group `vllm.general_plugins`).

It must be cheap and harmless: it imports neither torch nor vLLM's workers, and what it swaps in does what vLLM did
until `--additional-config '{"accept_head": …}'` asks for more. With a vLLM that it is not for it swaps
nothing, and asking is an error.

Both draft classes are looked up by name when a worker is built, so they are exchanged right after their modules are
imported; a proposer and a speculator are made nowhere else.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from accept_head.inference.adapters.vllm.scrape import share_metrics
from accept_head.inference.adapters.vllm.settings import check, installed_version, is_supported


def register() -> None:
    """Called once a process; calling it again changes nothing."""
    _check_configs()
    if is_supported(installed_version()):
        share_metrics()
        after_import(
            {
                "vllm.v1.worker.gpu_model_runner": _swap_proposer,
                "vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator": _swap_speculator,
                "vllm.v1.worker.gpu.spec_decode.utils": _swap_handler,
            }
        )


def _swap_proposer(module: ModuleType) -> None:
    from accept_head.inference.adapters.vllm.v1 import AcceptHeadProposer

    module.DraftModelProposer = AcceptHeadProposer  # type: ignore[attr-defined]


def _swap_speculator(module: ModuleType) -> None:
    from accept_head.inference.adapters.vllm.v2 import AcceptHeadSpeculator

    module.StandaloneARSpeculator = AcceptHeadSpeculator  # type: ignore[attr-defined]


def _swap_handler(module: ModuleType) -> None:
    from accept_head.inference.adapters.vllm.ragged import ragged_handler

    module.DraftTokensHandler = ragged_handler(module.DraftTokensHandler)  # type: ignore[attr-defined]


def _check_configs() -> None:
    """Have vLLM's configuration say at once, before anything is loaded, what cannot work; an adapter that is asked for
    and not used would be worse than an error."""
    from vllm.config.vllm import VllmConfig

    original: Callable[[Any], None] = VllmConfig.__post_init__
    if getattr(original, "checks_accept_head", False):
        return

    @functools.wraps(original)
    def post_init(self: Any) -> None:
        original(self)
        check(self)

    post_init.checks_accept_head = True  # type: ignore[attr-defined]
    VllmConfig.__post_init__ = post_init


def after_import(actions: dict[str, Callable[[ModuleType], None]]) -> None:
    """Call each action with its module: now if that is imported already, else right after it is. Once a process."""
    finder = next((finder for finder in sys.meta_path if isinstance(finder, _AfterImport)), None)
    if finder is not None:
        return
    finder = _AfterImport({})
    sys.meta_path.insert(0, finder)
    for name, action in actions.items():
        if name in sys.modules:
            action(sys.modules[name])
        else:
            finder.actions[name] = action


class _AfterImport(MetaPathFinder):
    """Finds nothing itself: it adds the action to what the other finders find."""

    def __init__(self, actions: dict[str, Callable[[ModuleType], None]]):
        self.actions = actions

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        action = self.actions.pop(name, None)  # taken out, so that the search below passes this finder by
        if action is None:
            return None
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_act(module: ModuleType) -> None:
            execute(module)
            action(module)

        spec.loader.exec_module = execute_and_act  # type: ignore[method-assign]
        return spec
