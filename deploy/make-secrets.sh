#!/bin/sh
# Makes what docker-compose.yml needs before its first start, in ./secrets or the folder that is named: an
# authority, a certificate for the daemon, and tokens for an operator and for Prometheus. What is there already is
# kept, so it can be run again; remove a file to have it made anew. Needs openssl 3.
#
#   sh deploy/make-secrets.sh [FOLDER]
set -eu
umask 077
folder=${1:-secrets}
mkdir -p "$folder"
cd "$folder"
DAYS=825

# The folder keeps others out. The files in it are bind-mounted one by one into containers that run as other users,
# so each of them is readable; the authority's key goes nowhere, so it is not.
readable() { chmod 644 "$@"; }

if [ ! -e ca.pem ]; then
  openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -noenc -days 3650 \
    -keyout ca.key -out ca.pem -subj "/CN=bloomgate authority" 2>/dev/null
  readable ca.pem
  echo "made ca.pem, ca.key: the authority; clients trust ca.pem"
fi

if [ ! -e bloomgated.pem ]; then
  openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -noenc -days "$DAYS" \
    -CA ca.pem -CAkey ca.key -keyout bloomgated.key -out bloomgated.pem -subj "/CN=bloomgated" \
    -addext "basicConstraints=critical,CA:FALSE" \
    -addext "subjectAltName=DNS:bloomgated,DNS:localhost,IP:127.0.0.1" 2>/dev/null
  readable bloomgated.pem bloomgated.key
  echo "made bloomgated.pem, bloomgated.key: the daemon's certificate, for $DAYS days"
fi

# token NAME ROLES FILTERS: what `bloomgated token new` does, for a machine that has the image alone.
token() {
  [ ! -e "$1.token" ] || return 0
  id=$(openssl rand -hex 4)
  made="bgt_${id}_$(openssl rand -base64 32 | tr '+/' '-_' | tr -d '=\n')"
  hash=$(printf %s "$made" | openssl dgst -sha256 -r | cut -d ' ' -f 1)
  printf '[[token]]\nid = "%s"\nhash = "sha256:%s"\nname = "%s"\nroles = %s\nfilters = %s\n\n' \
    "$id" "$hash" "$1" "$2" "$3" >> auth.toml
  printf '%s\n' "$made" > "$1.token"
  echo "made $1.token, and its entry in auth.toml"
}
token operator '["read", "replica", "write", "admin"]' '["*"]'
token prometheus '["read"]' '["*"]'
readable auth.toml prometheus.token
