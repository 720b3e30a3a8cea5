"""Write the documents that the tables already say; ``--check`` only compares.

docs/metrics.md and docs/triton-fields.md come from the catalogue, docs/configuration.md from the
settings, README.md's figures from the table in docs/performance.md. ``--check`` also follows every
link inside the repository and refuses the words of tools/private_words.txt.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import get_args, get_origin, get_type_hints

import msgspec
import tomllib

from sidestep.catalog import slo
from sidestep.catalog.buckets import DEFAULTS, SCHEMA, SCHEMAS
from sidestep.catalog.model import Alias, Computed, Constant, FeedsFrom, Handler, Info, Row, Sampled
from sidestep.config.settings import CONFIG_FILE, SETTINGS
from sidestep.engines import slo_rows
from sidestep.engines.dialects import DIALECTS
from sidestep.engines.triton import fields as triton_fields
from sidestep.engines.triton import rows as triton
from sidestep.engines.triton.wire import ModelStats
from sidestep.engines.vllm.core_rows import ROWS as TAPPED
from sidestep.telemetry.rows import ROWS as SELF_ROWS

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
TEXTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    ROOT / "benchmarks" / "README.md",
    *sorted(DOCS.glob("**/*.md")),
]
WORDS = ROOT / "tools" / "private_words.txt"
BEGIN = "<!-- Written by `make docs` from docs/performance.md: -->\n"
ROOMS = "<!-- Written by `make docs` from pyproject.toml and the packages: -->\n"
END = "<!-- until here. -->\n"
STEPS = "The same with a real vLLM's objects"
PAGES = "A scrape: making the page"
TAKEN_IN = "The exporter: values a second of one core"
FIGURES = (
    (STEPS, "step of 256 requests", "a step of 256 requests, on the engine's thread"),
    (STEPS, "step of 256 requests, multiprocess mode", "the same in multiprocess mode"),
    (STEPS, "step of 1,024 requests", "a step of 1,024 requests"),
    (STEPS, "step of 1 request", "a step of one request"),
    (STEPS, "step of 256 requests, whole process", "256 requests, publisher thread included"),
    (STEPS, "step of 1 request, whole process", "one request, publisher thread included"),
    (
        "The tap on the core's thread of a real vLLM",
        "step of 256 requests",
        "the tap: a step of 256 requests on the core's thread",
    ),
    ("A real SGLang's threads: what its calls cost", "log stats", "SGLang's scheduler report"),
    (
        TAKEN_IN,
        "16 engines, 256 values a step, latencies as recorded",
        "exporter: values of a step, latencies as recorded",
    ),
    (
        TAKEN_IN,
        "16 engines, 256 values a step, all latencies unlike",
        "the same, every latency of a step unlike the others",
    ),
    (PAGES, "text page of 100k samples, all dirty", "a page of 100,000 samples, every one changed"),
    (PAGES, "text page of 100k samples, 10 % dirty", "the same, one engine in ten changed"),
    (PAGES, "text page of 100k samples, none dirty", "the same, nothing changed"),
)
"""Rows of README.md: their topic and name in docs/performance.md, and what README.md calls them."""
CORE = (
    "With the tap that [vllm-core.md](vllm-core.md) describes;\n"
    "an engine's processes report from either side.\n\n"
)
STREAMS = (
    "With `--subscribe`, as [streams.md](streams.md) describes, for any engine. None of the names is\n"
    "another's: an engine that also pushes has both, under the same labels.\n\n"
)
TRITON = (
    "With `--triton`, as [triton.md](triton.md) describes; [triton-fields.md](triton-fields.md) has\n"
    "them by field of the statistics. Labels are the model's and its version's, and those that\n"
    "the model's `metric_tags` and `label.` options add.\n\n"
)
SLO = (
    "Only with `--slo`, as [slo.md](slo.md) describes. An SGLang scheduler's ranks come beside the labels\n"
    "named here; in the pod view one rank counts. The second family is there where it is above 0.\n\n"
)
OBJECTIVES = (*slo_rows.VLLM, *slo_rows.SGLANG)
WHOLE = {
    "stream": ("Streams that engines publish by themselves", STREAMS),
    "triton": ("triton: statistics of the server and of each version of its models", TRITON),
}
"""Dialects whose families stand in one table: title and note."""
SAMPLED = {
    "vllm": (
        "KV connectors and front end",
        "They travel self-described; a connector's appear where it is configured.\n\n",
    ),
    "sglang": (
        "what the engine passes to its collectors one value at a time",
        (
            "Each appears with its first data. Labels are those of the collector that counts it:\n"
            "a scheduler's ranks, none of a tokenizer's; `dp_rank` of a scheduler and labels that\n"
            "an administrator adds come beside those named here.\n\n"
        ),
    ),
}
"""By dialect: title and note of what travels self-described."""
NOTE = "<!-- Written by `make docs` from {source}. Do not edit. -->\n\n"


def metrics() -> str:
    """Every family, by what it belongs to."""
    text = NOTE.format(source="the rows in exporter/sidestep/engines") + "# Metrics\n\n"
    text += (
        "Every family sidestep can expose. Label names are sorted as on the page; `engine` and\n"
        "`model_name` say which engine. *Combined* is how the series of several engines become\n"
        "one: in the [pod view](views.md), where a label is dropped, and where a family has no\n"
        "`engine` label; *of one rank* where the ranks of a replica tell the same. Families with an option in *Shown* appear at\n"
        "0 when the engine says that the option is on, otherwise with their first data.\n\n"
        "Not here, because they are not in the stream: the API server's own `http_*` families,\n"
        "which stay on the engine's port, and the `process_*` and `python_*` families, which on\n"
        "sidestep's page are the exporter's. `vllm:tokens_total` has no row: no release of the\n"
        "engine ever filled it. Neither have `vllm:request_params_best_of` (the parameter is\n"
        "gone) and `vllm:prompt_tokens_recomputed_total` (today's engine does not tell).\n\n"
    )
    for name, dialect in DIALECTS.items():
        text += dialect_text(name, dialect.rows)
    text += "## Names that are the same for all engines\n\n"
    text += "Only with `--metrics.common`, since each doubles one of the engine's own. Labels are\n"
    text += "those of the engine, and of OpenTelemetry's for the rest.\n\n"
    text += common()
    text += "## Objectives\n\n" + SLO + objectives()
    text += "## The exporter itself\n\n| Name | Kind | Labels | Meaning |\n|---|---|---|---|\n"
    for row in SELF_ROWS:
        text += f"| `{row.name}` | {row.kind} | {labels(row.labels)} | {row.help} |\n"
    text += "\n## Bucket families\n\n"
    text += (
        "Bounds of the classic histograms. An engine's own override comes with its hello; the\n"
        "exporter's configuration file (`[buckets]`) wins over both. `request_tokens` ends at the\n"
        "model's length. *Schema* is the resolution of [native histograms](native-histograms.md).\n\n"
        "| Family | Schema | Upper bounds |\n|---|---|---|\n"
    )
    for name, bounds in DEFAULTS.items():
        schema = SCHEMAS.get(name, SCHEMA)
        text += f"| `{name}` | {schema} | {' '.join(f'{bound:g}' for bound in bounds)} |\n"
    return text


def dialect_text(dialect: str, rows: tuple[Row, ...]) -> str:
    """One dialect's families, by where they come from."""
    live = [row for row in rows if row.status != "hidden" and row not in OBJECTIVES]
    if dialect in WHOLE:
        title, note = WHOLE[dialect]
        return f"## {title}\n\n{note}{table(live)}"
    tapped = [row for row in live if row in TAPPED]
    own = [r for r in live if r.name.startswith("sidestep_") and r not in tapped]
    sampled = [row for row in live if isinstance(row.source, Sampled) and row not in tapped]
    core = [row for row in live if row not in [*own, *sampled, *tapped]]
    hidden = [row for row in rows if row.status == "hidden"]
    title, note = SAMPLED.get(dialect, ("self-described", ""))
    parts = (
        ("the engine's own", "", table(core)),
        (title, note, table(sampled)),
        ("what the engine collects and shows nowhere", "", table(own)),
        ("from the events of its core", CORE, table(tapped)),
        ("names it has given up", "Only with `--metrics.legacy`.\n\n", legacy(hidden)),
    )
    found = zip(parts, (core, sampled, own, tapped, hidden), strict=True)
    return "".join(
        f"## {dialect}: {name}\n\n{said}{text}" for (name, said, text), any_ in found if any_
    )


