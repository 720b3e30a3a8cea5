"""Write the documents, and parts of documents, that follow from tables in the code.

docs/metrics.md and docs/metrics/ are written as a whole. In docs/configuration.md, docs/doctor.md,
docs/tuning.md, docs/compatibility.md, README.md, docs/architecture.md and docs/protocol.md only the part between two comments is written. ``--check`` writes nothing:
it compares, follows every link inside the repository, and refuses pages that docs/README.md does not list.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from pathlib import Path

import tomllib

from sidestep.catalog import slo
from sidestep.catalog.buckets import DEFAULTS, SCHEMA, SCHEMAS
from sidestep.catalog.engine_pages import COMMON_NAMES
from sidestep.catalog.row import Alias, Computed, Constant, FeedsFrom, Handler, Info, Row, Sampled
from sidestep.catalog.tuning import CAUSES
from sidestep.config.settings import CONFIG_FILE, SETTINGS
from sidestep.config.variables import TOPICS
from sidestep.diagnosis import own_codes
from sidestep.engines import common_names
from sidestep.engines.dialect import Dialect
from sidestep.engines.dialects import DIALECTS
from sidestep.engines.vllm.own_rows import TAPPED
from sidestep.protocol import receiver
from sidestep.protocol.stream import StreamState
from sidestep.telemetry.rows import ROWS as SELF_ROWS
from sidestep_tools.doctor import endpoint, engine_page, environment, exporter
from sidestep_tools.doctor.environment import ENGINES
from sidestep_tools.doctor.manifests import checks as manifests
from sidestep_tools.doctor.queries import codes as queries
from sidestep_tools.run import SHUTDOWN_TIMEOUT_SINCE, STATISTICS_SINCE

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
TEXTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    ROOT / "CHANGELOG.md",
    ROOT / "benchmarks" / "README.md",
    *sorted(DOCS.glob("**/*.md")),
]
# fmt: off
DOCTOR = (
    ("An engine's environment", environment.CODES,
        "`python -m sidestep doctor --environment`, with the engine's Python and variables, such as in its container. The endpoint of `SIDESTEP_ENDPOINT` is checked as below. Options of command lines (SD021 to SD026) are checked in manifests."),
    ("An exporter, by itself", own_codes.CODES,
        "`sidestep doctor URL`, `/api/v1/doctor`, or the live page. Counters are findings if they have increased within the last hour."),
    ("An exporter, from outside", exporter.CODES,
        "`sidestep doctor URL`: the address of an exporter's page."),
    ("An ingest endpoint", endpoint.CODES,
        "`sidestep doctor --endpoint ENDPOINT`: by a connection as an engine makes it, with the keys of `SIDESTEP_SERVER_KEY` and `SIDESTEP_CLIENT_KEY`."),
    ("A metrics page", engine_page.CODES,
        "`sidestep doctor --engine-page URL|FILE`: the page of an engine, or of an exporter, as Prometheus scrapes it. With several, also whether an engine is on two of them."),
    ("Kubernetes manifests", manifests.CODES,
        "`sidestep doctor --manifest FILE|DIR|-`: rendered manifests, or those of a cluster. Resources without pods are ignored. Variables and options of engines have the codes of an engine's environment."),
    ("Dashboards and rule files", queries.CODES,
        "`sidestep doctor --dashboard FILE --rules FILE`: files of Grafana, Perses or Prometheus, also in ConfigMaps and operators' objects. Metrics are compared with the catalogue, or with the metrics pages of `--engine-page URL|FILE`."),
)
"""Headings, codes, and the commands that look for them, in Markdown."""
# fmt: on
PERFORMANCE = "docs/performance.md"
END = "<!-- until here. -->\n"
LOOP = "The loop of vLLM's API server: what statistics cost it"
FIGURES = ("64 requests", "256 requests", "1,024 requests", "256 requests, streaming")
MODES = {
    "no metrics": "no statistics",
    "vLLM's own": "vLLM's own metrics",
    "with sidestep": "plugin instead",
}
"""Rows of README.md's table, and its columns: their names in docs/performance.md begin and end so."""
CORE = (
    "Only with the tap, see [vllm-core.md](../vllm-core.md).\n"
    "The core reports `sidestep_engine_process_*` of itself and of its workers, and each API server its own.\n\n"
)
STREAMS = (
    "Only with `--subscribe`, see [streams.md](../streams.md), for any engine.\n"
    "An engine with a plugin, too, has the families of both sources, under the same labels.\n\n"
)
TRITON = (
    "Only with `--triton`, see [triton.md](../triton.md); [triton-fields.md](../triton-fields.md) lists them by field.\n"
    "The model's `metric_tags` and the `label.` options add labels to those listed here.\n\n"
)
SLO = (
    "Only with `--slo`, see [slo.md](../slo.md).\n"
    "Series of an SGLang scheduler also have its rank labels; in the pod view one rank counts.\n"
    "The second family has a sample only if it is above 0.\n\n"
)
SCRAPED = (
    "Pages of `--scrape` have these names too, with the page's own labels and buckets; a label `model` becomes `model_name`.\n"
    "Of gauges that the processes of a TensorRT-LLM repeat (`pid`) the highest counts.\n"
    "While an engine of this exporter has a family, those of pages are left out.\n"
    "The names are from the servers' documents; no page of them was recorded.\n\n"
)
OBJECTIVES = (slo.SLO_REQUESTS, slo.SLO_UNDECIDED)
"""Families of the objectives, which every dialect with latencies has."""
POLLED = (
    "Only with `--engine {name}=URL`, see [{name}.md](../{name}.md).\n"
    "The `label.` options add labels to those listed here.\n\n"
)
WHOLE = {
    "stream": STREAMS,
    "triton": TRITON,
    **{each.name: POLLED.format(name=each.name) for each in DIALECTS.values() if each.polls_page},
}
"""Notes of dialects with one table for all families."""
PAGES = {"stream": "streams"}
"""Names of pages in docs/metrics/ that differ from the dialect's name."""
SAMPLED = {
    "vllm": (
        "KV connectors and front end",
        "The sender describes these families. Those of a connector appear if it is configured.\n\n",
    ),
    "sglang": (
        "Values that the engine passes to its collectors one by one",
        (
            "Each appears with its first data, with the labels of its collector: a scheduler has its ranks, a tokenizer none.\n"
            "The `dp_rank` of a scheduler and labels that an administrator configures are added to those listed here.\n\n"
        ),
    ),
}
"""Title and note of the self-described families of a dialect."""
LISTED = {
    "vllm": "the engine's own and the tap's; what vLLM collects and does not expose; removed names",
    "sglang": "the same of schedulers, tokenizers and caches",
    "triton": "statistics of the server and of each version of its models",
    "streams": "KV events, forward passes and load",
    "common": "OpenTelemetry's names, and objectives",
    "exporter": "engines' states, delivery, scrapes, snapshots",
}
"""Contents of the pages in docs/metrics/."""
POLLED_CONTENTS = "the server's own page, and its other paths"
NOTE = "<!-- Written by `make docs` from {source}. Do not edit. -->\n\n"


