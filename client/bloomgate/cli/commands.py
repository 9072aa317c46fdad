"""The subcommands. What needs gRPC or rich imports it when it runs, so that a command starts at once."""

from __future__ import annotations

import errno
import os
import sys
import traceback
from typing import TYPE_CHECKING, Any, BinaryIO

import click

from bloomgate import __version__
from bloomgate.cli.errors import EXIT_NO_ANSWER

if TYPE_CHECKING:
    from bloomgate.client import Client

DEFAULT_TARGET = "127.0.0.1:50051"
# Seconds: a person waits, not a request, but not for a daemon that is not there. Writing takes longer.
PATIENCE = 3.0
PATIENCE_TO_WRITE = 600.0
BATCH = 10_000


def target_option(command: Any) -> Any:
    """``--target``, on the group and on every subcommand that asks a daemon; the nearest one counts."""

    def note(context: click.Context, _: click.Parameter, value: str | None) -> None:
        if value is not None:
            context.meta["target"] = value

    return click.option(
        "--target",
        metavar="HOST:PORT",
        callback=note,
        expose_value=False,
        help=f"The daemon; else BLOOMGATE_TARGET, else {DEFAULT_TARGET}.",
    )(command)


on_full_option = click.option(
    "--on-full",
    type=click.Choice(["grow", "reject", "degrade"]),
    default="grow",
    show_default=True,
    help="What an add does at the capacity.",
)


def connect(context: click.Context, *, patience: float = PATIENCE, batch: int = BATCH) -> Client:
    """A client of the daemon that was named; it closes with the command. ``patience`` in seconds."""
    from bloomgate.client import Client
    from bloomgate.endpoint import Tls
    from bloomgate.options import ClientOptions

    target = context.meta.get("target") or os.environ.get("BLOOMGATE_TARGET") or DEFAULT_TARGET
    options = ClientOptions(
        on_error="raise", check_timeout=patience, admin_timeout=patience, keys_per_call=batch
    )
    given = context.find_root().params
    token = os.environ.get("BLOOMGATE_TOKEN") or None
    if given["token_file"]:
        with open(given["token_file"], encoding="utf-8") as file:
            token = file.read().strip()
    files = {name: given[name] for name in ("ca", "cert", "key")}
    tls = Tls(**files) if given["tls"] or any(files.values()) else None
    return context.with_resource(Client(target, token=token, tls=tls, options=options))


def say(text: str) -> None:
    """Text for a person."""
    click.echo(text, err=True)


def opened(context: click.Context, file: str) -> BinaryIO:
    """The file of that name, or stdin for "-"."""
    if file == "-" and sys.stdin is None:
        raise OSError(errno.EBADF, "is closed", "stdin")
    return sys.stdin.buffer if file == "-" else context.with_resource(open(file, "rb"))


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="bloomgate")
@target_option
@click.option(
    "--token-file", metavar="FILE", envvar="BLOOMGATE_TOKEN_FILE", help="A token; else BLOOMGATE_TOKEN."
)
@click.option("--tls", is_flag=True, envvar="BLOOMGATE_TLS", help="Encrypt, trusting the usual roots.")
@click.option("--ca", metavar="FILE", envvar="BLOOMGATE_CA", help="Encrypt, trusting these roots alone.")
@click.option("--cert", metavar="FILE", envvar="BLOOMGATE_CERT", help="The certificate to show.")
@click.option("--key", metavar="FILE", envvar="BLOOMGATE_KEY", help="Its private key.")
def cli(**_: Any) -> None:
    """Ask a Bloom filter before you ask the database.

    A token and certificates are options of this command, before the subcommand; all can be set in the
    environment too, as BLOOMGATE_TOKEN_FILE, BLOOMGATE_CA and so on.
    """


