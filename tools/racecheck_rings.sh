#!/usr/bin/env bash
# Runs racecheck_rings.cu, all of its variants, under racecheck, and prints what the tool reports of each.
#
#   tools/racecheck_rings.sh [LOGDIR]
#
# needs a GPU, nvcc and compute-sanitizer. A variant is how threads meet, the warps of a set, what copies are, and
# "uneven" where some sets have fewer stages. How to read it: "block" is right and should be clean, "none" with 2 warps is
# wrong and should be reported. If so, whatever is reported of "named" with 2 warps, or of "warp", is reported of code
# that is right; and if "named" is clean, and "named" of rings of unequal length reported, it is since sets meet unequally
# often.
set -euo pipefail
cd "$(dirname "$0")/.."
logs=${1:-build/racecheck_rings}
mkdir -p "$logs"
program=$logs/rings
nvcc -O3 -std=c++17 -lineinfo -arch="${ARCHITECTURE:-native}" -o "$program" tools/racecheck_rings.cu

variants=$("$program")
for variant in $variants; do
  compute-sanitizer --tool racecheck --racecheck-report all "$program" "$variant" >"$logs/$variant.log" 2>&1 &
done
wait
printf '%-22s %-12s %s\n' meeting,warps,copies "sums" "racecheck"
for variant in $variants; do
  found=$(grep -oE 'RACECHECK SUMMARY: .*' "$logs/$variant.log" || echo "no summary: see $logs/$variant.log")
  printf '%-22s %-12s %s\n' "$variant" "$(grep -oE 'sums are \w+' "$logs/$variant.log" | cut -c10-)" \
    "${found#RACECHECK SUMMARY: }"
done
