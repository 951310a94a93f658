#!/bin/bash
# Makes a small certificate authority and certificates of it, for shardmesh's TLS. Needs openssl.
set -euo pipefail

usage() {
  cat <<'END'
Usage: make_certs.sh FOLDER NAME[=HOST[,HOST...]]...
       make_certs.sh --revoke FOLDER NAME...

Writes FOLDER/NAME.pem and FOLDER/NAME.key for each NAME: a certificate for the host names and IP addresses by which
others dial that process; without any, for one that only dials others (a trainer, a reader, shardctl). All are signed by
the authority FOLDER/ca.pem, which is made if it is not there. Its key, FOLDER/ca.key, makes more of them: keep it to
yourself. What is there is never written over.

  make_certs.sh certs server=10.0.0.1,trainer-1.example trainer
  make_certs.sh certs worker-2=10.0.0.2          one more, of the same authority

With --revoke the certificate of each NAME is taken back: FOLDER/ca-with-list.pem has the authority and its revocation
list, with all that were revoked so far. Give it to every process as --tls-ca in place of ca.pem, before DAYS are over.

  make_certs.sh --revoke certs worker-2

The environment: DAYS, for which certificates and lists are good (365).
END
}

fail() { echo "make_certs.sh: $*" >&2; exit 2; }

case "${1:-}" in -h|--help) usage; exit 0 ;; esac
revoke=
[ "${1:-}" != --revoke ] || { revoke=yes; shift; }
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

umask 077  # keys are for their owner
log=$(mktemp)
scratch=$(mktemp -d)
trap 'rm -rf "$log" "$scratch"' EXIT
run() { openssl "$@" >"$log" 2>&1 || { cat "$log" >&2; echo "make_certs.sh: openssl $1 failed" >&2; exit 1; }; }

# The list is made of FOLDER/revoked.txt, in which openssl keeps what was taken back.
if [ -n "$revoke" ]; then
  [ -e "$folder/ca.key" ] || fail "$folder has no ca.key, which signs lists"
  openssl x509 -in "$folder/ca.pem" -noout -ext keyUsage | grep -q "CRL Sign" ||
    fail "$folder/ca.pem may not sign lists; make a new authority in another folder, and certificates of it"
  for name in "$@"; do [ -e "$folder/$name.pem" ] || fail "$folder/$name.pem is not there; name certificates of $folder"; done
  touch "$folder/revoked.txt"
  printf '[ca]\ndefault_ca = list\n[list]\ndatabase = %s\ndefault_md = sha256\nunique_subject = no\n' \
    "$folder/revoked.txt" >"$scratch/conf"
  authority=(ca -config "$scratch/conf" -keyfile "$folder/ca.key" -cert "$folder/ca.pem")
  for name in "$@"; do run "${authority[@]}" -revoke "$folder/$name.pem"; done
  run "${authority[@]}" -gencrl -crldays "$days" -out "$scratch/list"
  cat "$folder/ca.pem" "$scratch/list" >"$folder/ca-with-list.pem"
  chmod 644 "$folder/ca-with-list.pem"
  echo "$folder/ca-with-list.pem: the authority, and what it has revoked; every process needs this file as --tls-ca"
  exit 0
fi

for each in "$@"; do
  name=${each%%=*}
  [[ $name =~ ^[A-Za-z0-9._-]+$ && $name != ca && $name != ca-with-list ]] || fail "\"$name\" is no name: letters, digits and . _ -, but not ca or ca-with-list"
  [[ $each != *= ]] || fail "\"$each\" has no host after the =; without hosts leave out the ="
  [[ ! -e $folder/$name.pem && ! -e $folder/$name.key ]] || fail "$folder/$name.pem is there; remove it and its key, or choose another name"
done

mkdir -p "$folder"
key=(-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes)

if [ ! -e "$folder/ca.pem" ]; then
  run req -x509 "${key[@]}" -days "$days" -subj "/CN=shardmesh authority" -keyout "$folder/ca.key" -out "$folder/ca.pem" \
    -addext basicConstraints=critical,CA:TRUE -addext keyUsage=critical,keyCertSign,cRLSign
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
