#!/bin/bash
# SPDX-License-Identifier: MIT
# Options of the build: an excluded dependency is not searched for, a requested dependency that is missing is an error that
# names it, and warnings are only errors in the presets. Nothing is compiled.
# options_test.sh SOURCE_DIR CMAKE CC CXX WORK_DIR
source "$(dirname "$0")/common.sh"
source=$1 cmake=$2 cc=$3 cxx=$4 work=$5
rm -rf "$work" && mkdir -p "$work"
cd "$work" || exit 1

choices=(TANDEM_CUDA TANDEM_GENERATE_CUDA TANDEM_CAIRO TANDEM_GGML TANDEM_GGML_TESTS TANDEM_PYTHON_TESTS TANDEM_NVTX_TESTS)
configure() { "$cmake" -S "$source" -B build -G Ninja "-DCMAKE_C_COMPILER=$cc" "-DCMAKE_CXX_COMPILER=$cxx" "$@" 2>&1; }
refused() { # text option…
  local text=$1 output
  shift
  output=$(configure "${off[@]}" "$@") && fail "$*: accepted"
  # CMake breaks lines.
  grep -qF -e "$text" <<<"$(tr -s '\n ' '  ' <<<"$output")" || fail "$*: does not say \"$text\": $output"
}

off=(-DTANDEM_ISAS= -DBUILD_SHARED_LIBS=ON -DTANDEM_BUILD_STATIC=ON) # set again, because the cache keeps the choices of a call
for name in "${choices[@]}"; do off+=("-D$name=OFF"); done
summary=$(configure "${off[@]}") || fail "all OFF: $summary"
for name in "${choices[@]}"; do
  grep -q " no ($name=OFF)$" <<<"$summary" || fail "the summary does not say that $name is OFF: $summary"
done
! grep -qi 'cuda compiler\|cairo,\|python3\|ggml [0-9]' <<<"$summary" || fail "with all OFF it looks for something: $summary"
grep -q '^TANDEM_WERROR:BOOL=OFF$' build/CMakeCache.txt || fail 'warnings are errors by default'
! grep -q -- '-Werror' build/compile_commands.json || fail 'a file is compiled with -Werror'

for preset in release dev asan tsan arm; do
  output=$(cd "$source" && "$cmake" -N --preset "$preset" -B "$work/unused")
  grep -q 'TANDEM_WERROR="ON"' <<<"$output" || fail "the preset $preset does not make warnings errors: $output"
done
# ./dev build turns the option off, both in a new folder and in one that has been configured.
source <(sed -n '/^werror() {/,/^}/p' "$source/dev")
[ "$(werror "$work/unused")" = OFF ] && [ "$(werror build)" = OFF ] || fail './dev build makes warnings errors'
"$cmake" -DTANDEM_WERROR=ON build >output 2>&1 || fail "TANDEM_WERROR=ON: $(cat output)"
[ "$(werror build)" = ON ] || fail './dev build compiles anew what ./dev test has compiled'
grep -q -- '-Werror' build/compile_commands.json || fail 'TANDEM_WERROR=ON: no file is compiled with -Werror'

refused 'TANDEM_CUDA=ON: no CUDA compiler is found' -DTANDEM_CUDA=ON -DCMAKE_CUDA_COMPILER=NOTFOUND
refused 'TANDEM_GENERATE_CUDA=ON: it takes the CUDA module' -DTANDEM_GENERATE_CUDA=ON
PKG_CONFIG_PATH='' PKG_CONFIG_LIBDIR=$work refused 'TANDEM_CAIRO=ON: Cairo (libcairo2-dev) is not found' -DTANDEM_CAIRO=ON
refused 'is not ON, OFF or AUTO' -DTANDEM_CAIRO=maybe
refused 'there are no kernels for avx9. For' -DTANDEM_ISAS=avx9
refused 'leave no library to build' -DBUILD_SHARED_LIBS=OFF -DTANDEM_BUILD_STATIC=OFF
# Must be the last one, because CMake finds nothing from here on.
refused 'TANDEM_GGML=ON: ggml-backend.h is not found' -DTANDEM_GGML=ON -DTANDEM_GGML_INCLUDE_DIR=NOTFOUND \
  -DCMAKE_DISABLE_FIND_PACKAGE_ggml=ON -DCMAKE_FIND_ROOT_PATH=/nonexistent -DCMAKE_FIND_ROOT_PATH_MODE_INCLUDE=ONLY
finish
