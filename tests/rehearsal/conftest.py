"""Leaves these tests out of ordinary runs, because they change their process permanently.

tests/integration/test_rehearsal.py starts them in their own process.
"""

from __future__ import annotations

import os

import pytest

IN_ITS_OWN_PROCESS = "ACCEPT_HEAD_REHEARSAL"

collect_ignore_glob = [] if os.environ.get(IN_ITS_OWN_PROCESS) else ["*.py"]

if not collect_ignore_glob:
    from tests.rehearsal.pretend_cuda import pretend_cuda

    @pytest.fixture
    def waits():
        """torch.cuda has a device; how often the host has waited for it, by (what, file:line)."""
        with pretend_cuda() as counted:
            yield counted
