"""Write rules and dashboards into the chart, whose templates cannot read files outside of it.

``python tools/charts.py`` writes deploy/helm/sidestep/templates/_rules.tpl and _dashboards.tpl;
with ``--check`` it only checks that they are current.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
TEMPLATES = ROOT / "deploy" / "helm" / "sidestep" / "templates"
HEADER = "{{/* Written by `make docs` from %s. Do not edit. */}}\n"


def literal(text: str) -> str:
    """Return a template that prints ``text``, braces included."""
    return "{{`" + text.replace("`", '`}}{{"`"}}{{`') + "`}}"


def defines(kind: str, texts: Mapping[str, str], source: str) -> str:
    """Return a template for each text, and one with their names."""
    parts = [
        HEADER % source,
        f'{{{{- define "sidestep.{kind}" -}}}}{" ".join(texts)}{{{{- end -}}}}\n',
    ]
    parts += [
        f'{{{{- define "sidestep.{kind}.{name}" -}}}}\n{literal(text.strip())}\n{{{{- end -}}}}\n'
        for name, text in texts.items()
    ]
    return "".join(parts)


def documents() -> dict[Path, str]:
    """Return the contents of the generated files."""
    rules = {path.stem: path.read_text() for path in sorted(ROOT.glob("deploy/rules/*.yaml"))}
    boards = {
        path.stem: json.dumps(json.loads(path.read_text()), separators=(",", ":"))
        for path in sorted(ROOT.glob("grafana/*.json"))
    }
    return {
        TEMPLATES / "_rules.tpl": defines("rules", rules, "deploy/rules"),
        TEMPLATES / "_dashboards.tpl": defines("dashboards", boards, "grafana"),
    }


def main() -> int:
    """Write the files, or check them."""
    check = sys.argv[1:] == ["--check"]
    stale = 0
    for path, text in documents().items():
        if path.exists() and path.read_text() == text:
            continue
        stale += 1
        if check:
            print(f"{path.relative_to(ROOT)} is stale: run make docs", file=sys.stderr)
        else:
            path.write_text(text)
    return int(check and stale > 0)


if __name__ == "__main__":
    sys.exit(main())
