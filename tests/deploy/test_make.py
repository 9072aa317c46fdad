"""What the Makefile says where a machine lacks something."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


def make_venv(python: Path, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    """The Makefile's first step, with ``python`` in the place of python3."""
    return subprocess.run(
        [
            "make",
            "-s",
            "-C",
            str(ROOT),
            f"PYTHON={python}",
            f"VENV={tmp_path}/venv",
            f"{tmp_path}/venv/.venv",
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={**os.environ, "MAKEFLAGS": ""},
    )


def stand_in(tmp_path: Path, refused: str) -> Path:
    """A python that fails on code with ``refused`` in it, and is the real one for all else."""
    script = tmp_path / "python-stand-in"
    script.write_text(f'#!/bin/sh\ncase "$2" in *"{refused}"*) exit 1;; esac\nexec {sys.executable} "$@"\n')
    script.chmod(0o755)
    return script


def test_a_missing_venv_names_the_package_to_install(tmp_path: Path) -> None:
    """Debian splits ensurepip off; its own message names no package on every version."""
    failed = make_venv(stand_in(tmp_path, "ensurepip"), tmp_path)
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert failed.returncode != 0
    assert f"install the package python{version}-venv" in failed.stderr
    assert not (tmp_path / "venv").exists()


@pytest.mark.parametrize("python", ["old", "none"])
def test_a_python_that_is_too_old_or_missing_is_named(tmp_path: Path, python: str) -> None:
    """The message says what is needed and how to name another one."""
    path = stand_in(tmp_path, "version_info < (3, 11)") if python == "old" else tmp_path / "no-such-python"
    failed = make_venv(path, tmp_path)
    assert failed.returncode != 0
    assert f"needs Python 3.11 or newer as {path}" in failed.stderr


def test_every_command_of_the_readme_is_a_target() -> None:
    """``make help`` lists them."""
    shown = subprocess.run(
        ["make", "-s", "-C", str(ROOT), "help"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "MAKEFLAGS": ""},
    ).stdout
    for target in ("demo", "test", "serve", "check", "fix", "proto", "bench"):
        assert f"make {target} " in shown