def objectives() -> str:
    """What ``--slo`` counts, and what each of its names stands for."""
    text = "| Name | Kind | Labels of vLLM | Of SGLang | Meaning |\n|---|---|---|---|---|\n"
    for row, other in zip(slo_rows.VLLM, slo_rows.SGLANG, strict=True):
        named = f"{labels(row.labels)} | {labels(other.labels)}"
        text += f"| `{row.name}` | {row.kind} | {named} | {row.help} |\n"
    text += "\n| `slo` | vLLM | SGLang |\n|---|---|---|\n"
    for name, families in slo.FAMILIES.items():
        text += f"| `{name}` | {' | '.join(f'`{family}`' for family in families)} |\n"
    return text + "\n"


def common() -> str:
    """Families under common names, and whence each engine's comes."""
    dialects = {name: one.common_rows for name, one in DIALECTS.items() if one.common_rows}
    text = f"| Name | Kind | Meaning | {' | '.join(f'From {name}' for name in dialects)} | Combined |\n"
    text += "|---" * (4 + len(dialects)) + "|\n"
    for rows in zip(*dialects.values(), strict=True):
        row = rows[0]
        values = f" By `{row.own_labels[0]}`." if row.closed else ""
        buckets = f" Buckets: `{row.buckets}`." if row.buckets else ""
        sources = " | ".join(map(source, rows))
        text += f"| `{row.name}` | {row.kind} | {row.help}{values}{buckets} | {sources} |"
        text += f" {row.combine} |\n"
    return text + "\n"


