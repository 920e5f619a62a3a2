# SPDX-License-Identifier: MIT
"""Writes the parts for Python: constants, structs and prototypes for ctypes, and the tables of options."""
import re
import textwrap

from emit_c import MADE
from options import TABLES, TITLES, options_of, sentence

WIDTH = 125
NUMBERS = {"uint8_t": "c_uint8", "int32_t": "c_int32", "uint32_t": "c_uint32", "int64_t": "c_int64", "uint64_t": "c_uint64",
           "size_t": "c_size_t", "float": "c_float", "double": "c_double"}
DTYPE = re.compile(r"TANDEM_(F\d+|BF16|E\dM\d|Q\d+_\d+)$")
GROUPS = {"TANDEM_ROPE_": "ROPES", "TANDEM_NORM_": "NORMS", "TANDEM_WEIGHTS_": "WEIGHTS", "TANDEM_ROTATION_": "ROTATIONS", "TANDEM_JUDGE_": "JUDGES"}
HEAD = f"# SPDX-License-Identifier: MIT\n# {MADE}\n"


def wrapped(first, items, last, indent):
    """Returns `first` and the items, separated by commas, with as many on a line as fit."""
    lines = [first]
    for i, item in enumerate(items):
        text = item + (last if i + 1 == len(items) else ", ")
        if len(lines[-1] + text.rstrip()) > WIDTH:
            lines.append(indent)
        lines[-1] += text
    return "\n".join(line.rstrip() for line in lines)


def camel(name):
    return "".join(part.capitalize() for part in name.split("_"))


def class_of(struct_name):
    return camel(struct_name.removeprefix("tandem_")) + "Struct"


def constants(header):
    groups, lines = {"STATUS": {}, "DTYPES": {}, **{name: {} for name in GROUPS.values()}}, []
    for name, value in header.constants.items():
        value = value.rstrip("u")
        prefix = next((prefix for prefix in GROUPS if name.startswith(prefix)), None)
        if name.startswith("TANDEM_VERSION_"):
            continue
        if name == "TANDEM_OK" or name.startswith("TANDEM_ERROR_"):
            groups["STATUS"][name.removeprefix("TANDEM_").removeprefix("ERROR_")] = value
        elif DTYPE.match(name):
            groups["DTYPES"][name.removeprefix("TANDEM_").lower()] = value
        elif prefix:
            groups[GROUPS[prefix]][name.removeprefix(prefix).lower()] = value
        else:
            lines.append(f"{name.removeprefix('TANDEM_')} = {value}")
    tables = [wrapped(f"{group} = {{", [f'"{name}": {value}' for name, value in values.items()], "}", "    ")
              for group, values in groups.items()]
    return [*tables, *lines]


def member_kind(struct, member, handles):
    """Returns the ctypes type of a member. In arguments of calls every pointer is an address."""
    kind = member.type
    if kind.name == "tandem_log_fn":
        return "LogFunction"
    if kind.name == "char" and kind.stars == 1:
        return "c_char_p"
    if kind.name == "char" and kind.stars == 2 and struct.name.endswith("_options"):
        return "POINTER(c_char_p)"
    if kind.stars and (struct.name.endswith("_args") or kind.stars > 1 or kind.name in ("void", *handles)):
        return "c_void_p"
    if kind.stars:
        return f"POINTER({NUMBERS.get(kind.name) or class_of(kind.name)})"
    if kind.name.endswith("_fn"):
        return "c_void_p"
    return NUMBERS[kind.name] + (f" * {member.length}" if member.length else "")


def in_order_of_use(structs):
    """Orders the structs so that each one comes after those that it points to."""
    by_name, ordered = {struct.name: struct for struct in structs}, []

    def add(struct):
        if struct in ordered:
            return
        for member in struct.members:
            if member.type.stars and member.type.name in by_name:
                add(by_name[member.type.name])
        ordered.append(struct)

    for struct in structs:
        add(struct)
    return ordered


def struct_lines(struct, handles):
    fields = [f'("{member.name}", {member_kind(struct, member, handles)})' for member in struct.members]
    return ["", "", f"class {class_of(struct.name)}(ctypes.Structure):", wrapped("    _fields_ = [", fields, "]", " " * 16)]


def parameter_kind(kind, is_written_text=False):
    if kind.name == "char" and kind.stars == 1 and not is_written_text:
        return "c_char_p"
    if kind.stars or kind.name.endswith("_fn"):
        return "_P"
    return {"void": "None", "int32_t": "_I", "int64_t": "_L"}.get(kind.name) or NUMBERS[kind.name]


def prototype(function):
    kinds = [parameter_kind(function.result)]
    kinds += [parameter_kind(field.type, not field.type.is_const) for field in function.parameters]
    return f'    "{function.name}": ({", ".join(kinds)}{"," if len(kinds) == 1 else ""}),'