def metrics() -> dict[Path, str]:
    """Return docs/metrics.md and the pages in docs/metrics/."""
    note = NOTE.format(source="the rows in exporter/sidestep/engines")
    pages = {}
    contents: dict[str, tuple[str, int]] = {}
    for dialect in DIALECTS.values():
        name = PAGES.get(dialect.name, dialect.name)
        pages[f"{name}.md"] = f"# Metrics: {dialect.title}\n\n{dialect_text(dialect)}"
        families = {row.name for row in dialect.rows} - {*OBJECTIVES}
        contents[name] = dialect.title, len(families)
    pages["common.md"] = (
        "# Metrics: names that are the same for all engines\n\n"
        "Only with `--metrics.common`, because each repeats a family of the engine, with the engine's labels.\n"
        "Names and other labels are OpenTelemetry's if it has them: those of\n"
        f"{common_names.CONVENTIONS}.\n\n"
        f"{common()}## From scraped pages\n\n{SCRAPED}{scraped()}\n## Objectives\n\n{SLO}{objectives()}"
    )
    contents["common"] = "Common names", len(common_names.FAMILIES) + len(OBJECTIVES)
    pages["exporter.md"] = (
        "# Metrics: the exporter itself\n\n| Name | Kind | Labels | Meaning |\n|---|---|---|---|\n"
    )
    for row in SELF_ROWS:
        text = f"| `{row.name}` | {row.kind} | {labels(row.labels)} | {row.help} |\n"
        pages["exporter.md"] += text
    contents["exporter"] = "The exporter itself", len(SELF_ROWS)
    index = "All families that sidestep can expose, by engine:\n\n| Page | Families | |\n|---|---|---|\n"
    for name, (title, count) in contents.items():
        index += (
            f"| [{title}](metrics/{name}.md) | {count} | {LISTED.get(name, POLLED_CONTENTS)} |\n"
        )
    index += (
        "\nIn these tables:\n\n"
        "- *Labels*: `engine` and `model_name` identify the engine.\n"
        "- *Combined*: how series of several engines are aggregated in the [pod view](views.md), and if a label is dropped.\n"
        "  *Of one rank*: all ranks of a replica report the same values, and one of them counts.\n"
        "- *Shown*: a family with an option appears at 0 if the engine reports that the option is on, otherwise with its first data.\n\n"
        "The `http_*` families of an engine's API server stay on the engine's page.\n"
        "`process_*` and `python_*` are the exporter's own.\n\n"
        "## Bucket families\n\n"
        "Default bounds of the classic histograms. An engine's own bounds replace them,\n"
        "and the exporter's [configuration file](configuration.md#buckets) replaces both.\n"
        "`request_tokens` ends at the model's maximum length.\n"
        "*Schema* is the resolution of [native histograms](native-histograms.md).\n\n"
        "| Family | Schema | Upper bounds |\n|---|---|---|\n"
    )
    for name, bounds in DEFAULTS.items():
        schema = SCHEMAS.get(name, SCHEMA)
        index += f"| `{name}` | {schema} | {' '.join(f'{bound:g}' for bound in bounds)} |\n"
    found = {DOCS / "metrics" / name: f"{note}{text.rstrip()}\n" for name, text in pages.items()}
    return {DOCS / "metrics.md": f"{note}# Metrics\n\n{index}", **found}


