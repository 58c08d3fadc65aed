"""Fixtures for the tests that run whole commands and hosts."""

from __future__ import annotations

import re

import pytest


@pytest.fixture(scope="session")
def my_policy(repository):
    """The class of docs/policies.md, as it stands there."""
    (code,) = re.findall(r"```python\n(.*?)```", (repository / "docs" / "policies.md").read_text("utf-8"), re.DOTALL)
    assert len(code[code.index("class ") :].strip().splitlines()) <= 15
    names = {}
    exec(compile(code, "docs/policies.md", "exec"), names)
    return names["MyPolicy"]
