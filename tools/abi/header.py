# SPDX-License-Identifier: MIT
"""Reads include/tandem/tandem.h and the parts that it includes at its end: constants, callbacks, structs and functions, and for
the manual their comments.

This is not a parser of C. It knows the few forms in which the header is written, and stops at any other.
"""
import dataclasses
import re

SIZES = {"uint8_t": 1, "int32_t": 4, "uint32_t": 4, "int64_t": 8, "uint64_t": 8, "size_t": 8, "float": 4, "double": 8}
POINTER_BYTES = 8  # layouts assume 64-bit pointers
COMMENT = re.compile(r"/\*.*?\*/", re.S)
MEMBER = re.compile(r"\s*(?P<type>(?:const )?(?:struct )?\w+(?: \*+(?:const \*)?| ))(?P<name>\w+)(?:\[(?P<length>\d+)\])?;"
                    r"[ ]*(?P<comment>/\*.*?\*/)?", re.S)


@dataclasses.dataclass(frozen=True)
class Type:
    """A type of C: `name` without const, struct and stars; the number of stars; is_const: what it points to is const."""
    name: str
    stars: int
    is_const: bool

    def size(self):
        return POINTER_BYTES if self.stars or self.name.endswith("_fn") else SIZES[self.name]


@dataclasses.dataclass(frozen=True)
class Field:
    """A member of a struct, or a parameter."""
    type: Type
    name: str
    length: int = 0  # of an array; 0: no array
    comment: str = ""

    @property
    def default(self):
        """Returns the default: zero, or -1 if the comment says what -1 means because zero is a value of its own."""
        return -1 if re.search(r"(^|\s)-1: ", self.comment) else 0


