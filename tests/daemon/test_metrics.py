"""What operators see: /metrics, /livez and /readyz, also through a real Prometheus."""

from __future__ import annotations

import json
import os
import re
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from bloomgate import __version__
from bloomgate.v1 import admin_pb2, filters_pb2
from conftest import StartDaemon
from support.daemon import DaemonProcess
from support.tools import program

from .calls import Admin, Filters, add, check, create, eventually, failure, stats
from .preludes import HOLD_CALLS

ROOT = Path(__file__).parent.parent.parent
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]

# Of one filter: every series there is, as (name, other labels).
SERIES_OF_A_FILTER = {
    *(
        f"bloomgate_checks_total/{result}/{via}"
        for result in ("skip", "hit", "unsure")
        for via in ("rpc", "replica")
    ),
    "bloomgate_leases",
    *((f"bloomgate_outcomes_total/{outcome}") for outcome in ("found", "not_found", "false_no")),
    *((f"bloomgate_filter_state/{state}") for state in ("ready", "damaged")),
    "bloomgate_adds_total",
    "bloomgate_filter_capacity",
    "bloomgate_filter_approximate_count",
    "bloomgate_filter_bits",
    "bloomgate_filter_bits_set",
    "bloomgate_filter_memory_bytes",
    "bloomgate_filter_expected_error_rate",
    "bloomgate_filter_target_error_rate",
    "bloomgate_filter_generation",
    "bloomgate_snapshot_seq",
    "bloomgate_snapshot_timestamp_seconds",
    "bloomgate_snapshot_failures_total",
}
METHODS = {
    "bloomgate.v1.FilterService": ("Add", "MightContain", "Stats", "ReportOutcomes", "HashSpec"),
    "bloomgate.v1.AdminService": ("CreateFilter", "ListFilters", "DropFilter", "SnapshotFilter"),
}


def scraped(daemon: DaemonProcess) -> Samples:
    """Every sample of /metrics, by name and labels."""
    status, text = daemon.get("/metrics")
    assert status == 200
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples[name, frozenset(labels.items())]


def series_of(samples: Samples, name: str) -> dict[str, float]:
    """What there is of one filter: name and other labels, joined by slashes."""
    found = {}
    for (metric, labels), number in samples.items():
        others = dict(labels)
        if others.pop("filter", None) == name:
            order = sorted(others, key=["result", "outcome", "state", "via"].index)
            found["/".join([metric, *(others[label] for label in order)])] = number
    return found


# -- filters


def test_a_new_filter_has_every_series_at_zero(shared: DaemonProcess, admin: Admin) -> None:
    """From its creation on, so that a rate over its first minutes is right; and no other series."""
    name = create(admin, capacity=1000, error_rate=0.02)
    series = series_of(scraped(shared), name)
    assert set(series) == SERIES_OF_A_FILTER
    told = {
        "bloomgate_filter_capacity": 1000,
        "bloomgate_filter_bits": stats_of(shared, name).bits,
        "bloomgate_filter_memory_bytes": stats_of(shared, name).memory_bytes,
        "bloomgate_filter_target_error_rate": 0.02,
        "bloomgate_filter_generation": 1,
        "bloomgate_filter_state/ready": 1,
    }
    assert {each: number for each, number in series.items() if number} == told


def stats_of(daemon: DaemonProcess, name: str) -> filters_pb2.FilterStats:
    with daemon.stubs() as (filters, _):
        return stats(filters, name)


def test_traffic_is_counted_in_keys(shared: DaemonProcess, admin: Admin, filters: Filters) -> None:
    """As Stats counts it: checks by what they came to, keys of acknowledged Adds, outcomes as reported."""
    name = create(admin, error_rate=1e-9)
    add(filters, name, b"a", b"b", b"a")
    check(filters, name, b"a", b"b", *(b"absent-%d" % i for i in range(100)))
    check(filters, name, b"a")
    filters.ReportOutcomes(filters_pb2.ReportOutcomesRequest(filter=name, found=3, not_found=2, false_no=1))
    shown = admin.SnapshotFilter(admin_pb2.SnapshotFilterRequest(name=name)).filter
    series = series_of(scraped(shared), name)
    assert series["bloomgate_checks_total/hit/rpc"] == 3
    assert series["bloomgate_checks_total/skip/rpc"] == 100
    assert series["bloomgate_checks_total/unsure/rpc"] == 0
    assert series["bloomgate_adds_total"] == 3
    assert series["bloomgate_outcomes_total/found"] == 3
    assert series["bloomgate_outcomes_total/not_found"] == 2
    assert series["bloomgate_outcomes_total/false_no"] == 1
    assert series["bloomgate_filter_approximate_count"] == 2
    assert series["bloomgate_filter_bits_set"] == shown.bits_set
    assert series["bloomgate_filter_expected_error_rate"] == shown.expected_error_rate
    assert series["bloomgate_snapshot_seq"] == shown.snapshot_seq
    assert series["bloomgate_snapshot_timestamp_seconds"] == pytest.approx(
        shown.snapshot_time.ToNanoseconds() / 1e9
    )


