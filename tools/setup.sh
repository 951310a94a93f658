# Sourced by ./demo and ./test: makes sure that the packages of packages.txt are installed, from whatever directory.
#
# All there: returns at once, silently. As root: installs what is missing, showing apt's progress. Otherwise: prints the
# command to run, and exits 2. Also gives HOME a value where none is set, since Bazel keeps its caches there.
# shellcheck shell=bash

setup_missing_packages() {  # $1: packages.txt. Prints the missing ones, one per line.
  local wanted
  wanted=$(sed -e 's/#.*//' "$1" | tr -s ' \t' '\n' | sed '/^$/d' | sort -u)
  # shellcheck disable=SC2086
  comm -23 <(echo "$wanted") <(dpkg-query -W -f '${binary:Package} ${db:Status-Status}\n' $wanted 2>/dev/null |
    sed -n 's/^\([^: ]*\)[^ ]* installed$/\1/p' | sort -u)
}

setup_packages() {
  local list missing
  list="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)/packages.txt"
  if ! command -v dpkg-query >/dev/null; then
    echo "setup: this is no Debian system: the packages of packages.txt come from Debian 12. deploy/Containerfile builds in one." >&2
    exit 2
  fi
  missing=$(setup_missing_packages "$list" | tr '\n' ' ')
  [ -z "${missing// /}" ] && return 0
  if [ "$(id -u)" -ne 0 ]; then
    echo "setup: some packages are missing. Please run, and then start again:" >&2
    echo "  sudo apt-get update && sudo apt-get install --yes --no-install-recommends $missing" >&2
    exit 2
  fi
  echo "setup: installing ${missing}"
  apt-get update || echo "setup: apt-get update failed; trying with the package lists at hand" >&2
  # shellcheck disable=SC2086
  if ! DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends $missing </dev/null; then
    echo "setup: apt-get could not install: $missing" >&2
    exit 2
  fi
}

if [ -z "${HOME:-}" ]; then
  HOME=$(getent passwd "$(id -u)" | cut -d: -f6)
  export HOME="${HOME:-/tmp}"
fi
export USER="${USER:-$(id -un)}"
setup_packages