def dialect_text(dialect: Dialect) -> str:
    """Return the tables of one dialect, by origin of the families."""
    live = [row for row in dialect.rows if row.status != "hidden" and row.name not in OBJECTIVES]
    if dialect.name in WHOLE:
        text = f"{WHOLE[dialect.name]}{table(live)}"
        return text.replace("| self-described |", "| the server |") if dialect.polls_page else text
    tapped = [row for row in live if row in TAPPED]
    own = [r for r in live if r.name.startswith("sidestep_") and r not in tapped]
    sampled = [row for row in live if isinstance(row.source, Sampled) and row not in tapped]
    core = [row for row in live if row not in [*own, *sampled, *tapped]]
    hidden = [row for row in dialect.rows if row.status == "hidden"]
    title, note = SAMPLED.get(dialect.name, ("Self-described", ""))
    parts = (
        ("The engine's own", "", table(core)),
        (title, note, table(sampled)),
        ("Collected by the engine, but not on its own page", "", table(own)),
        ("From events of the engine's core", CORE, table(tapped)),
        ("Names that the engine has removed", "Only with `--metrics.legacy`.\n\n", legacy(hidden)),
    )
    found = zip(parts, (core, sampled, own, tapped, hidden), strict=True)
    return "".join(f"## {name}\n\n{said}{text}" for (name, said, text), any_ in found if any_)


