"""Entry point of `python -m accept_head`, which equals `accept-head`, and of `accelerate launch -m accept_head …`."""

from accept_head.cli import run

if __name__ == "__main__":
    run()
