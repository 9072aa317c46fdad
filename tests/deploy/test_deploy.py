"""The image and the compose file, checked without a Docker engine."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from bloomgated.config import Config, split_address
from bloomgated.tls import TlsFiles
from support.tools import program

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
DOCKERFILE = ROOT / "Dockerfile"
COMPOSE = ROOT / "docker-compose.yml"
PROMETHEUS = ROOT / "deploy" / "prometheus"
VENV_IN_IMAGE = "/opt/bloomgate"
BUILD_TOOLS = ("pip", "setuptools", "hatchling", "editables", "wheel")
NOT_FOR_THE_IMAGE = (*BUILD_TOOLS, "pytest", "hypothesis", "mailchecker", "rbloom")


def run(*command: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        list(map(str, command)), capture_output=True, text=True, timeout=200, check=False, **options
    )


def instructions(text: str) -> Iterator[tuple[str, str]]:
    """Yield each instruction of a Dockerfile and its argument, continued lines joined."""
    lines = (line for line in text.splitlines() if line.strip() and not line.startswith("#"))
    for line in re.sub(r"\\\n", " ", "\n".join(lines)).splitlines():
        name, _, argument = line.strip().partition(" ")
        yield name, argument.strip()


@dataclass
class Stage:
    """A stage of a Dockerfile: what it starts from, and its instructions."""

    base: str
    steps: list[tuple[str, str]]

    def all(self, name: str) -> list[str]:
        return [argument for step, argument in self.steps if step == name]

    def one(self, name: str) -> str:
        (argument,) = self.all(name)
        return argument


def stages() -> list[Stage]:
    found: list[Stage] = []
    for name, argument in instructions(DOCKERFILE.read_text()):
        if name == "FROM":
            found.append(Stage(argument.split()[0], []))
        elif found:
            found[-1].steps.append((name, argument))
    return found


def image_environment() -> dict[str, str]:
    words = stages()[-1].one("ENV").split()
    return dict(word.split("=", 1) for word in words)


def compose() -> dict[str, Any]:
    loaded: dict[str, Any] = YAML(typ="safe").load(COMPOSE)
    return loaded


def seconds(text: str) -> float:
    """A compose duration, as 1m30s."""
    units = {"h": 3600, "m": 60, "s": 1}
    assert re.fullmatch(r"(\d+[hms])+", text), text
    return sum(int(number) * units[unit] for number, unit in re.findall(r"(\d+)([hms])", text))


def megabytes(text: str) -> int:
    number = re.fullmatch(r"(\d+)m", text)
    assert number, text
    return int(number[1]) << 20


# -- the files


def test_hadolint_finds_nothing() -> None:
    """The Dockerfile is clean."""
    found = run(BIN / "hadolint", DOCKERFILE)
    assert (found.returncode, found.stdout) == (0, "")


def test_the_base_image_is_an_argument() -> None:
    """Every stage starts from the one image that BASE names; its default is a slim one of a fixed minor."""
    before_first_stage = [
        argument for name, argument in instructions(DOCKERFILE.read_text()) if name == "ARG"
    ]
    assert before_first_stage == ["BASE=python:3.13-slim"]
    assert {stage.base for stage in stages()} == {"${BASE}"}


def test_the_image_is_made_of_wheels_of_pinned_hashes() -> None:
    """Nothing compiles and nothing unpinned is installed, and no index is named."""
    script = (ROOT / "deploy" / "install.sh").read_text()
    installs = re.findall(r"^.*\bpip\b.* install (.*)$|^pip install (.*)$", script, re.MULTILINE)
    for flags in map("".join, installs):
        pinned = "--only-binary :all: --require-hashes -r deploy/constraints-" in flags
        assert pinned or flags.startswith('--no-index --no-deps "$work"/dist/bloomgate-'), flags
    assert len(installs) == 3
    assert "--no-build-isolation --no-deps" in script
    for step in (argument for stage in stages() for argument in stage.all("RUN")):
        assert "pip install" not in step
    for text in (script, DOCKERFILE.read_text()):
        assert "index-url" not in text
        assert "INDEX_URL" not in text


@pytest.mark.parametrize("name", ["constraints-server.txt", "constraints-build.txt"])
def test_constraints_carry_hashes_and_no_address(name: str) -> None:
    """Each package is pinned with hashes, at the version that the tests run with, and no index is named."""
    text = (ROOT / "deploy" / name).read_text()
    assert "://" not in text
    assert not re.search(r"^--", text, re.MULTILINE)
    pins = set(re.findall(r"^([a-z0-9-]+==\S+)(?: ; [^\\]+)? \\\n    --hash=sha256:", text, re.MULTILINE))
    assert len(pins) >= 6
    assert len(pins) == len(re.findall(r"^[a-z]", text, re.MULTILINE))
    assert pins <= set(re.findall(r"^[a-z0-9-]+==\S+", (ROOT / "constraints.txt").read_text(), re.MULTILINE))


def test_the_container_is_not_root_and_owns_its_data() -> None:
    """A fixed uid other than 0 runs the daemon and owns the volume that the data directory is."""
    final = stages()[-1]
    uid, gid = final.one("USER").split(":")
    assert int(uid) > 0
    assert f"--uid {uid} --gid {gid}" in final.one("RUN")
    (volume,) = json.loads(final.one("VOLUME"))
    assert image_environment()["BLOOMGATED__DATA_DIR"] == volume
    assert f"install -d -o bloomgate -g bloomgate -m 0700 {volume}" in final.one("RUN")


def test_the_container_is_started_stopped_and_asked_in_exec_form() -> None:
    """No shell stands between Docker and the daemon, so that SIGTERM reaches it."""
    final = stages()[-1]
    assert json.loads(final.one("ENTRYPOINT")) + json.loads(final.one("CMD")) == ["bloomgated", "serve"]
    assert final.one("STOPSIGNAL") == "SIGTERM"
    _, _, check = final.one("HEALTHCHECK").partition(" CMD ")
    assert json.loads(check) == ["bloomgated", "healthcheck"]
    assert final.one("EXPOSE").split() == [str(grpc_port()), str(http_port())]


def grpc_port() -> int:
    return split_address("listen", image_environment()["BLOOMGATED__LISTEN"])[1]


def http_port() -> int:
    return split_address("http", image_environment()["BLOOMGATED__HTTP"])[1]


def test_the_compose_file_is_valid() -> None:
    """It satisfies the compose specification's schema."""
    found = run(BIN / "check-jsonschema", "--builtin-schema", "vendor.compose-spec", COMPOSE)
    assert found.returncode == 0, found.stdout + found.stderr


