"""Fixtures for the tests of inference."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Of made-up rollouts; each example writes its own over the last one's."""
    return tmp_path_factory.mktemp("rollouts")
