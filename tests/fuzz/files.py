"""Files that operators write: the settings, in all three places, and the auth file."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

from bloomgate.errors import NotAllowed
from bloomgated import config
from bloomgated.access import Access, Role, new_token
from bloomgated.errors import ConfigError

from .targets import Run, Target, folder


@contextmanager
def settings_loader() -> Iterator[Run]:
    """Settings or ConfigError, one line; settings that load are printed, and read again the same.

    The first byte says whether the rest is a file, the environment or flags.
    """
    with folder() as directory:
        file, again = directory / "settings.toml", directory / "again.toml"

        def run(data: bytes) -> None:
            place, text = data[:1] or b"\0", data[1:]
            pairs = _pairs(text)
            file.write_bytes(text)
            try:
                if place[0] % 3 == 0:
                    loaded, sources = config.load(file, {}, {})
                elif place[0] % 3 == 1:
                    loaded, sources = config.load(None, pairs, {})
                else:
                    loaded, sources = config.load(None, {}, pairs)
            except ConfigError as error:
                _one_sentence(str(error).removeprefix(str(file)))
                return
            again.write_text(config.to_toml(loaded, sources), "utf-8")
            assert config.load(again, {}, {})[0] == loaded
            for key in ("listen", "http"):
                host, port = config.split_address(key, getattr(loaded, key))
                # As the resolver is asked.
                assert host.encode("idna")
                assert 0 <= port <= 65535
            for path in (loaded.data_dir, loaded.tls.cert, loaded.tls.key, loaded.auth.file):
                assert b"\0" not in os.fsencode(path)

        yield run


def _pairs(text: bytes) -> dict[str, str]:
    lines = text.decode("utf-8", "surrogateescape").split("\n")
    return {name: value for name, equals, value in (line.partition("=") for line in lines) if equals}


def _one_sentence(text: str) -> None:
    assert text
    assert len(text) < 2000, text
    assert not re.search("[\x00-\x1f\x7f\ud800-\udfff]", text), repr(text)
    assert "Traceback" not in text


def settings_seeds() -> list[bytes]:
    """All defaults in each of the three places, and a file as one writes it."""
    text = config.to_toml(*config.load(None, {}, {})).encode()
    lines = [line for line in text.decode().splitlines() if " = " in line]
    plain = [line.partition("  #")[0].replace('"', "").split(" = ") for line in lines]
    keys = sorted(config.keys(), key=lambda key: ("." in key, key.partition(".")[0]))
    dotted = dict(zip(keys, (value.strip() for _, value in plain), strict=True))
    names = (f"{config.ENVIRONMENT_PREFIX}{key.upper().replace('.', '__')}" for key in dotted)
    environment = "\n".join(f"{name}={value}" for name, value in zip(names, dotted.values(), strict=True))
    flags = "\n".join(f"{key}={value}" for key, value in dotted.items())
    written = b'listen = "[::1]:0"\n[journal]\nretention = 60\n[limits]\nfilters = 3\n[tls]\ncert = "/a"\n'
    one = b"BLOOMGATED__LISTEN=a.example:1\nBLOOMGATED__DRAIN=2\n"
    return [
        b"\0" + text,
        b"\0" + written,
        b"\0" + written,
        b"\1" + environment.encode(),
        b"\1" + one,
        b"\2" + flags.encode(),
        b"\2drain=1e9\nlisten=localhost:00001\n",
    ]


TOML_TOKENS = [
    b"9" * 5000, b"0x" + b"f" * 5000, b"1e999", b"nan", b"-inf", b"true", b"[", b"]", b"[[", b"]]", b"{",
    b"}", b"[" * 3000, b"{a=" * 1500, b".a" * 3000, b'"', b"'", b'"""', b"\\u0000", b"\\ud800", b"\0",
    b"\xff",
    b"\n", b"\r\n", b"=", b",", b".", b"..", b":", b"::", b"%", b"#", b"1979-05-27", b"07:32:00", b"drain",
    b"limits", b"journal.retention", b"[journal]\n", b"[limits]\n", b"token", b"[[token]]\n", b"filters",
    b"[a-", b"[!]", b"*" * 300, b"a" * 70, b"\xc3\xa9", b"BLOOMGATED__", b"BLOOMGATED_LISTEN=1\n",
    b"\x1b[0m", b"\xe2\x80\xa8",
]  # fmt: skip


@contextmanager
def auth_file() -> Iterator[Run]:
    """Entries or ConfigError, one line; with entries, whoever comes is known or refused."""
    with folder() as directory:
        file = directory / "auth.toml"

        def run(data: bytes) -> None:
            file.write_bytes(data)
            try:
                access = Access(file)
            except ConfigError as error:
                _one_sentence(str(error).removeprefix(str(file)))
                return
            # Part of the file as a token: not one that it knows but by its hash.
            shown = data[:80].decode("utf-8", "replace")
            for values, names in (
                ([f"Bearer {shown}"], []),
                ([shown], []),
                ([], [shown, "loader.internal"]),
                ([TOKEN], []),
            ):
                try:
                    caller = access.authenticate(values, names)
                except NotAllowed:
                    continue
                for name in ("fraud-list", shown, ""):
                    caller.may(frozenset(Role), name)
                caller.may_all(frozenset(Role))

        yield run


TOKEN, _ENTRY = new_token("checkout", [Role.READ, Role.WRITE], ["fraud-*", "a?[b-d]"])


def auth_seeds() -> list[bytes]:
    """A token, a certificate, and both."""
    certificate = (
        b'[[certificate]]\nname = "loader.internal"\nroles = ["replica"]\nfilters = ["*", "[!a]*"]\n'
    )
    entry = _ENTRY.encode()
    return [entry, certificate, entry + certificate, certificate + certificate]


FILES = [
    Target("settings", settings_loader, settings_seeds, 60_000, tokens=TOML_TOKENS),
    Target("auth file", auth_file, auth_seeds, 60_000, tokens=TOML_TOKENS),
]
