"""Programs of the system that some tests need."""

from __future__ import annotations

import os
import shutil
from typing import NoReturn

import pytest


def program(name: str, package: str) -> str:
    """The path of a program of a Debian package. Without it a test is skipped, though never in CI."""
    found = shutil.which(name)
    if found is None:
        missing(f"{name} is missing: install the package {package} (apt-get install {package})")
    return found


def missing(reason: str) -> NoReturn:
    """What a test needs of the system is not here: skip it, or fail it in CI."""
    if os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)
