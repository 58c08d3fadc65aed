"""`python -m accept_head` is `accept-head`; `accelerate launch -m accept_head …` starts here."""

from accept_head.cli import run

if __name__ == "__main__":
    run()
