# SPDX-License-Identifier: MIT
"""PEP 517: writes the wheel of a package without compiled code, with the standard library alone.

pip install .                                          libtandem is searched for at run time (tandem/_library.py)
pip install . --config-settings library-dir=DIR        the wheel contains DIR/libtandem.so.0 and DIR/tandem/libtandem-*.so, and its
                                                       tag names this platform. Libraries that these load are not included
                                                       (build_wheel.sh adds them). licenses-dir=DIR: their licence files
pip install -e .                                       installs the package in place, for its developers
"""
import ast
import base64
import gzip
import hashlib
import io
import pathlib
import re
import sysconfig
import tarfile
import zipfile
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
SONAME = "libtandem.so.0"
Settings = dict[str, Any] | None


def _project() -> dict[str, Any]:
    """Returns the tables [project] and [project.*] of pyproject.toml. They hold only texts and lists of texts. Python 3.10 has
    no tomllib."""
    project: dict[str, Any] = {}
    table, value = None, ""
    for line in (HERE / "pyproject.toml").read_text().splitlines():
        if header := re.fullmatch(r"\[+([^\[\]]+)\]+", line):
            name = header[1]
            table = project if name == "project" else None
            if name.startswith("project."):
                table = project.setdefault(name.removeprefix("project."), {})
        elif table is not None and (value or (line and not line.startswith("#"))):
            value += line.strip()
            key, _, text = value.partition(" = ")
            if not text.startswith("[") or text.endswith("]"):
                table[key], value = ast.literal_eval(text), ""
    return project


def _metadata(project: dict[str, Any]) -> str:
    lines = ["Metadata-Version: 2.4", f"Name: {project['name']}", f"Version: {project['version']}",
             f"Summary: {project['description']}", f"License-Expression: {project['license']}",
             f"Requires-Python: {project['requires-python']}"]
    lines += [f"License-File: {name}" for name in project["license-files"]]
    lines += [f"Keywords: {','.join(project['keywords'])}"] + [f"Classifier: {name}" for name in project["classifiers"]]
    lines += [f"Requires-Dist: {name}" for name in project["dependencies"]]
    for extra, names in project["optional-dependencies"].items():
        lines += [f"Provides-Extra: {extra}"] + [f"Requires-Dist: {name}; extra == '{extra}'" for name in names]
    return "\n".join(lines + ["Description-Content-Type: text/markdown", "", (HERE / project["readme"]).read_text()])


def _info(project: dict[str, Any]) -> str:
    return f"{project['name']}-{project['version']}.dist-info"


def _library_files(settings: Settings) -> dict[str, bytes]:
    folder = (settings or {}).get("library-dir")
    if not folder:
        return {}
    folder = pathlib.Path(folder).resolve()
    library = folder / SONAME
    if not library.is_file():
        raise FileNotFoundError(f"library-dir: {library} is not there")
    files = {f"tandem/lib/{SONAME}": library.read_bytes()}
    for text in sorted(pathlib.Path(settings["licenses-dir"]).iterdir()) if settings and "licenses-dir" in settings else ():
        files[f"{_info(_project())}/licenses/{text.name}"] = text.read_bytes()
    for module in sorted((folder / "tandem").glob("libtandem-*.so")):
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


def _write_wheel(wheel_directory: str, contents: dict[str, bytes], is_pure: bool) -> str:
    project = _project()
    platform = "any" if is_pure else sysconfig.get_platform().replace("-", "_").replace(".", "_")
    tag = f"py3-none-{platform}"
    info = _info(project)
    wheel = f"Wheel-Version: 1.0\nGenerator: tandem\nRoot-Is-Purelib: {'true' if is_pure else 'false'}\nTag: {tag}\n"
    files = {**contents, f"{info}/METADATA": _metadata(project).encode(), f"{info}/WHEEL": wheel.encode()}
    files |= {f"{info}/licenses/{name}": (HERE / name).read_bytes() for name in project["license-files"]}
    files[f"{info}/RECORD"] = _record(files, f"{info}/RECORD")
    name = f"{project['name']}-{project['version']}-{tag}.whl"
    with zipfile.ZipFile(pathlib.Path(wheel_directory) / name, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, data in files.items():  # ZipInfo's default date, 1980, so that the same tree gives the same bytes
            entry = zipfile.ZipInfo(path)
            entry.external_attr = 0o644 << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, data)
    return name


def build_wheel(wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None) -> str:
    library = _library_files(config_settings)
    return _write_wheel(wheel_directory, {**_package_files(), **library}, is_pure=not library)


def build_editable(wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None) -> str:
    if _library_files(config_settings):
        raise ValueError("library-dir: an editable install carries no library; set TANDEM_LIB_DIR instead")
    return _write_wheel(wheel_directory, {"tandem.pth": f"{HERE}\n".encode()}, is_pure=True)


def build_sdist(sdist_directory: str, config_settings: Settings = None) -> str:
    project = _project()
    top = f"{project['name']}-{project['version']}"
    names = ("pyproject.toml", "wheel_backend.py", project["readme"], *project["license-files"])
    files = {name: (HERE / name).read_bytes() for name in names}
    files = {"PKG-INFO": _metadata(project).encode(), **files, **_package_files()}
    with (gzip.GzipFile(pathlib.Path(sdist_directory) / f"{top}.tar.gz", "wb", mtime=0) as packed,
          tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive):
        for path, data in files.items():
            entry = tarfile.TarInfo(f"{top}/{path}")
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    return f"{top}.tar.gz"
