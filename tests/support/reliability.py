"""`make reliability`: every test that notes what it tried, at full length, and the table of what it printed.

With ``--save`` the table goes into docs/RELIABILITY.md, between its two markers.
"""

from __future__ import annotations

import ast
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "RELIABILITY.md"
BEGIN, END = "<!-- begin: make reliability -->\n", "<!-- end: make reliability -->\n"

Row = tuple[str, str]
"""A fault, and how it ended."""


def sources() -> list[Path]:
    """The test files that record."""
    return [path for path in sorted((ROOT / "tests").rglob("test_*.py")) if any(recorded(path))]


def recorded(path: Path) -> Iterator[Row]:
    """What the calls of ``record`` in a file are about; both are constants there."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "record":
            fault, ending = node.args[0], node.args[2]
            assert isinstance(fault, ast.Constant), f"{path}:{node.lineno}: the fault is no constant"
            assert isinstance(ending, ast.Constant), f"{path}:{node.lineno}: the ending is no constant"
            yield fault.value, ending.value


def table(tried: Counter[Row]) -> str:
    """The rows as Markdown, in the order of the files that record them."""
    order = {row: place for place, row in enumerate(row for path in sources() for row in recorded(path))}
    lines = ["| fault | tried | every time it |", "|---|---|---|"]
    for fault, ending in sorted(tried, key=lambda row: order.get(row, len(order))):
        lines.append(f"| {fault} | {tried[fault, ending]:,} | {ending} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run, print, save; returns the exit code of pytest."""
    save = sys.argv[1:] == ["--save"]
    assert save or not sys.argv[1:], "takes nothing, or --save"
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        notes = Path(folder) / "tally"
        notes.touch()
        code = subprocess.run(
            [
                *(
                    sys.executable,
                    "-m",
                    "pytest",
                    "-q",
                    "-n",
                    "2",
                    "--dist",
                    "loadfile",
                    "-o",
                    "timeout=3600",
                ),
                *map(str, sources()),
            ],
            cwd=ROOT,
            env={**os.environ, "BLOOMGATE_RELIABILITY": "1", "BLOOMGATE_TALLY": str(notes)},
            check=False,
        ).returncode
        tried: Counter[Row] = Counter()
        for line in notes.read_text().splitlines():
            note = json.loads(line)
            tried[note["fault"], note["ending"]] += note["tried"]
    minutes = (time.monotonic() - started) / 60
    text = (
        f"{time.strftime('%Y-%m-%d')}, Python {platform.python_version()}, {os.cpu_count()} cores,"
        f" {minutes:.0f} minutes; every row had no wrong \"no\".\n\n{table(tried)}"
    )  # fmt: skip
    print(text if code == 0 else table(tried))
    missing = {row for path in sources() for row in recorded(path)} - set(tried)
    for fault, _ in sorted(missing):
        print(f"not tried: {fault}", file=sys.stderr)
    if save and code == 0 and not missing:
        page = PAGE.read_text()
        head, _, rest = page.partition(BEGIN)
        _, _, tail = rest.partition(END)
        PAGE.write_text(f"{head}{BEGIN}\n{text}\n{END}{tail}")
    return code or bool(missing)


if __name__ == "__main__":
    sys.exit(main())
