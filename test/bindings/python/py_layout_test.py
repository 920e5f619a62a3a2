# SPDX-License-Identifier: MIT
"""The declarations of tandem/_abi.py equal those of tandem.h: compared with a C program, and with the header's prototypes."""
import ctypes
import os
import re
import shutil
import subprocess

import pytest
from conftest import include_folder

from tandem import _abi, _cache, _session, _state, _weights
from tandem._library import lib

INCLUDE = include_folder()
HEADER = (INCLUDE / "tandem/tandem.h").read_text()
HEADER += "".join((INCLUDE / part).read_text() for part in re.findall(r'^#include "(.*)"$', HEADER, re.M))
CC = os.environ.get("CC") or shutil.which("cc")

CONSTANTS = {f"TANDEM_{'ERROR_' if code else ''}{name}": code for name, code in _abi.STATUS.items()}
CONSTANTS |= {f"TANDEM_{name.upper()}": code for name, code in _abi.DTYPES.items()}
CONSTANTS |= {f"TANDEM_{kind}_{name.upper()}": code
              for kind, table in (("ROPE", _abi.ROPES), ("NORM", _abi.NORMS), ("WEIGHTS", _abi.WEIGHTS),
                                  ("ROTATION", _abi.ROTATIONS), ("JUDGE", _abi.JUDGES)) for name, code in table.items()}
CONSTANTS |= {f"TANDEM_{name}": getattr(_abi, name) for name in
              ("DEVICE_HOST", "DEVICE_CUDA", "LOG_ERROR", "LOG_WARNING", "LOG_INFO", "ATTEND_SPECULATIVE", "ATTEND_PARTIAL",
               "SELECTION_ANY_ORDER", "SELECTION_PLUS_WINDOW", "I32", "TENSORS_CAUSAL", "PATTERN_BLOCK", "PATTERN_CHUNK", "PATTERN_UNIT", "PATTERN_FULL",
               "PATTERN_A_SHAPE", "PATTERN_VERTICAL_SLASH", "PATTERN_BLOCK_SPARSE")}


@pytest.mark.skipif(CC is None, reason="no C compiler")
def test_structs_and_constants_are_those_of_c(tmp_path):
    lines = []
    for name, kind in _abi.STRUCTS.items():
        lines.append(f'printf("{name} %zu\\n", sizeof({name}));')
        lines += [f'printf("{name}.{field} %zu %zu\\n", offsetof({name}, {field}), sizeof((({name} *)0)->{field}));'
                  for field, _ in kind._fields_]
    lines += [f'printf("{name} %d\\n", (int){name});' for name in CONSTANTS]
    lines.append('printf("fingerprint %llu\\n", (unsigned long long)tandem_abi_fingerprint(TANDEM_VERSION_MINOR));')
    source = tmp_path / "layout.c"
    source.write_text("#include <stdio.h>\n#include <tandem/tandem.h>\nint main(void) {\n" + "\n".join(lines) + "\nreturn 0;\n}\n")
    program = tmp_path / "layout"
    subprocess.run([CC, f"-I{INCLUDE}", str(source), "-o", str(program), lib._name,
                    f"-Wl,-rpath,{os.path.dirname(lib._name)}"], check=True)
    said = dict(line.split(" ", 1) for line in subprocess.run([str(program)], check=True, capture_output=True,
                                                              text=True).stdout.splitlines())
    for name, kind in _abi.STRUCTS.items():
        assert int(said.pop(name)) == ctypes.sizeof(kind), name
        for field, _ in kind._fields_:
            place = getattr(kind, field)
            assert said.pop(f"{name}.{field}") == f"{place.offset} {place.size}", (name, field)
    for name, value in CONSTANTS.items():
        assert int(said.pop(name)) == value, name
    assert int(said.pop("fingerprint")) == _abi.FINGERPRINT == lib.tandem_abi_fingerprint(_abi.MINOR)
    assert not said


def kind_of(declaration):
    """Returns the ctypes kind of a parameter or result of the header."""
    declaration = re.sub(r"\bconst\b", "", declaration).strip()
    if declaration.count("*") == 1 and declaration.startswith("char"):
        return ctypes.c_char_p
    if "*" in declaration or declaration.split()[0].endswith("_fn"):
        return ctypes.c_void_p
    return {"int32_t": ctypes.c_int32, "int64_t": ctypes.c_int64, "uint32_t": ctypes.c_uint32, "uint64_t": ctypes.c_uint64,
            "size_t": ctypes.c_size_t, "void": None}[declaration.split()[0]]


def test_prototypes_are_those_of_the_header():
    text = re.sub(r"/\*.*?\*/", "", HEADER, flags=re.S)
    found = {}
    for result, name, parameters in re.findall(r"^TANDEM_API ([^(]*[ *])(tandem_\w+)\(([^)]*)\);", text, re.M):
        parts = [] if parameters.strip() == "void" else parameters.split(",")
        found[name] = (kind_of(result), *(kind_of(part) for part in parts))
    # A buffer that the call writes is passed as an address.
    for name in ("tandem_engine_report", "tandem_plan_report", "tandem_route_report"):
        assert found[name][1] is ctypes.c_char_p
        found[name] = (found[name][0], ctypes.c_void_p, *found[name][2:])
    assert len(found) == HEADER.count("\nTANDEM_API ")
    assert found == _abi.FUNCTIONS


def test_every_struct_and_constant_of_the_header_is_there():
    assert set(re.findall(r"^typedef struct (tandem_\w+) \{", HEADER, re.M)) == set(_abi.STRUCTS)
    numbers = set(re.findall(r"^#define (TANDEM_\w+) -?\d+u?\b", HEADER, re.M))
    assert numbers - {"TANDEM_VERSION_MAJOR", "TANDEM_VERSION_MINOR", "TANDEM_VERSION_PATCH"} == set(CONSTANTS)


@pytest.mark.parametrize("made, struct", [(_cache.CacheStats, "tandem_cache_stats"),
                                          (_session.SessionStats, "tandem_session_stats"),
                                          (_session.RoutePlan, "tandem_route_plan"),
                                          (_weights.WeightsStats, "tandem_weights_stats"),
                                          (_state.MemoryPlan, "tandem_memory_plan")])
def test_dataclasses_have_the_members_of_their_structs(made, struct):
    assert [*made.__dataclass_fields__] == [name for name, _ in _abi.STRUCTS[struct]._fields_
                                            if name not in ("struct_size", "reserved")]


def test_names_of_types_are_the_librarys():
    names = []
    while (name := lib.tandem_dtype_name(len(names) + 1)) is not None:
        names.append(name.decode())
    assert {name: i + 1 for i, name in enumerate(names)} == _abi.DTYPES
