"""The ``bloomgated`` command: serve, healthcheck, config."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import click

from bloomgate import __version__
from bloomgated import commands
from bloomgated import config as settings
from bloomgated.errors import StartError

EXIT_REFUSED = 1


def _options(command: Any) -> Any:
    for option in (
        click.option("--set", "pairs", multiple=True, metavar="KEY=VALUE", help="Any other setting."),
        click.option("--http", help="HOST:PORT of /metrics, /livez and /readyz."),
        click.option("--listen", help="HOST:PORT of gRPC; port 0 picks a free one."),
        click.option("--data-dir", help="Where the journal and the snapshots are."),
        click.option("--insecure", is_flag=True, help="Bind other addresses than loopback without TLS."),
        click.option("--config", "file", type=click.Path(path_type=Path), help="A TOML file of settings."),
    ):
        command = option(command)
    return command


def _load(
    file: Path | None,
    data_dir: str | None,
    listen: str | None,
    http: str | None,
    insecure: bool,
    pairs: tuple[str, ...],
) -> tuple[settings.Config, dict[str, str]]:
    flags = {"data_dir": data_dir, "listen": listen, "http": http, "insecure": insecure or None}
    given: dict[str, Any] = {key: value for key, value in flags.items() if value is not None}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise click.UsageError(f"--set takes KEY=VALUE, got {pair!r}")
        given[key] = value
    return settings.load(file, os.environ, given)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="bloomgated")
def cli() -> None:
    """The daemon that hosts named Bloom filters."""


@cli.command()
@_options
@click.option(
    "--assert-no-later-adds",
    is_flag=True,
    help="Of a restored directory: nothing was added after the backup was made.",
)
def serve(assert_no_later_adds: bool, **flags: Any) -> None:
    """Serve the filters of a data directory until SIGTERM or SIGINT.

    Prints one line on stdout once it is ready; logs JSON on stderr.
    """
    config, _ = _load(**flags)
    # Here, not above: healthcheck and config need neither the server nor its start-up time.
    from bloomgated import logs
    from bloomgated.composition import build

    logs.configure(config.log_level)

    async def live() -> int:
        return await build(config, assert_no_later_adds=assert_no_later_adds).run()

    sys.exit(asyncio.run(live()))


@cli.command()
@_options
@click.option("--timeout", default=2.0, show_default=True, help="Seconds to wait for an answer.")
def healthcheck(timeout: float, **flags: Any) -> None:
    """Exit 0 if the daemon of these settings says that it serves, 1 otherwise. For containers.

    Asks /readyz of the HTTP address.
    """
    config, _ = _load(**flags)
    from bloomgated.healthcheck import SERVING, ask

    host, port = settings.split_address("http", config.http)
    # An address that means "every interface" is reached through the loopback one.
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    said = ask(host, port, Path(config.tls.cert) if config.tls.cert else None, timeout)
    click.echo(f"{settings.join_address(host, port)}: {said}", err=True)
    sys.exit(0 if said == SERVING else 1)


@cli.command("config")
@_options
def show_config(**flags: Any) -> None:
    """Print the effective settings as TOML, each with the source of its value."""
    config, sources = _load(**flags)
    click.echo(settings.to_toml(config, sources), nl=False)


@cli.group()
def token() -> None:
    """Make tokens for callers."""


@token.command("new")
@click.argument("name")
@click.option(
    "--role",
    "roles",
    multiple=True,
    required=True,
    type=click.Choice(["read", "replica", "write", "admin"]),
    help="What it may do; can be repeated.",
)
@click.option(
    "--filter", "globs", multiple=True, required=True, help="Name or glob of filters; can be repeated."
)
@click.option("--file", type=click.Path(path_type=Path), help="The auth file to add it to; made if need be.")
def new_token(name: str, roles: tuple[str, ...], globs: tuple[str, ...], file: Path | None) -> None:
    """Make a token called NAME, which is printed on stdout this once.

    Its entry, with the token's hash, goes into the auth file, or to stderr without one. A daemon that uses
    the file takes the token within a second.
    """
    from bloomgated import access

    made, entry = access.new_token(name, [access.Role(role) for role in roles], globs)
    if file is None:
        click.echo(entry, nl=False, err=True)
    else:
        access.append(file, entry)
    click.echo(made)


cli.add_command(commands.fsck)
cli.add_command(commands.backup)


def main() -> None:
    """Run the command; what the operator did wrong is one sentence on stderr."""
    # gRPC's core would add lines of its own to that, and to the JSON of the log.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    try:
        cli()
    except StartError as error:
        click.echo(f"bloomgated: {error}", err=True)
        sys.exit(EXIT_REFUSED)
