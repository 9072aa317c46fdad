"""What went wrong, in one sentence, with the exit code that says whether an answer was had."""

from __future__ import annotations

EXIT_ERROR = 1
EXIT_NO_ANSWER = 2


def as_sentence(error: BaseException) -> tuple[str, int]:
    """The sentence and exit code of an error of the user or the daemon; ("", 0) for a bug of ours."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", EXIT_ERROR
    if isinstance(error, BrokenPipeError):
        return "nobody reads the output any more", EXIT_ERROR
    if isinstance(error, OSError):
        named = f"{error.filename}: " if error.filename else ""
        return f"{named}{error.strerror or error}", EXIT_ERROR
    # Imported late: a command that fails before it asks a daemon does not pay for gRPC.
    from bloomgate.filters import InvalidKey, ParameterError

    if isinstance(error, (ParameterError, InvalidKey)):
        return str(error), EXIT_ERROR
    from bloomgate.errors import BloomgateError, DeadlineExceeded, NotServing, Unavailable

    if isinstance(error, (Unavailable, DeadlineExceeded)) and not isinstance(error, NotServing):
        hint = "is bloomgated running, is --target right, and does it want TLS (--ca)?"
        return f"no answer; {hint} ({error})", EXIT_ERROR
    if isinstance(error, BloomgateError):
        return str(error), EXIT_ERROR
    return "", 0
