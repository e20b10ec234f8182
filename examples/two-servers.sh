#!/bin/sh
# Two memory servers, here on one machine, in life on two others. A server knows its tenants by token; a job shows its own.
set -eu
PATH="$PATH:$(dirname "$0")/../target/release"
folder=$(mktemp -d)
servers=
stop() {
    # shellcheck disable=SC2086 # Several numbers.
    [ -z "$servers" ] || kill $servers 2>/dev/null || true
    wait
    rm -rf "$folder"
}
trap stop EXIT

# The server's file: NAME TOKEN QUOTA on each line. The job's file: its token.
umask 077
token=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')
echo "examples $token 1G" > "$folder/tenants"
echo "$token" > "$folder/token"

for name in a b; do
    farfield serve --listen "unix:$folder/$name.sock" --capacity 512M --token-file "$folder/tenants" > "$folder/$name.log" 2>&1 &
    servers="$servers $!"
done
for name in a b; do
    tries=0
    until [ -S "$folder/$name.sock" ]; do
        tries=$((tries + 1))
        [ $tries -lt 1200 ] || { cat "$folder/$name.log"; exit 1; }
        sleep 0.05
    done
done

seq 1 600000 | farfield run --near 16M --token-file "$folder/token" \
    --far "unix:$folder/a.sock" --far "unix:$folder/b.sock" -- sort -S 200M -r | head -n 1