@cli.command()
@target_option
@click.argument("name")
@click.option("--capacity", type=int, required=True, help="Keys it is planned for, 1 to 10^11.")
@click.option("--error-rate", type=float, default=0.01, show_default=True, help="1e-9 to 0.5.")
@on_full_option
@click.option(
    "--hash-scheme",
    type=click.Choice(["murmur3_x64_128", "blake2b_128"]),
    default="murmur3_x64_128",
    show_default=True,
    help="blake2b_128 is keyed: for keys that an attacker may choose.",
)
@click.option("--seed", type=click.IntRange(0, 2**32 - 1), help="Of murmur3; random unless given.")
@click.option("--key-format", default="", help="Free text: how callers make keys.")
@click.pass_context
def create(context: click.Context, /, name: str, hash_scheme: str, **spec: Any) -> None:
    """Create a filter; one that exists and is equal is as good."""
    from bloomgate.cli.show import count, size
    from bloomgate.filters import HashScheme

    made = connect(context, patience=PATIENCE_TO_WRITE).create_filter(
        name, hash_scheme=HashScheme[hash_scheme.upper()], **spec
    )
    stats = made.stats
    what = "created: room for" if made.created else "exists already, as asked: room for"
    say(
        f"{name} {what} {count(stats.capacity)} keys at {stats.error_rate:g},"
        f" {count(stats.bits)} bits, {stats.hashes} hashes, {size(stats.memory_bytes)}"
    )


@cli.command()
@target_option
@click.argument("name")
@click.argument("keys", nargs=-1, required=True)
@click.pass_context
def add(context: click.Context, name: str, keys: tuple[str, ...]) -> None:
    """Add keys; prints "new" or "maybe already there", a tab and the key, a line each."""
    encoded = [os.fsencode(key) for key in keys]
    was_new = connect(context).filter(name).add_many(encoded)
    for key, new in zip(encoded, was_new, strict=True):
        click.echo(b"%s\t%s" % (b"new" if new else b"maybe already there", key))


@cli.command()
@target_option
@click.argument("name")
@click.argument("keys", nargs=-1)
@click.option("--from", "file", help="Read keys from the lines of a file, - for stdin.")
@click.option("-q", "--quiet", is_flag=True, help="The exit code alone.")
@click.pass_context
def check(
    context: click.Context,
    name: str,
    keys: tuple[str, ...],
    file: str | None,
    quiet: bool,
) -> None:
    """Ask for keys; prints "maybe" or "no", a tab and the key, a line each.

    Exits 0 if any key might be contained, 1 if all are definitely absent, 2 if there was no answer.
    """
    if bool(keys) == (file is not None):
        raise click.UsageError("give either keys or --from FILE")
    # 0 and 1 say something about every key that was asked, so whatever happens before the last of them is
    # answered, a signal or a bug of ours included, ends in 2.
    code = EXIT_NO_ANSWER
    try:
        code = _check(context, name, keys, file, quiet)
    except BaseException as error:
        from bloomgate.cli.errors import as_sentence

        sentence, _ = as_sentence(error)
        if sentence:
            say(f"bloomgate: {sentence}")
        else:
            traceback.print_exc()
    sys.exit(code)


def _check(context: click.Context, name: str, keys: tuple[str, ...], file: str | None, quiet: bool) -> int:
    from bloomgate.cli.lines import Lines

    asked = connect(context).filter(name)
    lines = Lines(opened(context, file)) if file is not None else None
    batches = lines.batches(BATCH) if lines is not None else [[os.fsencode(key) for key in keys]]
    answered, any_maybe = 0, False
    for batch in batches:
        for key, maybe in zip(batch, asked.might_contain_many(batch), strict=True):
            any_maybe = any_maybe or maybe
            if not quiet:
                click.echo(b"%s\t%s" % (b"maybe" if maybe else b"no", key))
        answered += len(batch)
    if lines is not None and lines.skipped:
        say(f"{lines.skipped} empty lines skipped")
    if not answered:
        # Whoever makes the keys may have died: that is not "all absent".
        say("bloomgate: no keys were asked")
        return EXIT_NO_ANSWER
    click.echo(nl=False)  # flushes, where there is a stdout
    return 0 if any_maybe else 1


