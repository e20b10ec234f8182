#!/bin/sh
# A program that needs about 100 MiB, with 16 MiB near. The rest is far: in a private memory server that farfield starts
# for this job and stops with it.
set -eu
PATH="$PATH:$(dirname "$0")/../target/release"
report=$(mktemp)
trap 'rm -f "$report"' EXIT

# Counts words by keeping all of them in memory.
count='{ for (i = 1; i <= NF; i++) n[$i]++ } END { for (w in n) total++; print total " different words" }'
seq 1 400000 | farfield run --near 16M --quiet --report "$report" -- awk "$count"

# What happened, for people: leave --quiet away. For programs:
echo "from the report: $(grep -o '"far_peak_bytes": *[0-9]*' "$report"), $(grep -o '"faults": *[0-9]*' "$report")"
