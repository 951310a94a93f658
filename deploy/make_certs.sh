#!/bin/bash
# Makes a small certificate authority and certificates of it, for shardmesh's TLS. Needs openssl.
set -euo pipefail

usage() {
  cat <<'END'
Usage: make_certs.sh FOLDER NAME[=HOST[,HOST...]]...

Writes FOLDER/NAME.pem and FOLDER/NAME.key for each NAME: a certificate for the host names and IP addresses by which
others dial that process; without any, for one that only dials others (a trainer, a reader, shardctl). All are signed by
the authority FOLDER/ca.pem, which is made if it is not there. Its key, FOLDER/ca.key, makes more of them: keep it to
yourself. What is there is never written over.

  make_certs.sh certs server=10.0.0.1,trainer-1.example trainer
  make_certs.sh certs worker-2=10.0.0.2          one more, of the same authority

The environment: DAYS, for which they are good (365).
END
}

fail() { echo "make_certs.sh: $*" >&2; exit 2; }

case "${1:-}" in -h|--help) usage; exit 0 ;; esac
[ $# -ge 2 ] || { usage >&2; exit 2; }
command -v openssl >/dev/null || { echo "make_certs.sh: openssl is not installed; on Debian: apt-get install openssl" >&2; exit 1; }
folder=$1
shift
days=${DAYS:-365}
[[ $days =~ ^[1-9][0-9]{0,4}$ ]] || fail "DAYS is \"$days\"; give a number of days from 1 to 99999"

# The subjectAltName of "a.example,10.0.0.1".
hosts() {
  local host list=()
  IFS=, read -r -a given <<<"$1"
  for host in "${given[@]}"; do
    if [[ $host =~ ^[0-9.]+$ || $host == *:* ]]; then list+=("IP:$host"); else list+=("DNS:$host"); fi
  done
  (IFS=,; echo "${list[*]}")
}

for each in "$@"; do
  name=${each%%=*}
  [[ $name =~ ^[A-Za-z0-9._-]+$ && $name != ca ]] || fail "\"$name\" is no name: letters, digits and . _ -, but not ca"
  [[ $each != *= ]] || fail "\"$each\" has no host after the =; without hosts leave out the ="
  [[ ! -e $folder/$name.pem && ! -e $folder/$name.key ]] || fail "$folder/$name.pem is there; remove it and its key, or choose another name"
done

umask 077  # keys are for their owner
mkdir -p "$folder"
key=(-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes)
log=$(mktemp)
scratch=$(mktemp -d)
trap 'rm -rf "$log" "$scratch"' EXIT
run() { openssl "$@" >"$log" 2>&1 || { cat "$log" >&2; echo "make_certs.sh: openssl $1 failed" >&2; exit 1; }; }

if [ ! -e "$folder/ca.pem" ]; then
  run req -x509 "${key[@]}" -days "$days" -subj "/CN=shardmesh authority" -keyout "$folder/ca.key" -out "$folder/ca.pem" \
    -addext basicConstraints=critical,CA:TRUE -addext keyUsage=critical,keyCertSign
  echo "$folder/ca.pem: the authority; every host of the service needs this file, and nobody else ca.key"
fi
[ -e "$folder/ca.key" ] || fail "$folder has ca.pem, but not its key ca.key, which signs certificates"

for each in "$@"; do
  name=${each%%=*}
  {
    echo "basicConstraints=critical,CA:FALSE"
    if [[ $each == *=* ]]; then
      echo "extendedKeyUsage=serverAuth,clientAuth"
      echo "subjectAltName=$(hosts "${each#*=}")"
    else
      echo "extendedKeyUsage=clientAuth"
    fi
  } >"$scratch/extensions"
  run req "${key[@]}" -subj "/CN=$name" -keyout "$folder/$name.key" -out "$scratch/request"
  run x509 -req -days "$days" -in "$scratch/request" -CA "$folder/ca.pem" -CAkey "$folder/ca.key" \
    -set_serial "0x$(openssl rand -hex 16)" -extfile "$scratch/extensions" -out "$scratch/certificate"
  mv "$scratch/certificate" "$folder/$name.pem"
  if [[ $each == *=* ]]; then echo "$folder/$name.pem: for ${each#*=}"; else echo "$folder/$name.pem: for a client"; fi
done
chmod 644 "$folder"/*.pem
chmod 755 "$folder"