def test_a_dropped_filter_takes_its_series_along(
    shared: DaemonProcess, admin: Admin, filters: Filters
) -> None:
    """Not one stays behind, and one of the same name begins at zero."""
    name = create(admin)
    add(filters, name, b"a")
    check(filters, name, b"a")
    admin.DropFilter(admin_pb2.DropFilterRequest(name=name))
    assert series_of(scraped(shared), name) == {}
    create(admin, name)
    series = series_of(scraped(shared), name)
    assert series["bloomgate_adds_total"] == series["bloomgate_checks_total/hit/rpc"] == 0


# -- the journal, and what is running


def test_the_journal_tells_seq_and_groups(shared: DaemonProcess, admin: Admin, filters: Filters) -> None:
    """Its durable position, and one commit with its seconds and its records."""
    name = create(admin)
    before = scraped(shared)
    seq = add(filters, name, b"a").seq
    after = scraped(shared)
    assert value(after, "bloomgate_journal_seq") == seq
    for metric, least in (("commit_seconds", 0.0), ("group_size", 1.0)):
        for part, rise in (("count", 1.0), ("sum", least)):
            each = f"bloomgate_journal_{metric}_{part}"
            grown = value(after, each) - value(before, each)
            assert grown >= rise
            assert grown == rise or each.endswith("seconds_sum")


def test_the_version_that_runs_is_told(shared: DaemonProcess) -> None:
    """As a label, so that a dashboard can show when it changed."""
    assert value(scraped(shared), "bloomgate_build_info", version=__version__) == 1


def test_nothing_tells_when_a_series_was_created(
    shared: DaemonProcess, admin: Admin, filters: Filters
) -> None:
    """Those double the number of series and help nobody."""
    add(filters, create(admin), b"a")
    assert not [name for name, _ in scraped(shared) if name.endswith("_created")]


# -- calls


def test_every_method_is_there_from_the_start(start_daemon: StartDaemon) -> None:
    """Started, handled as OK and its seconds, at zero, under the names that gRPC dashboards know."""
    samples = scraped(start_daemon())
    for service, methods in METHODS.items():
        for method in methods:
            labels = {"grpc_type": "unary", "grpc_service": service, "grpc_method": method}
            assert value(samples, "grpc_server_started_total", **labels) == 0
            assert value(samples, "grpc_server_handled_total", **labels, grpc_code="OK") == 0
            assert value(samples, "grpc_server_handling_seconds_count", **labels) == 0
            bounds = {
                float(dict(labels)["le"])
                for (name, labels) in samples
                if name == "grpc_server_handling_seconds_bucket" and ("grpc_method", method) in labels
            }
            assert min(bounds) == 1e-4
            assert sorted(bounds)[-2:] == [1.0, float("inf")]


