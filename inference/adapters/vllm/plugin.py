"""The entry point that vLLM calls in each of its processes (group `vllm.general_plugins`).

It must be cheap and harmless: it imports neither torch nor vLLM's workers. The replaced classes act as vLLM's own
unless `--additional-config '{"accept_head": …}'` is given. In an unsupported vLLM it replaces nothing, and that option
is an error.

A worker looks up the draft classes by name when it is built, so they are replaced right after their modules are
imported. vLLM makes proposers and speculators nowhere else.
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
    """Install the plugin; vLLM calls it once a process. Further calls change nothing."""
    _check_configs()
    if is_supported(installed_version()):
        share_metrics()
        after_import(
            {
                "vllm.v1.worker.gpu_model_runner": _swap_proposers,
                "vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator": _swap_speculators,
                "vllm.v1.worker.gpu.spec_decode.eagle.speculator": _swap_speculators,
                "vllm.v1.worker.gpu.spec_decode.utils": _swap_handler,
            }
        )


def _swap_proposers(module: ModuleType) -> None:
    from accept_head.inference.adapters.vllm.v1 import AcceptHeadEagleProposer, AcceptHeadProposer

    module.DraftModelProposer = AcceptHeadProposer  # type: ignore[attr-defined]
    module.EagleProposer = AcceptHeadEagleProposer  # type: ignore[attr-defined]


def _swap_speculators(module: ModuleType) -> None:
    from accept_head.inference.adapters.vllm.v2 import with_policy

    for name in ("StandaloneARSpeculator", "EagleSpeculator"):
        if hasattr(module, name):
            setattr(module, name, with_policy(getattr(module, name)))


def _swap_handler(module: ModuleType) -> None:
    from accept_head.inference.adapters.vllm.ragged import ragged_handler

    module.DraftTokensHandler = ragged_handler(module.DraftTokensHandler)  # type: ignore[attr-defined]


def _check_configs() -> None:
    """Make vLLM's configuration check our settings, so that unsupported ones raise before anything is loaded. An error
    is better than an adapter that is silently unused."""
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
    """Call each action with its module: now if the module is imported already, else right after its import. Only the
    first call in a process has an effect."""
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
    """Finds no modules itself: it adds the action to what the other finders find."""

    def __init__(self, actions: dict[str, Callable[[ModuleType], None]]):
        self.actions = actions

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        action = self.actions.pop(name, None)  # removed, so that the search below skips this finder
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