def table(rows: list[Row]) -> str:
    """Live families."""
    text = "| Name | Kind | Labels | Meaning | From | Shown | Since | Combined |\n"
    text += "|---|---|---|---|---|---|---|---|\n"
    for row in rows:
        shown = f"`{row.feature}`" if row.feature else "always"
        values = (
            f" Values: {', '.join(f'`{value}`' for value in row.closed)}." if row.closed else ""
        )
        buckets = f" Buckets: `{row.buckets}`." if row.buckets else ""
        text += (
            f"| `{row.name}` | {row.kind} | {labels(row.labels)} | {row.exposed_help}{values}"
            f"{buckets} | {source(row)} | {shown} | {row.since or '-'} | {combined(row)} |\n"
        )
    return text + "\n"


def legacy(rows: list[Row]) -> str:
    """Hidden families: what they were and what to use."""
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
    """How several engines' series become one."""
    return f"{row.combine}, of one rank" if row.mirrored else row.combine


def labels(names: tuple[str, ...]) -> str:
    """Label names."""
    return " ".join(f"`{name}`" for name in names) or "-"


def source(row: Row) -> str:
    """Where the numbers come from."""
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
            paths = list(row.source)
        case Mapping():
            paths = [getattr(path, "name", path) for path in row.source.values()]
        case elsewhere:
            return words[type(elsewhere)]
    return "<br>".join(f"`{path}`" for path in paths)


def fields_page() -> str:
    """Every field of Triton's statistics, and what shows it."""
    text = NOTE.format(source="exporter/sidestep/engines/triton/rows.py and fields.py")
    text += "# Triton's statistics, field by field\n\n"
    text += (
        "Below `model_stats[]`, whose `name` and `version` are the labels. Nanoseconds are kept\n"
        "as such and shown in the family's unit. Of `response_stats`, `first` is index 0 and `next`\n"
        "are all others, added up; of `batch_stats`, `count` is the same for all stages.\n\n"
        "| Field | Families |\n|---|---|\n"
    )
    shown = shown_fields()
    for field in fields_of(ModelStats):
        found = shown.get(field, [])
        said = (
            "<br>".join(f"`{name}`" for name in found) or f"none: {triton_fields.LEFT_OUT[field]}"
        )
        text += f"| `{field}` | {said} |\n"
    text += (
        "\n`sidestep_triton_interval_mean_seconds` and `sidestep_triton_busy_ratio` come from the\n"
        "differences of two polls; `sidestep_triton_instances` from the model's configuration.\n"
    )
    return text


def shown_fields() -> dict[str, list[str]]:
    """Names of the families that each field of Triton's statistics feeds."""
    found: dict[str, list[str]] = {}
    for row in triton.ROWS:
        match row.source:
            case str() as path:
                paths = triton_fields.DERIVED.get(path, (path,))
            case Mapping():
                paths = tuple(str(path) for path in row.source.values())
            case Handler(name):
                paths = triton_fields.READS.get(name, ())
            case _:
                paths = ()
        for path in paths:
            found.setdefault(path, []).append(row.name)
    return found


def fields_of(struct: type[msgspec.Struct], before: str = "") -> Iterator[str]:
    """Paths of all plain fields in and below ``struct``."""
    for name, hint in get_type_hints(struct).items():
        options = get_args(hint) or (hint,)
        inner = next((o for o in options if isinstance(o, type) and o is not type(None)), hint)
        if isinstance(inner, type) and issubclass(inner, msgspec.Struct):
            many = "[]" if get_origin(hint) is tuple else ""
            yield from fields_of(inner, f"{before}{name}{many}.")
        else:
            yield before + name


