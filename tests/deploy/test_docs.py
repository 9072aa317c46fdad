"""The documentation says what the code does."""

from __future__ import annotations

import ast
import dataclasses
import re
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from bloomgate import Backoff, BloomFilter, Client, ClientOptions
from bloomgate.filters import Segment, image
from bloomgated import config
from bloomgated.storage.database import row_crc
from bloomgated.storage.mark import IN_USE, MarkFile
from bloomgated.storage.records import Add, Create, SnapshotFile, Snapshots, encode
from support import reliability
from support.daemon import DaemonProcess

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def page(name: str) -> str:
    return (ROOT / name).read_text()


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


def blocks(text: str, language: str) -> list[str]:
    """The fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def anchors(path: Path) -> set[str]:
    """What headings of a page are linked by."""
    headings = re.findall(r"^#+ (.+)$", without_code(path.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in headings}


def table(text: str, heading: str) -> list[list[str]]:
    """The rows of all tables below a heading, up to the next one, without their head."""
    section = re.split(r"^#+ ", text.partition(f"\n## {heading}\n")[2], flags=re.MULTILINE)[0]
    found = re.findall(r"(?:^\|.*\n)+", section, re.MULTILINE)
    rows = [line for block in found for line in block.splitlines()[2:]]
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows]


# -- links and words


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_relative_links_lead_somewhere(path: Path) -> None:
    """Every link that is not an address is a file of the project, and its anchor a heading in it."""
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(path.read_text())):
        if "://" in target:
            continue
        file, _, anchor = target.partition("#")
        found = (path.parent / file).resolve() if file else path
        assert found.is_relative_to(ROOT), target
        assert found.exists(), target
        if anchor:
            assert anchor in anchors(found), target


def test_no_page_is_left_out() -> None:
    """Each page of docs/ is linked from the README, each decision from its index."""
    readme, index = page("README.md"), page("docs/adr/README.md")
    for path in PAGES:
        if path.parent == ROOT / "docs":
            assert f"(docs/{path.name})" in readme, path.name
        elif path.parent.name == "adr" and path.name != "README.md":
            assert f"({path.name})" in index, path.name
            number, title = path.name[:4], path.read_text().splitlines()[0]
            assert title.startswith(f"# {number}: ")
            assert f"| {title[8:]} |" in index


def test_the_readme_names_the_two_commands() -> None:
    """make demo and make test, and what they need."""
    text = page("README.md")
    assert re.search(r"^make demo\b", text, re.MULTILINE)
    assert re.search(r"^make test\b", text, re.MULTILINE)
    assert "Python 3.11 or newer (with venv) and make" in text


def test_every_make_command_that_is_named_exists() -> None:
    """In all pages, a make command is one of the Makefile's."""
    targets = set(re.findall(r"^([a-z]+):", page("Makefile"), re.MULTILINE))
    for path in PAGES:
        named = re.findall(r"(?:`|^)make ([a-z]+)", path.read_text(), re.MULTILINE)
        assert set(named) <= targets, path


def test_the_readme_names_every_subcommand() -> None:
    """The table of commands is the command's own list."""
    from bloomgate.cli.commands import cli

    cells = [row[0] for row in table(page("README.md"), "The commands")]
    named = {re.split(r"\W", part.strip("` "))[0] for cell in cells for part in cell.split(", ")}
    assert named == set(cli.commands)


def test_the_changelog_has_the_version() -> None:
    """Its newest entry is the version that the package has."""
    from bloomgate import __version__

    newest = re.search(r"^## (\S+) - (\S+)$", page("CHANGELOG.md"), re.MULTILINE)
    assert newest
    assert newest[1] == __version__


# -- examples


