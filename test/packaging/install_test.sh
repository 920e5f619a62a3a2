#!/bin/bash
# SPDX-License-Identifier: MIT
# Installs into one folder, moves it to another whose name has a space, and runs the installed programs by both of their
# names. Builds the installed examples there like users do: with pkg-config and find_package, shared and static, as C99 and
# as C++20. Runs each program. Then uninstalls.
# install_test.sh SOURCE_DIR BUILD_DIR CMAKE CC CXX WORK_DIR
source "$(dirname "$0")/common.sh"
source=$1 build=$2 cmake=$3 cc=$4 cxx=$5 work=$6
here=$(cd "$(dirname "$0")" && pwd)
prefix="$work/moved to"
rm -rf "$work" && mkdir -p "$work"
cd "$work" || exit 1

step 'cmake --install' "$cmake" --install "$build" --prefix "$work/first" || finish
mv "$work/first" "$prefix"
libdir=$(dirname "$(cd "$prefix" && find . -name libtandem.so)")
libdir="$prefix/${libdir#./}"
for file in "$libdir"/pkgconfig/*.pc "$libdir"/cmake/tandem/*.cmake; do
  ! grep -qF -e "$work" -e "$source" "$file" || fail "$file names a folder of the build"
done
! grep -q '^Requires.private' "$libdir/pkgconfig/tandem.pc" || fail "tandem.pc has Requires.private"

# ---- programs ----
# With CMAKE_SKIP_INSTALL_RPATH, as distributions build, the loader needs the library's path.
[ ! -x "$prefix/bin/tandem-info" ] || readelf -d "$prefix/bin/tandem-info" | grep -q PATH || export "LD_LIBRARY_PATH=$libdir"
installed=0
for command in info plan bench patterns generate demo; do
  [ -x "$build/bin/tandem-$command" ] || continue # not part of this build
  installed=$((installed + 1))
  step "tandem $command --help" "$prefix/bin/tandem" "$command" --help
  [ "$("$prefix/bin/tandem" "$command" --help)" = "$("$prefix/bin/tandem-$command" --help)" ] ||
    fail "tandem $command and tandem-$command differ"
  "$prefix/bin/tandem" "$command" --nonsense >output 2>&1
  status=$?
  [ "$status" -eq 2 ] || fail "tandem $command --nonsense: exit code $status: $(cat output)"
done
[ "$installed" -eq 0 ] || step 'tandem info' "$prefix/bin/tandem" info --json
[ "$installed" -eq 0 ] || step 'tandem plan' "$prefix/bin/tandem" plan --kv-len 4096
if [ -x "$build/bin/tandem-demo" ]; then # the model and the text are installed with it
  step 'tandem demo' "$prefix/bin/tandem" demo --context 2048 --decode 4
  strip -o demo "$prefix/bin/tandem-demo"
  ! grep -qF -e "$source/" demo || fail 'tandem-demo names the folder of the sources'
  rm -r "$prefix/share/tandem"
  output=$("$prefix/bin/tandem" demo --context 2048 --decode 4 2>&1)
  status=$?
  [ "$status" -eq 1 ] && grep -qF "$prefix/share/tandem/models/pico" <<<"$output" ||
    fail "tandem demo without its model: exit code $status: $output"
fi
if [ -x "$build/bin/tandem" ]; then
  [ "$("$prefix/bin/tandem" --version)" = "tandem $(sed -n 's/^Version: //p' "$libdir/pkgconfig/tandem.pc")" ] ||
    fail 'the versions of tandem and of tandem.pc differ'
fi

# ---- the manual ----
if [ -e "$build/man/made" ]; then
  for page in man3/tandem_attend.3 man3/tandem_session_options_init.3 man7/tandem.7 man7/tandem-errors.7; do
    grep -q '^\.TH TANDEM' "$prefix/share/man/$page" || fail "share/man/$page is no page"
  done
  for page in "$prefix"/share/man/man[137]/*; do
    [ -e "$page" ] || fail "$page is a link that leads nowhere"
    ! grep -qF -e "$work" -e "$source" "$page" || fail "$page names a folder of the build"
  done
  for program in "$prefix"/bin/*; do
    [ -e "$prefix/share/man/man1/$(basename "$program").1" ] || fail "$program has no page"
  done
  [ -e "$prefix/share/doc/tandem/html/index.html" ] || fail 'the manual as HTML is missing'
  if command -v man >/dev/null; then
    step 'man tandem_attend' env "MANPATH=$prefix/share/man" man -w tandem_attend
  fi
elif grep -q '^TANDEM_MAN:BOOL=ON$' "$build/CMakeCache.txt"; then
  fail 'TANDEM_MAN is ON and the manual has not been made'
fi
# ---- pages ----
if command -v python3 >/dev/null; then
  step 'links of the installed pages' python3 "$here/docs_test.py" --links "$prefix/share/doc/tandem"
fi
# ---- shell completion ----
if [ -e "$build/completion/made" ]; then
  for program in "$prefix"/bin/*; do
    name=$(basename "$program")
    for file in "bash-completion/completions/$name" "fish/vendor_completions.d/$name.fish"; do
      [ -e "$prefix/share/$file" ] || fail "share/$file is missing"
    done
  done
  [ -e "$prefix/share/zsh/site-functions/_tandem" ] || fail 'share/zsh/site-functions/_tandem is missing'
  # shellcheck disable=SC2016
  offered=$(bash --norc -c 'source "$1"; COMP_WORDS=(tandem-plan --pol) COMP_CWORD=1; _tandem; echo "${COMPREPLY[*]}"' sh \
    "$prefix/share/bash-completion/completions/tandem-plan")
  [ "$offered" = --policy ] || fail "bash completes tandem-plan --pol to: $offered"
elif grep -q '^TANDEM_COMPLETION:BOOL=ON$' "$build/CMakeCache.txt" && [ -x "$build/bin/tandem" ]; then
  fail 'TANDEM_COMPLETION is ON and no completion has been made'
fi
# ---- documentation ----
doc=$prefix/share/doc/tandem
for file in LICENSE docs/pictures/tandem-light.svg examples/smallest.py examples/tutorial/toy.h; do
  cmp -s "$doc/$file" "$source/$file" || fail "share/doc/tandem/$file is missing, or another"
done
for file in README.md CHANGELOG.md CONTRIBUTING.md docs/README.md docs/patterns.md bindings/python/README.md; do
  [ "$(wc -lw <"$doc/$file")" = "$(wc -lw <"$source/$file")" ] || # some links are gone, no line and no word is
    fail "share/doc/tandem/$file is missing, or another"
done

# ---- pkg-config ----
export PKG_CONFIG_PATH="$libdir/pkgconfig"
[ "$(pkg-config --modversion tandem)" = "$(pkg-config --modversion tandem-static)" ] || fail 'versions of the .pc files differ'
compile() { # program package compiler flags…; compiles $user_source
  local program=$1 cflags libs
  cflags=$(pkg-config --cflags "$2") && libs="$(pkg-config --libs "$2") $user_libs" || return 1
  shift 2
  # pkg-config quotes the space in the prefix for a shell.
  eval "set -- $(printf '%q ' "$@") -o $program $cflags \"\$user_source\" $libs"
  "$@"
}
program_from_pkg_config() { # name package compiler flags…
  local name=$1
  step "$name: compile" compile "$@" || return
  step "$name: run" env "LD_LIBRARY_PATH=$libdir" "./$name"
}
strict=(-pedantic -Wall -Wextra -Werror)
user_libs=
user_source=$doc/examples/decode.c
program_from_pkg_config pkg-config-c99 tandem "$cc" -std=c99 "${strict[@]}"
program_from_pkg_config pkg-config-cxx20 tandem "$cxx" -std=c++20 "${strict[@]}" -x c++
program_from_pkg_config pkg-config-static tandem-static "$cc" -std=c99 "${strict[@]}"
! readelf -d pkg-config-static | grep -q libtandem || fail 'the static program needs libtandem.so'
# --static without -static: -ltandem would select the shared library.
flags="$(pkg-config --cflags tandem) '$user_source' $(pkg-config --static --libs tandem)"
output=$(eval "$cc -o quietly-shared $flags" 2>&1) &&
  fail 'pkg-config --static links the shared library'
grep -q 'tandem_archive_is_linked_by_tandem_static_pc' <<<"$output" || fail "pkg-config --static: $output"
step 'pkg-config --static, the archive named' eval "$cc -o static $(pkg-config --cflags tandem) '$user_source' \
  $(pkg-config --static --libs tandem | sed 's/-ltandem /-l:libtandem.a /')"
[ ! -x static ] || ! readelf -d static | grep -q libtandem || fail 'the program of the named archive needs libtandem.so'
user_source=$doc/examples/attend_tensors.c
program_from_pkg_config pkg-config-attend-tensors tandem "$cc" -std=c99 "${strict[@]}"
user_source=$doc/examples/smallest.c
program_from_pkg_config pkg-config-smallest tandem "$cc" -std=c99 "${strict[@]}"
program_from_pkg_config pkg-config-smallest-cxx20 tandem "$cxx" -std=c++20 "${strict[@]}" -x c++
user_libs=-lm
for user_source in "$doc"/examples/tutorial/*.c; do
  program_from_pkg_config "pkg-config-$(basename "$user_source" .c)" tandem "$cc" -std=c99 "${strict[@]}"
done
user_libs=
user_source=$here/raii.cc
program_from_pkg_config pkg-config-raii tandem "$cxx" -std=c++11 "${strict[@]}"
program_from_pkg_config pkg-config-raii-static tandem-static "$cxx" -std=c++20 "${strict[@]}"

# ---- find_package ----
consumer() { # name language standard target components
  "$cmake" -S "$here/consumer" -B "$1" -G Ninja "-DCMAKE_PREFIX_PATH=$prefix" "-DCMAKE_C_COMPILER=$cc" \
    "-DCMAKE_CXX_COMPILER=$cxx" "-DLANGUAGE=$2" "-DSTANDARD=$3" "-DTARGET=$4" "-DCOMPONENTS=$5" "-DSOURCE=$source" &&
    "$cmake" --build "$1" && "./$1/program"
}
step 'find_package: C99' consumer find-c99 C 99 tandem::tandem ''
step 'find_package: C++20' consumer find-cxx20 CXX 20 tandem::tandem ''
step 'find_package: static, C99' consumer find-static C 99 tandem::tandem_static static
step 'find_package: static, C++20' consumer find-static-cxx CXX 20 tandem::tandem_static static
[ ! -x find-static/program ] || ! readelf -d find-static/program | grep -q libtandem || fail 'the static program needs libtandem.so'
! grep -q find_dependency "$libdir"/cmake/tandem/tandem-targets*.cmake || fail 'the shared target has dependencies'

# ---- uninstall ----
# With a manifest of its own, because other tests install from the build folder at the same time.
touch "$prefix/include/tandem/mine.h"
mkdir manifest && find "$prefix" ! -type d ! -name mine.h >manifest/install_manifest.txt
step 'uninstall' "$cmake" -D "build=$work/manifest" -P "$source/cmake/uninstall.cmake"
left=$(find "$prefix" ! -type d)
[ "$left" = "$prefix/include/tandem/mine.h" ] || fail "left after the uninstall: $left"
left=$(find "$prefix" -type d -name tandem)
[ "$left" = "$prefix/include/tandem" ] || fail "folders left after the uninstall: $left"
finish
