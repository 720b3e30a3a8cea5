"""The command line. A usage error is one line on standard error and exit code 2."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import click

from sidestep import __version__
from sidestep.config.engine_settings import default_endpoint, temporary_directory
from sidestep.config.parsing import exporter_endpoint
from sidestep.config.setting import Setting
from sidestep.config.settings import CONFIG_FILE, SETTINGS, read
from sidestep.config.variables import TOPICS
from sidestep.errors import ConfigError, SidestepError
from sidestep.protocol.limits import escape
from sidestep.telemetry import logs

Command = TypeVar("Command", bound=Callable[..., Any])
COMMANDS = "sidestep.commands"
"""Group of entry points."""
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}
"""Errors of standard output, if it is a file."""
DEMO_LOG_LEVEL = "warning"
DEMO_STATS_INTERVAL = "0"
"""The demo shows a status line of its own."""


class _Settings(click.Command):
    """Command whose help groups the options of settings by topic."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the command's own options, then a section for each topic."""
        topics = {setting.key: setting.topic for setting in (*SETTINGS, CONFIG_FILE)}
        sections: dict[str, list[tuple[str, str]]] = {"Options": [], **{t: [] for t in TOPICS}}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                sections[topics.get(parameter.name or "", "Options")].append(record)
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records)


class _Commands(click.Group):
    """Group that finds commands of other packages by their entry points, when they are asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *entry_points(group=COMMANDS).names})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        own = super().get_command(ctx, cmd_name)
        found = () if own else entry_points(group=COMMANDS, name=cmd_name)
        return next((each.load() for each in found), own)


@click.group(
    cls=_Commands,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(__version__, prog_name="sidestep")
@click.pass_context
def cli(context: click.Context) -> None:
    """Metrics of LLM inference engines, taken off the engine's own loop."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


def _settings(**defaults: str) -> Callable[[Command], Command]:
    """Add every setting as an option; ``settings.read`` parses it, as for the other sources.

    Args:
        defaults: Texts of help on defaults that differ from those of settings, by key.
    """

    def add(command: Command) -> Command:
        for setting in (CONFIG_FILE, *reversed(SETTINGS)):
            default = defaults.get(setting.key, setting.default_text)
            command = _option(setting, default)(command)
        return command

    return add


def _option(setting: Setting, default: str) -> Callable[[Command], Command]:
    text = f"{setting.help} [{setting.variable}; {default}]"
    if not setting.metavar:
        # Without default=None, click would pass False for an absent flag, overriding other sources.
        return click.option(
            f"--{setting.flag}", setting.key, flag_value=True, default=None, help=text
        )
    return click.option(
        f"--{setting.flag}",
        setting.key,
        metavar=setting.metavar,
        multiple=setting.repeatable,
        help=text,
    )


_speed = click.option(
    "--speed",
    type=click.Choice(["real", "max"]),
    default="real",
    show_default=True,
    help="real: with the recorded times, from the first item on. max: without pauses; items of one"
    " process keep their order, those of several may not: then parts of a step count in other buckets"
    " of vllm:iteration_tokens_total, and parallel samples on several engines may count as unknown.",
)


@cli.command(cls=_Settings, short_help="Run the exporter: engines push, Prometheus scrapes.")
@click.option("--check", is_flag=True, help="Check the configuration, print what is set, and exit.")
@_settings()
def serve(*, check: bool, **flags: Any) -> None:
    """Run the exporter: engines push to it, Prometheus scrapes it."""
    # By default it would end the process; one that arrives during the start waits for its handler.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGHUP])
    from sidestep.app.exporter import Exporter
    from sidestep.app.run import check as check_exporter
    from sidestep.app.run import serve as run_exporter
    from sidestep.ingest.event_loop import run

    config = read(flags, os.environ)
    if check:
        check_exporter(Exporter(config))
        click.echo("\n".join(config.given) or "every setting has its default")
        return
    logs.set_up(config.log_level, config.log_format)
    run(run_exporter(config, lambda: read(flags, os.environ)))


@cli.command(cls=_Settings, short_help="Run an exporter and replay recorded engines to it.")
@click.option("--once", is_flag=True, help="Play each run once, print the totals and exit.")
@click.option("--open", "browse", is_flag=True, help="Open the exporter's page in a browser.")
@_speed
@_settings(
    ingest_endpoint="unset: an ipc path in a temporary directory",
    log_level=f"default: {DEMO_LOG_LEVEL}",
    log_stats_interval=f"default: {DEMO_STATS_INTERVAL}",
)
def demo(*, once: bool, browse: bool, speed: str, **flags: Any) -> None:
    """Start an exporter and play recorded runs of real vLLM, SGLang and Triton servers to it.

    A round of half an hour is staged, over and over: all is well, then one replica is full, one hangs
    (its replay pauses), clients leave, LoRA adapters wait, a cache is too small, and all is well
    again. What begins is printed, with where to look. Nothing is staged with --once or --speed max.
    """
    from sidestep.app.demo import run_demo

    environ = {
        "SIDESTEP_LOG_LEVEL": DEMO_LOG_LEVEL,
        "SIDESTEP_LOG_STATS_INTERVAL": DEMO_STATS_INTERVAL,
        **os.environ,
    }
    with contextlib.ExitStack() as stack:
        if not flags["ingest_endpoint"] and "SIDESTEP_INGEST_ENDPOINT" not in environ:
            made = tempfile.TemporaryDirectory(prefix="sidestep-demo-", dir=temporary_directory())
            flags["ingest_endpoint"] = (f"ipc://{stack.enter_context(made)}/ingest.ipc",)
        config = read(flags, environ)
        logs.set_up(config.log_level, config.log_format)
        asyncio.run(run_demo(config, once=once, realtime=speed == "real", browse=browse))


