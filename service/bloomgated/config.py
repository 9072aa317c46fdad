"""The daemon's settings: TOML file < environment < flags.

Every knob has a usable default. A key is written ``journal.retention``: in the file a table and a key, in the
environment ``BLOOMGATED__JOURNAL__RETENTION``, as a flag ``--set journal.retention=60``. An unknown key is
an error wherever it stands. (The doubled underscore keeps clear of the variables that container platforms set
for a service of this name. What would be a setting but for an underscore is an error, too: who writes
BLOOMGATED_AUTH_FILE must not be left with an open door.)
"""

from __future__ import annotations

import ipaddress
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from bloomgated.errors import ConfigError

ENVIRONMENT_PREFIX = "BLOOMGATED__"
# No setting lies deeper; a file may, and is then wrong without a walk to its bottom.
_DEEPEST = 8
# A path or host with one of these is a mistake, which the system would report in words of its own if at all.
_NOT_TEXT = re.compile("[\x00-\x1f\x7f\ud800-\udfff]")
# What a resolver can be asked for: labels of at most 63 characters. An IPv6 address may name an interface.
_HOST = re.compile(r"(?=.{1,253}\Z)[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63})*\.?")
_IPV6 = re.compile(r"\[([0-9A-Fa-f:.]{2,45})(%[A-Za-z0-9_-]{1,15})?\]")

Seconds = Annotated[float, Meta(gt=0, le=10**9)]
Bytes = Annotated[int, Meta(ge=1, le=2**50)]
Count = Annotated[int, Meta(ge=1, le=2**31)]


class JournalConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The journal."""

    retention: Annotated[float, Meta(ge=0, le=10**9)] = 900.0
    """Seconds of running time that records are kept at least. Must exceed the longest time from an Add to its
    caller's database commit."""
    max_queued_bytes: Bytes = 64 << 20
    """Bytes that may wait for the group commit; beyond, Adds are refused with a retry delay."""


class SnapshotConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Snapshots."""

    interval: Seconds = 300.0
    """Seconds after which a changed filter is written again."""
    journal_bytes: Bytes = 64 << 20
    """Bytes journalled for one filter after which it is written earlier."""
    check_every: Annotated[float, Meta(ge=0.01, le=10**9)] = 5.0
    """Seconds between looks at what is due. Each look costs a little per filter."""


class LimitsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one call may ask for, and what all filters may take."""

    keys_per_call: Count = 100_000
    bytes_per_key: Bytes = 64 << 10
    bytes_per_call: Annotated[int, Meta(ge=1, le=2**28)] = 16 << 20
    """Bytes of all keys or digests of one call together. gRPC's own limit is above that by five bytes a
    key, and a MiB."""
    concurrent_calls: Count = 1000
    """Unary calls under way at once; beyond, calls are refused with a retry delay. Health checks are not
    counted."""
    bytes_under_way: Bytes = 256 << 20
    """Bytes of the requests of all unary calls under way; beyond, calls are refused with a retry delay. One
    call alone is never refused for it."""
    streams: Count = 1000
    """Streams of one kind open at once: health watchers, and reflection."""
    filters: Count = 1000
    filter_bytes: Bytes = 1 << 30
    """Bytes of one filter's bodies together."""
    total_bytes: Bytes = 4 << 30
    """Bytes of all filters' bodies together."""


class LeaseConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Copies of filters that callers hold under leases."""

    duration: Annotated[float, Meta(ge=0.1, le=600)] = 2.0
    """Seconds that a copy is trusted without a renewal. Where a holder is cut off, an Add to its filter
    waits for up to four thirds of it, and the margin."""
    margin: Annotated[float, Meta(gt=0, le=60)] = 0.2
    """Seconds that a copy is trusted less and waited for more; less than half of the duration. Divided by it,
    this is by how much the clocks of two machines may differ in rate."""
    streams: Count = 2000
    """Streams open at once, one of each client that holds copies."""
    per_filter: Count = 2000
    """Copies of one filter held at once."""
    per_caller: Count = 2000
    """Copies that one caller holds at once, by its token's name or its certificate's."""


class TlsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """TLS, on both ports. Files are PEM, and are read again when they change."""

    cert: str = ""
    """Path of the certificate and what leads to its root. Empty: no TLS."""
    key: str = ""
    """Path of its private key."""
    client_ca: str = ""
    """Path of the roots that callers' certificates are judged by. Empty: callers need none."""


class AuthConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Who may do what."""

    file: str = ""
    """Path of the TOML file of tokens and certificate names with their roles, read again when it changes.
    Empty: whoever can connect may do everything."""


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All settings."""

    data_dir: Annotated[str, Meta(min_length=1)] = "./data"
    listen: str = "127.0.0.1:50051"
    """HOST:PORT of gRPC; port 0 picks a free one."""
    http: str = "127.0.0.1:9464"
    """HOST:PORT of /metrics, /livez and /readyz."""
    drain: Seconds = 10.0
    """Seconds that calls under way get to finish when the daemon stops."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    insecure: bool = False
    """Whether an address that is not loopback may be bound without TLS and without knowing who calls."""
    tls: TlsConfig = TlsConfig()
    auth: AuthConfig = AuthConfig()
    journal: JournalConfig = JournalConfig()
    snapshot: SnapshotConfig = SnapshotConfig()
    limits: LimitsConfig = LimitsConfig()
    lease: LeaseConfig = LeaseConfig()


def keys(struct: type[msgspec.Struct] = Config, prefix: str = "") -> Iterator[str]:
    """Yield every key, dotted."""
    for field in msgspec.structs.fields(struct):
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            yield from keys(field.type, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name


_KEYS = tuple(keys())
_TABLES = frozenset(key.rpartition(".")[0] for key in _KEYS)
_ALMOST = {f"BLOOMGATED_{key.upper().replace('.', '_')}": key for key in _KEYS}
"""Variables that look like a setting and are none, for want of an underscore."""


def load(
    file: Path | None, environment: Mapping[str, str], flags: Mapping[str, Any]
) -> tuple[Config, dict[str, str]]:
    """Merge the three sources. Returns the settings and, per dotted key, where its value comes from.

    Raises ConfigError naming the key and its source.
    """
    values: dict[str, Any] = {}
    sources = dict.fromkeys(sorted(_KEYS), "default")
    for name, given in (
        (named(str(file)), _flatten(read_toml(file)) if file else ()),
        ("environment", _from_environment(environment)),
        ("flag", flags.items()),
    ):
        seen = set()
        for key, value in given:
            if key not in sources:
                raise ConfigError(f"{name}: {named(key)} is not a setting; `bloomgated config` lists them")
            if key in seen:
                raise ConfigError(f"{name}: {key} is given twice")
            seen.add(key)
            if isinstance(value, str) and _NOT_TEXT.search(value):
                raise ConfigError(
                    f"{name}: {key}: must be UTF-8 without control characters, got {_shown(value)}"
                )
            values[key], sources[key] = value, name
    config = _convert(values, sources)
    if config.lease.margin >= config.lease.duration / 2:
        raise ConfigError(f"{sources['lease.margin']}: lease.margin must be below half of lease.duration")
    for key in ("listen", "http"):
        split_address(key, getattr(config, key), sources[key])
    return config, sources


def read_toml(file: Path) -> dict[str, Any]:
    """The tables of a TOML file. Raises ConfigError with its path."""
    try:
        return tomllib.loads(file.read_bytes().decode())
    except OSError as error:
        raise ConfigError(f"{named(str(file))}: cannot be read ({error.strerror})") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: not TOML ({error})") from None
    except RecursionError:
        raise ConfigError(f"{file}: not TOML that can be read (nested too deeply)") from None
    except ValueError as error:
        # A path with a zero in it, or what Python says of a number that is no use to anybody.
        reason = "a number has too many digits" if "digits" in str(error) else str(error)
        raise ConfigError(f"{named(str(file))}: cannot be read ({reason})") from None


def _from_environment(environment: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for name, value in environment.items():
        if name.startswith(ENVIRONMENT_PREFIX):
            yield name.removeprefix(ENVIRONMENT_PREFIX).lower().replace("__", "."), value
        elif (key := _ALMOST.get(name)) is not None:
            meant = ENVIRONMENT_PREFIX + key.upper().replace(".", "__")
            raise ConfigError(f"environment: {name} is not a setting; {meant} is")


def _flatten(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        # An empty table is a key too, unless it is one of ours: else a misspelt one would pass unseen.
        walked = isinstance(value, dict) and (value or prefix + key in _TABLES)
        if walked and prefix.count(".") < _DEEPEST:
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _convert(values: Mapping[str, Any], sources: Mapping[str, str]) -> Config:
    nested: dict[str, Any] = {}
    for key, value in values.items():
        *tables, last = key.split(".")
        at = nested
        for table in tables:
            at = at.setdefault(table, {})
        at[last] = value
    try:
        # Not strict: what the environment and the flags bring is text.
        return msgspec.convert(nested, Config, strict=False)
    except msgspec.ValidationError as error:
        key = str(error).rpartition(" - at ")[2].strip("`").removeprefix("$.")
        wanted, got = _wanted(key), _shown(values[key])
        raise ConfigError(f"{sources[key]}: {key}: must be {wanted}, got {got}") from None


def _wanted(key: str) -> str:
    """What a setting may be, in words."""
    at: Any = Config
    for part in key.split("."):
        at = {field.name: field.type for field in msgspec.structs.fields(at)}[part]
    kind: Any = msgspec.inspect.type_info(at)
    match kind:
        case msgspec.inspect.BoolType():
            return "true or false"
        case msgspec.inspect.LiteralType():
            return f"one of {', '.join(map(str, kind.values))}"
        case msgspec.inspect.IntType():
            return f"a whole number from {kind.ge} to {kind.le}"
        case msgspec.inspect.FloatType():
            least = f"above {kind.gt:g}, up to" if kind.gt is not None else f"from {kind.ge:g} to"
            return f"a number {least} {kind.le}"
        case _:
            return "text, and not empty" if kind.min_length else "text"


def _shown(value: Any) -> str:
    """A value in a message: on one line, and not at length."""
    if isinstance(value, str):
        return repr(value if len(value) <= 100 else f"{value[:100]}...")
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) and value.bit_length() > 300:
        return "a number of many digits"
    if isinstance(value, dict | list):
        # As deep or as long as a file can make them.
        return "a table" if isinstance(value, dict) else "a list"
    return str(value)


def named(text: str) -> str:
    """A key, a path or a reason in a message: as it is, if it can stand there."""
    return text if len(text) <= 1000 and not _NOT_TEXT.search(text) else _shown(text)


def split_address(key: str, address: str, source: str = "settings") -> tuple[str, int]:
    """HOST and PORT of an address; an IPv6 host stands in brackets. Raises ConfigError."""
    host, _, port = address.rpartition(":")
    if not (_is_host(host) and port.isascii() and port.isdigit() and len(port) <= 5 and int(port) <= 65535):
        hint = "" if host.count(":") < 2 or host.startswith("[") else "; an IPv6 address stands in brackets"
        raise ConfigError(f"{source}: {key}: {_shown(address)} is not HOST:PORT{hint}")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _is_host(text: str) -> bool:
    found = _IPV6.fullmatch(text)
    if found is None:
        return _HOST.fullmatch(text) is not None
    try:
        ipaddress.IPv6Address(found[1])
    except ValueError:
        return False
    return True


def join_address(host: str, port: int) -> str:
    """HOST:PORT, with an IPv6 host in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def to_toml(config: Config, sources: Mapping[str, str]) -> str:
    """The settings as TOML, each with a comment that says where its value comes from."""
    plain = dict(_flatten(msgspec.to_builtins(config)))
    width = max(len(key.rpartition(".")[2]) + len(_toml(value)) for key, value in plain.items()) + 3
    lines, table = [], ""
    for key in sorted(plain, key=lambda key: ("." in key, key.partition(".")[0])):
        head, _, name = key.rpartition(".")
        if head != table:
            lines += ["", f"[{head}]"]
            table = head
        lines.append(f"{f'{name} = {_toml(plain[key])}':<{width}}  # {sources[key]}")
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    # Every value is a number or a text, and of those JSON's form is TOML's too.
    return msgspec.json.encode(value).decode()