def test_the_stop_grace_period_covers_the_drain_and_the_last_snapshots() -> None:
    """Docker waits for the drain, and for all filters written at 50 MB/s, before it kills."""
    daemon = compose()["services"]["bloomgated"]
    limit = int(daemon["environment"]["BLOOMGATED__LIMITS__TOTAL_BYTES"])
    assert seconds(daemon["stop_grace_period"]) > Config().drain + limit / 50e6


def test_the_memory_limit_has_room_for_all_filters() -> None:
    """What the daemon may take for filters, a tenth more and 90 MB are less than the container's limit."""
    daemon = compose()["services"]["bloomgated"]
    limit = int(daemon["environment"]["BLOOMGATED__LIMITS__TOTAL_BYTES"])
    assert megabytes(daemon["mem_limit"]) > 1.1 * limit + 90e6


def test_services_are_confined_and_come_back() -> None:
    """Each has a read-only root, no capabilities, no new privileges, a memory limit and a restart policy."""
    for name, service in compose()["services"].items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service["restart"] == "unless-stopped", name
        assert megabytes(service["mem_limit"]), name
        assert "privileged" not in service, name


def test_ports_are_published_to_the_loopback_only() -> None:
    """Nothing is reachable from another machine unless somebody decides so."""
    for name, service in compose()["services"].items():
        for port in service["ports"]:
            assert port.startswith("127.0.0.1:"), f"{name} publishes {port}"


def test_the_data_is_on_a_volume() -> None:
    """The daemon's data directory is a named volume."""
    file = compose()
    (volume,) = json.loads(stages()[-1].one("VOLUME"))
    name, at = file["services"]["bloomgated"]["volumes"][0].split(":")
    assert at == volume
    assert name in file["volumes"]


def test_compose_asks_the_same_health_check() -> None:
    """Compose and the image agree on how the daemon is asked."""
    test = compose()["services"]["bloomgated"]["healthcheck"]["test"]
    assert test == ["CMD", *json.loads(stages()[-1].one("HEALTHCHECK").partition(" CMD ")[2])]


def test_prometheus_scrapes_the_service_by_name_once_it_is_healthy() -> None:
    """Its one target is the daemon's service and the HTTP port; its image has a fixed version."""
    services = compose()["services"]
    prometheus = services["prometheus"]
    assert re.fullmatch(r"prom/prometheus:v\d+\.\d+\.\d+", prometheus["image"])
    assert prometheus["depends_on"] == {"bloomgated": {"condition": "service_healthy"}}
    assert set(prometheus["networks"]) & set(services["bloomgated"]["networks"])
    (job,) = YAML(typ="safe").load(PROMETHEUS / "prometheus.yml")["scrape_configs"]
    (group,) = job["static_configs"]
    assert group["targets"] == [f"bloomgated:{http_port()}"]
    assert f"./{PROMETHEUS.relative_to(ROOT)}:/etc/prometheus:ro" in prometheus["volumes"]
    assert "--config.file=/etc/prometheus/prometheus.yml" in prometheus["command"]


