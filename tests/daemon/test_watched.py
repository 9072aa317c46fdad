"""Files that are read again when they change."""

from __future__ import annotations

from pathlib import Path

import pytest

from bloomgated import watched
from bloomgated.errors import ConfigError
from bloomgated.watched import Watched


class Note(Watched):
    """The text of two files, which must be equal."""

    what = "note"
    text = ""

    def read(self) -> None:
        one, other = (file.read_text() if file.exists() else "" for file in self._files)
        if one != other:
            raise ConfigError("they differ")
        self.text = one


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    pair = (tmp_path / "one", tmp_path / "other")
    for file in pair:
        file.write_text("old")
    return pair


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched, "SETTLE", 0)


def test_what_did_not_change_is_not_read(files: tuple[Path, Path]) -> None:
    """Looking costs a stat of each file and no more."""
    note = Note(files)
    note.text = "kept"
    assert not note.reload_if_changed()
    assert note.text == "kept"


def test_half_a_change_changes_nothing(files: tuple[Path, Path], caplog: pytest.LogCaptureFixture) -> None:
    """Until the second file fits the first, what was read before stays in force; the log says so once."""
    note = Note(files)
    files[0].write_text("newer")
    for _ in range(3):
        assert not note.reload_if_changed()
        assert note.failed
        assert note.text == "old"
    assert caplog.text.count("stays in force") == 1
    files[1].write_text("newer")
    assert note.reload_if_changed()
    assert not note.failed
    assert note.text == "newer"


def test_a_file_that_is_being_written_is_left_for_the_next_look(
    files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever writes in place cuts the file first: an empty one is then not what was meant."""
    note = Note(files)
    for file in files:
        file.write_text("")

    def meanwhile(_: float) -> None:
        for file in files:
            if not file.read_text():
                file.write_text("whole")

    monkeypatch.setattr(watched.time, "sleep", meanwhile)
    assert not note.reload_if_changed()
    assert note.text == "old"
    assert note.reload_if_changed()
    assert note.text == "whole"


def test_a_link_that_leads_elsewhere_counts(tmp_path: Path) -> None:
    """As Kubernetes swaps a directory of secrets: the link changes, the files do not."""
    for version in ("a", "b"):
        folder = tmp_path / version
        folder.mkdir()
        for name in ("one", "other"):
            (folder / name).write_text(version)
    current = tmp_path / "current"
    current.symlink_to("a")
    note = Note((current / "one", current / "other"))
    fresh = tmp_path / "fresh"
    fresh.symlink_to("b")
    fresh.rename(current)
    assert note.reload_if_changed()
    assert note.text == "b"


def test_a_file_that_cannot_be_read_at_start_is_refused(files: tuple[Path, Path]) -> None:
    """There is nothing older that could stay in force."""
    files[0].write_text("other")
    with pytest.raises(ConfigError):
        Note(files)


def test_files_that_are_gone_change_nothing(files: tuple[Path, Path]) -> None:
    """Nor do they when one of them comes back alone."""
    note = Note(files)
    files[0].unlink()
    assert not note.reload_if_changed()
    assert note.text == "old"
    files[0].write_text("old")
    assert note.reload_if_changed()
