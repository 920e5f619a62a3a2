#!/bin/bash
# SPDX-License-Identifier: MIT
# Each public header compiles alone in every dialect without a warning. tandem.h needs only two system headers and includes
# all of its parts.
# header_test.sh SOURCE_DIR CC CXX
source "$(dirname "$0")/common.sh"
include=$1/include cc=$2 cxx=$3
strict=(-pedantic -Wall -Wextra -Wshadow -Wconversion -Werror -fsyntax-only "-I$include")

compile() { # header standard compiler language
  printf '#include "tandem/%s"\n' "$1" | "$3" "-std=$2" "${strict[@]}" -x "$4" -
}
for header in tandem.h tensors.h weights.h selection.h pruning.h patterns.h saving.h plan.h dlpack.h; do
  for standard in c99 c11 c17 c2x; do
    step "$header as $standard" compile $header $standard "$cc" c
  done
done
for header in tandem.h tensors.h weights.h selection.h pruning.h patterns.h saving.h plan.h dlpack.h tandem.hpp saving.hpp; do
  for standard in c++11 c++14 c++17 c++20 c++2b; do
    step "$header as $standard" compile $header $standard "$cxx" c++
  done
done

includes=$(sed -n 's/^ *# *include *//p' "$include/tandem/tandem.h" | tr '\n' ' ')
[ "$includes" = '<stddef.h> <stdint.h> "tandem/tensors.h" "tandem/weights.h" "tandem/selection.h" "tandem/pruning.h" "tandem/patterns.h" "tandem/saving.h" "tandem/plan.h" ' ] || fail "tandem.h includes $includes"
for part in tensors.h weights.h selection.h pruning.h patterns.h saving.h plan.h; do
  includes=$(sed -n 's/^ *# *include *//p' "$include/tandem/$part" | tr '\n' ' ')
  [ "$includes" = '"tandem/tandem.h" ' ] || fail "$part includes $includes"
done

# Bindings copy the header's declarations. None may be missed because of a different layout.
n_api=$(public_header "$include" | grep -c '^TANDEM_API ')
n_found=$(declared_functions "$include" | wc -l)
[ "$n_api" -eq "$n_found" ] || fail "$n_api functions are declared, $n_found are laid out 'TANDEM_API type name(' on one line"
finish
