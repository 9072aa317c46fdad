"""Arrows point inward."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
KERNEL_LIBRARIES = {"mmh3", "bitarray", "numpy"}
STANDARD_LIBRARIES_OF_THE_KERNEL = {
    "__future__", "collections", "contextlib", "dataclasses", "enum", "functools", "hashlib", "io",
    "itertools", "math", "operator", "secrets", "struct", "sys", "typing", "zlib",
}  # fmt: skip
# The modules of the client that speak gRPC.
TRANSPORT = ("aio", "client", "endpoint", "transport", "wire")
# Where these may be imported, by path below the two import roots.
HOMES = {
    "grpc": (
        "bloomgated/api/",
        "bloomgate/v1/",
        *(f"bloomgate/{name}.py" for name in TRANSPORT),
    ),
    "prometheus_client": ("bloomgated/metrics.py", "bloomgated/web/", "bloomgate/metrics.py"),
    "sqlite3": ("bloomgated/storage/", "bloomgate/cli/world.py"),
    "aiohttp": ("bloomgated/web/",),
    "click": ("bloomgate/cli/", "bloomgated/main.py", "bloomgated/commands.py"),
    "rich": ("bloomgate/cli/",),
    "msgspec": ("bloomgated/config.py", "bloomgated/access.py"),
}
INNER = (
    "gate", "catalog", "requests", "room", "snapshotter", "access", "watched",
    "leases", "lease_flag", "holders", "subscriptions", "outbox",
)  # fmt: skip
NOT_FOR_INNER = {
    "grpc",
    "sqlite3",
    "prometheus_client",
    "aiohttp",
    "click",
    "bloomgated.api",
    "bloomgated.web",
}


def modules() -> Iterator[tuple[str, Path]]:
    for root in (ROOT / "client", ROOT / "service"):
        for path in sorted(root.rglob("*.py")):
            yield str(path.relative_to(root)), path


def imports(path: Path) -> set[str]:
    """Absolute names of all modules that a file imports, at any depth of it, for type checking or not."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: import absolutely"
            found |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def reaches(names: set[str], target: str) -> bool:
    return any(name == target or name.startswith(f"{target}.") for name in names)


MODULES = dict(modules())


@pytest.mark.parametrize("name", [name for name in MODULES if "/v1/" not in name])
def test_a_module_imports_only_what_its_place_may_see(name: str) -> None:
    """Each library has its homes; the library never sees the daemon; edges never see storage."""
    seen = imports(MODULES[name])
    for library, homes in HOMES.items():
        if reaches(seen, library):
            assert name.startswith(homes), f"{name} imports {library}"
    if name.startswith("bloomgate/"):
        assert not reaches(seen, "bloomgated")
    if name.startswith(("bloomgated/api/", "bloomgated/web/")):
        assert not reaches(seen, "bloomgated.storage")
    if name.startswith(tuple(f"bloomgated/{inner}.py" for inner in INNER)):
        for forbidden in NOT_FOR_INNER:
            assert not reaches(seen, forbidden), f"{name} imports {forbidden}"
    if name.startswith("bloomgated/storage/"):
        for outer in ("gate", "catalog", "snapshotter", "api", "web", "metrics", "lifecycle"):
            assert not reaches(seen, f"bloomgated.{outer}"), f"{name} imports {outer}"


def test_the_kernel_is_pure() -> None:
    """It imports three libraries and the harmless part of the standard one: no I/O, no clock, no network."""
    allowed = KERNEL_LIBRARIES | STANDARD_LIBRARIES_OF_THE_KERNEL
    for name, path in MODULES.items():
        if name.startswith("bloomgate/filters/"):
            for imported in imports(path):
                top = imported.split(".")[0]
                assert top in allowed or reaches({imported}, "bloomgate.filters"), (
                    f"{name} imports {imported}"
                )


def test_modules_are_rooms_not_halls() -> None:
    """No module is longer than 350 lines."""
    for name, path in MODULES.items():
        if "/v1/" not in name:
            lines = len(path.read_text().splitlines())
            assert lines <= 350, f"{name} has {lines} lines"


def test_the_test_can_fail(tmp_path: Path) -> None:
    """An import inside a function, or under TYPE_CHECKING, counts like any other."""
    file = tmp_path / "module.py"
    file.write_text("def f():\n    from grpc import aio\n")
    assert reaches(imports(file), "grpc")
    assert reaches(imports(file), "grpc.aio")
