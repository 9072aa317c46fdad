"""`make fuzz`: at least a million inputs, over all targets and cores, with a table of what came of them.

A finding is an input after which something is wrong, see targets.py. It is written to fuzz-findings/ with its
traceback, and ``--replay FILE`` runs it again. All inputs come from ``--seed`` alone. With atheris there are
runs beyond, guided by coverage.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import hashlib
import logging
import multiprocessing
import os
import random
import re
import subprocess
import sys
import time
import traceback
from collections import defaultdict
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from .calls import CALLS
from .files import FILES
from .mutating import mutated
from .port import PORTS
from .targets import READERS

ROOT = Path(__file__).parents[2]
FINDINGS = ROOT / "fuzz-findings"
TARGETS = {target.name: target for target in (*READERS, *FILES, CALLS, PORTS)}
GUIDED = [target.name for target in READERS]
LEAST = 1_000_000
SHARD = 20_000
# Seconds of one input that are a finding of their own, and after which the process is given up.
SLOW, HANGS = 10.0, 120.0
# Of one shard: after that, more of the same is likely.
MOST_FINDINGS = 5
GUIDED_RUNS, GUIDED_SECONDS = 500_000, 60


@dataclass
class Tried:
    """What came of some inputs."""

    inputs: int = 0
    seconds: float = 0.0
    findings: list[str] = field(default_factory=list)


def fuzz(name: str, seed: str, inputs: int, until: float) -> Tried:
    """Try inputs of one target, as many as there is time for; findings are written down."""
    target, tried, rng = TARGETS[name], Tried(), random.Random(seed)
    seeds, began = target.seeds(), time.monotonic()
    data = b""
    try:
        with target.open() as run:
            for number in range(inputs):
                if number % 256 == 0:
                    if time.time() > until:
                        break
                    faulthandler.dump_traceback_later(HANGS, exit=True)
                data = seeds[number] if number < len(seeds) else mutated(
                    rng, seeds, target.tokens, target.mend
                )  # fmt: skip
                started = time.monotonic()
                try:
                    run(data)
                    took = time.monotonic() - started
                    assert took < SLOW, f"one input took {took:.0f} s"
                except Exception:
                    tried.findings.append(_write(name, seed, number, data))
                    if len(tried.findings) == MOST_FINDINGS:
                        break
                tried.inputs += 1
    except Exception:
        # What it opened had to be as it was, and is not: the inputs before did that.
        tried.findings.append(_write(name, seed, tried.inputs, data))
    finally:
        faulthandler.cancel_dump_traceback_later()
    tried.seconds = time.monotonic() - began
    return tried


def _write(name: str, seed: str, number: int, data: bytes) -> str:
    FINDINGS.mkdir(exist_ok=True)
    stem = f"{re.sub('[^a-z]+', '-', name)}-{hashlib.sha256(data).hexdigest()[:12]}"
    (FINDINGS / f"{stem}.bin").write_bytes(data)
    (FINDINGS / f"{stem}.txt").write_text(
        f"target {name!r}, seed {seed!r}, input {number}\n\n{traceback.format_exc()}"
    )
    return f"{FINDINGS.name}/{stem}.txt: {traceback.format_exc().splitlines()[-1][:200]}"


def guided(name: str) -> Tried:
    """A bounded run of atheris in a process of its own."""
    FINDINGS.mkdir(exist_ok=True)
    began = time.monotonic()
    prefix = FINDINGS / f"{re.sub('[^a-z]+', '-', name)}-guided-"
    ended = subprocess.run(
        [
            sys.executable, "-m", "fuzz.guided", name, f"-artifact_prefix={prefix}",
            f"-atheris_runs={GUIDED_RUNS}", f"-max_total_time={GUIDED_SECONDS}", "-timeout=60", "-seed=1",
        ],
        capture_output=True, text=True, errors="replace", check=False,
    )  # fmt: skip
    counts = re.findall(r"^(?:#|Done )(\d+)\b", ended.stderr, re.MULTILINE)
    tried = Tried(max(map(int, counts), default=0))
    tried.seconds = time.monotonic() - began
    if ended.returncode:
        told = f"{prefix.name}output.txt"
        (FINDINGS / told).write_text(ended.stdout + ended.stderr)
        tried.findings.append(f"{FINDINGS.name}/{told}: atheris ended with {ended.returncode}")
    return tried


def quiet() -> None:
    """What is refused is logged by the daemon's parts, a million times."""
    logging.getLogger().addHandler(logging.NullHandler())


