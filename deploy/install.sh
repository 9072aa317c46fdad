#!/bin/sh
# Installs the daemon from this checkout into a new virtual environment:   deploy/install.sh VENV
# The Dockerfile runs this, and so does tests/deploy, so that what is tested is what is shipped. PYTHON names
# another interpreter. Everything comes as wheels of pinned hashes; pip, hatchling and the source tree stay
# outside of VENV.
set -eu
venv=$1
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

"${PYTHON:-python3}" -m venv "$work/build"
pip() { "$work/build/bin/python" -m pip --disable-pip-version-check --quiet "$@"; }

pip install --only-binary :all: --require-hashes -r deploy/constraints-build.txt
pip wheel --no-build-isolation --no-deps --wheel-dir "$work/dist" .

"${PYTHON:-python3}" -m venv --without-pip "$venv"
pip --python "$venv/bin/python" install --only-binary :all: --require-hashes -r deploy/constraints-server.txt
pip --python "$venv/bin/python" install --no-index --no-deps "$work"/dist/bloomgate-*.whl
