#!/usr/bin/env bash
# Runs racecheck_rings.cu and racecheck_barriers.cu, all of their variants, under racecheck, and prints what the tool
# reports of each.
#
#   tools/racecheck_rings.sh [LOGDIR]
#
# needs a GPU of sm_90, nvcc and compute-sanitizer. A variant of rings is how threads meet, the warps of a set, what
# copies are, and "uneven" where some sets have fewer stages. How to read it: "block" is right and should be clean, "none"
# with 2 warps is wrong and should be reported. If so, whatever is reported of "named" with 2 warps, or of "warp", is
# reported of code that is right; and if "named" is clean, and "named" of rings of unequal length reported, it is since
# sets meet unequally often. A variant of barriers is how writers and readers arrive: "lanes,lanes" should be clean, "none"
# reported; then whatever is reported of "warp" is reported of code that is right.
set -euo pipefail
cd "$(dirname "$0")/.."
logs=${1:-build/racecheck_rings}
mkdir -p "$logs"

printf '%-10s %-22s %-12s %s\n' program variant "sums" "racecheck"
for name in rings barriers; do
  program=$logs/$name
  nvcc -O3 -std=c++17 -lineinfo -arch="${ARCHITECTURE:-native}" -o "$program" "tools/racecheck_$name.cu"
  variants=$("$program")
  for variant in $variants; do
    compute-sanitizer --tool racecheck --racecheck-report all "$program" "$variant" >"$logs/$name.$variant.log" 2>&1 &
  done
  wait
  for variant in $variants; do
    log=$logs/$name.$variant.log
    found=$(grep -oE 'RACECHECK SUMMARY: .*' "$log" || echo "no summary: see $log")
    printf '%-10s %-22s %-12s %s\n' "$name" "$variant" "$(grep -oE 'sums are \w+' "$log" | cut -c10-)" \
      "${found#RACECHECK SUMMARY: }"
  done
done
