"""Who may do what: hashed bearer tokens and certificate names, each with roles and filter-name globs.

A token is ``bgt_<id>_<secret>``. The id finds its entry and is no secret; the secret is 32 random bytes, so
one plain SHA-256 of the whole token is kept, and compared in constant time. The file is TOML:

    [[token]]
    id = "1f0c9a3e"
    hash = "sha256:<64 hex digits>"
    name = "checkout"
    roles = ["read", "write"]
    filters = ["fraud-*"]

    [[certificate]]
    name = "checkout.internal"
    roles = ["read"]
    filters = ["*"]

A certificate's names are its subject's common name and its alternative names; entries of one name add up.
"""

from __future__ import annotations

import fcntl
import fnmatch
import hashlib
import hmac
import json
import os
import re
import secrets
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from bloomgate.errors import NotAllowed, NotAuthenticated
from bloomgated.config import named, read_toml
from bloomgated.errors import ConfigError
from bloomgated.watched import Watched

_TOKEN = re.compile(r"bgt_([0-9a-f]{8})_[A-Za-z0-9_-]{43}")
# What the secret of an unknown id is compared with, so that both take the same time.
_NO_HASH = "sha256:" + "0" * 64


class Role(StrEnum):
    """What may be done. None includes another, but for ``replica``, which may all that ``read`` may."""

    READ = "read"
    """Checks by key, stats, outcomes."""
    REPLICA = "replica"
    """The same, and hash specs and digests: who holds a seed can try keys one by one, offline."""
    WRITE = "write"
    """Adds."""
    ADMIN = "admin"
    """Creating, dropping and snapshotting filters; their stats."""


Globs = Annotated[list[Annotated[str, Meta(min_length=1, max_length=256)]], Meta(min_length=1)]
Roles = Annotated[list[Role], Meta(min_length=1)]
_Name = Annotated[str, Meta(min_length=1, max_length=256)]


