# SPDX-License-Identifier: MIT
"""Reads include/tandem/tandem.h and the parts that it includes at its end: constants, callbacks, structs, functions, and for
the manual the comments of each.

Not a parser of C: it knows the few forms in which the header is written, and stops at what it does not know.
"""
import dataclasses
import re

SIZES = {"uint8_t": 1, "int32_t": 4, "uint32_t": 4, "int64_t": 8, "uint64_t": 8, "size_t": 8, "float": 4, "double": 8}
POINTER_BYTES = 8  # layouts are those of machines with 64-bit pointers
COMMENT = re.compile(r"/\*.*?\*/", re.S)
MEMBER = re.compile(r"\s*(?P<type>(?:const )?(?:struct )?\w+(?: \*+(?:const \*)?| ))(?P<name>\w+)(?:\[(?P<length>\d+)\])?;"
                    r"[ ]*(?P<comment>/\*.*?\*/)?", re.S)


@dataclasses.dataclass(frozen=True)
class Type:
    """A type of C: `name` without const, struct and stars; how many stars; whether what is pointed to is const."""
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
    length: int = 0  # of an array; 0: none
    comment: str = ""

    @property
    def default(self):
        """Zero means default; where zero is a value of its own, the comment says what -1 is."""
        return -1 if re.search(r"(^|\s)-1: ", self.comment) else 0


@dataclasses.dataclass(frozen=True)
class Struct:
    name: str
    members: tuple

    def layout(self):
        """Bytes, and the offset of each member."""
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
    comment: str = ""  # of callbacks


@dataclasses.dataclass(frozen=True)
class Header:
    constants: dict  # name: text of its value, in the order of the header
    callbacks: tuple
    structs: tuple
    functions: tuple
    handles: tuple

    def version(self):
        return tuple(int(self.constants[f"TANDEM_VERSION_{part}"]) for part in ("MAJOR", "MINOR", "PATCH"))

    def struct(self, name):
        return next(struct for struct in self.structs if struct.name == name)

    def fingerprint(self):
        """What tandem_abi_fingerprint() gives: FNV-1a over size and member offsets of every struct, four bytes each."""
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
    """The comments of the header, with their lines, by the names that they are about."""
    comments: dict  # name: the comment above it, or behind it in its line
    sections: dict  # name: the title of its section, "engine"
    groups: dict    # name of a function: the comment that stands alone above several functions, "" where there is none
    constants: list  # (comment above, [names]) for each run of constants
    heads: dict     # file name: the comment at its head
    defaults: set   # names of the macros of defaults, TANDEM_*_INIT


ITEM = re.compile(r"/\*(?P<comment>.*?)\*/|^#define (?P<constant>TANDEM_\w+) -?\d+u?(?=[ \n])|"
                  r"^typedef struct (?P<handle>tandem_\w+) \w+;|"
                  r"^typedef struct tandem_\w+ \{\n.*?^\} (?P<struct>tandem_\w+);|"
                  r"^typedef [^;{]*?\(\*(?P<callback>tandem_\w+)\)\([^)]*\);|"
                  r"^TANDEM_API [^(;]*?(?P<function>tandem_\w+)\([^)]*\);", re.S | re.M)
TITLE = re.compile(r" -+ (.*?) -+ $")


def lines_of(comment):
    """The text between the stars of a comment, without what begins each line."""
    lines = [re.sub(r"^ *\* ?", "", line) if i else line.strip() for i, line in enumerate(comment.splitlines())]
    return "\n".join(line.rstrip() for line in lines).strip("\n")


def add_notes(notes, text):
    """Notes of one file. A comment is about what follows on the next line, or about what stands before it in its line. One
    with an empty line behind it is about the functions behind it in its section."""
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
                notes.comments[name] = notes.comments.get(last[0], "")  # one comment above two functions that are alike
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
    """The text of a comment, on one line."""
    return " ".join(line.strip().lstrip("*").strip() for line in comment[2:-2].strip().splitlines()) if comment else ""


def type_of(text):
    """'const struct tandem_layer_projection *' and the like."""
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
    """The comment that ends on the line before the one that begins so; "" where there is none."""
    before = text[:text.index(line)].rstrip("\n")
    return words_of(before[before.rindex("/*"):]) if before.endswith("*/") else ""


def parse(texts):
    """texts: of the files, in the order in which tandem.h brings them."""
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
    """The parts that tandem.h includes at its end, in order."""
    return re.findall(r'^#include "tandem/(\w+\.h)"$', text, re.M)