@cli.command()
@target_option
@click.argument("name")
@click.argument("file", default="-")
@click.option(
    "--batch", type=click.IntRange(1, 100_000), default=BATCH, show_default=True, help="Keys per call."
)
@click.pass_context
def load(context: click.Context, name: str, file: str, batch: int) -> None:
    """Add the lines of FILE, or of stdin.

    A line ends at a newline; one carriage return before it is dropped; empty lines are skipped. If it stops
    half-way, what was added stays, and loading again from the start is harmless.
    """
    from bloomgate.cli.loading import load_lines

    load_lines(connect(context, batch=batch).filter(name), opened(context, file), file, batch)


@cli.command()
@target_option
@click.argument("name")
@click.option("--json", "json_", is_flag=True, help="JSON on stdout.")
@click.pass_context
def stats(context: click.Context, name: str, json_: bool) -> None:
    """What a filter is, how full it is and what it saved."""
    from bloomgate.cli import show

    found = connect(context).filter(name).stats()
    if json_:
        click.echo(show.as_json(found))
    else:
        show.console().print(show.stats_table(found))


@cli.command("list")
@target_option
@click.option("--json", "json_", is_flag=True, help="JSON on stdout.")
@click.pass_context
def list_filters(context: click.Context, json_: bool) -> None:
    """Every filter."""
    from bloomgate.cli import show

    found = connect(context).list_filters()
    if json_:
        click.echo(show.as_json(found))
    elif found:
        show.console().print(show.filters_table(found))
    else:
        say("no filters yet; `bloomgate create NAME --capacity N` makes one")


@cli.command()
@target_option
@click.argument("name")
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.pass_context
def drop(context: click.Context, name: str, yes: bool) -> None:
    """Drop a filter for good."""
    if not yes:
        click.confirm(f"drop {name} and all its keys?", abort=True, err=True)
    connect(context, patience=PATIENCE_TO_WRITE).drop_filter(name)
    say(f"{name} dropped")


@cli.command()
@target_option
@click.argument("name")
@click.pass_context
def snapshot(context: click.Context, name: str) -> None:
    """Write a filter to the daemon's disk now."""
    stats = connect(context, patience=PATIENCE_TO_WRITE).snapshot_filter(name)
    say(f"{name} written up to seq {stats.snapshot_seq}")


@cli.command()
@click.option("--capacity", type=int, required=True, help="Keys, 1 to 10^11.")
@click.option("--error-rate", type=float, default=0.01, show_default=True, help="1e-9 to 0.5.")
@on_full_option
@click.option("--json", "json_", is_flag=True, help="JSON on stdout.")
def size(capacity: int, error_rate: float, on_full: str, json_: bool) -> None:
    """Plan bits, hashes and bytes of the filter that `create` would make, without a daemon.

    One that grows begins a fifth more precise than asked, so that its later bodies have a share of the error.
    """
    from bloomgate.cli import show
    from bloomgate.filters import FilterSpec, sizing

    body = FilterSpec.plan(capacity, error_rate, on_full=on_full).first_body
    rate = sizing.expected_error_rate(body.bits, body.hashes, capacity)
    if json_:
        plan = {"capacity": capacity, "error_rate": error_rate, "on_full": on_full, "bits": body.bits}
        click.echo(show.as_json({**plan, "hashes": body.hashes, "bytes": body.nbytes}))
        return
    click.echo(f"{show.count(body.bits)} bits, {body.hashes} hashes, {show.size(body.nbytes)}")
    say(
        f"{body.bits / capacity:.1f} bits a key; {show.share(rate)} of absent keys answered maybe once"
        f" {show.count(capacity)} keys are in"
    )


@cli.command()
@click.option("--keep", is_flag=True, help="Leave the daemon up, and print its addresses.")
def demo(keep: bool) -> None:
    """Do the main job on a real list, end to end, and print what it saved."""
    from importlib.util import find_spec

    # Looked for, not imported: the library does not know the daemon, the demo runs it as a process.
    for module in ("aiohttp", "MailChecker"):
        if find_spec(module) is None:
            raise click.ClickException(f"the demo needs {module}: pip install '.[demo]' in a checkout")
    from bloomgate.cli.demo import run

    sys.exit(run(keep=keep))
