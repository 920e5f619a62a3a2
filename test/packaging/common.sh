# SPDX-License-Identifier: MIT
# shellcheck shell=bash
# Shared by the tests of this folder: step "what" command… runs a command quietly and prints its output when it fails.
set -u
n_failed=0

fail() {
  printf 'FAIL  %s\n' "$*"
  n_failed=$((n_failed + 1))
}

step() {
  local what=$1 output
  shift
  if output=$("$@" 2>&1); then
    printf 'ok    %s\n' "$what"
  else
    fail "$what"
    printf '      %q' "$@"
    printf '\n%s\n' "$output" | tail -30
    return 1
  fi
}

# Prints tandem.h and the parts of it that it includes at its end.
public_header() { # include folder
  local part
  cat "$1/tandem/tandem.h"
  for part in $(sed -n 's/^#include "\(.*\)"$/\1/p' "$1/tandem/tandem.h"); do cat "$1/$part"; done
}

# Prints the functions that these headers declare, sorted.
declared_functions() { # include folder
  public_header "$1" | sed -n 's/^TANDEM_API [^(]*[ *]\(tandem_[a-z0-9_]*\)(.*/\1/p' | LC_ALL=C sort
}

# Copies the files that a user of the bindings has besides the installed library: bindings, their tests and models. Leaves
# out headers and sources of the library.
copy_bindings() { # source, to
  local folder
  for folder in bindings test/bindings test/reference examples/models examples/data; do
    mkdir -p "$(dirname "$2/$folder")" && cp -R "$1/$folder" "$2/$folder" || return 1
  done
  cp "$1/README.md" "$2"
}

finish() {
  [ "$n_failed" -eq 0 ] || printf '%s failed\n' "$n_failed"
  exit $((n_failed != 0))
}
