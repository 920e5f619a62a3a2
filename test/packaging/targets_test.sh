#!/bin/bash
# SPDX-License-Identifier: MIT
# The target tandem_programs, which ./dev build makes, contains the library and every program, and nothing that takes
# longer: no test and no CUDA module. The targets fast and smoke contain every program that a test of that label runs. Each
# test that test/CMakeLists.txt lists has label smoke.
# targets_test.sh SOURCE_DIR BUILD_DIR CTEST NINJA
source "$(dirname "$0")/common.sh"
source=$1 build=$2 ctest=$3 ninja=$4
cd "$build" || exit 1
# Prints the files that ninja would link, compile or archive for a target: -o FILE, or ar's argument.
outputs() { "$ninja" -t commands "$1" | grep -oE ' (-o|qc) [^ ]+' | sed 's/^ [^ ]* //' | sort -u; }

programs=$(outputs tandem_programs)
[ "$(sed -n 's/^TANDEM_BUILD_STATIC:BOOL=//p' CMakeCache.txt)" = OFF ] || grep -qxF libtandem.a <<<"$programs" ||
  fail 'tandem_programs lacks libtandem.a'
for file in bin/tandem bin/tandem-info bin/tandem-plan bin/tandem-patterns bin/tandem-bench; do
  grep -qxF "$file" <<<"$programs" || fail "tandem_programs lacks $file"
done
! grep -E '^test/|tandem-cuda' <<<"$programs" || fail 'tandem_programs has the files above'

# Programs are the same in every build folder.
for file in bin/tandem*; do
  path=$(LC_ALL=C readelf -d "$file" | sed -n 's/.*R.*PATH).*\[\(.*\)\]$/\1/p')
  [[ $path != *"$PWD"* ]] || fail "$file looks for libraries in $path"
done

for label in fast smoke; do
  made=$(outputs $label)
  ! grep 'tandem-cuda' <<<"$made" || fail "$label has the files above"
  commands=$("$ctest" -N -V -L "^$label\$" | sed -n "s|^[0-9]*: Test command: $PWD/\([^ ]*\).*|\1|p" | sort -u)
  [ -n "$commands" ] || fail "ctest lists no program of label $label"
  for file in $commands; do
    grep -qxF "$file" <<<"$made" || fail "$label lacks $file"
  done
done
labelled=$("$ctest" -N -L '^smoke$' | sed -n 's/^ *Test *#[0-9]*: //p')
listed=$(sed -n '/^set(tandem_smoke_tests/,/)/p' "$source/test/CMakeLists.txt" | tr -d '()' | sed 's/^settandem_smoke_tests//')
for name in $listed; do
  grep -qxF "$name" <<<"$labelled" || fail "$name is no test of label smoke: there is none of that name"
done

# ---- the command line of ./dev ----
for arguments in nonsense 'release nonsense' --gpu; do
  # shellcheck disable=SC2086
  message=$("$source/dev" build $arguments 2>&1)
  status=$?
  [ "$status" -eq 2 ] || fail "./dev build $arguments: exit code $status"
  grep -q "unknown argument ${arguments##* }" <<<"$message" || fail "./dev build $arguments: $message"
done
# Lists the ten slowest tests of a file as ctest writes it.
times=$(mktemp)
for i in {1..12}; do echo "	<testcase name=\"t$i\" classname=\"t$i\" time=\"$i.5\" status=\"run\">"; done >"$times"
slowest=$(bash -c "$(sed -n '/^slowest()/,/^}/p' "$source/dev"); slowest '$times'")
grep -q '12.5 s  t12' <<<"$slowest" && grep -q '3.5 s  t3' <<<"$slowest" && ! grep -q 't2$' <<<"$slowest" ||
  fail "./dev: the slowest tests: $slowest"
echo '<testsuite/>' >"$times"
[ -z "$(bash -c "$(sed -n '/^slowest()/,/^}/p' "$source/dev"); slowest '$times'")" ] || fail './dev: no test is slow'
rm "$times"
message=$("$source/dev" test smoke fast 2>&1)
status=$?
[ "$status" -eq 2 ] && grep -q 'unknown argument fast' <<<"$message" || fail "./dev test smoke fast: $status: $message"
finish
