#!/bin/bash
# SPDX-License-Identifier: MIT
# The Go module as its users get it. Tandem is installed to a folder outside of the checkout and the module is copied next
# to it. The folder has no space in its name, which Go 1.19 does not accept from pkg-config. The module's tests run under
# the strictest check of the addresses that C gets, and under the race detector. Also measures the cost of a call, and
# builds the program of the module's page in a module of its own. Nothing is downloaded. MODULE is a device module in host
# memory.
# go_test.sh SOURCE_DIR BUILD_DIR CMAKE CC WORK_DIR MODULE; exits 77 without Go, or with a Go older than 1.19.
source "$(dirname "$0")/common.sh"
source=$1 build=$2 cmake=$3 cc=$4 work=$5
export TANDEM_TEST_MODULE=$6
version=$(GOTOOLCHAIN=local go env GOVERSION 2>/dev/null)
if [[ ! $version =~ ^go1\.([0-9]+) ]] || [ "${BASH_REMATCH[1]}" -lt 19 ]; then
  echo "skipped: there is no Go 1.19 or later (go is ${version:-missing})"
  exit 77
fi
minor=${BASH_REMATCH[1]}
prefix=$(mktemp -d "${TMPDIR:-/tmp}/tandem-go.XXXXXX") && trap 'rm -rf "$prefix"' EXIT || exit 1
mkdir -p "$work"
unset GOFLAGS GODEBUG GOEXPERIMENT GOROOT PKG_CONFIG CGO_CFLAGS CGO_LDFLAGS
export GOCACHE=$work/cache GOPATH=$work/path GOPROXY=off GOTOOLCHAIN=local GOENV=off GOWORK=off GO111MODULE=on CGO_ENABLED=1 CC=$cc
step 'cmake --install' "$cmake" --install "$build" --prefix "$prefix/installed" || finish
step 'copy' copy_bindings "$source" "$prefix/user" || finish
libdir=$(dirname "$(find "$prefix" -name libtandem.so)")
export PKG_CONFIG_PATH=$libdir/pkgconfig LD_LIBRARY_PATH=$libdir
# Go caches compiled code by sources and settings, which do not include the header.
export CGO_CPPFLAGS=-DTANDEM_TEST_HEADER=$(public_header "$source/include" | cksum | cut -d ' ' -f 1)
module=$prefix/user/bindings/go
cd "$module" || exit 1

without_the_library() { # the build stops and names the missing part
  local output
  ! output=$(env PKG_CONFIG_LIBDIR=/no/such/folder PKG_CONFIG_PATH= go build . 2>&1) || return 1
  printf '%s\n' "$output"
  [[ $output == *tandem* ]]
}
without_cgo() { # the build stops and names the missing part in one line
  local output
  ! output=$(CGO_ENABLED=0 go build . 2>&1) || return 1
  printf '%s\n' "$output"
  [ "$(grep -vc '^#' <<< "$output")" -eq 1 ] && [[ $output == *needs_cgo* ]]
}
vet_alone() { # the folder without its neighbours
  cp -R "$module" "$prefix/alone" && cd "$prefix/alone" && go vet ./...
}
formatted() { [ -z "$(gofmt -l . | tee /dev/stderr)" ]; }
smallest() { # in a module of its own
  mkdir "$prefix/program" && cd "$prefix/program" && cp "$module/examples/smallest/main.go" . &&
    go mod init program && go mod edit -require=tandem@v0.2.0 "-replace=tandem=$module" || return 1
  local output
  output=$(go run .)
  printf "%s\n" "$output"
  [ "$output" = "3 <nil>" ]
}
checked() { # go test under the checks that Go 1.21 turned from a setting into an experiment
  if [ "$minor" -lt 21 ]; then GODEBUG=cgocheck=2 go test "$@"; else GOEXPERIMENT=cgocheck2 go test "$@"; fi
}
step 'without the library' without_the_library
step 'without cgo' without_cgo
step 'gofmt' formatted
step 'go vet of the folder alone' vet_alone
step 'go vet' go vet ./...
step 'go test, addresses checked' checked ./...
step 'go test -race' go test -race -count=1 .
step 'what a call costs' go test -run '^$' -bench . -benchtime 1x .
step 'the program of README.md' smallest
written=$(find . -newer "$prefix/user/README.md")
[ -z "$written" ] || fail "the tests have written into the module: $written"
finish
