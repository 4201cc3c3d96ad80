#!/usr/bin/env bash
# Fails on trailing blanks, conflict markers or a missing newline at the end of the files named; prints each place.
set -euo pipefail
status=0
for file in "$@"; do
  if grep -nHE '[[:blank:]]+$|^(<{7}|>{7}|={7})( |$)' "$file"; then status=1; fi
  if [ -s "$file" ] && [ -n "$(tail -c1 "$file")" ]; then
    echo "$file: no newline at the end"
    status=1
  fi
done
exit "$status"
