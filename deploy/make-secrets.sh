#!/bin/sh
# Makes what docker-compose.yml needs before its first start, in ./secrets or the folder that is named: an
# authority, a certificate for the daemon, and tokens for an operator and for Prometheus. What is there and fits is
# kept, so it can be run again. Needs openssl 3.
#
#   sh deploy/make-secrets.sh [FOLDER]
set -eu
umask 077
folder=${1:-secrets}
DAYS=825

case "$(openssl version 2>&1)" in
  "OpenSSL "[3-9]*) ;;
  *) echo "make-secrets.sh needs the command openssl in version 3 or newer (apt-get install openssl)" >&2; exit 1 ;;
esac
mkdir -p "$folder/daemon"
cd "$folder"
chmod 700 .
# The folder keeps others out. What is in it is mounted into containers that run as other users, so it is readable
# there; the authority's key and the operator's token go nowhere, so they are not.
chmod 755 daemon

# quietly COMMAND...: openssl talks on stderr while all is well.
quietly() {
  said=$("$@" 2>&1) || { printf '%s\n' "$said" >&2; exit 1; }
}

if [ -e ca.pem ] && [ ! -e ca.key ]; then
  if [ ! -e daemon/certificate.pem ] || [ ! -e daemon/key.pem ]; then
    echo "ca.key is not here to sign a certificate with: put it back, or remove ca.pem for another authority" >&2
    exit 1
  fi
elif [ ! -e ca.pem ]; then
  quietly openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -noenc -days 3650 \
    -keyout ca.key -out ca.pem -subj "/CN=bloomgate authority"
  chmod 644 ca.pem
  rm -f daemon/certificate.pem
  echo "made ca.pem, ca.key: the authority; clients trust ca.pem"
fi

if [ ! -e daemon/certificate.pem ] || [ ! -e daemon/key.pem ]; then
  quietly openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -noenc -days "$DAYS" \
    -CA ca.pem -CAkey ca.key -keyout daemon/key.pem -out daemon/certificate.pem -subj "/CN=bloomgated" \
    -addext "basicConstraints=critical,CA:FALSE" \
    -addext "subjectAltName=DNS:bloomgated,DNS:localhost,IP:127.0.0.1"
  chmod 644 daemon/certificate.pem daemon/key.pem
  echo "made daemon/certificate.pem, daemon/key.pem: the daemon's, for $DAYS days"
fi

# token NAME ROLES FILTERS: what `bloomgated token new` does, for a machine that has the image alone.
token() {
  if grep -qs "^name = \"$1\"\$" daemon/auth.toml; then
    [ -e "$1.token" ] && return 0
    echo "$1.token is gone, but daemon/auth.toml still lets it in: remove its entry there first" >&2
    exit 1
  fi
  if [ -e "$1.token" ]; then
    made=$(cat "$1.token")
  else
    made="bgt_$(openssl rand -hex 4)_$(openssl rand -base64 32 | tr '+/' '-_' | tr -d '=\n')"
    printf '%s\n' "$made" > "$1.token"
    echo "made $1.token"
  fi
  id=${made#bgt_}
  hash=$(printf %s "$made" | openssl dgst -sha256 -r | cut -d ' ' -f 1)
  printf '[[token]]\nid = "%s"\nhash = "sha256:%s"\nname = "%s"\nroles = %s\nfilters = %s\n\n' \
    "${id%%_*}" "$hash" "$1" "$2" "$3" >> daemon/auth.toml
  echo "added $1 to daemon/auth.toml"
}
token operator '["read", "replica", "write", "admin"]' '["*"]'
token prometheus '["read"]' '["*"]'
chmod 644 daemon/auth.toml prometheus.token
