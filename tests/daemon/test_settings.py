"""Settings: file < environment < flags, every knob, and what is said of a wrong one."""

from __future__ import annotations

import asyncio
import tomllib
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from bloomgated import config as settings
from bloomgated.api.server import ApiServer
from bloomgated.errors import ConfigError
from bloomgated.gate import Gate
from bloomgated.metrics import CallMetrics
from support.daemon import refused

# Every knob with its default. A knob that is not here, or has another default, fails a test: it is documented
# here, in config.py, and by `bloomgated config`.
DEFAULTS = {
    "data_dir": "./data",
    "listen": "127.0.0.1:50051",
    "http": "127.0.0.1:9464",
    "drain": 10.0,
    "log_level": "info",
    "insecure": False,
    "tls.cert": "",
    "tls.key": "",
    "tls.client_ca": "",
    "auth.file": "",
    "lease.duration": 2.0,
    "lease.margin": 0.2,
    "lease.streams": 2000,
    "lease.per_filter": 2000,
    "lease.per_caller": 2000,
    "journal.retention": 900.0,
    "journal.max_queued_bytes": 64 << 20,
    "snapshot.interval": 300.0,
    "snapshot.journal_bytes": 64 << 20,
    "snapshot.check_every": 5.0,
    "limits.keys_per_call": 100_000,
    "limits.bytes_per_key": 64 << 10,
    "limits.bytes_per_call": 16 << 20,
    "limits.concurrent_calls": 1000,
    "limits.bytes_under_way": 256 << 20,
    "limits.streams": 1000,
    "limits.filters": 1000,
    "limits.filter_bytes": 1 << 30,
    "limits.total_bytes": 4 << 30,
}
# For each knob a value that is not its default, as text.
OTHERS = {key: "1.5" if isinstance(value, float) else "77" for key, value in DEFAULTS.items()} | {
    "data_dir": "/somewhere", "listen": "[::1]:7", "http": "0.0.0.0:0", "log_level": "error",
    "insecure": "true", "lease.margin": "0.7", "tls.cert": "/cert", "tls.key": "/key", "tls.client_ca": "/ca",
    "auth.file": "/auth",
}  # fmt: skip


def variable(key: str) -> str:
    return "BLOOMGATED__" + key.upper().replace(".", "__")


def value_of(config: settings.Config, key: str) -> object:
    found: object = config
    for part in key.split("."):
        found = getattr(found, part)
    return found


def as_toml(pairs: dict[str, str]) -> str:
    lines = []
    for key, value in pairs.items():
        quoted = f'"{value}"' if isinstance(DEFAULTS[key], str) else value
        lines.append(f"{key} = {quoted}")
    return "\n".join(lines)


def test_every_knob_has_a_usable_default() -> None:
    """These and no others; nothing has to be set."""
    config, sources = settings.load(None, {}, {})
    assert set(settings.keys()) == set(DEFAULTS) == set(sources)
    assert {key: value_of(config, key) for key in DEFAULTS} == DEFAULTS
    assert set(sources.values()) == {"default"}


@pytest.mark.parametrize("key", DEFAULTS)
def test_a_knob_can_be_set_in_all_three_places(tmp_path: Path, key: str) -> None:
    """With the same meaning; of two places the later one counts: file, environment, flag."""
    file = tmp_path / "bloomgated.toml"
    file.write_text(as_toml({key: OTHERS[key]}))
    expected = True if OTHERS[key] == "true" else type(DEFAULTS[key])(OTHERS[key])
    ways = ((file, {}, {}), (None, {variable(key): OTHERS[key]}, {}), (None, {}, {key: OTHERS[key]}))
    for way, source in zip(ways, (str(file), "environment", "flag"), strict=True):
        config, sources = settings.load(*way)
        assert value_of(config, key) == expected
        assert sources[key] == source
        assert {each for other, each in sources.items() if other != key} == {"default"}
    default = str(DEFAULTS[key])
    config, sources = settings.load(file, {variable(key): default}, {})
    assert (value_of(config, key), sources[key]) == (DEFAULTS[key], "environment")
    config, sources = settings.load(file, {variable(key): default}, {key: OTHERS[key]})
    assert (value_of(config, key), sources[key]) == (expected, "flag")


def test_tables_of_a_file_may_be_written_as_such(tmp_path: Path) -> None:
    """As tables, inline, or empty."""
    file = tmp_path / "bloomgated.toml"
    file.write_text("limits = { filters = 3 }\n[journal]\nretention = 60\n[snapshot]\n")
    config, _ = settings.load(file, {}, {})
    assert (config.limits.filters, config.journal.retention) == (3, 60.0)


