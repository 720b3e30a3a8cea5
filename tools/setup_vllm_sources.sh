#!/bin/bash
# Unpack the Python sources of the newest vLLM into build/vllm-sources, from its wheel of more than
# 300 MB, which is not installed. Each run gets the wheel of the day.
set -euo pipefail
cd "$(dirname "$0")/.."

TARGET=${1:-build/vllm-sources}
PYTHON=${PYTHON:-python3}

wheel=$(mktemp -d)
trap 'rm -r "$wheel"' EXIT
"$PYTHON" -m pip --disable-pip-version-check --quiet download --no-deps --only-binary :all: --dest "$wheel" vllm
rm -rf "$TARGET"
"$PYTHON" - "$wheel" "$TARGET" <<'PYTHON'
import pathlib
import sys
import zipfile

(file,) = pathlib.Path(sys.argv[1]).glob("vllm-*.whl")
with zipfile.ZipFile(file) as wheel:
    names = [name for name in wheel.namelist() if name.startswith("vllm/") and name.endswith(".py")]
    wheel.extractall(sys.argv[2], names)
print(f"the sources of {'-'.join(file.name.split('-')[:2])} are in {sys.argv[2]}")
PYTHON
