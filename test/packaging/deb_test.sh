#!/bin/bash
# SPDX-License-Identifier: MIT
# Debian packages of the build folder: their content, their dependencies, and a program built from their files in a folder,
# as a cross compiler would build it. With `root` the packages are installed in a separate Debian, run there and removed
# again.
# deb_test.sh SOURCE_DIR BUILD_DIR CPACK CC WORK_DIR [root]
source "$(dirname "$0")/common.sh"
source=$1 build=$2 cpack=$3 cc=$4 work=$5 in_root=${6:-}
for tool in dpkg-deb dpkg-shlibdeps; do
  command -v $tool >/dev/null || { echo "skipped: there is no $tool"; exit 77; }
done
rm -rf "$work" && mkdir -p "$work"
cd "$work" || exit 1

step 'cpack' "$cpack" -G DEB --config "$build/CPackConfig.cmake" -B "$work" || finish
package() { # name; prints the package's file
  local files=("$work/$1"_*.deb)
  [ -e "${files[0]}" ] || fail "there is no package $1"
  echo "${files[0]}"
}
runtime=$(package libtandem0) dev=$(package libtandem-dev) tools=$(package tandem-tools) doc=$(package tandem-doc)
[ "$n_failed" -eq 0 ] || finish
[ -e "$build/libtandem-cuda.so" ] || [ -z "$(find . -maxdepth 1 -name 'libtandem-cuda*')" ] ||
  fail 'a package without the module'
version=$(dpkg-deb -f "$runtime" Version)

has() { # package, pattern of a path…; in packages of multiarch systems, usr/lib has one more folder
  local files pattern
  files=$(dpkg-deb -c "$1" | awk '{ print $6 }' | sed 's|^\./||; s|^usr/lib/[^/]*-linux-[^/]*/|usr/lib/|')
  for pattern in "${@:2}"; do
    grep -qE "^$pattern$" <<<"$files" || fail "$(basename "$1") lacks $pattern"
  done
}
has_no() { # package, pattern of a path
  ! dpkg-deb -c "$1" | awk '{ print $6 }' | grep -E "$2" || fail "$(basename "$1") has the files above"
}
has "$runtime" 'usr/lib/libtandem\.so\.[0-9]+' 'usr/lib/libtandem\.so\.[0-9.]+'
has_no "$runtime" 'include|bin/|\.a$|libtandem\.so$'
has "$dev" usr/include/tandem/tandem.h 'usr/lib/libtandem\.so' 'usr/lib/libtandem\.a' usr/lib/pkgconfig/tandem.pc \
  usr/lib/pkgconfig/tandem-static.pc usr/lib/cmake/tandem/tandem-config.cmake
has_no "$dev" 'bin/|so\.[0-9]'
has "$tools" usr/bin/tandem usr/bin/tandem-{info,plan,patterns,bench,generate,demo} \
  usr/share/tandem/models/pico/model.safetensors usr/share/tandem/data/haystack.txt
if [ -e "$build/completion/made" ]; then
  has "$tools" usr/share/bash-completion/completions/tandem usr/share/bash-completion/completions/tandem-bench \
    usr/share/zsh/vendor-completions/_tandem usr/share/fish/vendor_completions.d/tandem.fish
fi
has "$doc" usr/share/doc/tandem/README.md usr/share/doc/tandem/CHANGELOG.md usr/share/doc/tandem/docs/concepts.md \
  usr/share/doc/tandem/examples/decode.c
for file in "$runtime" "$dev" "$tools" "$doc"; do
  name=$(dpkg-deb -f "$file" Package)
  has "$file" "usr/share/doc/$name/copyright" "usr/share/doc/$name/changelog.Debian.gz"
  [ -n "$(dpkg-deb -f "$file" Description)" ] || fail "$name has no description"
done