@pytest.mark.parametrize(
    "key", ["jurnal.retention", "journal.retenton", "retention", "journal", "limits.a.b", ""]
)
def test_an_unknown_key_is_an_error_wherever_it_stands(tmp_path: Path, key: str) -> None:
    """A typo must not leave the default in place unseen; the message names key and source."""
    ways: list[tuple[str, tuple[Path | None, dict[str, str], dict[str, str]]]] = [
        ("environment", (None, {variable(key): "1"}, {})),
        ("flag", (None, {}, {key: "1"})),
    ]
    if key:
        file = tmp_path / "bloomgated.toml"
        file.write_text(f"{key} = 1")
        ways.append((str(file), (file, {}, {})))
    for source, way in ways:
        with pytest.raises(ConfigError) as caught:
            settings.load(*way)
        assert str(caught.value) == f"{source}: {key} is not a setting; `bloomgated config` lists them"


@pytest.mark.parametrize("text", ["[jurnal]", "[journal.more]", "[[journal]]\nretention = 1"])
def test_an_unknown_table_is_an_error_even_if_it_is_empty(tmp_path: Path, text: str) -> None:
    """Its keys may be commented out, and will be put in one day."""
    file = tmp_path / "bloomgated.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match="is not a setting"):
        settings.load(file, {}, {})


@pytest.mark.parametrize(("duration", "margin"), [("2", "1"), ("0.3", "0.2")])
def test_a_lease_is_longer_than_twice_its_margin(duration: str, margin: str) -> None:
    """Nothing would be left of it; the message names the key and where it comes from."""
    with pytest.raises(ConfigError) as caught:
        settings.load(None, {}, {"lease.duration": duration, "lease.margin": margin})
    assert str(caught.value) == "flag: lease.margin must be below half of lease.duration"


def test_other_variables_are_not_ours() -> None:
    """Such as those that container platforms set for a service of this name."""
    others = {
        "BLOOMGATED_PORT": "tcp://10.0.0.1:50051",
        "BLOOMGATED_SERVICE_HOST": "x",
        "BLOOMGATE_TARGET": "y",
    }
    assert settings.load(None, others, {})[1] == dict.fromkeys(DEFAULTS, "default")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("journal.retention", "-1"),
        ("journal.retention", "soon"),
        ("journal.retention", "nan"),
        ("journal.retention", "inf"),
        ("lease.duration", "0.05"),
        ("lease.duration", "601"),
        ("lease.margin", "0"),
        ("drain", "0"),
        ("drain", "nan"),
        ("limits.filters", "0"),
        ("limits.filters", "1.5"),
        ("limits.keys_per_call", "-5"),
        ("limits.bytes_per_call", str(1 << 40)),
        ("limits.total_bytes", str(1 << 70)),
        ("log_level", "loud"),
        ("data_dir", ""),
        ("listen", "50051"),
        ("listen", ":50051"),
        ("listen", "localhost:"),
        ("listen", "localhost:99999"),
        ("http", "localhost:http"),
        ("http", "localhost:-1"),
        ("listen", f"localhost:{'9' * 5000}"),
        ("listen", "::1:50051"),
        ("listen", "[::1:50051"),
        ("listen", "[::1%a..b]:50051"),
        ("listen", "a b:50051"),
        ("listen", "http://localhost:50051"),
        ("listen", "é:50051"),
        # What the resolver would refuse with an exception of its own.
        ("listen", f"{'a' * 64}.example:50051"),
        ("http", "a..example:50051"),
        ("snapshot.check_every", "0.009"),
    ],
)
def test_a_value_that_cannot_be_used_is_named_with_its_source(tmp_path: Path, key: str, value: str) -> None:
    """Whether it is of the wrong type or out of range."""
    file = tmp_path / "bloomgated.toml"
    file.write_text(as_toml({key: value}) if value != "soon" else f'{key} = "soon"')
    ways = ((file, {}, {}), (None, {variable(key): value}, {}), (None, {}, {key: value}))
    for way, source in zip(ways, (str(file), "environment", "flag"), strict=True):
        with pytest.raises(ConfigError) as caught:
            settings.load(*way)
        assert str(caught.value).startswith(f"{source}: {key}: ")


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("limits.filters", "[1]", "must be a whole number from 1 to 2147483648, got a list"),
        ("limits.filters", "1.5", "must be a whole number from 1 to 2147483648, got 1.5"),
        ("limits.filters", "true", "must be a whole number from 1 to 2147483648, got true"),
        (
            "limits.filters",
            f"0x{'f' * 5000}",
            "must be a whole number from 1 to 2147483648, got a number of many",
        ),
        ("journal.retention", "1979-05-27", "must be a number from 0 to 1000000000, got 1979-05-27"),
        ("drain", '"soon"', "must be a number above 0, up to 1000000000, got 'soon'"),
        ("drain", "[{a.a.a = 1}]", "must be a number above 0, up to 1000000000, got a list"),
        ("insecure", '"yes"', "must be true or false, got 'yes'"),
        ("log_level", '"loud"', "must be one of debug, error, info, warning, got 'loud'"),
        ("listen", "50051", "must be text, got 50051"),
        ("listen", '"::1:1"', "'::1:1' is not HOST:PORT; an IPv6 address stands in brackets"),
        ("data_dir", '""', "must be text, and not empty, got ''"),
        ("data_dir", '"a\\u0000b"', r"must be UTF-8 without control characters, got 'a\x00b'"),
        ("tls.cert", '"a\\nb"', r"must be UTF-8 without control characters, got 'a\nb'"),
    ],
)
def test_a_wrong_value_is_told_what_would_be_right(tmp_path: Path, key: str, value: str, said: str) -> None:
    """One sentence: source, key, what it may be, and what it was, cut to a line."""
    file = tmp_path / "bloomgated.toml"
    file.write_text(f"{key} = {value}")
    with pytest.raises(ConfigError) as caught:
        settings.load(file, {}, {})
    assert str(caught.value).startswith(f"{file}: {key}: {said}")
    assert len(str(caught.value).removeprefix(str(file))) < 300