def test_prometheus_accepts_its_configuration() -> None:
    """promtool finds configuration and rules valid."""
    found = run(
        program("promtool", "prometheus"), "check", "config", "--syntax-only", PROMETHEUS / "prometheus.yml"
    )
    assert found.returncode == 0, found.stdout + found.stderr


def test_alerts_fire_on_what_they_are_for() -> None:
    """promtool runs the cases of rules_test.yml."""
    found = run(
        program("promtool", "prometheus"), "test", "rules", Path(__file__).with_name("rules_test.yml")
    )
    assert found.returncode == 0, found.stdout + found.stderr


# -- the steps, run for real


@dataclass
class Installed:
    """What the build stage makes, in a virtual environment of the test's own."""

    venv: Path

    def environment(self, **more: str) -> dict[str, str]:
        """The image's environment, and nothing of this process's."""
        image = {
            name: value.replace(VENV_IN_IMAGE, str(self.venv)).replace("$PATH", os.defpath)
            for name, value in image_environment().items()
        }
        return {**image, **more}

    def command(self, text: str) -> list[str]:
        """A command in exec form, with the program that the image's PATH finds first."""
        program, *arguments = json.loads(text)
        return [str(self.venv / "bin" / program), *arguments]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """Run the build stage's one step on what .dockerignore lets through."""
    context = tmp_path_factory.mktemp("context")
    patterns = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in patterns
    for pattern in (each[1:] for each in patterns if each.startswith("!")):
        source, target = ROOT / pattern, context / pattern
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))
        else:
            shutil.copy(source, target)
    build, final = stages()
    assert build.one("COPY") == ". ."
    assert final.one("COPY") == f"--from=build {VENV_IN_IMAGE} {VENV_IN_IMAGE}"
    venv = tmp_path_factory.mktemp("image") / "bloomgate"
    step = [word.replace(VENV_IN_IMAGE, str(venv)) for word in json.loads(build.one("RUN"))]
    done = run(*step, cwd=context, env={**os.environ, "PYTHON": sys.executable})
    assert done.returncode == 0, done.stderr
    return Installed(venv)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.mark.timeout(300)
def test_the_image_holds_what_runs_and_nothing_else(installed: Installed) -> None:
    """Neither pip nor a build tool, test tool or source tree is in the final environment."""
    program = (
        "import importlib.util, bloomgated, bloomgate, sys\n"
        f"print([name for name in {NOT_FOR_THE_IMAGE!r} if importlib.util.find_spec(name)])\n"
        "print(bloomgated.__file__, bloomgate.__file__, sep='\\n')"
    )
    found = run(installed.venv / "bin" / "python", "-c", program, env=installed.environment())
    left, *files = found.stdout.splitlines()
    assert left == "[]", found.stderr
    assert all(Path(file).is_relative_to(installed.venv) for file in files)


@dataclass
class Secrets:
    """What deploy/make-secrets.sh made, where the compose file mounts it."""

    folder: Path

    def mapped(self, service: str, text: str) -> str:
        """A text in which each file below /run/secrets is the one that ``service`` has there."""
        file = compose()
        (mount,) = [
            Path(each.split(":")[0]).name
            for each in file["services"][service]["volumes"]
            if each.split(":")[1] == "/run/secrets"
        ] or [""]

        def found(name: re.Match[str]) -> str:
            secret = file["secrets"].get(name[1])
            return str(self.folder / (Path(secret["file"]).name if secret else f"{mount}/{name[1]}"))

        return re.sub(r"/run/secrets/([\w.]+)", found, text)


def make_secrets(folder: Path) -> subprocess.CompletedProcess[str]:
    return run("sh", ROOT / "deploy" / "make-secrets.sh", folder)


@pytest.fixture(scope="module")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> Secrets:
    folder = tmp_path_factory.mktemp("deploy") / "secrets"
    made = make_secrets(folder)
    assert made.returncode == 0, made.stderr
    assert made.stderr == ""
    return Secrets(folder)


