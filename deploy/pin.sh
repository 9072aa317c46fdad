#!/usr/bin/env bash
# Writes constraints.txt (what runs) and constraints-dev.txt (what tests), every version pinned with the hashes
# of its wheels, for all Pythons from 3.11 on, and without the address of any index.
set -euo pipefail
cd "$(dirname "$0")/.."
uv=${1:-uv}
compile() {
  "$uv" pip compile pyproject.toml --quiet --universal --python-version 3.11 --generate-hashes --only-binary :all: \
    --no-emit-index-url --no-annotate --upgrade --custom-compile-command "make pins" "$@"
}
compile --extra server --extra demo --extra build -o constraints.txt
compile --all-extras -c constraints.txt -o constraints-dev.txt
