"""The ``bloomgate`` command. Human text goes to stderr, data to stdout; a user's error is one sentence."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command."""
    # Here, so that importing the package costs nothing.
    from bloomgate.cli.commands import cli
    from bloomgate.cli.errors import as_sentence

    try:
        cli(standalone_mode=True)
    except Exception as error:
        sentence, code = as_sentence(error)
        if not sentence:
            raise
        print(f"bloomgate: {sentence}", file=sys.stderr)
        sys.exit(code)