def objectives(dialects: Mapping[str, Dialect] = DIALECTS) -> str:
    """Return the families of ``--slo``, and the histogram of each predefined objective."""
    measured = [one for one in dialects.values() if one.latencies]
    titles = [one.title for one in measured]
    text = f"| Name | Kind | Labels of {' | Of '.join(titles)} | Meaning |\n"
    text += "|---" * (3 + len(titles)) + "|\n"
    for name in OBJECTIVES:
        rows = [row for one in measured for row in one.rows if row.name == name]
        named = " | ".join(labels(row.labels) for row in rows)
        text += f"| `{name}` | {rows[0].kind} | {named} | {rows[0].help} |\n"
    text += f"\n| `slo` | {' | '.join(titles)} |\n" + "|---" * (1 + len(titles)) + "|\n"
    for name in slo.LATENCIES:
        families = (one.latencies.get(name) for one in measured)
        text += f"| `{name}` | {' | '.join(f'`{f}`' if f else '-' for f in families)} |\n"
    return text + "\n"


def common(dialects: Mapping[str, Dialect] = DIALECTS) -> str:
    """Return the families under common names, and their source in each engine."""
    columns = {
        name: {row.name: row for row in one.common_rows}
        for name, one in dialects.items()
        if one.common_rows
    }
    text = (
        f"| Name | Kind | Meaning | {' | '.join(f'From {name}' for name in columns)} | Combined |\n"
    )
    text += "|---" * (4 + len(columns)) + "|\n"
    for family in common_names.FAMILIES:
        rows = [column.get(family.name) for column in columns.values()]
        own = next(row.own_labels for row in rows if row is not None)
        values = f" By `{own[0]}`." if family.closed else ""
        buckets = f" Buckets: `{family.buckets}`." if family.buckets else ""
        sources = " | ".join("-" if row is None else source(row) for row in rows)
        flag = " Only with `--metrics.legacy` as well." if family.successor else ""
        text += f"| `{family.name}` | {family.kind} | {family.help}{values}{buckets}{flag} | {sources} |"
        text += f" {family.combine} |\n"
    return text + "\n"


def scraped() -> str:
    """Return the scraped families that have copies under common names."""
    text = "| Common name | Scraped family | Read from |\n|---|---|---|\n"
    for row in COMMON_NAMES:
        kind = f", `{common_names.TOKEN_TYPE}` `{row.token_type}`" if row.token_type else ""
        text += f"| `{row.name}`{kind} | `{row.source}` | {row.read_from} |\n"
    return text


def table(rows: list[Row]) -> str:
    """Return a table of families, with ``...`` for the labels that most of them have."""
    usual = Counter(row.labels for row in rows).most_common(1)[0][0] if rows else ()
    text = f"`...` stands for {labels(usual)}.\n\n"
    text += "| Name | Kind | Labels | Meaning | From | Shown | Combined |\n"
    text += "|---|---|---|---|---|---|---|\n"
    for row in rows:
        shown = f"`{row.feature}`" if row.feature else "always"
        values = (
            f" Values: {', '.join(f'`{value}`' for value in row.closed)}." if row.closed else ""
        )
        buckets = f" Buckets: `{row.buckets}`." if row.buckets else ""
        text += (
            f"| `{row.name}` | {row.kind} | {labels(shortened(row, usual))} | {row.exposed_help}{values}"
            f"{buckets} | {source(row)} | {shown} | {combined(row)} |\n"
        )
    return text + "\n"


def shortened(row: Row, usual: tuple[str, ...]) -> tuple[str, ...]:
    """Return the labels of a row, with ``...`` in place of the usual ones if it has all of them."""
    if not usual or not set(usual) <= {*row.labels}:
        return row.labels
    return ("...", *(name for name in row.labels if name not in usual))


def legacy(rows: list[Row]) -> str:
    """Return a table of hidden families and their successors."""
    text = (
        "| Name | Kind | Labels | Last release | Use instead | Today |\n|---|---|---|---|---|---|\n"
    )
    for row in rows:
        text += (
            f"| `{row.name}` | {row.kind} | {labels(row.labels)} | {row.until} |"
            f" `{row.successor}` | {row.help} |\n"
        )
    return text + "\n"


