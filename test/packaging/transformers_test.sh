#!/bin/bash
# SPDX-License-Identifier: MIT
# Runs the tests of tandem.transformers with other versions of Transformers than the installed one. Each version gets a
# virtual environment, with PyTorch, from pip's registry. That is several GB, so the test only runs on request.
#   TANDEM_TRANSFORMERS='oldest newest' ctest --test-dir build -R transformers_test
# Words are "oldest" (the oldest version that bindings/python/pyproject.toml allows, with the oldest PyTorch), "newest", or
# a version of Transformers. TANDEM_TRANSFORMERS_VENVS, if set, is a folder where the environments are kept.
# TANDEM_TRANSFORMERS_TESTS is pytest's -k.
# transformers_test.sh SOURCE_DIR BUILD_DIR PYTHON; exits 77 (skipped) if no version is requested.
source "$(dirname "$0")/common.sh"
source=$1 build=$2 python=$3
[ -n "${TANDEM_TRANSFORMERS:-}" ] || { echo 'skipped: TANDEM_TRANSFORMERS names no version'; exit 77; }
work=$(mktemp -d) && trap 'rm -rf "$work"' EXIT
venvs=${TANDEM_TRANSFORMERS_VENVS:-$work}
export PYTHONDONTWRITEBYTECODE=1 PIP_DISABLE_PIP_VERSION_CHECK=1
export PYTHONPATH=$source/bindings/python TANDEM_LIB_DIR=$build TANDEM_INCLUDE_DIR=$source/include
oldest() { # package
  sed -n "s/^transformers = .*\"$1>=\([0-9.]*\)\".*/\1/p" "$source/bindings/python/pyproject.toml"
}

for version in $TANDEM_TRANSFORMERS; do
  case $version in
    oldest) packages="torch==$(oldest torch).* transformers==$(oldest transformers).0.*" ;;
    newest) packages='torch transformers' ;;
    *) packages="torch transformers==$version" ;;
  esac
  venv=$venvs/$version
  [ -x "$venv/bin/python" ] || step "venv $version" "$python" -m venv "$venv" || continue
  # shellcheck disable=SC2086
  step "pip install $packages" "$venv/bin/python" -m pip install --quiet --upgrade $packages numpy pytest ml_dtypes || continue
  "$venv/bin/python" -c 'import torch, transformers; print(f"Transformers {transformers.__version__}, PyTorch {torch.__version__}")'
  "$venv/bin/python" -P -m pytest -q -p no:cacheprovider -rf -c "$source/bindings/python/pyproject.toml" \
    -k "${TANDEM_TRANSFORMERS_TESTS:-transformers}" "$source/test/bindings/python" || fail "the tests with Transformers $version"
done
finish
