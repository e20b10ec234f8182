#!/bin/sh
# Redis under load: filled through a pipe, changed while a child process saves a snapshot, then started again from the
# snapshot. Prints digests of the data, which do not depend on time.
# Arguments: number of keys. Needs redis-server and redis-cli.
set -eu
keys=$1
start() {
    redis-server --port 0 --unixsocket ./redis.sock --save '' --appendonly no --enable-debug-command yes \
        --dir . --dbfilename "$1" --loglevel warning --logfile ./redis.log --daemonize no &
    server=$!
    tries=0
    until redis-cli -s ./redis.sock ping 2>/dev/null | grep -q PONG; do
        tries=$((tries + 1))
        if [ $tries -gt 600 ]; then echo "no server"; cat ./redis.log; exit 1; fi
        sleep 0.05
    done
}
stop() {
    redis-cli -s ./redis.sock shutdown nosave 2>/dev/null || true
    wait $server
    rm -f ./redis.sock
}
fill() { # from to text
    awk -v from="$1" -v to="$2" -v text="$3" 'BEGIN {
        for (i = 0; i < 8; i++) text = text text
        text = substr(text, 1, 700)
        for (i = from; i < to; i++) {
            key = "key:" i; value = i ":" substr(text, i % 100) ":" i
            printf "*3\r\n$3\r\nSET\r\n$%d\r\n%s\r\n$%d\r\n%s\r\n", length(key), key, length(value), value
            if (i % 10 == 0) { list = "list:" i % 1000; printf "*3\r\n$5\r\nRPUSH\r\n$%d\r\n%s\r\n$%d\r\n%s\r\n", length(list), list, length(key), key }
            if (i % 7 == 0) printf "*4\r\n$4\r\nZADD\r\n$6\r\nscores\r\n$%d\r\n%s\r\n$%d\r\n%s\r\n", length(i ""), i, length(key), key
        }
    }' | redis-cli -s ./redis.sock --pipe | tail -1
}
digest() { redis-cli -s ./redis.sock debug digest; }

start snapshot.rdb
fill 0 "$keys" 'all the far memory a program can use '
echo "keys: $(redis-cli -s ./redis.sock dbsize)"
before=$(digest)
echo "filled: $before"
redis-cli -s ./redis.sock bgsave
# The child saves what was; the parent changes what is.
fill 0 $((keys / 2)) 'something else that came later '
tries=0
while redis-cli -s ./redis.sock info persistence | grep -q 'rdb_bgsave_in_progress:1'; do
    tries=$((tries + 1))
    if [ $tries -gt 2000 ]; then echo "the snapshot does not end"; exit 1; fi
    sleep 0.05
done
redis-cli -s ./redis.sock info persistence | grep rdb_last_bgsave_status
echo "changed: $(digest)"
stop
start snapshot.rdb
after=$(digest)
echo "from the snapshot: $after"
if [ "$before" = "$after" ]; then echo "the snapshot is what was"; else echo "the snapshot is wrong"; fi
stop
rm -f snapshot.rdb redis.log
