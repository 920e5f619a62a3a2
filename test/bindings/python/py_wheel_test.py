# SPDX-License-Identifier: MIT
"""Contents of the wheel and the source archive, and where the library is looked for."""
import ast
import base64
import hashlib
import os
import pathlib
import shutil
import subprocess
import sys
import tarfile
import zipfile

import pytest
from conftest import ROOT

import tandem

BINDING = ROOT / "bindings/python"
MODULES = sorted(path.relative_to(BINDING / "tandem").as_posix() for path in (BINDING / "tandem").rglob("*.py"))
LIBRARY = pathlib.Path(tandem.library_path())
sys.dont_write_bytecode = True


@pytest.fixture
def backend(monkeypatch):
    monkeypatch.syspath_prepend(str(BINDING))
    import wheel_backend
    return wheel_backend


def names(path):
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        files = {name: archive.read(name) for name in archive.namelist()}
    record = files.pop("tandem-0.2.0.dist-info/RECORD").decode()
    lines = dict(line.split(",", 1) for line in record.splitlines())
    assert lines.pop("tandem-0.2.0.dist-info/RECORD") == ","
    assert set(lines) == set(files)
    for name, data in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        assert lines[name] == f"sha256={digest},{len(data)}"
    return files


def test_wheel(backend, tmp_path):
    name = backend.build_wheel(str(tmp_path))
    assert name == "tandem-0.2.0-py3-none-any.whl"
    files = names(tmp_path / name)
    info = {f"tandem-0.2.0.dist-info/{part}" for part in ("METADATA", "WHEEL", "licenses/LICENSE")}
    assert set(files) == {f"tandem/{module}" for module in MODULES} | {"tandem/py.typed"} | info
    metadata = files["tandem-0.2.0.dist-info/METADATA"].decode()
    assert "\nRequires-Dist: numpy" in metadata and "\nRequires-Python: >=3.10\n" in metadata
    assert "\nLicense-Expression: MIT\nRequires" in metadata and "\nClassifier: Typing :: Typed\n" in metadata
    assert metadata.endswith((BINDING / "README.md").read_text())
    os.mkdir(tmp_path / "again")
    backend.build_wheel(str(tmp_path / "again"))
    assert (tmp_path / "again" / name).read_bytes() == (tmp_path / name).read_bytes()


def test_the_project_is_read_without_tomllib(backend):
    """Python 3.10 does not have it, and a build must need nothing from a registry."""
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10")
    assert backend._project() == tomllib.loads((BINDING / "pyproject.toml").read_text())["project"]


@pytest.mark.parametrize("name", ["wheel_backend.py", *(f"tandem/{module}" for module in MODULES)])
def test_the_oldest_python_parses_it(backend, name):
    """mypy reports what its standard library lacks. pyproject.toml sets the version for mypy."""
    oldest = backend._project()["requires-python"].removeprefix(">=")
    assert f'python_version = "{oldest}"' in (BINDING / "pyproject.toml").read_text()
    ast.parse((BINDING / name).read_text(), name, feature_version=tuple(int(number) for number in oldest.split(".")))


