"""Command lines of the commands, which the group ``sidestep`` finds by entry points."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import click

from sidestep.diagnosis.finding import SEVERITIES, Severity
from sidestep.protocol.limits import COUNT_LIMIT

Command = TypeVar("Command", bound=Callable[..., Any])

# Options are laid out by hand, as rows of tables are: names above text.
# fmt: off
ACCESS = (
    click.option("-u", "--user", default="", metavar="USER[:PASSWORD]",
                 help="Log in. Without a password here, SIDESTEP_PASSWORD has it, or you type it."),
    click.option("-H", "--header", multiple=True, metavar="LINE",
                 help="A header of every request, such as 'Authorization: Bearer TOKEN'; repeatable."),
    click.option("--cacert", default="", metavar="FILE",
                 help="Trusted certificates, instead of the system's."),
    click.option("--cert", default="", metavar="FILE", help="The client's certificate."),
    click.option("--key", default="", metavar="FILE", help="The key of the client's certificate."),
    click.option("-k", "--insecure", is_flag=True, help="Trust every certificate."),
)
"""Options of web requests, as curl has them."""


def _access(command: Command) -> Command:
    """Add the options of ``web_client.access.Access``."""
    for option in reversed(ACCESS):
        command = option(command)
    return command


@click.command(short_help="Show engines at the terminal.")
@click.argument("urls", nargs=-1, metavar="[URL]...")
@click.option("--discover", is_flag=True, help="Ask the usual ports of this machine as well.")
@click.option("--interval", default=1.0, show_default=True, type=click.FloatRange(0.5, 3600),
              help="Seconds between two requests.")
@click.option("--once", is_flag=True, help="Print a table once, after two requests.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON once, after two requests.")
@_access
def top(
    urls: tuple[str, ...],
    *,
    discover: bool,
    interval: float,
    once: bool,
    as_json: bool,
    **access: Any,
) -> int:
    """Show engines at the terminal: those of exporters, or of servers with a metrics page of their own.

    URL is an exporter's address, a server's, or that of a metrics page; without any, the exporter on
    this machine. The exit code is 1 if one did not answer.
    """
    from sidestep_tools.top.command import run
    from sidestep_tools.web_client.access import Access

    return asyncio.run(
        run(urls, Access(**access), finds=discover, interval=interval, once=once, as_json=as_json)
    )


@click.command(short_help="Check an installation and say what is wrong.")
@click.argument("urls", nargs=-1, metavar="[URL]...")
@click.option("--manifest", "manifests", multiple=True, metavar="FILE|DIR|-",
              type=click.Path(exists=True, allow_dash=True),
              help="Check Kubernetes manifests, rendered by helm or kustomize or printed by kubectl;"
                   " repeatable.")
@click.option("--environment", is_flag=True,
              help="Check the packages and variables that an engine started here would have.")
@click.option("--endpoint", "endpoints", multiple=True, metavar="ENDPOINT",
              help="Check an exporter's ingest endpoint, by connecting as an engine does; repeatable.")
@click.option("--dashboard", "dashboards", multiple=True, metavar="FILE",
              help="Check the queries of a dashboard of Grafana or Perses; repeatable.")
@click.option("--rules", multiple=True, metavar="FILE",
              help="Check the queries of a rule file of Prometheus; repeatable.")
@click.option("--engine-page", "pages", multiple=True, metavar="URL|FILE",
              help="Check a metrics page, of an engine or an exporter; with --dashboard or --rules,"
                   " compare the queries with it. Repeatable.")
@click.option("--bundle", default="", metavar="FILE",
              help="Write the findings and the exporters' own pages, settings and last log lines to this"
                   " .tar.gz, for a report of a bug.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--fail-on", type=click.Choice(SEVERITIES), default="error", show_default=True,
              help="Exit with 1 if there is a finding of this severity or a higher one; with 2 for"
                   " errors.")
@_access
def doctor(
    urls: tuple[str, ...],
    *,
    manifests: tuple[str, ...],
    environment: bool,
    endpoints: tuple[str, ...],
    dashboards: tuple[str, ...],
    rules: tuple[str, ...],
    pages: tuple[str, ...],
    bundle: str,
    as_json: bool,
    fail_on: Severity,
    **access: Any,
) -> int:
    """Check an installation, and say what is wrong and how to mend it.

    URL is the address of an exporter, or of an engine, whose own metrics page is then checked; without
    any source, the exporter on this machine. docs/doctor.md describes every code. The exit code is 2
    with errors, 1 with findings of the severity of --fail-on or above, else 0.
    """
    from sidestep_tools.doctor.command import Sources, run
    from sidestep_tools.web_client.access import Access

    sources = Sources(
        exporters=urls,
        environment=("this environment",) if environment else (),
        endpoints=endpoints,
        manifests=manifests,
        dashboards=dashboards,
        rules=rules,
        pages=pages,
    )
    return asyncio.run(
        run(sources, Access(**access), as_json=as_json, fail_on=fail_on, archive=bundle)
    )


@click.command(
    short_help="Start an engine with what sidestep needs.",
    context_settings={"allow_interspersed_args": False},
)
@click.option("--tap", is_flag=True, help="Tap the scheduler in vLLM's core as well.")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def run(*, tap: bool, command: tuple[str, ...]) -> None:
    """Start an engine by COMMAND, such as `vllm serve MODEL`, with what sidestep needs.

    Standard error says which variables and options are set, and why; those that you have set stay.
    The engine then replaces this process.
    """
    from sidestep_tools.run import run as start

    start(command, tap=tap)


@click.command(short_help="Add the exporter to the engines of Kubernetes manifests.")
@click.option(
    "-f",
    "--filename",
    "files",
    metavar="FILE",
    default=("-",),
    multiple=True,
    type=click.File("rb"),
    help="Manifests; standard input by default. Repeatable.",
)
@click.option("--image", default="sidestep:dev", show_default=True, help="Image of the exporter.")
@click.option(
    "--mode",
    default="beside",
    show_default=True,
    type=click.Choice(("beside", "instead")),
    help="instead: sidestep counts in the engine's place, whose own page loses its families.",
)
@click.option("--diff", is_flag=True, help="Print what is added, as a unified diff.")
def inject(*, files: tuple[BinaryIO, ...], image: str, mode: str, diff: bool) -> None:
    """Print manifests with the exporter beside each vLLM and SGLang, and the plugin in it.

    It reads what `helm template`, `kubectl kustomize` or you have written, and can be Helm's post-renderer
    or an exec function of kustomize. Documents without an engine are printed as they are; a workload with
    the label sidestep/inject: "false" is left unchanged, and so is one that has an exporter.
    """
    from sidestep_tools.inject.command import run

    if any(each.isatty() for each in files):
        raise click.UsageError("give -f FILE, or manifests on standard input")
    run(files, image=image, mode=mode, diff=diff)


MINUTES = click.option("--minutes", default=10, show_default=True, type=click.IntRange(1, 10),
                       help="Look at so many of an exporter's last minutes.")
ENGINE = click.option("--engine", default="", metavar="NAME",
                      help="Look only at the engine of this name or identity.")


@click.command(short_help="Say why requests are slow, and what to change.")
@click.argument("arguments", metavar="[URL]... [REQUEST_ID]", nargs=-1)
@click.option(
    "--request",
    "joined",
    metavar="ID",
    default="",
    help="Show all parts of a request, whichever of the exporters has them.",
)
@click.option("--slowest", metavar="N", type=click.IntRange(1), help="Show the N slowest requests.")
@click.option("--from", "file", metavar="FILE", type=click.Path(path_type=Path),
              help="Read records of requests, or a recording, instead of an exporter.")
@ENGINE
@MINUTES
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@_access
def why(
    arguments: tuple[str, ...],
    *,
    joined: str,
    slowest: int | None,
    file: Path | None,
    engine: str,
    minutes: int,
    as_json: bool,
    **access: Any,
) -> None:
    """Say where the time of the last minutes' requests went, which limit bound and what to change.

    URL is an exporter's address; without one, the exporter on this machine. With REQUEST_ID, --request or
    --slowest, the time line of these requests. docs/why.md says how to read it.
    """
    from sidestep_tools.web_client.access import Access
    from sidestep_tools.why.command import EXPORTER, Question
    from sidestep_tools.why.command import why as answer

    # A file needs no address.
    most = 0 if file is not None else 1
    urls = arguments if joined else arguments[:most]
    request_id = joined or "".join(arguments[most : most + 1])
    if len(urls) + bool(request_id and not joined) < len(arguments) or (file and urls):
        raise click.UsageError("give URL or --from FILE, not both; several URLs need --request ID")
    question = Question(engine, request_id, slowest or 0)
    sources = [file] if file is not None else urls or [EXPORTER]
    asyncio.run(answer(sources, question, Access(**access), minutes=minutes, as_json=as_json))


@click.command(short_help="Write the last minutes as a trace for Perfetto and Chrome.")
@click.argument("source", metavar="[URL|FILE]", default="")
@click.option("-o", "--output", required=True, metavar="FILE", type=click.Path(path_type=Path),
              help="File to write, such as trace.json.")
@ENGINE
@MINUTES
@_access
def timeline(source: str, *, output: Path, engine: str, minutes: int, **access: Any) -> None:
    """Write steps and requests as a trace, to be opened in Perfetto or Chrome.

    The source is an exporter's address, or a file: records of requests, or a recording; without one,
    the exporter on this machine.
    """
    from sidestep_tools.web_client.access import Access
    from sidestep_tools.why.command import EXPORTER, write_trace

    is_file = Path(source).is_file() or (source and "://" not in source and "/" in source)
    found = Path(source) if is_file else source or EXPORTER
    asyncio.run(write_trace(found, engine, Access(**access), minutes=minutes, output=output))


def _capacities(_context: click.Context, _option: click.Parameter, text: str) -> tuple[int, ...]:
    """Return numbers of blocks, which commas separate; none of an empty text."""
    try:
        numbers = tuple(map(int, text.split(","))) if text else ()
    except ValueError:
        numbers = (0,)
    if any(not 1 <= number <= COUNT_LIMIT for number in numbers):
        raise click.BadParameter(
            f"{text:.40}: must be numbers of blocks above 0, separated by commas"
        )
    return numbers


@click.command(short_help="Show the hit ratio of a prefix cache over its size.")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--sample-rate", default=0.01, show_default=True,
              type=click.FloatRange(0, 1, min_open=True),
              help="Share of the blocks to sample, if there are more than 8192; 1: all of them.")
@click.option("--capacity", "capacities", metavar="N,N,...", callback=_capacities, default="",
              help="Sizes of the cache, in blocks. [unset: 1/64 to all of the distinct blocks]")
@click.option("--block-size", metavar="TOKENS", type=click.IntRange(1),
              help="Tokens in a block, for a column of tokens.")
@click.option("--plot", metavar="FILE", type=click.Path(path_type=Path),
              help="Write the curve as SVG to a file whose name ends with .svg.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def whatif(
    file: Path,
    *,
    sample_rate: float,
    capacities: tuple[int, ...],
    block_size: int | None,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Show what a prefix cache of other sizes would hit, from the lookups in FILE.

    FILE is a trace, plain or gzip, with a JSON object a request whose hash_ids are the blocks of
    its prompt; or a recording of sidestep record; or a capture of KV events, a JSON array a batch.
    docs/kv-residency.md says how to decide with it.
    """
    from sidestep_tools.whatif.command import run

    run(
        file,
        rate=sample_rate,
        capacities=capacities,
        block_size=block_size,
        plot=plot,
        as_json=as_json,
    )


