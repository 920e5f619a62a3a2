#!/bin/bash
# SPDX-License-Identifier: MIT
# The Python binding as its users get it. Tandem is installed to a folder outside of the checkout and the package is copied
# next to it. pip installs the package into a virtual environment, with and without build isolation, without a registry.
# Then its tests run (test/bindings/python). MODULE is a device module in host memory.
# python_test.sh SOURCE_DIR BUILD_DIR CMAKE CC PYTHON MODULE; exits 77 (skipped) without Python, venv, NumPy or pytest.
source "$(dirname "$0")/common.sh"
source=$1 build=$2 cmake=$3 cc=$4 python=$5
export TANDEM_TEST_MODULE=$6
skip() {
  printf 'skipped: %s\n' "$*"
  exit 77
}
work=$(mktemp -d) && trap 'rm -rf "$work"' EXIT
export PYTHONDONTWRITEBYTECODE=1 PIP_DISABLE_PIP_VERSION_CHECK=1 CC=$cc
unset PYTHONPATH TANDEM_LIB_DIR

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || skip "$("$python" --version) is older than 3.10"
"$python" -c 'import ensurepip, venv' 2>/dev/null || skip "$python has no venv"
"$python" -m venv --system-site-packages "$work/venv" >/dev/null 2>&1 || skip "$python cannot make a virtual environment"
python=$work/venv/bin/python
if ! "$python" -c 'import numpy, pytest' 2>/dev/null; then
  timeout 40 "$python" -m pip install --quiet --retries 0 --timeout 10 numpy pytest ml_dtypes >/dev/null 2>&1
  "$python" -c 'import numpy, pytest' 2>/dev/null || skip 'NumPy and pytest are neither installed nor to be had from a registry'
fi

step 'cmake --install' "$cmake" --install "$build" --prefix "$work/prefix" || finish
step 'copy' copy_bindings "$source" "$work/user" || finish
package=$work/user/bindings/python
library=$(find "$work/prefix" -name libtandem.so.0)
step 'pip wheel, isolated' "$python" -m pip wheel --no-index --no-deps -w "$work" "$package"
step 'pip install of the wheel' "$python" -m pip install --no-index --no-deps "$work"/tandem-*.whl
step 'pip uninstall' "$python" -m pip uninstall --yes tandem
step 'pip install --no-build-isolation' "$python" -m pip install --no-index --no-deps --no-build-isolation \
  "$package" || finish
pip_check() { ! "$python" -m pip check | grep -i '^tandem '; } # pip may complain about other packages
step 'pip check' pip_check
written=$(find "$package" -newer "$work/user/README.md")
[ -z "$written" ] || fail "the install has written into the package's folder: $written"

export TANDEM_LIB_DIR=${library%/*} TANDEM_INCLUDE_DIR=$work/prefix/include
cd "$package" || exit 1
the_installed_one() { "$python" -P -c 'import sys, tandem; sys.exit(not tandem.__file__.startswith(sys.prefix))'; }
step 'the installed package' the_installed_one
"$python" -P -m pytest -q -p no:cacheprovider -rs || fail 'pytest'
step 'the reference of pruning' "$python" -P -m pytest -q -p no:cacheprovider ../../test/reference
step 'docs/support.md' env PYTHONDONTWRITEBYTECODE=1 "TANDEM_LIB_DIR=$build" "$python" "$source/tools/support/make.py" --check
step 'what a call costs' "$python" ../../test/bindings/python/overhead_bench.py
"$python" -m mypy --version >/dev/null 2>&1 ||
  timeout 40 "$python" -m pip install --quiet --retries 0 --timeout 10 mypy >/dev/null 2>&1
if "$python" -m mypy --version >/dev/null 2>&1; then
  step 'mypy --strict' "$python" -m mypy --cache-dir /dev/null tandem wheel_backend.py
  cd "$work" || exit 1 # here the installed package is imported, with the types of its py.typed
  awk '/^```python$/ {n++; next} /^```$/ {n += n % 2} n == 1' "$package/README.md" >example.py
  grep -q 'session.attend' example.py || fail 'the example of the README is not found'
  step 'mypy --strict, the example' "$python" -P -m mypy --strict --cache-dir /dev/null example.py
  echo 'reveal_type(o); o = session.attend(3)' >>example.py
  "$python" -P -m mypy --strict --cache-dir /dev/null example.py 2>&1 | tr '\n' ' ' |
    grep -q 'Revealed type is "numpy.*No overload variant.*"attend"' || fail 'mypy does not see the types of attend'
fi
finish
