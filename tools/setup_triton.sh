#!/bin/bash
# Put a real Triton, which runs on the CPU too, and its clients into build/triton-venv, once:
# a second run finds everything there and does nothing. Everything comes from PyPI.
set -euo pipefail
cd "$(dirname "$0")/.."

PYTRITON=0.7.0 # brings tritonserver 2.51.0, the newest in any package: "tritonserver" has no server
GLIBC=2.35     # what its wheel was built for
VENV=${1:-build/triton-venv}
PYTHON=${PYTHON:-python3.11} # one that the wheel has a stub for

say() {
    echo "$0: $1" >&2
    exit 1
}
version() { "$VENV/bin/python" -c "from importlib.metadata import version as v; assert v('$1') == '$2'" 2>/dev/null; }

found=$(getconf GNU_LIBC_VERSION 2>/dev/null | cut -d' ' -f2)
[ "$(printf '%s\n' "$GLIBC" "${found:-0}" | sort -V | head -n1)" = "$GLIBC" ] ||
    say "Triton needs glibc $GLIBC or later; here is ${found:-another libc}"

[ -x "$VENV/bin/python" ] || "$PYTHON" -m venv "$VENV"
version nvidia-pytriton "$PYTRITON" ||
    "$VENV/bin/python" -m pip --disable-pip-version-check --quiet install "nvidia-pytriton==$PYTRITON"

read -r site python < <("$VENV/bin/python" -c '
import sys, sysconfig
print(sysconfig.get_path("purelib"), "%d.%d" % sys.version_info[:2])')
server="$site/pytriton/tritonserver"

# The process of a Python model embeds the interpreter, which Debian packages apart.
library="libpython$python.so.1.0"
has_library() { "$VENV/bin/python" -c "import ctypes; ctypes.CDLL('$library')" 2>/dev/null; }
if ! has_library; then
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
        export DEBIAN_FRONTEND=noninteractive
        apt-get update -qq
        apt-get install -y -qq --no-install-recommends "libpython$python" >/dev/null
    fi
    has_library || say "Triton's Python models need $library (apt-get install libpython$python)"
fi

# The wheel has a stub for each Python; the backend runs the one beside itself.
stub="$server/backends/python/triton_python_backend_stub"
fitting="$server/python_backend_stubs/$python/triton_python_backend_stub"
[ -e "$fitting" ] || say "the wheel has no stub for Python $python"
cmp --quiet "$fitting" "$stub" || cp "$fitting" "$stub"
chmod +x "$server/bin/tritonserver" "$stub"

"$VENV/bin/python" -c '
from importlib.metadata import version

import tritonclient.grpc

print("Triton of pytriton", version("nvidia-pytriton"), "with tritonclient", version("tritonclient"))'
