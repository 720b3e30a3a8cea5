"""Write the documents that the tables already say; ``--check`` only compares.

docs/metrics.md and docs/triton-fields.md come from the catalogue, docs/configuration.md from the
settings.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import get_args, get_origin, get_type_hints

import msgspec

from sidestep.catalog import slo
from sidestep.catalog.buckets import DEFAULTS, SCHEMA, SCHEMAS
from sidestep.catalog.model import Also, Constant, Hook, Info, Reading, Row, Same, Sampled
from sidestep.config.settings import CONFIG_FILE, SETTINGS
from sidestep.engines import slo_rows
from sidestep.engines.dialects import DIALECTS
from sidestep.engines.triton import fields as triton_fields
from sidestep.engines.triton import rows as triton
from sidestep.engines.triton.wire import ModelStats
from sidestep.engines.vllm.core_rows import ROWS as TAPPED
from sidestep.telemetry.rows import ROWS as SELF_ROWS

DOCS = Path(__file__).parents[1] / "docs"
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
        "what its collectors are told one by one",
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
    text = NOTE.format(source="exporter/sidestep/catalogue") + "# Metrics\n\n"
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
        Hook: "several fields",
        Reading: "computed",
        Constant: "constant",
        Info: "configuration",
        Sampled: "self-described",
    }
    match row.source:
        case str() | Same() | Also():
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
    text = NOTE.format(source="exporter/sidestep/engines/triton/rows.py and triton_fields.py")
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
            case Hook(name):
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


def main() -> int:
    """Write, or compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail where a document is out of date")
    check = parser.parse_args().check
    stale = []
    written = {
        "metrics.md": metrics(),
        "configuration.md": configuration(),
        "triton-fields.md": fields_page(),
    }
    for name, text in written.items():
        path = DOCS / name
        if check and (not path.exists() or path.read_text() != text):
            stale.append(f"docs/{name}")
        elif not check:
            path.write_text(text)
    if stale:
        sys.stderr.write(f"out of date, run `make docs`: {', '.join(stale)}\n")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
