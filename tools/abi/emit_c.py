# SPDX-License-Identifier: MIT
"""Writes the parts for C and C++: the default macro of each struct, and the list of sizes and offsets."""
import re
import textwrap

MADE = "Made by tools/abi/generate.py from include/tandem/; not to be edited."
# Size in bytes of a struct in the version that introduced it, for structs that have grown since a release. Nothing is released
# yet.
FIRST_BYTES = {}


def macro_of(struct):
    return struct.name.upper() + "_INIT"


def default_text(member):
    kind = member.type
    if kind.stars or kind.name.endswith("_fn"):
        return "NULL"
    return f"{member.default}{ {'float': '.0f', 'double': '.0'}.get(kind.name, '')}"


def with_defaults(text, structs):
    """Returns the text of a header with the default macros of its structs, as the members' comments give the defaults."""
    for struct in structs:
        head = f"#define {macro_of(struct)} \\\n"
        if f"typedef struct {struct.name} {{" not in text or struct.name == "tandem_tensor":
            continue
        values = [f"sizeof({struct.name})", *(default_text(member) for member in struct.members[1:])]
        lines = textwrap.wrap("{ " + ", ".join(values) + " }", 96, break_long_words=False)
        made = head + "".join(f"  {'  ' if i else ''}{line}{' ' + chr(92) if i + 1 < len(lines) else ''}\n"
                              for i, line in enumerate(lines))
        text, n = re.subn(re.escape(head) + r"(?:.*\\\n)*.*\n", lambda _, made=made: made, text)
        if n != 1:
            raise SystemExit(f"emit_c.py: {macro_of(struct)} is defined {n} times in the header: write '{head.strip()}' and a line")
    return text


def layout(header):
    """Returns lib/base/abi_layout.h. The library hashes this list, and a test compares it with the layout of a compiler."""
    lines = ["/* SPDX-License-Identifier: MIT", f" * {MADE}", " *",
             " * The public structs where pointers have 64 bits: STRUCT(type, bytes) and MEMBER(type, member, offset), in the order of",
             " * the header; DEFAULTS(type, macro of its defaults, bytes in the version that introduced it). */",
             "#ifndef TANDEM_LIB_ABI_LAYOUT_H_", "#define TANDEM_LIB_ABI_LAYOUT_H_", "",
             "/* clang-format off */",
             f"#define TANDEM_ABI_FINGERPRINT UINT64_C(0x{header.fingerprint():016x})", "",
             "#define TANDEM_ABI_LAYOUT(STRUCT, MEMBER) \\"]
    rows = []
    for struct in header.structs:
        size, offsets = struct.layout()
        rows.append(f"  STRUCT({struct.name}, {size})")
        rows += [f"  MEMBER({struct.name}, {member.name}, {offset})" for member, offset in zip(struct.members, offsets)]
    lines += [row + " \\" for row in rows[:-1]] + [rows[-1], "", "#define TANDEM_ABI_DEFAULTS(DEFAULTS) \\"]
    rows = [f"  DEFAULTS({struct.name}, {macro_of(struct)}, {FIRST_BYTES.get(struct.name, struct.layout()[0])})"
            for struct in header.structs if struct.name != "tandem_tensor"]
    lines += [row + " \\" for row in rows[:-1]] + [rows[-1], "/* clang-format on */", "", "#endif /* TANDEM_LIB_ABI_LAYOUT_H_ */"]
    return "\n".join(lines) + "\n"
