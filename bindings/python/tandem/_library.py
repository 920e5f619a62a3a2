# SPDX-License-Identifier: MIT
"""Finds and loads libtandem. Refuses a library whose structs differ from those of _abi.py.

Search order: $TANDEM_LIB_DIR, and no other place if it is set; lib/ beside this file, where a wheel may carry the library; the
folder that pkg-config names; the dynamic linker ($LD_LIBRARY_PATH, ldconfig's cache).
"""
import ctypes
import os
import pathlib
import subprocess

from . import _abi


def _pkg_config_folder() -> tuple[str | None, str]:
    """Returns the library's folder, or None and the reason why pkg-config does not name it."""
    command = [os.environ.get("PKG_CONFIG") or "pkg-config", "--variable=libdir", "tandem"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        return None, f"{' '.join(command)}: {error}"
    folder = done.stdout.strip()
    if done.returncode or not folder:
        said = done.stderr.strip().splitlines()
        return None, f"{' '.join(command)}: {said[0] if said else 'names no folder'}"
    return folder, ""


def _load_from(folder: str, tried: list[str], what: str) -> ctypes.CDLL | None:
    path = pathlib.Path(folder) / _abi.SONAME
    if not path.is_file():
        tried.append(f"{path} ({what}): no such file")
        return None
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        tried.append(f"{path} ({what}): {error}")
        return None


def _find() -> ctypes.CDLL:
    tried: list[str] = []
    chosen = os.environ.get("TANDEM_LIB_DIR")
    if chosen:
        library = _load_from(chosen, tried, "TANDEM_LIB_DIR, which excludes other places")
    else:
        library = _load_from(str(pathlib.Path(__file__).resolve().parent / "lib"), tried, "carried by the package")
        if library is None:
            folder, why = _pkg_config_folder()
            if folder is None:
                tried.append(why)
            else:
                library = _load_from(folder, tried, "pkg-config")
        if library is None:
            try:
                library = ctypes.CDLL(_abi.SONAME)
            except OSError as error:
                tried.append(f"the dynamic linker: {error}")
    if library is None:
        raise ImportError("libtandem was not found. Tried:\n" + "\n".join(f"  {place}" for place in tried)
                          + "\nSet TANDEM_LIB_DIR to the folder that holds " + _abi.SONAME)
    return library


def _load() -> ctypes.CDLL:
    library = _find()
    try:
        _abi.declare(library)
    except AttributeError as error:
        raise ImportError(f"{library._name}: {error}: not a libtandem of version {_abi.MAJOR}.{_abi.MINOR}") from error
    fingerprint = library.tandem_abi_fingerprint(_abi.MINOR)
    if fingerprint != _abi.FINGERPRINT:
        version = library.tandem_version()
        raise ImportError(f"{library._name} is libtandem {version >> 16}.{version >> 8 & 255}: its structs have the fingerprint "
                          f"{fingerprint:#x} for version {_abi.MAJOR}.{_abi.MINOR}, this package was written for "
                          f"{_abi.FINGERPRINT:#x}")
    return library


lib = _load()
