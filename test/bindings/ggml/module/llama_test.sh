#!/bin/bash
# SPDX-License-Identifier: MIT
# Tests the module in llama.cpp's own ggml. Downloads the sources that a version of the Python package llama-cpp-python contains
# (80 MB), builds ggml, its test program and the module, and runs ggml's tests of FLASH_ATTN_EXT on the module's device.
#   TANDEM_GGML_SOURCES=llama.cpp   a folder of llama.cpp's sources, instead of the download
# llama_test.sh SOURCE_DIR CMAKE CXX PYTHON; exits 77 (skipped) if the sources cannot be downloaded.
source "$(dirname "$0")/../../../packaging/common.sh"
source=$1 cmake=$2 cxx=$3 python=$4
package=llama-cpp-python version=0.3.36
case $(uname -m) in # one instruction set compiles in a fourth of the time; other tests are about the others
  x86_64) isas=avx2 ;;
  *) isas= ;;
esac
work=$(mktemp -d "${TMPDIR:-/tmp}/tandem-llama.XXXXXX") && trap 'rm -rf "$work"' EXIT || exit 1

sources=${TANDEM_GGML_SOURCES:-}
if [ -z "$sources" ]; then
  if ! "$python" -m pip download --quiet --no-deps --no-binary "$package" -d "$work" "$package==$version" >"$work/log" 2>&1; then
    echo "skipped: the sources of $package $version cannot be downloaded: $(tail -1 "$work/log")"
    exit 77
  fi
  tar -xzf "$work"/*.tar.gz -C "$work" --wildcards '*/vendor/llama.cpp/ggml/*' '*/vendor/llama.cpp/tests/test-backend-ops.cpp' ||
    exit 1
  sources=$(echo "$work"/*/vendor/llama.cpp)
fi

# llama.cpp's copy of ggml cannot be configured as a project of its own.
mkdir "$work/top" && printf '%s\n' 'cmake_minimum_required(VERSION 3.25)' 'project(ggml_alone C CXX)' \
  "add_subdirectory($sources/ggml ggml)" >"$work/top/CMakeLists.txt"
libs=$work/libs
step 'configure ggml' "$cmake" -S "$work/top" -B "$work/ggml" -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=ON -DGGML_NATIVE=OFF \
  "-DCMAKE_LIBRARY_OUTPUT_DIRECTORY=$libs" "-DCMAKE_CXX_COMPILER=$cxx" &&
  step 'build ggml' "$cmake" --build "$work/ggml" --parallel "$(nproc)" || finish
step 'build ggml'"'"'s tests' "$cxx" -std=c++17 -O1 "-I$sources/ggml/include" "$sources/tests/test-backend-ops.cpp" \
  -o "$work/test-backend-ops" "-L$libs" -lggml -lggml-base "-Wl,-rpath,$libs" -pthread &&
  step 'configure the module' "$cmake" -S "$source" -B "$work/tandem" -DCMAKE_BUILD_TYPE=Release -DTANDEM_CUDA=OFF \
    "-DTANDEM_ISAS=$isas" -DTANDEM_BUILD_TESTS=OFF -DTANDEM_BUILD_TOOLS=OFF -DTANDEM_BUILD_EXAMPLES=OFF "-DCMAKE_CXX_COMPILER=$cxx" \
    "-DTANDEM_GGML_INCLUDE_DIR=$sources/ggml/include" &&
  step 'build the module' "$cmake" --build "$work/tandem" --parallel "$(nproc)" --target ggml-tandem || finish

export GGML_BACKEND_PATH TANDEM_GGML_FEWEST_PAIRS=0
GGML_BACKEND_PATH=$(find "$work/tandem" -name libggml-tandem.so)
step 'ggml'"'"'s tests of FLASH_ATTN_EXT' sh -c "'$work/test-backend-ops' test -o FLASH_ATTN_EXT -b TANDEM >'$work/out' 2>&1"
sed -n '/tests passed/p' "$work/out"
n_computed=$(grep -c 'OK' "$work/out")
n_left=$(grep -c 'not supported' "$work/out")
echo "$n_computed nodes were computed, $n_left left to ggml"
[ "$n_computed" -gt 500 ] || fail "of $n_computed nodes there are too few"
! grep -q 'FAIL' "$work/out" || fail "$(grep 'FAIL' "$work/out" | head -5)"
finish
