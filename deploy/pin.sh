#!/usr/bin/env bash
# Writes constraints.txt (what runs), constraints-dev.txt (what tests), and in deploy/ constraints-bench.txt (what
# the benchmark measures against); for the image constraints-server.txt (the daemon alone), constraints-build.txt
# (what makes its wheel), and constraints-proto.txt (what makes the stubs).
# Every version is pinned with the hashes of its wheels, for all Pythons from 3.11 on, and without the address
# of any index.
set -euo pipefail
cd "$(dirname "$0")/.."
uv=${1:-uv}
compile() {
  "$uv" pip compile --quiet --universal --python-version 3.11 --generate-hashes --only-binary :all: \
    --no-emit-index-url --no-emit-find-links --no-annotate --upgrade --custom-compile-command "make pins" "$@"
}
compile pyproject.toml --extra server --extra demo --extra build -o constraints.txt
compile pyproject.toml --extra dev -c constraints.txt -o constraints-dev.txt
# The peers of the benchmark.
compile pyproject.toml --extra bench -c constraints-dev.txt -o deploy/constraints-bench.txt
# Constrained by the first, so that the image runs the very versions that the tests ran.
compile pyproject.toml --extra server -c constraints.txt -o deploy/constraints-server.txt
# The generators of the stubs: older on purpose, see proto/generate.sh.
printf 'grpcio-tools==1.76.0\nmypy-protobuf==3.7.0\nsetuptools\n' | compile - -o deploy/constraints-proto.txt
# The wheel of a release needs no editables.
echo 'hatchling>=1.27' | compile - -c constraints.txt -o deploy/constraints-build.txt
