#!/bin/sh
# Exit codes: 93 to 97 are ours, 126 and 127 as in a shell, everything else is the program's own.
PATH="$PATH:$(dirname "$0")/../target/release"

run() {
    farfield run --quiet --near 64M "$@" 2>/dev/null
    code=$?
    case $code in
        93) echo "$code: the memory server was lost" ;;
        94) echo "$code: far memory is full" ;;
        95) echo "$code: a page came back corrupt" ;;
        96) echo "$code: a fault of farfield's own" ;;
        97) echo "$code: not started, because it could not have had far memory" ;;
        126 | 127) echo "$code: cannot be executed, or not found" ;;
        *) echo "$code: the program's own" ;;
    esac
}

run -- true
run -- sh -c 'exit 5'
run -- no-such-program
run --far tcp://127.0.0.1:1 -- true
