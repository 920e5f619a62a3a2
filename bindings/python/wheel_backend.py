# SPDX-License-Identifier: MIT
"""PEP 517: the wheel of a package without compiled code, written with the standard library alone.

pip install .                                          libtandem is looked for at run time (tandem/_library.py)
pip install . --config-settings library-dir=DIR        DIR/libtandem.so.0 and DIR/tandem/libtandem-*.so go into the wheel, whose
                                                       tag then names this platform; what they load in turn does not
"""
import base64
import hashlib
import io
import pathlib
import sysconfig
import tarfile
import tomllib
import zipfile
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
SONAME = "libtandem.so.0"
Settings = dict[str, Any] | None


def _project() -> dict[str, Any]:
    with open(HERE / "pyproject.toml", "rb") as file:
        project: dict[str, Any] = tomllib.load(file)["project"]
    return project


def _metadata(project: dict[str, Any]) -> str:
    lines = ["Metadata-Version: 2.1", f"Name: {project['name']}", f"Version: {project['version']}",
             f"Summary: {project['description']}", f"License: {project['license']}",
             f"Requires-Python: {project['requires-python']}"]
    lines += [f"Requires-Dist: {name}" for name in project["dependencies"]]
    for extra, names in project["optional-dependencies"].items():
        lines += [f"Provides-Extra: {extra}"] + [f"Requires-Dist: {name}; extra == '{extra}'" for name in names]
    return "\n".join(lines + ["Description-Content-Type: text/markdown", "", (HERE / project["readme"]).read_text()])


def _library_files(settings: Settings) -> dict[str, bytes]:
    folder = (settings or {}).get("library-dir")
    if not folder:
        return {}
    library = pathlib.Path(folder) / SONAME
    if not library.is_file():
        raise FileNotFoundError(f"library-dir: {library} is not there")
    files = {f"tandem/lib/{SONAME}": library.read_bytes()}
    for module in sorted((pathlib.Path(folder) / "tandem").glob("libtandem-*.so")):
        files[f"tandem/lib/tandem/{module.name}"] = module.read_bytes()
    return files


def _package_files() -> dict[str, bytes]:
    paths = sorted([*(HERE / "tandem").rglob("*.py"), HERE / "tandem" / "py.typed"])
    return {path.relative_to(HERE).as_posix(): path.read_bytes() for path in paths}


def _record(files: dict[str, bytes], name: str) -> bytes:
    rows = []
    for path, data in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        rows.append(f"{path},sha256={digest},{len(data)}")
    return "\n".join([*rows, f"{name},,", ""]).encode()


def build_wheel(wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None) -> str:
    project = _project()
    library = _library_files(config_settings)
    platform = sysconfig.get_platform().replace("-", "_").replace(".", "_") if library else "any"
    tag = f"py3-none-{platform}"
    info = f"{project['name']}-{project['version']}.dist-info"
    wheel = f"Wheel-Version: 1.0\nGenerator: tandem\nRoot-Is-Purelib: {'false' if library else 'true'}\nTag: {tag}\n"
    files = {**_package_files(), **library, f"{info}/METADATA": _metadata(project).encode(), f"{info}/WHEEL": wheel.encode()}
    files[f"{info}/RECORD"] = _record(files, f"{info}/RECORD")
    name = f"{project['name']}-{project['version']}-{tag}.whl"
    with zipfile.ZipFile(pathlib.Path(wheel_directory) / name, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, data in files.items():  # ZipInfo's own date, 1980: the same tree gives the same bytes
            entry = zipfile.ZipInfo(path)
            entry.external_attr = 0o644 << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, data)
    return name


def build_sdist(sdist_directory: str, config_settings: Settings = None) -> str:
    project = _project()
    top = f"{project['name']}-{project['version']}"
    files = {name: (HERE / name).read_bytes() for name in ("pyproject.toml", "wheel_backend.py", project["readme"])}
    files = {"PKG-INFO": _metadata(project).encode(), **files, **_package_files()}
    with tarfile.open(pathlib.Path(sdist_directory) / f"{top}.tar.gz", "w:gz", format=tarfile.PAX_FORMAT) as archive:
        for path, data in files.items():
            entry = tarfile.TarInfo(f"{top}/{path}")
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    return f"{top}.tar.gz"