def configuration() -> str:
    """Every setting in its three forms."""
    adjustable = " and ".join(f"`{setting.flag}`" for setting in SETTINGS if setting.adjustable)
    text = NOTE.format(source="exporter/sidestep/config/settings.py") + "# Configuration\n\n"
    text += (
        "A flag wins over its environment variable, which wins over the file. A repeatable\n"
        "setting takes several flags, a comma-separated variable, or a list in the file. In the\n"
        "TOML file the part before the dot is the table: `--log.level debug` is\n\n"
        '```toml\n[log]\nlevel = "debug"\n```\n\n'
        f"On SIGHUP `sidestep serve` reads all of it again and takes over {adjustable}. A change\n"
        "of another setting is named in the log and needs a restart. A file that cannot be read\n"
        "changes nothing.\n\n"
        "| Flag | Variable | Default | Meaning |\n|---|---|---|---|\n"
    )
    for setting in (*SETTINGS, CONFIG_FILE):
        default = setting.default
        shown = ", ".join(default) if isinstance(default, tuple) else str(default)
        if setting.key == "ingest_endpoint":
            shown = "ipc path in `$XDG_RUNTIME_DIR/sidestep` or `/tmp/sidestep-UID`"
        value = f" {setting.metavar}" if setting.metavar else ""
        text += (
            f"| `--{setting.flag}{value}` | `{setting.variable}` |"
            f" {shown.lower() if isinstance(default, bool) else shown or '-'} | {setting.help} |\n"
        )
    text += (
        "\n## Buckets\n\nOnly in the file: bounds of a bucket family (see"
        " [metrics.md](metrics.md#bucket-families)), for all engines.\n\n"
        "```toml\n[buckets]\ntime_to_first_token = [0.05, 0.1, 0.25, 0.5, 1.0, 2.5]\n```\n\n"
        "Likewise the resolution of its [native histograms](native-histograms.md), from -4 to 8:\n\n"
        "```toml\n[schemas]\ntime_to_first_token = 5\n```\n\n"
        "Likewise the bounds that are shown of families of such names, where an engine has them"
        " (see [views.md](views.md)).\n\n"
        '```toml\n[shown_buckets]\n"vllm:*_time_seconds" = [0.3, 1.0, 10.0, 60.0]\n```\n\n'
        "## Objectives\n\nThe names are yours, or those of [slo.md](slo.md); a number is seconds.\n\n"
        '```toml\n[slo]\nttft = 0.35\ninter_token = "50ms"\navailability = true\n\n'
        '[slo.slow_prefill]\nfamily = "vllm:request_prefill_time_seconds"\nthreshold = 2\n```\n\n'
        "## In the engine's environment\n\n"
        "| Variable | Meaning |\n|---|---|\n"
        "| `SIDESTEP_ENDPOINT` | The exporter's ingest endpoint; unset, the plugin does nothing. |\n"
        "| `SIDESTEP_SERVER_KEY` | For a `tcp://` exporter that requires keys: its public key, or"
        " the file with it. See [security.md](security.md). |\n"
        "| `SIDESTEP_CLIENT_KEY` | Likewise: the file with the engine's own secret key. |\n"
        "| `SIDESTEP_VLLM_MODE` | `beside` (default) adds to vLLM's own metrics, `instead`"
        " replaces them. |\n"
        "| `SIDESTEP_SGLANG_MODE` | Likewise for SGLang. |\n"
        "| `SIDESTEP_NAMESPACE` | Tells deployments apart that feed one exporter; default the host"
        " name, which in Kubernetes is the pod's. |\n"
    )
    return text


def readme() -> str:
    """README.md with the figures of the table in docs/performance.md.

    Raises:
        KeyError: The table has no such row.
    """
    performance = (DOCS / "performance.md").read_text(encoding="utf-8")
    found: dict[tuple[str, str], list[str]] = {}
    topic = measured = ""
    for line in performance.splitlines():
        if line.startswith("**") and line.endswith("**"):
            topic = line.strip("*")
        elif line.startswith("| ") and topic:
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            found[topic, cells[0]] = cells
        elif line.startswith("Measured "):
            measured = line
    table = "| What | Peer | Speed-up |\n|---|---|---|\n"
    for topic, row, name in FIGURES:
        _, peer, ratio, *_ = found[topic, row]
        table += f"| {name} | {peer} | {ratio} |\n"
    before, _, rest = (ROOT / "README.md").read_text(encoding="utf-8").partition(BEGIN)
    return f"{before}{BEGIN}\n{measured}\n\n{table}\n{END}{rest.partition(END)[2]}"