@pytest.fixture
def names(daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What examples run in: a daemon, an authority, and the filter that the README creates with a command."""
    authority = sqlite3.connect(":memory:")
    authority.execute("CREATE TABLE blocked (domain TEXT PRIMARY KEY, reason TEXT)")
    with Client(daemon.grpc) as client:
        assert client.create_filter("fraud-blocklist", capacity=100_000, error_rate=0.01).created
    # No check may fall back here because the machine is busy, so none has a deadline that it could miss.
    slow = ClientOptions(check_timeout=20.0, on_error="raise")
    real = Client.__init__

    def patient(self: Client, target: str, **options: Any) -> None:
        real(self, target, **{"options": slow, **options})

    monkeypatch.setattr(Client, "__init__", patient)
    return {"db": authority, "daemon": daemon}


def run_examples(name: str, names: dict[str, Any]) -> dict[str, Any]:
    """Run a page's Python, one block after the other in one namespace."""
    for number, code in enumerate(blocks(page(name), "python")):
        code = code.replace("127.0.0.1:50051", names["daemon"].grpc)
        exec(compile(code, f"{name} block {number}", "exec"), names)
    return names


def test_the_readmes_examples_do_what_they_say(names: dict[str, Any]) -> None:
    """They run against a daemon; the guarded lookup finds what was blocked, and asks for nothing else."""
    queries: list[str] = []
    names["db"].set_trace_callback(queries.append)
    run_examples("README.md", names)
    names["block"]("mailinator.com", "disposable")
    queries.clear()
    assert names["blocked_because"]("mailinator.com") == ("disposable",)
    assert len(queries) == 1
    found = [names["blocked_because"](f"{number}.example.org") for number in range(100)]
    assert found == [None] * 100
    # At this fill a single false positive among a hundred has a chance of one in a billion billion.
    assert len(queries) == 1
    names["blocked_because"].guard.flush()
    outcomes = names["blocklist"].stats()
    assert (outcomes.outcomes_found, outcomes.outcomes_not_found) == (1, 0)
    names["db"].close()


def test_the_guard_example_is_short() -> None:
    """Ten lines of code, not counting empty ones."""
    code = blocks(page("README.md"), "python")[0]
    assert len([line for line in code.splitlines() if line.strip()]) <= 10


def test_the_client_guides_examples_do_what_they_say(names: dict[str, Any]) -> None:
    """They run against a daemon, one after the other; their asserts hold."""
    run_examples("docs/CLIENT.md", names)
    names["client"].close()
    names["db"].close()


def test_the_client_guide_begins_with_the_first_rule() -> None:
    """Its first paragraph says in which order to add and to commit."""
    first = page("docs/CLIENT.md").split("\n\n")[1]
    assert first.startswith("**Add before the authority's transaction commits.**")


# -- tables


def test_the_settings_table_is_the_daemons() -> None:
    """Every key with its default, in the order of `bloomgated config`'s source, and no other."""
    rows = table(page("docs/OPERATIONS.md"), "Settings")
    settings, _ = config.load(None, {}, {})
    defaults = dict(re.findall(r"^(\S+) += (\S+) ", _dotted(config.to_toml(settings, _sources())), re.M))
    assert {row[0].strip("`"): row[1].strip("`") for row in rows} == defaults
    assert [row[0].strip("`") for row in rows] == list(config.keys())


def _sources() -> dict[str, str]:
    return dict.fromkeys(config.keys(), "default")


def _dotted(toml: str) -> str:
    """TOML with its tables written out in each key."""
    head, lines = "", []
    for line in toml.splitlines():
        if line.startswith("["):
            head = f"{line.strip('[]')}."
        elif line:
            lines.append(f"{head}{line}")
    return "\n".join(lines)


def test_the_metrics_tables_are_the_daemons(daemon: DaemonProcess) -> None:
    """Every metric that /metrics serves is described, and no other."""
    with Client(daemon.grpc) as client:
        client.create_filter("coupons", 1000)
    _, served = daemon.get("/metrics")
    found = set(re.findall(r"^# HELP (\S+)", served, re.MULTILINE))
    rows = table(page("docs/OPERATIONS.md"), "Metrics")
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row[0])}
    assert named == found


def test_the_client_options_are_the_clients() -> None:
    """Every knob with its default."""
    section = page("docs/CLIENT.md").partition("## Options")[2]
    named = {name: float(value) for name, value in re.findall(r"`(\w+)` (\d+(?:\.\d+)?)\b", section)}
    known: dict[str, float] = {}
    for options in (ClientOptions(), Backoff()):
        for field in dataclasses.fields(options):
            value = getattr(options, field.name)
            if isinstance(value, int | float):
                known[field.name] = value
    assert named == known


