"""One target under atheris: ``python -m fuzz.guided "image loader" -atheris_runs=1000``."""

from __future__ import annotations

import random
import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["bloomgate.filters", "bloomgated.storage"]):
    from fuzz.targets import READERS


def main() -> None:
    """Does not return: libFuzzer ends the process, with 0 if it found nothing."""
    target = next(target for target in READERS if target.name == sys.argv[1])

    def mutator(data: bytes, most: int, seed: int) -> bytes:
        changed = bytearray(atheris.Mutate(data, most))
        target.mend(changed, random.Random(seed))
        return bytes(changed[:most])

    with target.open() as run, tempfile.TemporaryDirectory() as corpus:
        for number, seed in enumerate(target.seeds()):
            (Path(corpus) / str(number)).write_bytes(seed)
        # It takes none but bytes of its own kind.
        atheris.Setup([sys.argv[0], *sys.argv[2:], corpus], run, custom_mutator=mutator)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
