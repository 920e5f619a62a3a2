#!/bin/bash
# SPDX-License-Identifier: MIT
# A project of another language default adds Tandem as a subdirectory and links either library.
# subdirectory_test.sh SOURCE_DIR CMAKE CC CXX WORK_DIR
source "$(dirname "$0")/common.sh"
source=$1 cmake=$2 cc=$3 cxx=$4 work=$5
here=$(cd "$(dirname "$0")" && pwd)
rm -rf "$work" && mkdir -p "$work"
cd "$work" || exit 1

case $(uname -m) in # one instruction set, which every such processor has, is soon compiled
  x86_64) isas=ssse3 ;;
  aarch64) isas=neon ;;
  *) isas= ;;
esac
step 'configure' "$cmake" -S "$here/consumer" -B build -G Ninja "-DCMAKE_C_COMPILER=$cc" "-DCMAKE_CXX_COMPILER=$cxx" \
  -DCMAKE_BUILD_TYPE=Debug "-DSUBDIRECTORY=$source" "-DSOURCE=$source" -DTARGET=tandem::tandem -DLANGUAGE=C -DSTANDARD=99 \
  "-DTANDEM_ISAS=$isas" || finish
step 'build' "$cmake" --build build || finish
step 'run' ./build/program
step 'run, static' ./build/program-static
targets=$("$cmake" --build build --target help)
! grep -qE 'tandem-(bench|front|info|plan|patterns|generate)|_test' <<<"$targets" || fail 'tools or tests are part of the build of a parent project'
finish
