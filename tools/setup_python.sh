#!/bin/sh
# Make a virtual environment: setup_python.sh DIRECTORY EXTRA, an extra of pyproject.toml. Installs Debian's venv module if root.
set -eu
python=${PYTHON:-python3}
if ! command -v "$python" >/dev/null 2>&1 || ! "$python" -c 'import ensurepip' 2>/dev/null; then
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
        DEBIAN_FRONTEND=noninteractive
        export DEBIAN_FRONTEND
        apt-get update -qq
        apt-get install -y -qq --no-install-recommends python3 python3-venv >/dev/null
    fi
fi
if ! "$python" -c 'import sys, ensurepip; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
    echo "sidestep needs Python 3.10 or later with its venv module (apt-get install python3-venv)" >&2
    exit 1
fi
"$python" -m venv "$1"
"$1/bin/pip" install -q --upgrade pip
"$1/bin/pip" install -q -e ".[$2]"
