#!/usr/bin/env bash
# Regenerates the committed stubs below OUT (default client/). The generators are pinned: stubs of an older
# grpcio-tools run on every newer runtime, not the other way round.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-client}
tools=.venv/proto
pins="grpcio-tools==1.76.0 mypy-protobuf==3.7.0"
if [ ! -x "$tools/bin/protoc-gen-mypy" ] || [ "$(cat "$tools/pins" 2>/dev/null)" != "$pins" ]; then
  python3 -m venv "$tools"
  # shellcheck disable=SC2086  # two words
  "$tools/bin/pip" install --quiet --only-binary :all: $pins setuptools
  echo "$pins" > "$tools/pins"
fi
PATH="$PWD/$tools/bin:$PATH" "$tools/bin/python" -m grpc_tools.protoc -Iproto \
  --python_out="$out" --grpc_python_out="$out" --mypy_out="quiet:$out" --mypy_grpc_out="quiet:$out" \
  proto/bloomgate/v1/*.proto