def combined(row: Row) -> str:
    """Return how series of several engines are aggregated."""
    return f"{row.combine}, of one rank" if row.mirrored else row.combine


def labels(names: tuple[str, ...]) -> str:
    """Format label names."""
    return " ".join(f"`{name}`" for name in names) or "-"


def source(row: Row) -> str:
    """Return the source of the values."""
    words = {
        Handler: "several fields",
        Computed: "computed",
        Constant: "constant",
        Info: "configuration",
        Sampled: "self-described",
    }
    match row.source:
        case str() | Alias() | FeedsFrom():
            paths = [getattr(row.source, "name", row.source)]
        case tuple():
            paths = [getattr(path, "name", path) for path in row.source]
        case Mapping():
            paths = [getattr(path, "name", path) for path in row.source.values()]
        case elsewhere:
            return words[type(elsewhere)]
    return "<br>".join(f"`{path}`" for path in paths)


def written(path: Path, source: str, text: str) -> str:
    """Return a document with ``text`` between its comments that name ``source``."""
    begin = f"<!-- Written by `make docs` from {source}: -->\n"
    before, _, rest = path.read_text(encoding="utf-8").partition(begin)
    return f"{before}{begin}\n{text}\n{END}{rest.partition(END)[2]}"


def configuration() -> str:
    """Return docs/configuration.md with every setting as flag and variable."""
    *others, last = [f"`{setting.flag}`" for setting in SETTINGS if setting.adjustable]
    text = (
        "On SIGHUP `sidestep serve` reads the file again and applies changes of"
        f" {', '.join(others)} and {last}.\nIt logs the names of other changed settings, which need a restart."
        " An invalid file changes nothing.\n"
    )
    for topic in TOPICS:
        text += f"\n## {topic}\n\n| Flag | Variable | Default | Meaning |\n|---|---|---|---|\n"
        for setting in (*SETTINGS, CONFIG_FILE):
            if setting.topic == topic:
                default = setting.default_text.removeprefix("default: ")
                text += (
                    f"| `{setting.usage}` | `{setting.variable}` | {default} | {setting.help} |\n"
                )
    return written(DOCS / "configuration.md", "exporter/sidestep/config/*_settings.py", text)


def readme() -> str:
    """Return README.md with the figures of the table in docs/performance.md.

    Raises:
        KeyError: The table has no such row.
    """
    performance = (ROOT / PERFORMANCE).read_text(encoding="utf-8")
    found: dict[tuple[str, str], list[str]] = {}
    topic = ""
    measured: dict[str, str] = {}
    for line in performance.splitlines():
        if line.startswith("**") and line.endswith("**"):
            topic = line.strip("*")
        elif line.startswith("| ") and topic:
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            found[topic, cells[0]] = cells
        elif line.startswith("Measured "):
            measured[topic] = line
    table = f"| us a token | {' | '.join(MODES)} |\n|---|{'---|' * len(MODES)}\n"
    for load in FIGURES:
        cells = [found[LOOP, f"{load}: {row}"][2] for row in MODES.values()]
        times = [re.sub(r".*\(([\d.]+) us a token\)", r"\1", cell) for cell in cells]
        table += f"| {load} | {' | '.join(times)} |\n"
    return written(ROOT / "README.md", PERFORMANCE, f"{measured[LOOP]}\n\n{table}")