def test_secrets_are_made_once_and_kept_from_others(secrets: Secrets) -> None:
    """Running it again changes nothing; the folder keeps others out, and what is mounted is readable in its
    container; git and the image never see any of it."""
    files = [file for file in secrets.folder.rglob("*") if file.is_file()]
    before = {file: file.read_bytes() for file in files}
    again = make_secrets(secrets.folder)
    assert (again.returncode, again.stdout, again.stderr) == (0, "", "")
    assert {file: file.read_bytes() for file in files} == before
    assert secrets.folder.stat().st_mode & 0o777 == 0o700
    modes = {str(file.relative_to(secrets.folder)): file.stat().st_mode & 0o777 for file in files}
    assert {name for name, mode in modes.items() if mode == 0o600} == {"ca.key", "operator.token"}
    assert {name for name, mode in modes.items() if mode == 0o644} == modes.keys() - {
        "ca.key",
        "operator.token",
    }
    assert "/secrets/" in (ROOT / ".gitignore").read_text().splitlines()
    assert "*" in (ROOT / ".dockerignore").read_text().splitlines()


@pytest.mark.parametrize("gone", ["ca.pem", "daemon/certificate.pem", "daemon/key.pem"])
def test_certificates_that_are_gone_are_made_anew_and_fit(
    secrets: Secrets, tmp_path: Path, gone: str
) -> None:
    """Whatever is missing: afterwards the daemon's certificate is one that the authority signed."""
    folder = tmp_path / "secrets"
    shutil.copytree(secrets.folder, folder)
    (folder / gone).unlink()
    made = make_secrets(folder)
    assert (made.returncode, made.stderr) == (0, "")
    assert "made" in made.stdout
    files = (folder / "daemon" / "certificate.pem", folder / "daemon" / "key.pem")
    TlsFiles(*files, None)
    assert run("openssl", "verify", "-CAfile", folder / "ca.pem", files[0]).returncode == 0


def test_a_token_that_is_gone_is_not_doubled(secrets: Secrets, tmp_path: Path) -> None:
    """While its entry stands it would still be let in: the script says so and makes none. An auth file that
    is gone is made of the tokens that are there."""
    folder = tmp_path / "secrets"
    shutil.copytree(secrets.folder, folder)
    (folder / "operator.token").unlink()
    made = make_secrets(folder)
    assert made.returncode == 1
    assert made.stderr.startswith("operator.token is gone, but daemon/auth.toml still lets it in")
    shutil.copy(secrets.folder / "operator.token", folder)
    auth = folder / "daemon" / "auth.toml"
    before = auth.read_text()
    auth.unlink()
    made = make_secrets(folder)
    assert (made.returncode, made.stderr) == (0, "")
    assert auth.read_text() == before


def test_without_openssl_the_script_says_so(tmp_path: Path) -> None:
    """Also where it is too old."""
    old = tmp_path / "openssl"
    old.write_text("#!/bin/sh\necho 'OpenSSL 1.1.1w  11 Sep 2023'\n")
    old.chmod(0o755)
    for path in (tmp_path, tmp_path / "nowhere"):
        environment = {"PATH": f"{path}"}
        made = run("/bin/sh", ROOT / "deploy" / "make-secrets.sh", tmp_path / "secrets", env=environment)
        assert made.returncode == 1
        assert "needs the command openssl in version 3 or newer" in made.stderr
        assert not (tmp_path / "secrets").exists()


def test_each_service_has_the_secrets_that_its_settings_name() -> None:
    """And no other: Prometheus sees neither the daemon's key nor its auth file. Nothing is insecure."""
    file = compose()
    services = file["services"]
    scraper = (PROMETHEUS / "prometheus.yml").read_text()
    assert set(re.findall(r"/run/secrets/(\w+)", scraper)) == set(services["prometheus"]["secrets"])
    assert set(services["prometheus"]["secrets"]) == set(file["secrets"])
    # By its folder, so that files that are replaced are seen.
    assert "./secrets/daemon:/run/secrets:ro" in services["bloomgated"]["volumes"]
    assert "secrets" not in services["bloomgated"]
    assert "insecure" not in COMPOSE.read_text().lower()


