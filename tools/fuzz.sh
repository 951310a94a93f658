#!/bin/bash
# Builds the fuzzers of tests/fuzz and runs each. Ends with 1 when one found something, and says where the input lies.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2

usage() {
  cat <<'HELP'
Usage: tools/fuzz.sh [--seconds N] [NAME]...

Runs each fuzzer (manifest, names, plan_spec, safetensors; or those named) for N seconds, 20 unless said. Inputs that it
finds interesting are kept in .cache/fuzz/NAME and used the next time; an input that breaks a promise is written to .cache/fuzz/ as
NAME-crash-..., NAME-timeout-... or NAME-oom-...: mend the code, then move it to tests/fuzz/seeds/NAME.

  tools/fuzz.sh                          what ./test --all runs
  tools/fuzz.sh --seconds 300 names      five minutes of one
HELP
}

SECONDS_EACH=20
NAMES=()
while [ $# -gt 0 ]; do
  case "$1" in
    --seconds)
      SECONDS_EACH="${2:-}"
      [[ "$SECONDS_EACH" =~ ^[1-9][0-9]*$ ]] || { echo "fuzz.sh: --seconds takes a whole number, not '$SECONDS_EACH'" >&2; exit 2; }
      shift ;;
    manifest | names | plan_spec | safetensors) NAMES+=("$1") ;;
    --help | -h) usage; exit 0 ;;
    *) echo "fuzz.sh: no fuzzer or option '$1'; see tools/fuzz.sh --help" >&2; exit 2 ;;
  esac
  shift
done
[ ${#NAMES[@]} -eq 0 ] && NAMES=(manifest names plan_spec safetensors)

# shellcheck source=tools/setup.sh
. tools/setup.sh
targets=("${NAMES[@]/#///tests/fuzz:}")
bazel build --config=asan --color=no --curses=no --symlink_prefix=/ "${targets[@]/%/_fuzz}" </dev/null 2>&1 | tail -n 3 >&2
bin=$(bazel info --config=asan bazel-bin 2>/dev/null </dev/null)
failed=0
for name in "${NAMES[@]}"; do
  corpus=.cache/fuzz/$name
  mkdir -p "$corpus"
  echo "fuzz.sh: $name for $SECONDS_EACH s"
  if ! "$bin/tests/fuzz/${name}_fuzz" -max_total_time="$SECONDS_EACH" -timeout=10 -rss_limit_mb=2048 -max_len=65536 \
    -print_final_stats=1 -verbosity=0 -artifact_prefix=".cache/fuzz/$name-" "$corpus" "tests/fuzz/seeds/$name" \
    > ".cache/fuzz/$name.log" 2>&1; then
    echo "fuzz.sh: FAILED $name:" >&2
    tail -n 30 ".cache/fuzz/$name.log" >&2
    failed=1
    continue
  fi
  grep -E "number_of_executed_units|peak_rss" ".cache/fuzz/$name.log" | sed "s/^stat::/  /"
done
exit $failed
