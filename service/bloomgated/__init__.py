"""bloomgated: the daemon that hosts named Bloom filters."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the ``bloomgated`` command, which is installed with the library, unlike what it needs."""
    try:
        from bloomgated.main import main as run
    except ModuleNotFoundError as error:
        hint = "install the extra `server`, as in pip install '.[server]'"
        print(f"bloomgated needs {error.name}: {hint}", file=sys.stderr)
        sys.exit(1)
    run()
