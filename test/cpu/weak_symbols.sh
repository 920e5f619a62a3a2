#!/bin/sh
# SPDX-License-Identifier: MIT
# weak_symbols.sh nm object...
# Fails when an object compiled for one instruction set defines a weak function outside that set's namespace (hwy's and ours
# are called N_AVX3 and so on). The linker keeps one copy for all callers, which might be the copy for this instruction set.
nm=$1
shift
[ $# -gt 0 ] || { echo "no objects"; exit 1; }
failed=0
for object in "$@"; do
  [ -f "$object" ] || { echo "$object: missing"; exit 1; }
  "$nm" --defined-only -C "$object" | grep -q 'attend_span' || { echo "$object: not an object of kernels"; exit 1; }
  found=$("$nm" --defined-only -C "$object" | grep -E '^[0-9a-f]+ W ' | grep -vE '^[0-9a-f]+ . ([a-z0-9_:]+ )*tandem::cpu::N_|^[0-9a-f]+ W DW\.ref')
  if [ -n "$found" ]; then
    echo "$object:"
    echo "$found"
    failed=1
  fi
done
exit $failed
