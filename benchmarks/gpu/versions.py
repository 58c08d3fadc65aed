"""Which packages this machine has, and what it lacks of what is needed here: printed before anything imports them.

python benchmarks/gpu/versions.py
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import Requirement

PACKAGES = ("accept-head", "torch", "transformers", "triton", "lightning", "datasets", "pyarrow", "flash-attn")
CHECKED = ("accept-head", "datasets")  # whose requirements are looked at
UNUSED = ("jsonargparse", "httpx2")  # of the command line and of collecting from a server


def main() -> int:
    """1 if something is missing."""
    print(", ".join(f"{name} {there or 'is not there'}" for name, there in versions().items()), flush=True)
    missing = [line for package in CHECKED for line in unmet(package)]
    for line in missing:
        print(f"expected {line}", flush=True)
    return int(bool(missing))


def versions() -> dict[str, str | None]:
    """Of PACKAGES, None for one that is not there."""
    return {name: version_of(name) for name in PACKAGES}


def version_of(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def unmet(package: str) -> list[str]:
    """What the package needs, without its extras, and this machine has not, or in another version."""
    try:
        needed = [Requirement(line) for line in requires(package) or []]
    except PackageNotFoundError:
        return [f"{package}, found none"]
    used = [each for each in needed if each.name not in UNUSED]
    used = [each for each in used if not each.marker or each.marker.evaluate({"extra": ""})]
    return [
        f"{each}, found {there or 'none'}"
        for each, there in ((each, version_of(each.name)) for each in used)
        if there is None or not each.specifier.contains(there, prereleases=True)
    ]


if __name__ == "__main__":
    raise SystemExit(main())
