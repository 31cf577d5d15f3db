#!/bin/sh
# Make .venv with tsd installed in it (editable); "dev" adds what the tests need. Asks for nothing.
# As root on Debian or Ubuntu, missing system packages are installed; otherwise one line says what to install.
set -eu
cd "$(dirname "$0")/.."
VENV=.venv

note() { printf '%s\n' "make venv: $*" >&2; }

apt_can() { [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; }

apt_install() {
    note "installing $*"
    apt-get update -qq </dev/null >/dev/null || true
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" </dev/null >/dev/null
}

find_python() {
    for candidate in ${PYTHON:-} python3 python3.14 python3.13 python3.12 python3.11; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$candidate"
            return 0
        fi
    done
    return 1
}

make_venv() {
    "$PY" -m venv "$VENV" >/dev/null 2>&1 && return 0
    rm -rf "$VENV"
    # Debian without python3-venv: the module is there, only pip's seed is missing.
    if "$PY" -m pip --version >/dev/null 2>&1 && "$PY" -m venv --without-pip "$VENV" >/dev/null 2>&1; then
        "$PY" -m pip --python "$VENV/bin/python" install -q pip </dev/null && return 0
        rm -rf "$VENV"
    fi
    return 1
}

has_compiler() {
    { command -v cc || command -v gcc || command -v clang; } >/dev/null 2>&1 &&
        "$PY" -c 'import os, sysconfig; os.stat(os.path.join(sysconfig.get_path("include"), "Python.h"))' 2>/dev/null
}

if ! PY=$(find_python); then
    { apt_can && apt_install python3 python3-venv && PY=$(find_python); } ||
        { note "Python 3.11 or newer is needed: sudo apt-get install python3 python3-venv"; exit 1; }
fi

if ! "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then
    if ! make_venv; then
        { apt_can && apt_install python3-venv && make_venv; } ||
            { note "the venv module is missing: sudo apt-get install python3-venv"; exit 1; }
    fi
fi

if ! has_compiler; then
    if apt_can; then apt_install gcc libc6-dev python3-dev || true; fi
    if ! has_compiler; then
        if [ "${TSD_REQUIRE_NATIVE:-}" = 1 ]; then
            note "a C compiler and Python's headers are needed: sudo apt-get install gcc libc6-dev python3-dev"
            exit 1
        fi
        note "no C compiler: the data path will be pure Python; for the fast one: sudo apt-get install gcc libc6-dev python3-dev"
    fi
fi

install() { "$VENV/bin/python" -m pip install -q --disable-pip-version-check "$@" </dev/null; }

if [ "${1:-}" = dev ]; then
    install -e '.[dev,interop]' || { note "third-party peers are not available here; their tests will be skipped"; install -e '.[dev]'; }
else
    install -e .
fi
