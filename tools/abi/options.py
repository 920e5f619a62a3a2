# SPDX-License-Identifier: MIT
"""The meaning of option members as far as bindings need it, derived from their types, names and comments."""
import dataclasses
import re

# The structs with generated tables. Structs of engines and layers have callbacks and nested structs, so bindings write them by
# hand.
TABLES = ("tandem_cache_options", "tandem_session_options")
TITLES = {"tandem_cache_options": "How keys and values are stored", "tandem_session_options": "How a cache is attended"}


@dataclasses.dataclass(frozen=True)
class Option:
    """kind: text, texts (a count follows), dtype, dtypes (one a layer), enum, flag, flags (a count follows), struct, or a C
    number type."""
    name: str
    kind: str
    default: object  # a number or a text
    enum: str = ""   # "ROTATION" for TANDEM_ROTATION_*
    comment: str = ""
    count: str = ""  # name of the member with the length
    struct: str = ""  # name of the struct that the member points to, such as "tandem_pruning"


def kind_of(member, following):
    kind = member.type
    if kind.name == "char" and kind.stars == 1:
        return "text"
    if kind.stars == 1 and kind.is_const and following is not None and following.name == "n_" + member.name:
        return "flags" if kind.name == "uint8_t" else None
    if kind.stars == 2 and kind.name == "char" and following is not None and following.name == "n_" + member.name:
        return "texts"
    if kind.stars == 1 and kind.name == "int32_t" and member.name.endswith("_types"):
        return "dtypes"
    if kind.stars == 1 and kind.name.startswith("tandem_"):
        return "struct"
    if kind.stars:
        return None
    if kind.name == "int32_t" and member.name.endswith("_type"):
        return "dtype"
    if kind.name == "int32_t" and re.match(r"TANDEM_\w+_\*", member.comment):
        return "enum"
    if kind.name == "int32_t" and re.match(r"1: ", member.comment):
        return "flag"
    return kind.name if kind.name in ("int32_t", "int64_t", "float", "double") else None


def options_of(struct, with_structs=False):
    """Returns the options in the order of their members, without struct_size, counts and reserved members. Each binding has
    hand-written types for structs that an option points to. with_structs keeps such options."""
    options, members = [], struct.members[1:]
    counts = set()
    for member, following in zip(members, (*members[1:], None)):
        if member.name in counts or member.name == "reserved":
            continue
        kind = kind_of(member, following)
        if kind is None:
            raise SystemExit(f"options.py: {struct.name}.{member.name} is of a kind that bindings have no rule for")
        if kind == "struct" and not with_structs:
            continue
        default, enum, count = member.default, "", ""
        if kind == "text":
            found = re.match(r'NULL: "(.*?)"', member.comment)
            if found is None:
                raise SystemExit(f"options.py: the comment of {struct.name}.{member.name} does not begin with 'NULL: \"default\"'")
            default = found[1]
        if kind == "enum":
            enum = re.match(r"TANDEM_(\w+)_\*", member.comment)[1]
        if kind in ("flags", "texts"):
            counts.add(count := following.name)
        if kind == "flag" and default:
            raise SystemExit(f"options.py: {struct.name}.{member.name} is a flag with a default of -1")
        pointed_to = member.type.name if kind == "struct" else ""
        options.append(Option(member.name, kind, default, enum, member.comment, count, pointed_to))
    return options


def sentence(option, rename, nothing, no_type, true, false):
    """Returns the comment in a binding's words. rename: maps members' names; nothing, no_type: words for NULL and type 0."""
    text = re.sub(r'^NULL: (?=")', "default: ", option.comment)
    text = re.sub(r"^TANDEM_\w+_\*; ", "", text)
    text = re.sub(r"\[[^\]]*\]|\b[a-z][a-z0-9]*(?:_[a-z0-9]+)+\b", lambda found: rename(found[0]), text)
    text = re.sub(r"\bTANDEM_([A-Z0-9_]+)\b", lambda found: found[1].lower(), text)
    text = re.sub(r"\bNULL\b", nothing, text)
    if option.kind == "dtype":
        text = re.sub(r"\b0: ", f"{no_type}: ", text)
    if option.kind in ("flag", "flags"):
        text = re.sub(r"(^|(?<=[.;] ))1: ", f"{true}: ", text)
        text = re.sub(r"(^|(?<=[.;] ))0: ", f"{false}: ", text)
    return text[:1].upper() + text[1:] + ("" if text.endswith(".") else ".")
