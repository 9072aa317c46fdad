#!/usr/bin/env bash
# Regenerates the committed stubs below OUT (default client/). The generators are pinned to older releases: their
# stubs run on every newer runtime, not the other way round.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-client}
tools=.venv/proto
pins=deploy/constraints-proto.txt
if ! cmp -s "$pins" "$tools/pins"; then
  "${PYTHON:-python3}" -m venv "$tools"
  "$tools/bin/python" -m pip --disable-pip-version-check install --quiet --only-binary :all: --require-hashes -r "$pins"
  cp "$pins" "$tools/pins"
fi
PATH="$PWD/$tools/bin:$PATH" "$tools/bin/python" -m grpc_tools.protoc -Iproto \
  --python_out="$out" --grpc_python_out="$out" --mypy_out="quiet:$out" --mypy_grpc_out="quiet:$out" \
  proto/bloomgate/v1/*.proto