depends() { # package, word…
  local depends word
  depends=$(dpkg-deb -f "$1" Depends)
  for word in "${@:2}"; do
    grep -qF "$word" <<<"$depends" || fail "$(basename "$1") does not depend on $word: $depends"
  done
}
depends "$runtime" libhwloc libdnnl libhwy libstdc++6
depends "$dev" "libtandem0 (= $version)"
depends "$tools" "libtandem0 (= $version)" libstdc++6
control() { dpkg-deb --ctrl-tarfile "$runtime" | tar -xO "./$1"; }
control shlibs | grep -q '^libtandem 0 libtandem0 (>= ' || fail 'libtandem0 has no shlibs file'
control triggers | grep -q 'ldconfig' || fail 'libtandem0 does not trigger ldconfig'
if command -v lintian >/dev/null; then
  # Packages whose libraries lie outside of the multiarch folder, because the build folder has such a prefix.
  step 'lintian' lintian --allow-root --fail-on error,warning \
    --suppress-tags pkg-config-unavailable-for-cross-compilation,shared-library-lacks-prerequisites ./*.deb
fi

# ---- unpacked, used by pkg-config through a sysroot ----
for file in "$runtime" "$dev" "$tools"; do dpkg-deb -x "$file" root || fail "dpkg-deb -x $file"; done
! readelf -d root/usr/bin/tandem-info | grep -qE 'RPATH|RUNPATH' || fail 'a packaged program has an RPATH'
libdir=$(dirname "$(find "$work/root" -name 'libtandem.so.0')")
export PKG_CONFIG_SYSROOT_DIR=$work/root PKG_CONFIG_PATH=$libdir/pkgconfig
flags=$(pkg-config --cflags --libs tandem)
grep -qF "$work/root" <<<"$flags" && ! grep -qF "$work/root$work" <<<"$flags" || fail "pkg-config with a sysroot: $flags"
# shellcheck disable=SC2086
step 'decode.c from the packages' "$cc" -o decode "$source/examples/decode.c" $flags
step 'run' env "LD_LIBRARY_PATH=$libdir" ./decode
for program in "$source"/examples/tutorial/*.c; do
  # shellcheck disable=SC2086
  step "$(basename "$program") from the packages" "$cc" -o tutorial "$program" $flags -lm
  step 'run' env "LD_LIBRARY_PATH=$libdir" ./tutorial
done
step 'tandem info' env "LD_LIBRARY_PATH=$libdir" root/usr/bin/tandem info
step 'tandem demo' env "LD_LIBRARY_PATH=$libdir" root/usr/bin/tandem demo --context 2048 --decode 4
[ -n "$in_root" ] && [ "$n_failed" -eq 0 ] || finish

# ---- installed in a minimal system ----
system=$(sed -n 's/^ID=//p' /etc/os-release) codename=$(sed -n 's/^VERSION_CODENAME=//p' /etc/os-release)
if [ "$(id -u)" -ne 0 ] || [ "$system" != debian ] || ! command -v debootstrap >/dev/null; then
  echo 'skipped from here on: this takes root, Debian and debootstrap'
  exit 77
fi
bare=$work/bare
if ! debootstrap --variant=minbase "$codename" "$bare" http://deb.debian.org/debian >debootstrap.log 2>&1; then
  echo "skipped from here on: debootstrap: $(tail -1 debootstrap.log)"
  exit 77
fi
cp "$runtime" "$dev" "$tools" "$doc" "$bare/"
inside() { env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin DEBIAN_FRONTEND=noninteractive LC_ALL=C chroot "$bare" "$@"; }
cp /etc/resolv.conf "$bare/etc/"
cp -r /etc/apt/apt.conf.d/. "$bare/etc/apt/apt.conf.d/"
mount --bind /proc "$bare/proc" && mount --bind /sys "$bare/sys" || { echo 'skipped from here on: no mount'; exit 77; }
trap 'umount "$bare/proc" "$bare/sys"' EXIT
step 'apt-get install' inside sh -c 'apt-get update && apt-get install -y --no-install-recommends ./*.deb'
step 'tandem info, installed' inside tandem info
step 'tandem demo, installed' inside tandem demo --context 2048 --decode 4
step 'the loader knows the library' inside sh -c 'ldconfig -p | grep -q libtandem.so.0'
step 'a compiler' inside apt-get install -y --no-install-recommends gcc libc6-dev pkg-config
# shellcheck disable=SC2016
step 'the programs of the tutorial, built and run there' inside sh -c 'cd /usr/share/doc/tandem/examples/tutorial &&
  for program in *.c; do
    cc -o /tmp/program "$program" $(pkg-config --cflags --libs tandem) -lm && /tmp/program || exit 1
  done'
step 'apt-get purge' inside apt-get purge -y libtandem0 libtandem-dev tandem-tools tandem-doc
left=$(inside find /usr -path '*tandem*')
[ -z "$left" ] || fail "left after the purge: $left"
finish