def architecture() -> str:
    """Return docs/architecture.md with the packages, in the order of the import contract.

    Raises:
        StopIteration: pyproject.toml has no such contract.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = project["tool"]["importlinter"]["contracts"]
    layers = next(one["layers"] for one in contracts if one["type"] == "layers")
    drawing, table = "```\n", "| Package | Contents |\n|---|---|\n"
    for number, layer in enumerate(layers):
        names = [name.strip().removeprefix("sidestep.") for name in layer.split("|")]
        drawing += "      ↓\n" if number else ""
        drawing += f"  {'   |   '.join(names)}\n"
        for name in names:
            package = ROOT / "exporter" / "sidestep" / name
            source = package / "__init__.py" if package.is_dir() else package.with_suffix(".py")
            summary = (ast.get_docstring(ast.parse(source.read_text())) or "").partition("\n")[0]
            table += f"| `{name}` | {summary} |\n"
    source = "pyproject.toml and the packages"
    return written(DOCS / "architecture.md", source, f"{drawing}```\n\n{table}")


def protocol() -> str:
    """Return docs/protocol.md with the receiver's states and its state table."""
    states, events = member_docs(StreamState), member_docs(receiver.Event)
    rows = [["State", "Meaning"], ["---", "---"]]
    rows += [[name.lower(), text] for name, text in states.items()]
    rows += [[], ["State", "Event", "Action", "Next"], ["---"] * 4]
    for row in receiver.TRANSITIONS:
        present = (
            "any" if len(row.states) == len(states) else ", ".join(map(state_name, row.states))
        )
        event = "; ".join(events[event.name] for event in row.events)
        following = "same" if row.following is None else state_name(row.following)
        rows.append([present, event, action_text(row.action), following])
    rows.append(["any", "any other", action_text(receiver.OTHERWISE), "same"])
    tables = "".join(f"| {' | '.join(row)} |\n" if row else "\n" for row in rows)
    return written(DOCS / "protocol.md", "exporter/sidestep/protocol/receiver.py", tables)


def state_name(state: StreamState) -> str:
    """Return the name of a stream's state as docs/protocol.md writes it."""
    return state.name.lower()


def action_text(action: Callable[..., object]) -> str:
    """Return the first line of an action's docstring, without its full stop."""
    return (action.__doc__ or "").partition("\n")[0].removesuffix(".")


def member_docs(enum: type[Enum]) -> dict[str, str]:
    """Return the docstring of each member of ``enum``, by name."""
    (found,) = ast.parse(inspect.getsource(enum)).body
    assert isinstance(found, ast.ClassDef)
    texts = [n.value.value for n in found.body[1:] if isinstance(n, ast.Expr)]  # type: ignore[attr-defined]
    return dict(zip(enum.__members__, texts, strict=True))


def broken_links(paths: list[Path]) -> Iterator[str]:
    """Yield links to missing files and headings."""
    for path in paths:
        text = prose(path.read_text(encoding="utf-8"))
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            if re.match(r"[a-z]+:", target):
                continue
            file, _, anchor = target.partition("#")
            other = path.parent / file if file else path
            if not other.exists():
                yield f"{path}: {target}: there is no such file"
            elif anchor and anchor not in anchors(other.read_text(encoding="utf-8")):
                yield f"{path}: {target}: there is no such heading"


def unlisted() -> Iterator[str]:
    """Yield pages that are not in docs/README.md, the index from which the site's navigation is made."""
    listed = re.findall(r"\]\(([\w/-]+\.md)\)", (DOCS / "README.md").read_text(encoding="utf-8"))
    for path in sorted([*DOCS.glob("*.md"), *DOCS.glob("metrics/*.md")]):
        page = str(path.relative_to(DOCS))
        if page not in {*listed, "README.md"}:
            yield f"{path}: docs/README.md does not list it"


def prose(text: str) -> str:
    """Return a document without its code, with the same line numbers."""
    text = re.sub(r"^( *)```.*?^\1```", blank, text, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"`[^`\n]*`", "``", text)


def blank(block: re.Match[str]) -> str:
    """Return only the newlines of a block."""
    return "\n" * block[0].count("\n")


def anchors(text: str) -> set[str]:
    """Return the anchors that GitHub makes from the headings of a document."""
    found: Counter[str] = Counter()
    names = set()
    # Code in a heading counts, code blocks do not.
    for line in re.sub(r"^( *)```.*?^\1```", "", text, flags=re.DOTALL | re.MULTILINE).splitlines():
        if heading := re.match(r"#+ +(.*)", line):
            shown = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading[1])
            name = re.sub(r"[^\w\- ]", "", shown.strip().lower()).replace(" ", "-")
            names.add(f"{name}-{found[name]}" if found[name] else name)
            found[name] += 1
    return names