class _Token(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    id: Annotated[str, Meta(pattern=r"^[0-9a-f]{8}\Z")]
    hash: Annotated[str, Meta(pattern=r"^sha256:[0-9a-f]{64}\Z")]
    name: _Name
    roles: Roles
    filters: Globs


class _Certificate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: _Name
    roles: Roles
    filters: Globs


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    token: list[_Token] = []
    certificate: list[_Certificate] = []


READERS = frozenset((Role.READ, Role.REPLICA))
REPLICAS = frozenset((Role.REPLICA,))


@dataclass(frozen=True, slots=True)
class Grant:
    """Roles on the filters whose names match one of the globs."""

    roles: frozenset[Role]
    names: re.Pattern[str]
    everything: bool
    """Whether it is for every filter, whatever its name."""

    @classmethod
    def of(cls, roles: Iterable[Role], globs: Iterable[str]) -> Grant:
        """``*`` stands for any characters, ``?`` for one, ``[ab]`` for one of these."""
        globs = list(globs)
        return cls(frozenset(roles), re.compile("|".join(map(fnmatch.translate, globs))), "*" in globs)


@dataclass(frozen=True, slots=True)
class Principal:
    """Who calls, and what it may do."""

    name: str
    grants: tuple[Grant, ...]

    def has(self, roles: frozenset[Role]) -> bool:
        """Whether it has one of these roles, on whatever filter."""
        return any(roles & grant.roles for grant in self.grants)

    def may(self, roles: frozenset[Role], name: str) -> bool:
        """Whether it has one of these roles on the filter ``name``, which need not exist."""
        return any(roles & grant.roles and grant.names.match(name) for grant in self.grants)

    def may_all(self, roles: frozenset[Role]) -> bool:
        """Whether it has one of these roles on every filter."""
        return any(roles & grant.roles and grant.everything for grant in self.grants)


ANYONE = Principal("anyone", (Grant.of(Role, ("*",)),))
"""Whoever can connect, where nobody is asked who they are."""


@dataclass(frozen=True, slots=True)
class _Known:
    """What one reading of the file said: id -> hash and whose it is; certificate name -> grants."""

    tokens: Mapping[str, tuple[str, Principal | None]]
    certificates: Mapping[str, tuple[Grant, ...]]


class Access(Watched):
    """The entries of an auth file. Reading it again replaces them whole; a wrong file changes nothing."""

    what = "auth"

    def __init__(self, file: Path) -> None:
        """Raises ConfigError, one sentence with the path and what is wrong."""
        self._file = file
        self._known = _Known({}, {})
        super().__init__((file,))

    def read(self) -> None:
        """Read the file. Raises ConfigError, and keeps what there was."""
        entries = _read(self._file)
        certificates: dict[str, tuple[Grant, ...]] = {}
        for each in entries.certificate:
            grant = Grant.of(each.roles, each.filters)
            certificates[each.name] = (*certificates.get(each.name, ()), grant)
        tokens = {
            each.id: (each.hash, Principal(each.name, (Grant.of(each.roles, each.filters),)))
            for each in entries.token
        }
        # In one step: calls are being judged meanwhile, in another thread.
        self._known = _Known(tokens, certificates)

    def authenticate(self, authorization: Sequence[str], names: Iterable[str]) -> Principal:
        """Who calls with these Authorization values and, verified, these certificate names.

        A token counts alone where one is given. Raises NotAuthenticated, or NotAllowed for a certificate that
        no entry names.
        """
        if authorization:
            return self._of_token(authorization)
        known, certificates = [name for name in names if name], self._known.certificates
        grants = tuple(grant for name in known for grant in certificates.get(name, ()))
        if grants:
            return Principal(known[0], grants)
        if known:
            raise NotAllowed("no entry names this certificate")
        raise NotAuthenticated

    @property
    def knows_certificates(self) -> bool:
        """Whether a certificate alone may say who calls."""
        return bool(self._known.certificates)

    def sees_all(self, authorization: str | None, names: Iterable[str]) -> bool:
        """Whether who calls so may read every filter, as what speaks of all of them at once demands."""
        try:
            caller = self.authenticate([] if authorization is None else [authorization], names)
        except NotAllowed:
            return False
        return caller.may_all(READERS)

    def _of_token(self, authorization: Sequence[str]) -> Principal:
        scheme, _, token = authorization[0].partition(" ")
        found = _TOKEN.fullmatch(token.strip())
        if len(authorization) != 1 or scheme.lower() != "bearer" or found is None:
            raise NotAuthenticated
        kept, principal = self._known.tokens.get(found[1], (_NO_HASH, None))
        right = hmac.compare_digest(hash_of(found[0]), kept)
        if principal is None or not right:
            raise NotAuthenticated
        return principal


def hash_of(token: str) -> str:
    """What the file keeps of a token."""
    return f"sha256:{hashlib.sha256(token.encode()).hexdigest()}"


def new_token(name: str, roles: Sequence[Role], globs: Sequence[str]) -> tuple[str, str]:
    """A fresh token, and its entry as TOML. The token is nowhere else: show it once."""
    token_id = secrets.token_hex(4)
    token = f"bgt_{token_id}_{secrets.token_urlsafe(32)}"
    # JSON's texts and lists of texts are TOML's too.
    fields = {"id": token_id, "hash": hash_of(token), "name": name, "roles": roles, "filters": globs}
    return token, "[[token]]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in fields.items())


def append(file: Path, entry: str) -> None:
    """Add an entry to an auth file, made if need be, which no reader sees half. Raises ConfigError."""
    file = file.resolve()
    try:
        with _alone_in(file.parent):
            _append(file, entry)
    except OSError as error:
        raise ConfigError(f"{file}: cannot be written ({error.strerror})") from None


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Wait until nobody else is here, who would write what they read before. Syncs the folder at the end."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _append(file: Path, entry: str) -> None:
    aside = file.with_name(f"{file.name}.new")
    try:
        before = file.read_text("utf-8") if file.exists() else ""
        if before:
            _read(file, may_be_empty=True)
        aside.unlink(missing_ok=True)
        with open(
            aside, "x", encoding="utf-8", opener=lambda path, flags: os.open(path, flags, 0o600)
        ) as new:
            new.write(f"{before.rstrip()}\n\n{entry}" if before.strip() else entry)
            if before:
                # Whoever could read it still can.
                known = file.stat()
                os.fchmod(new.fileno(), known.st_mode & 0o777)
                with suppress(PermissionError):
                    os.fchown(new.fileno(), known.st_uid, known.st_gid)
            new.flush()
            os.fsync(new.fileno())
        _read(aside)
        aside.rename(file)
    finally:
        aside.unlink(missing_ok=True)


def _read(file: Path, *, may_be_empty: bool = False) -> _File:
    table = read_toml(file)
    try:
        entries = msgspec.convert(table, _File)
    except msgspec.ValidationError as error:
        reason, _, path = str(error).partition(" - at ")
        where = path.strip("`").removeprefix("$.") or "the file"
        # It repeats what stands in the file, whatever that is.
        raise ConfigError(f"{file}: {where}: {named(reason)}") from None
    if not may_be_empty and not entries.token and not entries.certificate:
        # More likely cut than meant: nobody could come in.
        raise ConfigError(f"{file}: names nobody; `bloomgated token new` makes an entry")
    ids = Counter(each.id for each in entries.token)
    if twice := {each for each, times in ids.items() if times > 1}:
        raise ConfigError(f"{file}: token id {min(twice)} stands there twice")
    return entries