@dataclasses.dataclass(frozen=True)
class Struct:
    name: str
    members: tuple

    def layout(self):
        """Returns the size in bytes and the offset of each member."""
        offsets, end, widest = [], 0, 1
        for member in self.members:
            size = member.type.size()
            end = -(-end // size) * size
            offsets.append(end)
            end += size * max(1, member.length)
            widest = max(widest, size)
        return -(-end // widest) * widest, offsets


@dataclasses.dataclass(frozen=True)
class Function:
    result: Type
    name: str
    parameters: tuple
    comment: str = ""  # for callbacks


@dataclasses.dataclass(frozen=True)
class Header:
    constants: dict  # name: text of the value, in the order of the header
    callbacks: tuple
    structs: tuple
    functions: tuple
    handles: tuple

    def version(self):
        return tuple(int(self.constants[f"TANDEM_VERSION_{part}"]) for part in ("MAJOR", "MINOR", "PATCH"))

    def struct(self, name):
        return next(struct for struct in self.structs if struct.name == name)

    def fingerprint(self):
        """Returns the value of tandem_abi_fingerprint(): FNV-1a over the structs' sizes and offsets, four bytes each."""
        numbers, value = [], 0xCBF29CE484222325
        for struct in self.structs:
            size, offsets = struct.layout()
            numbers += [size, *offsets]
        for number in numbers:
            for byte in number.to_bytes(4, "little"):
                value = (value ^ byte) * 0x100000001B3 % (1 << 64)
        return value


@dataclasses.dataclass
class Notes:
    """The comments of the header, with their line breaks, by the names that they describe."""
    comments: dict  # name: the comment above it, or behind it on its line
    sections: dict  # name: the title of its section, such as "engine"
    groups: dict    # name of a function: the comment that stands alone above several functions, or ""
    constants: list  # (comment above, [names]) for each run of constants
    heads: dict     # file name: the comment at its head
    defaults: set   # names of the default macros, TANDEM_*_INIT


ITEM = re.compile(r"/\*(?P<comment>.*?)\*/|^#define (?P<constant>TANDEM_\w+) -?\d+u?(?=[ \n])|"
                  r"^typedef struct (?P<handle>tandem_\w+) \w+;|"
                  r"^typedef struct tandem_\w+ \{\n.*?^\} (?P<struct>tandem_\w+);|"
                  r"^typedef [^;{]*?\(\*(?P<callback>tandem_\w+)\)\([^)]*\);|"
                  r"^TANDEM_API [^(;]*?(?P<function>tandem_\w+)\([^)]*\);", re.S | re.M)
TITLE = re.compile(r" -+ (.*?) -+ $")


def lines_of(comment):
    """Returns the text of a comment without its delimiters and without the beginnings of lines."""
    lines = [re.sub(r"^ *\* ?", "", line) if i else line.strip() for i, line in enumerate(comment.splitlines())]
    return "\n".join(line.rstrip() for line in lines).strip("\n")


def add_notes(notes, text):
    """Adds the notes of one file. A comment describes the item on the next line, or the item before it on the same line. If an
    empty line follows a comment, it describes all later functions of its section."""
    section, group, above, last, shared = "", "", None, None, None
    for found in ITEM.finditer(text):
        kind, name = found.lastgroup, found[found.lastgroup]
        if kind == "comment":
            title = TITLE.match(name)
            if title:
                section, group, above, last = title[1], "", None, None
            elif last is not None and "\n" not in text[last[1]:found.start()]:
                notes.comments[last[0]] = lines_of(name)
            elif text[found.end():found.end() + 2] == "\n\n":
                group, above = lines_of(name), None
            else:
                above = (found.end(), lines_of(name))
            continue
        own = above[1] if above is not None and text[above[0]:found.start()] == "\n" else ""
        if kind == "constant":
            if own or last is None or last[2] != "constant" or "\n\n" in text[last[1]:found.start()]:
                notes.constants.append((own, []))
            notes.constants[-1][1].append(name)
        elif own:
            notes.comments[name] = own
        if kind == "function":
            signature = re.sub(r"tandem_\w+\(", "(", found[0])
            if not own and shared == (found.start() - 1, signature) and "(void" not in signature:
                notes.comments[name] = notes.comments.get(last[0], "")  # one comment above two similar functions
            shared = (found.end(), signature)
            notes.groups[name] = group
        notes.sections[name] = section
        above, last = None, (name, found.end(), kind)


def notes_of(texts):
    """texts: by file name."""
    notes = Notes({}, {}, {}, [], {}, set())
    for name, text in texts.items():
        notes.defaults |= set(re.findall(r"^#define (TANDEM_\w+_INIT)\b", text, re.M))
        notes.heads[name] = lines_of(text[2:text.index("*/")])
        add_notes(notes, text[text.index("*/") + 2:])
    return notes


def words_of(comment):
    """Returns the text of a comment on one line."""
    return " ".join(line.strip().lstrip("*").strip() for line in comment[2:-2].strip().splitlines()) if comment else ""


def type_of(text):
    """Parses a type such as 'const struct tandem_layer_projection *'."""
    name = re.sub(r"\b(const|struct)\b|\*", " ", text).split()
    if len(name) != 1:
        raise SystemExit(f"header.py: {text!r} is no type that it knows")
    return Type(name[0], text.count("*"), "const" in text.split("*")[0])


def members_of(name, body):
    members, at = [], 0
    body = body.strip("\n")
    while body[at:].strip():
        match = MEMBER.match(body, at)
        if match is None:
            raise SystemExit(f"header.py: {name} has a member in a form that it does not know: {body[at:].strip()[:60]!r}")
        members.append(Field(type_of(match["type"]), match["name"], int(match["length"] or 0), words_of(match["comment"])))
        at = match.end()
    if members[0].name != "struct_size":
        raise SystemExit(f"header.py: {name} does not begin with struct_size")
    return tuple(members)


def parameters_of(text):
    parameters = []
    for part in [] if text.strip() == "void" else text.split(","):
        kind, name = re.fullmatch(r"(.*?)(\w+)", part.strip()).groups()
        parameters.append(Field(type_of(kind), name))
    return tuple(parameters)


def function_of(match, comment=""):
    return Function(type_of(match[1]), match[2], parameters_of(" ".join(match[3].split())), comment)


def comment_before(text, line):
    """Returns the comment that ends on the line before the line that begins with `line`, or ""."""
    before = text[:text.index(line)].rstrip("\n")
    return words_of(before[before.rindex("/*"):]) if before.endswith("*/") else ""


def parse(texts):
    """Parses the header. texts: of the files, in the order in which tandem.h includes them."""
    text = "\n".join(texts)
    plain = COMMENT.sub("", text)
    constants = dict(re.findall(r"^#define (TANDEM_\w+) (-?\d+u?)[ ]*$", plain, re.M))
    structs = [Struct(found[1], members_of(found[1], found[2]))
               for found in re.finditer(r"^typedef struct (tandem_\w+) \{\n(.*?)^\} \1;", text, re.M | re.S)]
    callbacks = [function_of(found, comment_before(text, found[0]))
                 for found in re.finditer(r"^typedef ([^;{]*?)\(\*(tandem_\w+)\)\(([^)]*)\);", plain, re.M)]
    functions = [function_of(found) for found in re.finditer(r"^TANDEM_API ([^(;]*?)(tandem_\w+)\(([^)]*)\);", plain, re.M)]
    handles = re.findall(r"^typedef struct (tandem_\w+) \1;", plain, re.M)
    if len(functions) != plain.count("\nTANDEM_API ") or len(structs) != plain.count("\ntypedef struct ") - len(handles):
        raise SystemExit("header.py: a function or a struct is in a form that it does not know")
    return Header(constants, tuple(callbacks), tuple(structs), tuple(functions), tuple(handles))


def includes_of(text):
    """Returns the parts that tandem.h includes at its end, in order."""
    return re.findall(r'^#include "tandem/(\w+\.h)"$', text, re.M)