def test_what_is_no_utf8_is_refused(tmp_path: Path) -> None:
    """A name in the environment, a value there, and the path of the file itself."""
    for environment, said in (
        ({"BLOOMGATED__DATA_DIR": "a\udcff"}, "environment: data_dir: must be UTF-8"),
        ({"BLOOMGATED__\udcff": "a"}, r"environment: '\udcff' is not a setting"),
        ({"BLOOMGATED__A\nB": "a"}, r"environment: 'a\nb' is not a setting"),
    ):
        with pytest.raises(ConfigError) as caught:
            settings.load(None, environment, {})
        assert str(caught.value).startswith(said)
    with pytest.raises(ConfigError, match="cannot be read") as caught:
        settings.load(tmp_path / "a\0b", {}, {})
    assert "\0" not in str(caught.value)


@pytest.mark.parametrize("key", DEFAULTS)
def test_one_underscore_too_few_is_not_passed_over(key: str) -> None:
    """Else who writes BLOOMGATED_AUTH_FILE would have a daemon that asks nobody."""
    name = f"BLOOMGATED_{key.upper().replace('.', '_')}"
    with pytest.raises(ConfigError) as caught:
        settings.load(None, {name: "1"}, {})
    assert str(caught.value) == f"environment: {name} is not a setting; {variable(key)} is"


def test_a_key_is_given_once_in_one_place(tmp_path: Path) -> None:
    """Two spellings of one key would hide each other."""
    file = tmp_path / "bloomgated.toml"
    file.write_text('"journal.retention" = 5\n[journal]\nretention = 6')
    with pytest.raises(ConfigError) as caught:
        settings.load(file, {}, {})
    assert str(caught.value) == f"{file}: journal.retention is given twice"
    with pytest.raises(ConfigError) as caught:
        settings.load(None, {"BLOOMGATED__DRAIN": "1", "BLOOMGATED__drain": "2"}, {})
    assert str(caught.value) == "environment: drain is given twice"