@pytest.mark.timeout(300)
def test_the_composed_daemon_is_scraped_by_the_composed_prometheus(
    installed: Installed, secrets: Secrets, tmp_path: Path
) -> None:
    """The image's environment and the compose file's, with the secrets that the script made: the daemon takes
    the operator's token and refuses others, and a real Prometheus with the real configuration scrapes it."""
    prometheus = program("prometheus", "prometheus")
    grpc, http = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
    composed = compose()["services"]["bloomgated"]["environment"]
    environment = installed.environment(
        **{name: secrets.mapped("bloomgated", str(value)) for name, value in composed.items()},
        BLOOMGATED__DATA_DIR=str(tmp_path / "data"), BLOOMGATED__LISTEN=grpc, BLOOMGATED__HTTP=http,
    )  # fmt: skip
    config = secrets.mapped("prometheus", (PROMETHEUS / "prometheus.yml").read_text())
    config = config.replace(f"bloomgated:{http_port()}", http).replace("15s", "1s")
    (tmp_path / "prometheus.yml").write_text(config)
    shutil.copy(PROMETHEUS / "rules.yml", tmp_path)
    port = free_port()
    commands = (
        installed.command(stages()[-1].one("ENTRYPOINT")) + json.loads(stages()[-1].one("CMD")),
        [prometheus, f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/tsdb",
         f"--web.listen-address=127.0.0.1:{port}"],
    )  # fmt: skip
    started = []
    try:
        for command in commands:
            with (tmp_path / "log").open("a") as log:
                process = subprocess.Popen(
                    command, env=environment, stdout=subprocess.PIPE, stderr=log, text=True
                )
            started.append(process)
            if len(started) == 1:
                assert process.stdout is not None
                assert process.stdout.readline().startswith("bloomgated ready"), (
                    tmp_path / "log"
                ).read_text()
        health = installed.command(stages()[-1].one("HEALTHCHECK").partition(" CMD ")[2])
        assert run(*health, env=environment).returncode == 0
        asking = {**environment, "BLOOMGATE_TARGET": grpc, "BLOOMGATE_CA": str(secrets.folder / "ca.pem")}
        command = (installed.venv / "bin" / "bloomgate", "create", "coupons", "--capacity", "1000")
        assert "token is missing" in run(*command, env=asking).stderr
        asking["BLOOMGATE_TOKEN_FILE"] = str(secrets.folder / "operator.token")
        created = run(*command, env=asking)
        assert created.returncode == 0, created.stderr
        url = f"http://127.0.0.1:{port}/api/v1/query?query=bloomgate_filter_capacity"
        for _ in range(600):
            with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=10) as reply:
                found = json.load(reply)["data"]["result"]
                if found:
                    break
            time.sleep(0.05)
        assert [(each["metric"]["filter"], each["value"][1]) for each in found] == [("coupons", "1000")]
    finally:
        for process in started:
            process.terminate()
            process.wait(30)
            assert process.stdout is not None
            process.stdout.close()


@pytest.mark.timeout(300)
def test_the_installed_daemon_starts_answers_and_stops(installed: Installed, tmp_path: Path) -> None:
    """With the image's environment it gets ready, is healthy, writes to its data directory only, serves every
    metric that an alert names, and exits 0 on SIGTERM; then it is not healthy."""
    final = stages()[-1]
    grpc, http = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
    data, work = tmp_path / "data", tmp_path / "work"
    work.mkdir()
    environment = installed.environment(
        BLOOMGATED__DATA_DIR=str(data), BLOOMGATED__LISTEN=grpc, BLOOMGATED__HTTP=http
    )
    files = sorted(installed.venv.rglob("*"))
    serve = installed.command(final.one("ENTRYPOINT")) + json.loads(final.one("CMD"))
    health = installed.command(final.one("HEALTHCHECK").partition(" CMD ")[2])
    with (tmp_path / "log").open("w") as log:
        daemon = subprocess.Popen(
            serve, env=environment, cwd=work, stdout=subprocess.PIPE, stderr=log, text=True
        )
    try:
        assert daemon.stdout is not None
        ready = daemon.stdout.readline()
        assert ready == f"bloomgated ready grpc={grpc} http={http}\n", (tmp_path / "log").read_text()
        healthy = run(*health, env=environment)
        assert healthy.returncode == 0, healthy.stderr
        create = ("create", "coupons", "--capacity", "1000")
        created = run(
            installed.venv / "bin" / "bloomgate", *create, env={**environment, "BLOOMGATE_TARGET": grpc}
        )
        assert created.returncode == 0, created.stderr
        with urllib.request.urlopen(f"http://{http}/metrics", timeout=10) as reply:
            served = set(re.findall(r"^(bloomgate_\w+)", reply.read().decode(), re.MULTILINE))
        named = set(re.findall(r"\bbloomgate_\w+", (PROMETHEUS / "rules.yml").read_text()))
        assert named <= served
    finally:
        daemon.send_signal(signal.SIGTERM)
        code = daemon.wait(30)
        assert daemon.stdout is not None
        daemon.stdout.close()
    assert code == 0, (tmp_path / "log").read_text()
    assert run(*health, env=environment).returncode == 1
    assert sorted(installed.venv.rglob("*")) == files
    assert list(work.iterdir()) == []
    assert (data / "bloomgate.db").exists()