@click.command(short_help="Compare two runs: load, latencies, throughput.")
@click.argument("a")
@click.argument("b")
@click.option("--threshold", default=5.0, show_default=True, metavar="PERCENT",
              type=click.FloatRange(0),
              help="A latency is worse if the whole interval of its change lies above this.")
@click.option("--load-tolerance", default=20.0, show_default=True, metavar="PERCENT",
              type=click.FloatRange(0),
              help="Load is another one if its mean changes by more than this.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@_access
def compare(
    a: str, b: str, *, threshold: float, load_tolerance: float, as_json: bool, **access: Any
) -> int:
    """Compare B with A, such as the time after a change with the time before it.

    Each is a file of request records (--requests.log) or a recording of sidestep record; the
    address of an exporter, whose last ten minutes count; or URL@START/END, a time range of a
    Prometheus. A file may have a range, too, and all of them '{label=value,...}' before it.
    docs/compare.md says how to read the report. The exit code is 1 if B is worse, 3 if they are not
    comparable, 2 for an error, else 0.
    """
    from sidestep_tools.compare.command import run
    from sidestep_tools.compare.report import Thresholds
    from sidestep_tools.web_client.access import Access

    thresholds = Thresholds(threshold / 100, load_tolerance / 100)
    return asyncio.run(run((a, b), Access(**access), thresholds, as_json=as_json))