@pytest.mark.parametrize("host", ["localhost", "a_b.example.", "10.0.0.1", "[::1]", "[fe80::1%eth0]", "[::]"])
def test_a_host_is_a_name_or_an_address(host: str) -> None:
    """With the address in brackets where it has colons of its own."""
    for key in ("listen", "http"):
        config, _ = settings.load(None, {}, {key: f"{host}:0"})
        assert settings.split_address(key, getattr(config, key)) == (host.strip("[]"), 0)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"drain = " + b"9" * 5000, "cannot be read (a number has too many digits)"),
        (b"a = " + b"[" * 100_000, "not TOML that can be read (nested too deeply)"),
        (b"a = " + b"{a = " * 5000, "not TOML that can be read (nested too deeply)"),
        (b"a" + b".a" * 5000 + b" = 1", "a.a.a.a.a.a.a.a.a is not a setting"),
    ],
    ids=["digits", "lists", "tables", "dots"],
)
def test_a_file_that_is_all_depth_is_one_sentence(tmp_path: Path, content: bytes, reason: str) -> None:
    """No exception of the parser's, and none of the walk through what it gives."""
    file = tmp_path / "bloomgated.toml"
    file.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        settings.load(file, {}, {})
    assert str(caught.value).startswith(f"{file}: {reason}")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"listen = ", "not TOML"),
        (b"\xff\xfe", "not TOML"),
        (b"a = 1\na = 2", "not TOML"),
        (None, "cannot be read"),
    ],
)
def test_a_file_that_cannot_be_read_is_one_sentence(
    tmp_path: Path, content: bytes | None, reason: str
) -> None:
    """Also where it is no TOML, no UTF-8, or not there."""
    file = tmp_path / "bloomgated.toml"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        settings.load(file, {}, {})
    assert str(caught.value).startswith(f"{file}: {reason} (")


@pytest.mark.parametrize("key", [key for key in DEFAULTS if key.startswith("limits.")])
def test_every_value_that_is_taken_also_works(key: str) -> None:
    """A server can be built with each power of two that is in range."""
    taken = 0
    for exponent in range(64):
        try:
            config, _ = settings.load(None, {}, {key: str(1 << exponent)})
        except ConfigError:
            continue
        taken += 1

        async def build(limits: settings.LimitsConfig = config.limits) -> None:
            await ApiServer(Gate(limits), limits, CallMetrics(CollectorRegistry())).stop(0.01)

        asyncio.run(build())
    assert taken > 20


# -- the command


def test_config_prints_toml_with_the_source_of_each_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it prints can be read as a settings file again, with the same effect."""
    file = tmp_path / "bloomgated.toml"
    file.write_text(
        'data_dir = "/a \\"quoted\\" \\\\ path"\n[journal]\nretention = 60\n[limits]\nfilters = 5\n'
    )
    monkeypatch.setenv("BLOOMGATED__LIMITS__FILTERS", "6")
    monkeypatch.setenv("BLOOMGATED__DRAIN", "0.000001")
    ended = refused("config", "--config", str(file), "--listen", "[::1]:5", "--set", "log_level=debug")
    assert (ended.returncode, ended.stderr) == (0, "")
    printed = tomllib.loads(ended.stdout)
    assert printed["data_dir"] == '/a "quoted" \\ path'
    assert printed["journal"]["retention"] == 60.0
    assert printed["limits"]["filters"] == 6
    assert (printed["listen"], printed["log_level"], printed["drain"]) == ("[::1]:5", "debug", 1e-6)
    said = {
        line.split(" = ")[0]: line.rpartition("# ")[2] for line in ended.stdout.splitlines() if " = " in line
    }
    assert said.pop("filters") == said.pop("drain") == "environment"
    assert said.pop("listen") == said.pop("log_level") == "flag"
    assert said.pop("data_dir") == said.pop("retention") == str(file)
    assert set(said.values()) == {"default"}

    monkeypatch.delenv("BLOOMGATED__LIMITS__FILTERS")
    monkeypatch.delenv("BLOOMGATED__DRAIN")
    again = tmp_path / "again.toml"
    again.write_text(ended.stdout)
    assert tomllib.loads(refused("config", "--config", str(again)).stdout) == printed


def test_a_wrong_setting_is_one_sentence_of_every_command(tmp_path: Path) -> None:
    """On stderr, exit 1, no traceback."""
    for command in ("serve", "config", "healthcheck"):
        ended = refused(command, "--data-dir", str(tmp_path / "data"), "--set", "jurnal.retention=1")
        assert (ended.returncode, ended.stdout) == (1, "")
        assert ended.stderr == (
            "bloomgated: flag: jurnal.retention is not a setting; `bloomgated config` lists them\n"
        )
    assert not (tmp_path / "data").exists()


def test_flags_are_named_in_the_help() -> None:
    """The four that most set have flags of their own; --set is for the rest."""
    shown = refused("serve", "--help").stdout
    for flag in ("--config", "--data-dir", "--listen", "--http", "--set KEY=VALUE"):
        assert flag in shown
