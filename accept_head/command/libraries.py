"""Switches off the progress bars and remarks of libraries."""

from __future__ import annotations

import logging
import threading
import warnings

from accept_head.files import machine_fault


def quiet_libraries() -> None:
    """Silence libraries except their warnings. Progress and results are printed by this package."""
    threading.excepthook = show_thread_error
    import datasets
    from transformers.utils import logging as transformers_logging

    datasets.disable_progress_bars()
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    # Lightning uses a deprecated torch name, and remarks that our batches are not index lists.
    warnings.filterwarnings("ignore", message=".*isinstance\\(treespec, LeafSpec\\).*")
    warnings.filterwarnings("ignore", message=".*Couldn't infer the batch indices.*")
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    # Our sampler starts at the checkpoint's step (training/learn/data.py).
    warnings.filterwarnings("ignore", message=".*dataloader is not resumable.*")


def show_thread_error(error: threading.ExceptHookArgs) -> None:
    """Print an error in a thread, except a disk fault. A logger's thread may find it first, but `main` reports it."""
    if machine_fault(error.exc_value) is None:
        threading.__excepthook__(error)