def architecture() -> str:
    """Return docs/architecture.md with the rooms, as the import contract orders them.

    Raises:
        StopIteration: pyproject.toml has no such contract.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = project["tool"]["importlinter"]["contracts"]
    layers = next(one["layers"] for one in contracts if one["type"] == "layers")
    drawing, rooms = "```\n", "| Room | What it holds |\n|---|---|\n"
    for number, layer in enumerate(layers):
        names = [name.strip().removeprefix("sidestep.") for name in layer.split("|")]
        drawing += "      ↓\n" if number else ""
        drawing += f"  {'   |   '.join(names)}\n"
        for name in names:
            package = ROOT / "exporter" / "sidestep" / name
            source = package / "__init__.py" if package.is_dir() else package.with_suffix(".py")
            summary = (ast.get_docstring(ast.parse(source.read_text())) or "").partition("\n")[0]
            rooms += f"| `{name}` | {summary} |\n"
    path = DOCS / "architecture.md"
    before, _, rest = path.read_text(encoding="utf-8").partition(ROOMS)
    return f"{before}{ROOMS}\n{drawing}```\n\n{rooms}\n{END}{rest.partition(END)[2]}"


def broken_links(paths: list[Path]) -> Iterator[str]:
    """Links to files that do not exist, and to headings that their file does not have."""
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


def prose(text: str) -> str:
    """A document without its code blocks and inline code, lines kept."""
    text = re.sub(r"^( *)```.*?^\1```", blank, text, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"`[^`\n]*`", "``", text)


def blank(block: re.Match[str]) -> str:
    """Its newlines alone."""
    return "\n" * block[0].count("\n")


def anchors(text: str) -> set[str]:
    """The names by which GitHub links to the headings of a document."""
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


def texts() -> Iterator[tuple[str, int, str]]:
    """Every text that users read: file, line, text; of documents, help, panels and log lines."""
    for path in (text for text in TEXTS if text.parent.name != "decisions"):
        for number, line in enumerate(prose(path.read_text(encoding="utf-8")).splitlines(), 1):
            yield str(path.relative_to(ROOT)), number, line
    for path in sorted((ROOT / "grafana").glob("*.json")):
        for title in titles(json.loads(path.read_text(encoding="utf-8"))):
            yield str(path.relative_to(ROOT)), 0, title
    for path in sorted([*ROOT.glob("exporter/**/*.py"), *ROOT.glob("adapters/**/*.py")]):
        helps = path.name == "settings.py" or path.name.endswith("rows.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and (helps or is_log(node)):
                for part in (*node.args, *(keyword.value for keyword in node.keywords)):
                    if isinstance(part, ast.Constant) and isinstance(part.value, str):
                        yield str(path.relative_to(ROOT)), part.lineno, part.value


def titles(found: object) -> Iterator[str]:
    """Titles and descriptions of panels, at any depth of a dashboard."""
    if isinstance(found, list):
        for each in found:
            yield from titles(each)
    elif isinstance(found, dict):
        for key, value in found.items():
            if key in ("title", "description") and isinstance(value, str):
                yield value
            else:
                yield from titles(value)


def is_log(call: ast.Call) -> bool:
    """Tell whether ``call`` writes a log line, as ``log.info(...)`` does."""
    levels = {"debug", "info", "warning", "error", "critical", "exception"}
    return isinstance(call.func, ast.Attribute) and call.func.attr in levels


def private_words(listed: str) -> Iterator[str]:
    """Where texts that users read have words of a list, and what to say instead."""
    rules = word_list(listed)
    for file, line, text in texts():
        for words, instead in rules:
            for said in words.finditer(text):
                yield f"{file}:{line}: {said[0]!r}: say {instead}"


def word_list(text: str) -> list[tuple[re.Pattern[str], str]]:
    """Read a list of words: patterns and what to say instead."""
    lines = (line for line in text.splitlines() if line and not line.startswith("#"))
    rules = (line.partition(" -> ") for line in lines)
    return [(re.compile(words, re.IGNORECASE), instead) for words, _, instead in rules]


def main() -> int:
    """Write, or compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail where a document is out of date")
    args = parser.parse_args()
    written = {
        DOCS / "metrics.md": metrics(),
        DOCS / "configuration.md": configuration(),
        DOCS / "triton-fields.md": fields_page(),
        ROOT / "README.md": readme(),
        DOCS / "architecture.md": architecture(),
    }
    if not args.check:
        for path, text in written.items():
            path.write_text(text, encoding="utf-8")
        return 0
    wrong = [
        f"{path.relative_to(ROOT)} is out of date, run `make docs`"
        for path, text in written.items()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    ]
    wrong += broken_links(TEXTS)
    wrong += private_words(WORDS.read_text(encoding="utf-8"))
    sys.stderr.writelines(f"{line}\n" for line in wrong)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
