#!/bin/bash
# Put a real SGLang, to run on the CPU, and this checkout into build/sglang-venv, once:
# a second run finds everything there and does nothing. Everything comes from PyPI.
set -euo pipefail
cd "$(dirname "$0")/.."

SGLANG=0.5.23
TORCH=2.13.0
REQUIREMENTS=tools/sglang-requirements.txt
VENV=${1:-build/sglang-venv}
PYTHON=${PYTHON:-python3.11} # the version that the list was resolved for

has() { "$VENV/bin/python" -c "$1" 2>/dev/null; }
version() { has "from importlib.metadata import version as v; assert v('$1').startswith('$2')"; }

[ -x "$VENV/bin/python" ] || "$PYTHON" -m venv "$VENV"
pip=("$VENV/bin/python" -m pip --disable-pip-version-check --quiet)

version torch "$TORCH" || "${pip[@]}" install "torch==$TORCH"

# Without its dependencies: most are CUDA, and of torch it pins another version.
version sglang "$SGLANG" || "${pip[@]}" install --no-deps "sglang==$SGLANG"
installed="$VENV/sglang-requirements"
if ! cmp --quiet "$REQUIREMENTS" "$installed"; then
    "${pip[@]}" install --no-deps --requirement "$REQUIREMENTS"
    cp "$REQUIREMENTS" "$installed"
fi

# What it imports all the same stands in tests/support/real_engines/sglang_stand_ins, and must not be here too.
for extra in torchvision sglang-kernel; do
    ! version "$extra" "" || "${pip[@]}" uninstall --yes "$extra"
done

# Editable, so that SGLang finds this checkout by its entry point; again when the entry points changed.
stamp="$VENV/sidestep-entry-points"
if ! version sidestep "" || ! cmp --quiet pyproject.toml "$stamp"; then
    "${pip[@]}" install --editable .
    cp pyproject.toml "$stamp"
fi

has 'import pytest, pytest_asyncio' || "${pip[@]}" install 'pytest>=8.2' 'pytest-asyncio>=0.24'

PYTHONPATH=tests/support/real_engines/sglang_stand_ins "$VENV/bin/python" -W ignore - <<'PYTHON'
from importlib.metadata import version

import sglang.srt.observability.metrics_collector  # noqa: F401

print(f"SGLang {version('sglang')} with sidestep {version('sidestep')}")
PYTHON