def test_source_archive(backend, tmp_path):
    name = backend.build_sdist(str(tmp_path))
    with tarfile.open(tmp_path / name) as archive:
        held = {name.removeprefix("tandem-0.2.0/") for name in archive.getnames()}
        archive.extractall(tmp_path, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    assert held == {"LICENSE", "PKG-INFO", "README.md", "pyproject.toml", "wheel_backend.py", "tandem/py.typed",
                    *(f"tandem/{module}" for module in MODULES)}
    # A wheel built from the archive equals the wheel of the checkout.
    program = "import sys; sys.path.insert(0, '.'); import wheel_backend; print(wheel_backend.build_wheel(sys.argv[1]))"
    wheels = []
    for folder in (tmp_path / "tandem-0.2.0", BINDING):
        to = tmp_path / f"of_{folder.name}"
        to.mkdir()
        made = subprocess.run([sys.executable, "-B", "-c", program, str(to)], cwd=folder, check=True, capture_output=True,
                              text=True)
        wheels.append((to / made.stdout.strip()).read_bytes())
    assert wheels[0] == wheels[1]
    (tmp_path / "again").mkdir()
    assert (tmp_path / "again" / backend.build_sdist(str(tmp_path / "again"))).read_bytes() == (tmp_path / name).read_bytes()


def test_licence_is_the_projects():
    assert not (ROOT / "LICENSE").exists() or (ROOT / "LICENSE").read_text() == (BINDING / "LICENSE").read_text()


def test_editable(backend, tmp_path):
    name = backend.build_editable(str(tmp_path))
    files = names(tmp_path / name)
    assert files["tandem.pth"].decode() == f"{BINDING}\n" and not [file for file in files if file.endswith(".py")]
    with pytest.raises(FileNotFoundError, match="library-dir: /no/such/libtandem.so.0"):
        backend.build_editable(str(tmp_path), {"library-dir": "/no/such"})
    if LIBRARY.is_absolute():
        with pytest.raises(ValueError, match="carries no library"):
            backend.build_editable(str(tmp_path), {"library-dir": str(LIBRARY.parent)})


def imported(folder, **environment):
    """Returns the output of `import tandem` from a folder, without this process's settings."""
    inherited = {name: value for name, value in os.environ.items()
                 if name not in ("TANDEM_LIB_DIR", "PKG_CONFIG_PATH", "LD_LIBRARY_PATH", "PYTHONPATH")}
    program = "import sys; sys.path.insert(0, sys.argv[1]); import tandem; print(tandem.library_path())"
    return subprocess.run([sys.executable, "-B", "-c", program, str(folder)], capture_output=True, text=True, check=False,
                          env={**inherited, "PKG_CONFIG": "/no/such/pkg-config", **environment})


@pytest.mark.skipif(not LIBRARY.is_absolute(), reason="the library was found by the dynamic linker")
def test_licences_of_carried_libraries(backend, tmp_path):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts/libhwloc15.txt").write_text("BSD")
    name = backend.build_wheel(str(tmp_path), {"library-dir": str(LIBRARY.parent), "licenses-dir": str(tmp_path / "texts")})
    files = names(tmp_path / name)
    assert files["tandem-0.2.0.dist-info/licenses/libhwloc15.txt"] == b"BSD" and "tandem/lib/libtandem.so.0" in files


@pytest.mark.skipif(not LIBRARY.is_absolute(), reason="the library was found by the dynamic linker")
def test_library_is_found_in_order(backend, tmp_path):
    name = backend.build_wheel(str(tmp_path), {"library-dir": str(LIBRARY.parent)})
    assert "any" not in name and "linux" in name
    bundled, plain = tmp_path / "bundled", tmp_path / "plain"
    with zipfile.ZipFile(tmp_path / name) as archive:
        archive.extractall(bundled)
    shutil.copytree(BINDING / "tandem", plain / "tandem", ignore=shutil.ignore_patterns("__pycache__"))
    assert imported(bundled).stdout == f"{bundled}/tandem/lib/libtandem.so.0\n"
    assert imported(bundled, TANDEM_LIB_DIR=str(LIBRARY.parent)).stdout == f"{LIBRARY}\n"
    assert imported(plain, LD_LIBRARY_PATH=str(LIBRARY.parent)).stdout == "libtandem.so.0\n"
    pkg_config = tmp_path / "pkg-config"
    pkg_config.write_text(f"#!/bin/sh\n[ \"$*\" = '--variable=libdir tandem' ] && echo '{LIBRARY.parent}'\n")
    pkg_config.chmod(0o755)
    assert imported(plain, PKG_CONFIG=str(pkg_config)).stdout == f"{LIBRARY}\n"


def test_a_library_that_is_not_found_is_said_to_be_so(tmp_path):
    said = imported(BINDING, TANDEM_LIB_DIR=str(tmp_path))
    assert said.returncode != 0 and "ImportError: libtandem was not found" in said.stderr
    assert f"{tmp_path}/libtandem.so.0 (TANDEM_LIB_DIR" in said.stderr and "pkg-config" not in said.stderr
    said = imported(BINDING, LD_LIBRARY_PATH="")
    if said.returncode != 0:  # otherwise it is installed where the linker looks
        assert "tandem/lib/libtandem.so.0 (carried by the package): no such file" in said.stderr
        assert "/no/such/pkg-config" in said.stderr and "the dynamic linker: " in said.stderr


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_a_library_of_other_structs_is_refused(tmp_path):
    from tandem import _abi
    answers = {"tandem_version": 0x000100, "tandem_abi_fingerprint": 0}  # libtandem 0.1, which does not know 0.2
    text = "".join(f"long long {name}(void) {{ return {answers.get(name, 5)}; }}\n" for name in _abi.FUNCTIONS)
    (tmp_path / "other.c").write_text(text)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(tmp_path / "libtandem.so.0"), str(tmp_path / "other.c")], check=True)
    said = imported(BINDING, TANDEM_LIB_DIR=str(tmp_path))
    assert "ImportError" in said.stderr and "is libtandem 0.1: its structs have the fingerprint 0x0 for version 0.2" in said.stderr
    (tmp_path / "other.c").write_text("int none;\n")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(tmp_path / "libtandem.so.0"), str(tmp_path / "other.c")], check=True)
    assert "not a libtandem of version 0.2" in imported(BINDING, TANDEM_LIB_DIR=str(tmp_path)).stderr