@pytest.mark.parametrize(
    ("service", "method", "request_", "code"),
    [
        ("FilterService", "Add", filters_pb2.AddRequest(filter="absent", keys=[b"k"]), "NOT_FOUND"),
        ("FilterService", "Add", filters_pb2.AddRequest(filter="../x", keys=[b"k"]), "INVALID_ARGUMENT"),
        ("FilterService", "MightContain", filters_pb2.MightContainRequest(filter="a", keys=[b"k" * 65537]),
         "RESOURCE_EXHAUSTED"),
        ("FilterService", "Stats", filters_pb2.StatsRequest(filter="taken"), "OK"),
        ("AdminService", "CreateFilter", admin_pb2.CreateFilterRequest(
            name="taken", spec=filters_pb2.FilterSpec(capacity=5, error_rate=0.1)), "ALREADY_EXISTS"),
        ("AdminService", "ListFilters", admin_pb2.ListFiltersRequest(), "OK"),
    ],
)  # fmt: skip
def test_calls_are_counted_with_their_code(
    shared: DaemonProcess, admin: Admin, filters: Filters, service: str, method: str, request_: Any, code: str
) -> None:
    """Started once, handled once with the code that the caller got, timed once."""
    if not any(each.name == "taken" for each in admin.ListFilters(admin_pb2.ListFiltersRequest()).filters):
        create(admin, "taken")
    labels = {"grpc_type": "unary", "grpc_service": f"bloomgate.v1.{service}", "grpc_method": method}
    before = scraped(shared)
    call = getattr(filters if service == "FilterService" else admin, method)
    if code == "OK":
        call(request_)
    else:
        assert failure(call, request_).code.name == code

    def risen() -> dict[str, float]:
        now = scraped(shared)
        return {
            name: now.get((name, frozenset(of.items())), 0) - before.get((name, frozenset(of.items())), 0)
            for name, of in (
                ("grpc_server_started_total", labels),
                ("grpc_server_handled_total", {**labels, "grpc_code": code}),
                ("grpc_server_handling_seconds_count", labels),
            )
        }

    # The caller may have its answer a moment before it is counted.
    eventually(lambda: min(risen().values()) >= 1)
    assert set(risen().values()) == {1.0}
    after = scraped(shared)
    handled = [
        number - before.get(key, 0) for key, number in after.items() if key[0] == "grpc_server_handled_total"
    ]
    assert sum(handled) == 1


def test_a_call_that_the_caller_gave_up_is_counted_as_such(start_daemon: StartDaemon, tmp_path: Path) -> None:
    """Its deadline passed while the daemon was still at it."""
    prelude = HOLD_CALLS.format(verb="add", path=str(tmp_path / "never"))
    daemon = start_daemon("--set", "drain=0.1", prelude=prelude)
    with daemon.stubs() as (filters, admin):
        name = create(admin)
        request = filters_pb2.AddRequest(filter=name, keys=[b"k"])
        with pytest.raises(Exception, match="DEADLINE_EXCEEDED"):
            filters.Add(request, timeout=0.2)
    labels = {"grpc_type": "unary", "grpc_service": "bloomgate.v1.FilterService", "grpc_method": "Add"}
    key = ("grpc_server_handled_total", frozenset({**labels, "grpc_code": "CANCELLED"}.items()))
    assert eventually(lambda: scraped(daemon).get(key)) == 1


# -- the HTTP port


def test_the_http_port_answers_what_it_should(shared: DaemonProcess) -> None:
    """Alive, ready, metrics in the text format, a word about these; anything else is not there."""
    assert shared.get("/livez") == (200, "ok\n")
    assert shared.get("/readyz") == (200, "ok\n")
    assert shared.get("/")[0] == 200
    assert shared.get("/metricz")[0] == 404
    with urllib.request.urlopen(f"http://{shared.http}/metrics") as reply:
        assert reply.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"


# -- a real Prometheus


def test_promtool_finds_nothing_wrong(shared: DaemonProcess, admin: Admin, filters: Filters) -> None:
    """Of the names, types and help of the real output, with traffic and failures in it."""
    promtool = program("promtool", "prometheus")
    name = create(admin)
    add(filters, name, b"a")
    check(filters, name, b"a", b"b")
    failure(filters.Stats, filters_pb2.StatsRequest(filter="absent"))
    admin.SnapshotFilter(admin_pb2.SnapshotFilterRequest(name=name))
    ended = subprocess.run(
        [promtool, "check", "metrics"],
        input=shared.get("/metrics")[1],
        capture_output=True,
        text=True,
        check=False,
    )
    said = [line for line in (ended.stdout + ended.stderr).splitlines() if not MEANT.search(line)]
    assert said == []
    assert ended.returncode in (0, 3)  # 3: it said something


# A filter's bits are what is counted, not a size in a wrong unit; and its count is a gauge like any other.
MEANT = re.compile(
    r'^bloomgate_filter_bits(_set)? use base unit "bytes" instead of "bits"$'
    r'|^bloomgate_filter_approximate_count non-histogram .* should not have "_count" suffix$'
)