def doctor() -> str:
    """Return docs/doctor.md from its introduction and the codes."""
    path = DOCS / "doctor.md"
    text = ""
    for title, codes, usage in DOCTOR:
        text += f"## {title}\n\n{usage}\n\n"
        for code in codes:
            text += f"### {code.code}\n\n**{code.title}** ({code.severity}).\n"
            text += f"{code.cause}\n\n*Mend:* {code.remedy}\n\n"
    return written(path, "tools/docs.py", text)


def compatibility() -> str:
    """Return docs/compatibility.md from the supported ranges, and from the rows that name a release."""
    text = "| Engine | From | Up to | Tested with each change |\n|---|---|---|---|\n"
    for engine in ENGINES:
        first, last = (".".join(map(str, each)) for each in (engine.first, engine.last))
        setup = (ROOT / "tools" / f"setup_{engine.package}.sh").read_text(encoding="utf-8")
        (tested,) = re.findall(rf"^{engine.package.upper()}=(\S+)", setup, re.MULTILINE)
        text += f"| {engine.title} | {first} | {last} | {tested} |\n"
    text += "\n| From vLLM | There is |\n|---|---|\n"
    found: dict[tuple[int, ...], str] = {
        SHUTDOWN_TIMEOUT_SINCE: "`--shutdown-timeout`: before, the tap and several API servers lose their last items",
        STATISTICS_SINCE: "mode `instead` without any statistics on vLLM's loop",
    }
    for row in DIALECTS["vllm"].rows:
        if row.since:
            release = tuple(map(int, row.since.split(".")))
            found[release] = ", ".join(filter(None, (found.get(release), f"`{row.name}`")))
    for release, what in sorted(found.items()):
        text += f"| {'.'.join(map(str, release))} | {what} |\n"
    source = "exporter/sidestep_tools/doctor/environment.py and the rows"
    return written(DOCS / "compatibility.md", source, text)


def tuning() -> str:
    """Return docs/tuning.md from its introduction and the table of causes."""
    text = ""
    for cause in CAUSES:
        parts = ", ".join(f"`{part}`" for part in cause.parts)
        text += f"## {cause.name}\n\n{cause.meaning}\nParts of requests: {parts}.\n\n"
        text += "".join(
            f"- {DIALECTS[change.dialect].title}: {flags_as_code(change.text)}.\n"
            for change in cause.changes
        )
        text += f"- {'Otherwise' if cause.changes else 'Always'}: {cause.otherwise}\n"
        text += f"- Not if {cause.unless}\n- Look at: {cause.evidence}\n\n"
    return written(DOCS / "tuning.md", "exporter/sidestep/catalog/tuning.py", text)


def flags_as_code(text: str) -> str:
    """Return a text with the names of settings as code."""
    return re.sub(r"--[\w-]+", r"`\g<0>`", text)


def main() -> int:
    """Write the documents, or check them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail where a document is out of date")
    args = parser.parse_args()
    documents = {
        **metrics(),
        DOCS / "configuration.md": configuration(),
        DOCS / "doctor.md": doctor(),
        DOCS / "compatibility.md": compatibility(),
        DOCS / "tuning.md": tuning(),
        ROOT / "README.md": readme(),
        DOCS / "architecture.md": architecture(),
        DOCS / "protocol.md": protocol(),
    }
    if not args.check:
        for path, text in documents.items():
            path.write_text(text, encoding="utf-8")
        return 0
    wrong = [
        f"{path.relative_to(ROOT)} is out of date, run `make docs`"
        for path, text in documents.items()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    ]
    wrong += broken_links(TEXTS)
    wrong += unlisted()
    sys.stderr.writelines(f"{line}\n" for line in wrong)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
