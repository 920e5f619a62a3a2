#!/bin/bash
# SPDX-License-Identifier: MIT
# The visible parts of the shared library: exactly the functions of tandem.h under their version, its SONAME, and only
# needed libraries that the package names.
# symbols_test.sh SOURCE_DIR LIBRARY SOVERSION VERSION_NODE
source "$(dirname "$0")/common.sh"
include=$1/include map=$1/lib/tandem.map library=$2 soversion=$3 node=$4

declared=$(declared_functions "$include" | sed "s/\$/@@$node/")
exported=$(nm -D --defined-only --with-symbol-versions "$library" | awk '$2 != "A" { print $3 }' | LC_ALL=C sort)
difference=$(diff <(echo "$declared") <(echo "$exported")) || fail "tandem.h (<) and $library (>) differ:"$'\n'"$difference"

listed=$(sed -n 's/^ *\(tandem_[a-z0-9_]*\);$/\1/p' "$map" | LC_ALL=C sort)
difference=$(diff <(declared_functions "$include") <(echo "$listed")) || fail "tandem.h (<) and $map (>) differ:"$'\n'"$difference"

dynamic=$(LC_ALL=C readelf -d "$library")
soname=$(sed -n 's/.*(SONAME).*\[\(.*\)\]$/\1/p' <<<"$dynamic")
[ "$soname" = "libtandem.so.$soversion" ] || fail "SONAME is $soname"

while read -r needed; do
  case $needed in
    libhwloc.so.* | libdnnl.so.* | libhwy.so.* | libgomp.so.* | libomp.so.*) ;;
    libstdc++.so.* | libgcc_s.so.* | libm.so.* | libc.so.* | libpthread.so.* | ld-linux*) ;;
    *) fail "unexpected library: $needed" ;;
  esac
done < <(sed -n 's/.*(NEEDED).*\[\(.*\)\]$/\1/p' <<<"$dynamic")
! grep -qE '\((RPATH|RUNPATH|TEXTREL)\)' <<<"$dynamic" || fail "RPATH or TEXTREL in $library"
n=$(wc -l <<<"$exported")
printf '%s functions exported as %s by %s\n' "$n" "$node" "$soname"
finish
