"""The exception for wrong input of the user. Its message says which part is wrong."""

from __future__ import annotations


class InputError(ValueError):
    """A file, field or value given by the user is wrong.

    The message is one sentence that names it and says what was expected. The command line prints it on one line and
    exits with code 2, without a traceback.
    """


def one_line(error: BaseException) -> str:
    """The beginning of a library's message on one line, to be quoted in an InputError."""
    return " ".join(str(error).split())[:160] or type(error).__name__
