#!/bin/bash
# SPDX-License-Identifier: MIT
# The Rust crates as their users get them. Tandem is installed to a folder outside of the checkout whose name has a space,
# and the crates are copied next to it. Their tests run through pkg-config and through TANDEM_LIB_DIR. Also measures the
# cost of a call, and checks documentation, lints and format if cargo has them. MODULE is a device module in host memory.
# rust_test.sh SOURCE_DIR BUILD_DIR CMAKE CC WORK_DIR MODULE; exits 77 without cargo.
source "$(dirname "$0")/common.sh"
source=$1 build=$2 cmake=$3 cc=$4 work=$5
export TANDEM_TEST_MODULE=$6
if ! cargo --version > /dev/null 2>&1; then
  echo 'skipped: there is no cargo'
  exit 77
fi
unset PKG_CONFIG_PATH PKG_CONFIG TANDEM_LIB_DIR TANDEM_INCLUDE_DIR
rm -rf "$work" && mkdir -p "$work/empty"
prefix=$(mktemp -d "${TMPDIR:-/tmp}/tandem rust.XXXXXX") || exit 1
trap 'rm -rf "$prefix"' EXIT
step 'cmake --install' "$cmake" --install "$build" --prefix "$prefix" || finish
step 'copy' copy_bindings "$source" "$prefix/user" || finish
libdir=$(dirname "$(find "$prefix" -name libtandem.so)")
cd "$prefix/user/bindings/rust" || exit 1
export CARGO_INCREMENTAL=0 CARGO_PROFILE_DEV_DEBUG=0 CARGO_PROFILE_TEST_DEBUG=0
export CARGO_TARGET_DIR="$work/target" LD_LIBRARY_PATH="$libdir" CC="$cc"

without() { # expected text; environment…: without the library the build stops with instructions
  local output said=$1
  shift
  ! output=$(env "$@" cargo build --offline --locked -p tandem-sys 2>&1) || return 1
  printf '%s\n' "$output"
  [[ $output == *'libtandem was not found'*"$said"*PKG_CONFIG_PATH=* ]]
}
step 'without the library' without 'tandem' "PKG_CONFIG_LIBDIR=$work/empty"
step 'without pkg-config' without 'could not be run' PKG_CONFIG=/no/such/program
step 'a folder without the library' without 'has no libtandem.so' "TANDEM_LIB_DIR=$work/empty"
step 'TANDEM_LIB_DIR' env "TANDEM_LIB_DIR=$libdir" PKG_CONFIG=false cargo test --offline --locked -p tandem-sys
multiarch() { # the header is in the folder above the one next to the library's folder
  local lib=$work/multiarch/usr/lib/x86_64-linux-gnu include
  include=$(PKG_CONFIG_PATH=$libdir/pkgconfig pkg-config --variable=includedir tandem | tr -d '\\')
  mkdir -p "$lib" && cp -P "$libdir"/libtandem.so* "$lib" &&
    cp -R "$include" "$work/multiarch/usr/include" &&
    env "TANDEM_LIB_DIR=$lib" PKG_CONFIG=false cargo test --offline --locked -p tandem-sys || return 1
  grep -qx "cargo:include=$(realpath "$work/multiarch/usr/include")" "$CARGO_TARGET_DIR"/debug/build/tandem-sys-*/output
}
packaged() { # crate: the package contains licence and README
  local listed
  cmp "$1/LICENSE" "$source/LICENSE" && listed=$(cargo package --offline --list --allow-dirty -p "$1") &&
    grep -qx LICENSE <<< "$listed" && grep -qx README.md <<< "$listed"
}
step 'a multiarch folder' multiarch
step 'documentation without the library' env DOCS_RS=1 PKG_CONFIG=false cargo doc --offline --locked --no-deps
step 'package of tandem-sys' packaged tandem-sys
step 'package of tandem' packaged tandem
export PKG_CONFIG_PATH="$libdir/pkgconfig"
step 'pkg-config' cargo test --offline --locked
step 'documentation' env RUSTDOCFLAGS='-D warnings' cargo doc --offline --locked --no-deps
! cargo clippy --version > /dev/null 2>&1 || step 'clippy' cargo clippy --offline --locked --all-targets -- -D warnings
! cargo fmt --version > /dev/null 2>&1 || step 'format' cargo fmt --check
step 'what a call costs' cargo bench --offline --locked
finish
