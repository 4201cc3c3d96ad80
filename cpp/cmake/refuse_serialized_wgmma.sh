#!/bin/sh
# refuse_serialized_wgmma.sh COMPILER ARGUMENTS...: compiles; fails where ptxas says that it made asynchronous MMAs wait
# for each other (its remarks C7510 and following), which it has no option to treat as errors. Code that is not optimized
# always does.
case " $* " in *" --Ofast-compile="*) exec "$@" ;; esac
log=$(mktemp) || exit 1
trap 'rm -f "$log"' EXIT
"$@" 2>"$log"
status=$?
cat "$log" >&2
if grep -q '(C751[0-9]).*wgmma' "$log"; then
  echo "error: wgmma instructions are serialized" >&2
  exit 1
fi
exit $status
