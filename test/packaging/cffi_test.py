# SPDX-License-Identifier: MIT
"""Python's cffi parses tandem.h unchanged, lays out the structs as the C compiler does, and calls the library.

cffi_test.py SOURCE_DIR CC LIBRARY WORK_DIR; exits 77 (skipped) if Python has no cffi.
"""
import pathlib
import subprocess
import sys

try:
    import cffi
except ImportError:
    print("skipped: Python has no cffi")
    sys.exit(77)

source, cc, library, work = sys.argv[1:]
empty = pathlib.Path(work)
empty.mkdir(parents=True, exist_ok=True)
for name in ("stddef.h", "stdint.h"):  # cffi knows their types
    (empty / name).write_text("")
include = f"{source}/include"
text = subprocess.run(
    [cc, "-E", "-P", "-nostdinc", "-isystem", str(empty), "-I", include, "-D__attribute__(x)=", f"{include}/tandem/tandem.h"],
    check=True, capture_output=True, text=True).stdout
ffi = cffi.FFI()
ffi.cdef(text)

structs = [name for kind in ffi.list_types() for name in kind
           if ffi.typeof(f"{name} *").item.kind == "struct" and ffi.typeof(name).fields]
assert len(structs) >= 10, structs
lines = []
for name in structs:
    lines.append(f'  printf("{name} %zu", sizeof({name}));')
    for field, _ in ffi.typeof(name).fields:
        lines.append(f'  printf(" {field} %zu", offsetof({name}, {field}));')
    lines.append('  printf("\\n");')
program = empty / "offsets.c"
program.write_text('#include <stdio.h>\n#include "tandem/tandem.h"\nint main(void) {\n' + "\n".join(lines) + "\n  return 0;\n}\n")
subprocess.run([cc, "-I", include, str(program), "-o", str(empty / "offsets")], check=True)
for line in subprocess.run([str(empty / "offsets")], check=True, capture_output=True, text=True).stdout.splitlines():
    name, size, *pairs = line.split()
    assert ffi.sizeof(name) == int(size), line
    for field, offset in zip(pairs[::2], pairs[1::2]):
        assert ffi.offsetof(name, field) == int(offset), (name, field)

lib = ffi.dlopen(library)
assert lib.tandem_version() >> 16 == 0
assert ffi.string(lib.tandem_status_name(-7)) == b"TANDEM_ERROR_BUSY"
print(f"{len(structs)} structs, library {lib.tandem_version():#x}")
