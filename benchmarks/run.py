"""``make bench``: every benchmark, one after the other, in one run. ``--save`` keeps the output in docs/."""

from __future__ import annotations

import contextlib
import io
import platform
import sys
from pathlib import Path

import daemon
import kernel

KEPT = Path(__file__).parent.parent / "docs" / "BENCHMARKS.md"


class Tee(io.StringIO):
    """Writes to stdout as well."""

    def write(self, text: str) -> int:
        sys.__stdout__.write(text)  # type: ignore[union-attr]
        sys.__stdout__.flush()  # type: ignore[union-attr]
        return super().write(text)


def main() -> None:
    """Run, print, and keep if asked to."""
    seen = Tee()
    with contextlib.redirect_stdout(seen):
        kernel.main()
        print()
        daemon.main()
    if "--save" in sys.argv[1:]:
        KEPT.write_text(
            "# Benchmarks\n\nWhat `make bench ARGS=--save` printed, as it was measured, on"
            f" {platform.system()} {platform.machine()}.\nRatios compare within one run; absolute figures are"
            " of that machine.\n\n```text\n" + seen.getvalue().rstrip() + "\n```\n"
        )


if __name__ == "__main__":
    main()
