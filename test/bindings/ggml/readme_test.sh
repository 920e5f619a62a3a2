#!/bin/bash
# SPDX-License-Identifier: MIT
# The header as its users get it: compiles in every dialect without a warning and is installed beside the others. The program of
# the binding's page is built with pkg-config and run, and the page shows that program.
# readme_test.sh SOURCE_DIR BUILD_DIR CMAKE CC CXX GGML_INCLUDE_DIR GGML_LIB_DIR
source "$(dirname "$0")/../../packaging/common.sh"
source=$1 build=$2 cmake=$3 cc=$4 cxx=$5 ggml_include=$6 ggml_lib=$7
binding=$source/bindings/ggml
strict=(-pedantic -Wall -Wextra -Wshadow -Werror -isystem "$ggml_include")

compile() { # standard compiler language
  printf '#include "tandem-ggml.h"\n' |
    "$2" "-std=$1" "${strict[@]}" -Wconversion "-I$source/include" "-I$binding" -fsyntax-only -x "$3" -
}
for standard in c99 c11 c17 c2x; do step "as $standard" compile $standard "$cc" c; done
for standard in c++11 c++14 c++17 c++20 c++2b; do step "as $standard" compile $standard "$cxx" c++; done

[ "$(sed -n '/^```c$/,/^```$/{//d;p}' "$binding/README.md")" = "$(cat "$binding/smallest.c")" ] ||
  fail "the program in $binding/README.md is not smallest.c"

prefix=$(mktemp -d "${TMPDIR:-/tmp}/tandem-ggml.XXXXXX") && trap 'rm -rf "$prefix"' EXIT || exit 1
step 'cmake --install' "$cmake" --install "$build" --prefix "$prefix" || finish
libdir=$(dirname "$(find "$prefix" -name libtandem.so)")
export PKG_CONFIG_PATH=$libdir/pkgconfig LD_LIBRARY_PATH=$libdir:$ggml_lib
smallest() { # compiler flags…; links as the program's first lines say: pkg-config's part of ggml (-lggml) and the rest
  local output flags rest line='^ \* cc smallest.c $(pkg-config --cflags --libs tandem ggml) \(-l.*\) \*/$'
  read -ra flags <<<"$(pkg-config --cflags --libs tandem)"
  read -ra rest <<<"$(sed -n "s|$line|\\1|p" "$binding/smallest.c")"
  [ "${#rest[@]}" -gt 0 ] || return 1
  "$@" "${strict[@]}" "$binding/smallest.c" -o "$prefix/smallest" "${flags[@]}" "-L$ggml_lib" -lggml "${rest[@]}" || return 1
  output=$("$prefix/smallest")
  printf '%s\n' "$output"
  [ "$output" = 3 ]
}
if [ -e "$ggml_lib/libggml-base.so" ]; then
  step 'smallest.c' smallest "$cc" -std=c99
else
  echo "skipped: smallest.c, as ggml's archives need more libraries than its pkg-config file says"
fi
finish
