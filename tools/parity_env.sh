#!/bin/bash
# Makes the virtual environment of the parity lane, .cache/parity, from tests/parity/requirements.txt; at once if it is
# there. Exits 3, with the reason, if it is not and the package index cannot be reached.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2

venv=.cache/parity
requirements=tests/parity/requirements.txt
stamp=$( (/usr/bin/python3 --version; cat "$requirements") | sha256sum)
[ "$(cat "$venv/stamp" 2>/dev/null)" = "$stamp" ] && exit 0

pip() { "$venv/bin/python" -m pip --disable-pip-version-check --no-input "$@"; }

echo "parity: making $venv"
rm -rf "$venv"
mkdir -p .cache && /usr/bin/python3 -m venv "$venv" || exit 1
torch=$(grep '^torch==' "$requirements")
if ! pip --quiet --retries 1 --timeout 30 install "$(grep '^typing_extensions==' "$requirements")"; then
  echo "parity: the package index cannot be reached, and there is no finished $venv" >&2
  exit 3
fi
# torch first and alone: nothing else may choose another one.
pip --quiet install "$torch" && pip --quiet install --requirement "$requirements" && echo "$stamp" >"$venv/stamp"