@cli.command(short_help="Replay a recording to an exporter.")
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--connect",
    metavar="ENDPOINT",
    help="The exporter's ingest endpoint. [SIDESTEP_ENDPOINT; unset: that of an exporter of this user]",
)
@_speed
@click.option(
    "--namespace", default="replay", show_default=True, help="Prefix of the engines' identities."
)
def replay(file: Path, connect: str | None, speed: str, namespace: str) -> None:
    """Replay FILE, a recording of either format, to an exporter."""
    from sidestep.transport.keys import keys_for
    from sidestep_adapters.recording.replay import Replay

    logs.set_up("warning", "text")
    endpoint = _endpoint(connect or os.environ.get("SIDESTEP_ENDPOINT") or default_endpoint())
    keys_for(endpoint)
    player = Replay(file, endpoint, realtime=speed == "real", namespace=namespace)
    player.run()
    click.echo(f"replayed {player.progress.records} records; the exporter has applied all of them")


@cli.command(short_help="Record what engines send to a file.")
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--listen",
    metavar="ENDPOINT",
    help="Endpoint that engines connect to. [unset: as --ingest.endpoint of an exporter]",
)
@click.option(
    "--connect",
    metavar="ENDPOINT",
    default="",
    help="Endpoint of an exporter to pass everything on to. [unset: nothing is passed on]",
)
def record(file: Path, listen: str | None, connect: str) -> None:
    """Record what engines send to FILE, and pass it on to an exporter if one is given."""
    from sidestep.app.from_config import access
    from sidestep_adapters.recording.recorder import Tee

    logs.set_up("info", "text")
    stop = threading.Event()
    endpoint = listen or default_endpoint()
    # The recorder replaces an exporter, so it uses the exporter's keys from the environment.
    config = read({}, os.environ)
    tee = Tee(endpoint, _endpoint(connect) if connect else "", file, access(config))
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    click.echo(f"recording what engines send to {endpoint}; Ctrl-C ends", err=True)
    tee.run(stop)
    click.echo(f"recorded {tee.items} items to {file}", err=True)


@cli.command(short_help="Write a new CURVE key pair.")
@click.argument("name")
@click.option(
    "--out",
    metavar="DIR",
    type=click.Path(path_type=Path),
    default=Path(),
    help="Directory to write to; the current one by default.",
)
def keygen(name: str, out: Path) -> None:
    """Write a new CURVE key pair: NAME.key, the secret key, and NAME.pub, the public key."""
    from sidestep.transport.keys import generate

    secret, public = generate(out, name)
    click.echo(f"wrote {secret} (secret) and {public}")


@cli.command("hash-password", short_help="Print the hash of a password for basic_auth_users.")
def hash_password() -> None:
    """Ask for a password, print its bcrypt hash for basic_auth_users."""
    import bcrypt

    from sidestep.http.auth import BCRYPT_BYTES

    # No option for the password: other users can see command lines.
    given = click.prompt("Password", hide_input=True, confirmation_prompt=True, err=True).encode()
    if len(given) > BCRYPT_BYTES:
        raise ConfigError(f"a password has at most {BCRYPT_BYTES} bytes: bcrypt ignores the rest")
    click.echo(bcrypt.hashpw(given, bcrypt.gensalt(10)).decode())


def _endpoint(text: str) -> str:
    try:
        return exporter_endpoint(text)
    except ValueError as error:
        raise ConfigError(f"endpoint {text!r}: {error}") from None


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a command and exit with 0, 1 for a runtime error, or 2 for a usage error or a full disk.

    A reader that ends early, as of ``| head``, is no full disk: the exit code is 1, as click has it.
    """
    _set_signals()
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            # Closed by the caller: else a file or a connection would get its descriptor, and uvloop
            # aborts the process when it closes that one.
            setattr(sys, name, Path(os.devnull).open(mode, encoding="utf-8"))  # noqa: SIM115
    try:
        code = cli.main(args=arguments, prog_name="sidestep", standalone_mode=False)
        click.echo(nl=False)  # It flushes, so that an error is not met at the interpreter's end.
    except click.ClickException as error:
        _die(error.format_message(), 2)
    except ConfigError as error:
        _die(str(error), 2)
    except SidestepError as error:
        _die(str(error), 1)
    except (click.Abort, KeyboardInterrupt):
        sys.exit(130)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(1)
    except OSError as error:
        if error.filename is not None or error.errno not in FULL:
            raise
        # The interpreter writes what is left at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        _die(f"cannot write the output: {error.strerror}", 2)
    sys.exit(code if isinstance(code, int) else 0)


def _set_signals() -> None:
    signal.signal(signal.SIGTERM, _terminate)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # In its place asyncio has one that only cancels, which a file being read does not see.
        signal.signal(signal.SIGINT, _interrupt)


def _terminate(number: int, _frame: object) -> NoReturn:
    """End the process, as the kernel does by default, except for process 1 of a container.

    Not by an exception: Python drops one that is raised within a callback of a weak reference, as
    while a module is imported.
    """
    os._exit(128 + number)


def _interrupt(_number: int, _frame: object) -> NoReturn:
    raise KeyboardInterrupt


def _die(message: str, code: int) -> NoReturn:
    with contextlib.suppress(OSError):  # The exit code says it, too.
        sys.stderr.write(f"sidestep: {escape(' '.join(message.split()))}\n")
    sys.exit(code)