def shards(names: list[str], seed: int, scale: float) -> list[tuple[str, str, int]]:
    """Targets with seeds and numbers of inputs, the slowest first."""
    made: list[tuple[str, str, int]] = []
    for name in reversed(names):
        inputs = max(1, int(TARGETS[name].inputs * scale))
        made += [
            (name, f"{seed}:{name}:{start}", min(SHARD, inputs - start)) for start in range(0, inputs, SHARD)
        ]
    return made


def main() -> int:
    """Exit code 0 if nothing was found and, where nothing less was asked for, a million inputs were tried."""
    parser = argparse.ArgumentParser(prog="fuzz", description=__doc__)
    parser.add_argument("--only", choices=TARGETS, action="append", help="a target; can be repeated")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="where all inputs come from")
    parser.add_argument("--scale", type=float, default=1.0, help="times as many inputs")
    parser.add_argument("--minutes", type=float, default=13.0, help="after which it ends in any case")
    parser.add_argument("--replay", type=Path, help="run one finding's .bin again, of the one --only")
    asked = parser.parse_args()
    quiet()
    if asked.replay:
        if not asked.only:
            parser.error("--replay needs the target of the finding: --only")
        with TARGETS[asked.only[0]].open() as run:
            run(asked.replay.read_bytes())
        return 0
    names = asked.only or list(TARGETS)
    print(f"seed {asked.seed}", flush=True)
    table: dict[str, Tried] = defaultdict(Tried)
    until = time.time() + 60 * asked.minutes
    processes = max(2, os.cpu_count() or 1)
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, spawn, initializer=quiet) as pool:
        waiting: dict[Future[Tried], tuple[str, str]] = {
            pool.submit(fuzz, name, seed, inputs, until): (name, seed)
            for name, seed, inputs in shards(names, asked.seed, asked.scale)
        }
        if find_spec("atheris") is not None:
            for name in set(GUIDED) & set(names):
                waiting[pool.submit(guided, name)] = (f"{name}, guided", "1")
        else:
            print("atheris is not installed: no guided runs", flush=True)
        for done in as_completed(waiting):
            name, seed = waiting[done]
            try:
                tried = done.result()
            except BrokenProcessPool:
                tried = Tried(findings=[f"a process died, perhaps of seed {seed!r}; stderr has where it was"])
            row = table[name]
            row.inputs += tried.inputs
            row.seconds += tried.seconds
            row.findings += tried.findings
    with contextlib.suppress(OSError):
        FINDINGS.rmdir()  # of no findings
    return report(table, whole=asked.only is None and asked.scale >= 1)


def report(table: dict[str, Tried], *, whole: bool) -> int:
    """Print the table and the findings; returns the exit code."""
    line = "{:<26} {:>10} {:>9} {:>9}"
    print(line.format("target", "inputs", "seconds", "findings"))
    for name in sorted(table):
        row = table[name]
        print(line.format(name, row.inputs, f"{row.seconds:.0f}", len(row.findings)))
    inputs = sum(row.inputs for row in table.values())
    seconds = sum(row.seconds for row in table.values())
    findings = [finding for row in table.values() for finding in row.findings]
    print(line.format("all", inputs, f"{seconds:.0f}", len(findings)))
    for finding in findings:
        print(finding, file=sys.stderr)
    few = whole and inputs < LEAST
    if few:
        print(f"the time was up before {LEAST} inputs", file=sys.stderr)
    return 1 if findings or few else 0


if __name__ == "__main__":
    sys.exit(main())
