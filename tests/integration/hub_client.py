"""Runs `accept-head` commands, or with -c a snippet, in forks of one process that has already imported the libraries.

It is started as a script with HF_ENDPOINT set to a HubServer, because huggingface_hub reads this at import. It also
reads the cache and offline mode at import. Each fork sets these again, as in a fresh process with this environment.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
import time
import traceback

from warm_cli import become, finish, serve

PRELOADED = (
    "jsonargparse",
    "transformers.utils.logging",
    "accept_head.cli",
    "accept_head.hub.publish",
    "accept_head.inference.policies.registry",
)


def set_up() -> None:
    from huggingface_hub import constants

    constants.HF_HUB_CACHE = os.environ["HF_HUB_CACHE"]
    constants.HF_HUB_OFFLINE = os.environ.get("HF_HUB_OFFLINE") == "1"
    wait = time.sleep
    time.sleep = lambda seconds: wait(min(seconds, 0.01))  # between retries, up to 8 s each


if __name__ == "__main__":
    for module in PRELOADED:
        importlib.import_module(module)
    gc.freeze()
    if (mine := serve()) is not None:
        become(mine)
        set_up()
        try:
            if mine["arguments"][0] == "-c":
                exec(mine["arguments"][1], {"arguments": mine["arguments"][2:]})
            else:
                sys.modules["accept_head.cli"].run()
        except SystemExit as stop:
            finish(stop.code)
        except BaseException:
            traceback.print_exc()
            finish(1)
        finish(0)
    os._exit(0)
