#!/usr/bin/env bash
# Runs racecheck_rings.cu and racecheck_barriers.cu, all of their variants, under racecheck, and prints what the tool
# reports of each.
#
#   tools/racecheck_rings.sh [LOGDIR]
#
# needs a GPU of sm_90, nvcc and compute-sanitizer. A row is printed when its variant ends; one that has not after LIMIT
# seconds (60) is ended, and its row says so. The exit status is 1 if a variant had no summary.
#
# A variant of rings is how threads meet, the warps of a set, what copies are, and "uneven" where some sets have fewer
# stages. How to read it: "block" is right and should be clean, "none" with 2 warps is wrong and should be reported. If so,
# whatever is reported of "named" with 2 warps, or of "warp", is reported of code that is right; and if "named" is clean,
# and "named" of rings of unequal length reported, it is since sets meet unequally often. A variant of barriers is how
# writers and readers arrive: "lanes,lanes" should be clean, "late" reported; then whatever is reported of "warp" is
# reported of code that is right.
set -euo pipefail
cd "$(dirname "$0")/.."
logs=${1:-build/racecheck_rings}
limit=${LIMIT:-60}
mkdir -p "$logs"

# row PROGRAM VARIANT: runs it and prints its row.
row() {
  local log=$logs/$1.$2.log status=0 found sums
  timeout --kill-after 5 "$limit" compute-sanitizer --tool racecheck --racecheck-report all "$logs/$1" "$2" \
    >"$log" 2>&1 || status=$?
  sums=$(grep -oE 'sums are \w+' "$log" | cut -c10-) || sums=-
  found=$(grep -oE 'RACECHECK SUMMARY: .*' "$log" | cut -c20-) || found="no summary, status $status: see $log"
  case $status in 124 | 137) found="ended by the limit of $limit s: see $log" ;; esac
  printf '%-10s %-22s %-12s %s\n' "$1" "$2" "$sums" "$found"
  [[ $found != *"see $log" ]]
}

compute-sanitizer --version
printf '%-10s %-22s %-12s %s\n' program variant "sums" "racecheck"
failed=0
for name in rings barriers; do
  nvcc -O3 -std=c++17 -lineinfo -arch="${ARCHITECTURE:-native}" -o "$logs/$name" "tools/racecheck_$name.cu"
  variants=$("$logs/$name")
  rows=()
  for variant in $variants; do
    row "$name" "$variant" &
    rows+=($!)
  done
  for pid in "${rows[@]}"; do wait "$pid" || failed=1; done
done
exit $failed
