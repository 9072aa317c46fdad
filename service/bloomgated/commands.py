"""What operators do to a data directory: fsck, backup. Part of the ``bloomgated`` command."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bloomgated import config as settings
from bloomgated.errors import StartError

if TYPE_CHECKING:
    from bloomgated.storage.fsck import Report

EXIT_DAMAGED, EXIT_UNCHECKED = 1, 2


@click.command()
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of lines.")
def fsck(directory: Path, as_json: bool) -> None:
    """Check the data directory DIRECTORY of a daemon that is stopped, changing nothing.

    Prints what it finds, one file a line, then how a start would find each filter. Exits 0 if all is as it
    was written, which a backup can be too, 1 on damage, 2 where it cannot be checked, such as under a daemon.
    """
    # Here, not above: the kernel takes longer to import than the command line takes to read.
    from bloomgated.storage.fsck import check

    try:
        report = check(directory)
    except StartError as error:
        if as_json:
            click.echo(json.dumps({"verdict": "unchecked", "summary": str(error)}))
        else:
            click.echo(f"bloomgated: {error}", err=True)
        sys.exit(EXIT_UNCHECKED)
    summary = f"{directory}: {_summary(report)}"
    if as_json:
        click.echo(json.dumps(_plain(report, summary), indent=2))
    else:
        for finding in report.findings:
            click.echo(f"{finding.path}: {'' if finding.damage else 'note: '}{finding.reason}")
        for each in report.filters:
            click.echo(f"{each.name}: {each.state}{', ' if each.damage else ''}{each.damage}")
        click.echo(summary)
    sys.exit(EXIT_DAMAGED if report.damaged else 0)


def _summary(report: Report) -> str:
    if report.refused:
        return "damaged, a start would be refused"
    if not report.last_seq and not report.filters:
        return "nothing was acknowledged here yet, a start would begin with no filters"
    whole, total = sum(not each.damage for each in report.filters), len(report.filters)
    served = f"a start would serve {whole} of {total} filters whole, up to seq {report.last_seq}"
    return f"{_verdict(report)}, {served}"


def _verdict(report: Report) -> str:
    if report.damaged:
        return "damaged"
    return "sound, but restored" if any(each.restored for each in report.filters) else "sound"


def _plain(report: Report, summary: str) -> dict[str, Any]:
    return {
        "verdict": "damaged" if report.damaged else "sound",
        "restored": any(each.restored for each in report.filters),
        "findings": [
            {"path": each.path, "reason": each.reason, "damage": each.damage} for each in report.findings
        ],
        "filters": [
            {"name": each.name, "state": each.state, "reason": each.damage} for each in report.filters
        ],
        "refused": report.refused,
        "seq": report.last_seq,
        "summary": summary,
    }


@click.command()
@click.argument("target", metavar="DEST", type=click.Path(path_type=Path))
@click.option("--data-dir", help="The data directory to copy.")
@click.option("--config", "file", type=click.Path(path_type=Path), help="A TOML file of settings.")
@click.option("--set", "pairs", multiple=True, metavar="KEY=VALUE", help="Any other setting.")
def backup(target: Path, data_dir: str | None, file: Path | None, pairs: tuple[str, ...]) -> None:
    """Copy the data directory to DEST, which is new or empty, also while a daemon runs on it.

    The copy is consistent, and checked. Started on, its filters answer maybe until they are rebuilt, or until
    `bloomgated serve --assert-no-later-adds` says that nothing was added after the copy was made.
    """
    given: dict[str, Any] = {} if data_dir is None else {"data_dir": data_dir}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise click.UsageError(f"--set takes KEY=VALUE, got {pair!r}")
        given[key] = value
    config, _ = settings.load(file, os.environ, given)
    from bloomgated.storage.backup import back_up

    copied = back_up(Path(config.data_dir), target)
    click.echo(
        f"copied {config.data_dir} to {target}: {copied.filters} filters, {copied.bytes} bytes, up to seq"
        f" {copied.seq}"
    )
