#!/bin/bash
# SPDX-License-Identifier: MIT
# A project with another default language adds Tandem as a subdirectory and links either library. Then only one library is
# built, as BUILD_SHARED_LIBS and TANDEM_BUILD_STATIC select, installed, and linked by a user's project.
# subdirectory_test.sh SOURCE_DIR CMAKE CC CXX WORK_DIR
source "$(dirname "$0")/common.sh"
source=$1 cmake=$2 cc=$3 cxx=$4 work=$5
here=$(cd "$(dirname "$0")" && pwd)
rm -rf "$work" && mkdir -p "$work"
cd "$work" || exit 1

case $(uname -m) in # one instruction set that every such processor has, to compile quickly
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
! grep -q '^BUILD_SHARED_LIBS:' build/CMakeCache.txt || fail 'the parent project has got an option of its subdirectory'

# ---- one library alone ----
export PKG_CONFIG_PATH
only() { # name option…; builds, installs
  local name=$1
  shift
  "$cmake" build -DTANDEM_INSTALL=ON "$@" && "$cmake" --build build && rm -rf "$name" &&
    "$cmake" --install build --prefix "$name" && ./build/program
}
find_tandem() { # name prefix components
  "$cmake" -S "$here/consumer" -B "$1" -G Ninja "-DCMAKE_PREFIX_PATH=$work/$2" "-DCMAKE_C_COMPILER=$cc" \
    -DLANGUAGE=C -DSTANDARD=99 -DTARGET=tandem::tandem "-DCOMPONENTS=$3" "-DSOURCE=$source" &&
    "$cmake" --build "$1" && "./$1/program"
}
installed() { find "$1" -name 'libtandem.*' -printf '%f\n' | sort | xargs; }

rm -f build/tandem/libtandem.so*
step 'BUILD_SHARED_LIBS=OFF' only archive -DBUILD_SHARED_LIBS=OFF || finish
[ "$(installed archive)" = libtandem.a ] || fail "BUILD_SHARED_LIBS=OFF installs $(installed archive)"
[ ! -e build/tandem/libtandem.so ] || fail 'BUILD_SHARED_LIBS=OFF builds the shared library'
! readelf -d build/program | grep -q libtandem || fail 'BUILD_SHARED_LIBS=OFF: tandem::tandem is the shared library'
step 'find_package: the archive alone' find_tandem find-archive archive ''
! find_tandem find-no-shared archive shared >output 2>&1 && grep -q 'the static library alone' output ||
  fail "find_package(COMPONENTS shared) of an archive: $(cat output)"
PKG_CONFIG_PATH=$(dirname "$(find "$work/archive" -name tandem.pc)")
# shellcheck disable=SC2046
step 'pkg-config: the archive alone' "$cc" -o of-archive "$source/examples/decode.c" $(pkg-config --cflags --libs tandem)
step 'run' ./of-archive

step 'TANDEM_BUILD_STATIC=OFF' only shared -DBUILD_SHARED_LIBS=ON -DTANDEM_BUILD_STATIC=OFF || finish
[ "$(installed shared)" = "libtandem.so libtandem.so.0 $(basename "$(find shared -name 'libtandem.so.0.*')")" ] ||
  fail "TANDEM_BUILD_STATIC=OFF installs $(installed shared)"
step 'find_package: the shared library alone' find_tandem find-shared shared shared
! find_tandem find-no-static shared static >output 2>&1 && grep -q 'is not part of this installation' output ||
  fail "find_package(COMPONENTS static) of a shared library: $(cat output)"
[ -z "$(find shared -name tandem-static.pc)" ] || fail 'TANDEM_BUILD_STATIC=OFF installs tandem-static.pc'
finish