class Prometheus:
    """A real process that scrapes one daemon four times a second."""

    def __init__(self, daemon: DaemonProcess, directory: Path) -> None:
        prometheus = program("prometheus", "prometheus")
        file = directory / "prometheus.yml"
        file.write_text(self._settings(daemon.http))
        self.log_path = directory / "prometheus.log"
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                [prometheus, f"--config.file={file}", f"--storage.tsdb.path={directory / 'tsdb'}",
                 "--web.listen-address=127.0.0.1:0", "--log.level=debug"],
                stdout=log, stderr=log,
            )  # fmt: skip
        # Port 0 is a free one; which, it says only in its log or not at all: its sockets tell.
        self.address = eventually(self._listening, 30)

    @staticmethod
    def _settings(target: str) -> str:
        """The settings that are deployed, if there are some, aimed at ``target`` and in more of a hurry."""
        deployed = ROOT / "deploy" / "prometheus" / "prometheus.yml"
        text = (
            deployed.read_text()
            if deployed.exists()
            else "global:\n  scrape_interval: 5s\nscrape_configs:\n  - job_name: bloomgated\n"
            '    static_configs:\n      - targets: ["bloomgated:9464"]\n'
        )
        text, targets = re.subn(r"bloomgated:\d+", target, text)
        assert targets == 1
        text = re.sub(r"(scrape_interval|evaluation_interval): *\S+", r"\1: 250ms", text)
        text = re.sub(r"scrape_timeout: *\S+", "scrape_timeout: 250ms", text)
        # The shared daemon has no TLS and asks nobody who they are.
        text = re.sub(r"    scheme: https\n.*?credentials_file: *\S+\n", "", text, flags=re.S)
        # What stands beside the deployed file is checked with it, not here.
        return re.sub(r"^rule_files:\n(\s+- .*\n)+", "", text, flags=re.M)

    def _listening(self) -> str:
        assert self.process.poll() is None, self.log_path.read_text()
        sockets = {
            link.removeprefix("socket:[").removesuffix("]")
            for fd in Path(f"/proc/{self.process.pid}/fd").iterdir()
            if (link := _link(fd)).startswith("socket:[")
        }
        for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[9] in sockets and fields[3] == "0A":
                return f"127.0.0.1:{int(fields[1].rpartition(':')[2], 16)}"
        return ""

    def ask(self, query: str) -> float | None:
        """The value of an instant query with one result, if it has that by now."""
        url = f"http://{self.address}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
        try:
            with urllib.request.urlopen(url, timeout=5) as reply:
                found = json.load(reply)["data"]["result"]
        except OSError:
            return None
        return float(found[0]["value"][1]) if len(found) == 1 else None

    def end(self) -> None:
        self.process.kill()
        self.process.wait(10)


def _link(fd: Path) -> str:
    try:
        return os.readlink(fd)
    except OSError:
        return ""


@pytest.fixture
def prometheus(shared: DaemonProcess, tmp_path: Path) -> Iterator[Prometheus]:
    """It scrapes the shared daemon."""
    running = Prometheus(shared, tmp_path)
    yield running
    running.end()


def test_a_real_prometheus_sees_what_happens(
    prometheus: Prometheus, shared: DaemonProcess, admin: Admin, filters: Filters
) -> None:
    """The target is up, and counters and gauges arrive there with the values that they have here."""
    name = create(admin, error_rate=1e-9)
    add(filters, name, b"a", b"b")
    check(filters, name, b"a", b"x", b"y")
    code = failure(admin.SnapshotFilter, admin_pb2.SnapshotFilterRequest(name="../x")).code.name
    eventually(lambda: prometheus.ask("up") == 1)
    for query, expected in (
        (f'bloomgate_checks_total{{filter="{name}",result="skip",via="rpc"}}', 2),
        (f'bloomgate_checks_total{{filter="{name}",result="hit",via="rpc"}}', 1),
        (f'bloomgate_adds_total{{filter="{name}"}}', 2),
        (f'bloomgate_filter_state{{filter="{name}",state="ready"}}', 1),
        ("bloomgate_journal_seq", value(scraped(shared), "bloomgate_journal_seq")),
        (f'bloomgate_build_info{{version="{__version__}"}}', 1),
        (f'sum(grpc_server_handled_total{{grpc_method="SnapshotFilter",grpc_code="{code}"}})', 1),
    ):  # fmt: skip
        eventually(lambda query=query, expected=expected: prometheus.ask(query) == expected)
    # A dropped filter goes stale at once, rather than showing its last values for minutes.
    admin.DropFilter(admin_pb2.DropFilterRequest(name=name))
    eventually(lambda: prometheus.ask(f'count(bloomgate_filter_state{{filter="{name}"}}) or vector(0)') == 0)