def abi(header):
    major, minor, _ = header.version()
    lines = [HEAD + f'"""tandem.h of version {major}.{minor} as ctypes sees it: constants, structs, prototypes. Nothing else is known '
             'about the library.', "",
             "test/bindings/python/py_layout_test.py holds it against a C program that prints sizes, offsets and constants; at run time",
             'the library\'s fingerprint decides.', '"""', "import ctypes",
             "from ctypes import POINTER, c_char_p, c_double, c_float, c_int32, c_int64, c_size_t, c_uint8, c_uint32, c_uint64, c_void_p",
             "from typing import Any", "", f"MAJOR, MINOR = {major}, {minor}", 'SONAME = f"libtandem.so.{MAJOR}"',
             f"FINGERPRINT = 0x{header.fingerprint():016X}  # tandem_abi_fingerprint(MINOR) where pointers have 64 bits", "",
             *constants(header), "", "LogFunction = ctypes.CFUNCTYPE(None, c_int32, c_char_p, c_void_p)"]
    for struct in in_order_of_use(header.structs):
        lines += struct_lines(struct, header.handles)
    names = [f'"{struct.name}": {class_of(struct.name)}' for struct in header.structs]
    lines += ["", "", "# Structs by their C names, in the order of the header.",
              wrapped("STRUCTS: dict[str, type[ctypes.Structure]] = {", names, "}", "    "), "",
              "# Every pointer but that to a text is void *: byref(), an address or None. Result first.",
              "_P, _I, _L = c_void_p, c_int32, c_int64", "FUNCTIONS: dict[str, tuple[Any, ...]] = {",
              *(prototype(function) for function in header.functions), "}", "", "",
              "def declare(library: ctypes.CDLL) -> None:", '    """Gives every function of `library` its prototype."""',
              "    for name, (result, *parameters) in FUNCTIONS.items():", "        function = getattr(library, name)",
              "        function.restype, function.argtypes = result, parameters"]
    return "\n".join(lines) + "\n"


def option_type(option):
    return {"text": "str", "dtype": "str", "dtypes": "Sequence[str]", "enum": "str", "flag": "bool", "float": "float",
            "double": "float", "flags": "Sequence[Sequence[bool]]", "texts": "Sequence[str]",
            "struct": f"{camel(option.name)} | str"}.get(option.kind, "int")


def option_doc(option):
    text = sentence(option, "``{}``".format, "None", "left out", "True", "False")
    kind = option_type(option).replace("Sequence[", "sequence of ").replace("]", "")
    return [f"    {option.name} : {kind}", *textwrap.wrap(text, WIDTH, initial_indent=" " * 8, subsequent_indent=" " * 8,
                                                          break_long_words=False, break_on_hyphens=False)]


def option_tables(header):
    lines = [HEAD + '"""Options of caches and sessions, and how each is turned into a member of the struct of C."""',
             "from collections.abc import Mapping, Sequence", "from typing import NamedTuple, TypedDict", "", "from . import _abi",
             "from ._patterns import Patterns", "from ._pruning import Pruning", "", "", "class OptionTable(NamedTuple):",
             '    """Options that are no numbers or texts: by name, a name for each layer, flags and texts with the member that counts them."""',
             "", "    names: Mapping[str, Mapping[str, int]]", "    names_by_layer: Mapping[str, Mapping[str, int]]",
             "    flags: Mapping[str, str]", "    texts: Mapping[str, str]"]
    for name in TABLES:
        # each such struct has a module of its own; a text is a shorthand for one
        options = options_of(header.struct(name), with_structs=True)
        short = name.removeprefix("tandem_").removesuffix("_options")
        lines += ["", "", f"class {camel(short)}Options(TypedDict, total=False):",
                  f'    """{TITLES[name]}. Every key may be left out.', "", "    Parameters", "    ----------"]
        for option in options:
            lines += option_doc(option)
        lines += ['    """', "", *(f"    {option.name}: {option_type(option)}" for option in options)]
        tables = {"dtype": "_abi.DTYPES", "dtypes": "_abi.DTYPES"}
        named = {kind: [f'"{option.name}": {tables.get(option.kind) or "_abi." + option.enum + "S"}' for option in options
                        if option.kind in kinds] for kind, kinds in (("one", ("dtype", "enum")), ("each", ("dtypes",)))}
        flags, texts = ([f'"{option.name}": "{option.count}"' for option in options if option.kind == kind]
                        for kind in ("flags", "texts"))
        rows = [f"    {{{', '.join(part)}}}" for part in (named["one"], named["each"], flags, texts)]
        lines += ["", "", f"{short.upper()} = OptionTable(", ",\n".join(rows) + ")"]
    return "\n".join(lines) + "\n"


def files(header):
    return {"bindings/python/tandem/_abi.py": abi(header), "bindings/python/tandem/_option_tables.py": option_tables(header)}
