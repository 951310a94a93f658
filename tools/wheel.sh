#!/bin/bash
# Builds the Python package's wheel, with the service's programs in it: tools/wheel.sh [FOLDER]
#
# FOLDER: where to; unset: dist/ of the repository. PYTHON: whose pip builds it (unset: python3), a CPython 3.11;
# setuptools and wheel are that one's, or, where it has none, pip's to download. Prints the wheel's path.
set -euo pipefail
folder=$(realpath -m "${1:-$(dirname "${BASH_SOURCE[0]}")/../dist}")
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python3}

isolation=()
if "$python" -c 'import setuptools, wheel; assert int(setuptools.__version__.split(".")[0]) >= 68' 2>/dev/null; then
  isolation=(--no-build-isolation)
fi
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
"$python" -m pip --disable-pip-version-check wheel --quiet "${isolation[@]}" --no-deps --wheel-dir "$scratch" . >&2
mkdir -p "$folder"
mv -f "$scratch"/shardmesh-*.whl "$folder/"
echo "$folder/$(cd "$folder" && ls -t shardmesh-*.whl | head -1)"