def test_the_reliability_page_is_of_these_tests() -> None:
    """Its rows are what the fault tests record, and how it ended; each was tried, kills 500 times."""
    rows = table(page("docs/RELIABILITY.md"), "What was tried")
    known = {row for path in reliability.sources() for row in reliability.recorded(path)}
    assert {(fault, ending) for fault, _, ending in rows} == known
    assert all(int(tried.replace(",", "")) > 0 for _, tried, _ in rows)
    kills = sum(
        int(tried.replace(",", "")) for fault, tried, _ in rows if "kill -9 at random moments, under" in fault
    )
    assert kills >= 500


# -- formats


def example(name: str) -> bytes:
    """The bytes of a hex example of FORMAT.md; its offsets are judged on the way."""
    found = re.search(rf"<!-- EXAMPLE {name} -->\n```\n(.*?)```", page("docs/FORMAT.md"), re.DOTALL)
    assert found, name
    data = b""
    for line in found[1].splitlines():
        offset, shown = line[:4], line[6:53]
        assert int(offset, 16) == len(data), line
        data += bytes.fromhex(shown)
    return data


def test_the_image_example_is_the_codes() -> None:
    """The image on the page is the one that the code makes, and reads back."""
    bloom = BloomFilter.sized(67, 2, seed=0)
    bloom.add("mango")
    shown = example("image")
    assert image.to_bytes(bloom, generation=1, seq=2) == shown
    assert BloomFilter.from_bytes(shown).might_contain("mango")
    assert bloom.spec.hasher.digest(b"mango").hex(" ") in page("docs/FORMAT.md")


def test_the_journal_examples_are_the_codes(tmp_path: Path) -> None:
    """Payloads, checksums of rows and the mark on the page are those that the code writes."""
    text = page("docs/FORMAT.md")
    bloom = BloomFilter.sized(67, 2, seed=0)
    create = encode(Create("coupons", bloom.spec))
    add = encode(Add(1, Segment(0, bloom.spec.hasher.digest(b"mango"), 1)))
    shown = example("image")
    crc = int.from_bytes(shown[-4:], "little")
    file = SnapshotFile("0000000000000001-1-1.bgf", 1, 2, 2, len(shown), crc, 1.5)
    assert create.payload == example("create")
    assert add.payload == example("add")
    assert encode(Snapshots(1, (file,))).payload == example("snapshots")
    assert f"kind 1, filter_id 0, crc `{row_crc(1, create, 0.5):#010x}`" in text
    assert f"kind 3, filter_id 1, crc `{row_crc(2, add, 0.5):#010x}`" in text
    mark = MarkFile(tmp_path / "mark", bytes(range(16)))
    mark.write(IN_USE, 2, row_crc(2, add, 0.5))
    mark.close()
    assert (tmp_path / "mark").read_bytes() == example("mark")


def test_the_schema_is_the_codes() -> None:
    """The tables on the page are those that are created."""
    from bloomgated.storage import database

    (shown,) = blocks(page("docs/FORMAT.md"), "sql")
    assert shown.split() == database._SCHEMA.split()


# -- guarantees


def functions_of(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_every_guarantee_names_tests_that_exist() -> None:
    """Sentences are numbered without a gap, and each names a test by file and function."""
    guarantees = re.split(r"^(\d+)\. ", page("docs/GUARANTEES.md"), flags=re.MULTILINE)[1:]
    numbers, texts = guarantees[::2], guarantees[1::2]
    assert list(map(int, numbers)) == list(range(1, len(numbers) + 1))
    for number, text in zip(numbers, texts, strict=True):
        sentence = text.split("\n\n")[0]
        named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", sentence)
        assert named, f"{number} names no test"
        for file, function in named:
            assert function in functions_of(ROOT / file), f"{number}: {file}::{function}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_fenced_block_is_empty(page: Path) -> None:
    """What a page announces it shows."""
    assert not re.search(r"^```\w*\n\s*```$", page.read_text(), re.MULTILINE)
