# SPDX-License-Identifier: MIT
"""Section 3: a page for each function and each struct of the header, from its comments."""
import re

from comment_text import Reader, Words, sentence
from document import Lines, Page, Paragraph, Section, Span, Terms
from rules import Rules

INCLUDE = (Span("#include <tandem/tandem.h>", "bold"),)
LINK = Paragraph((Span("Link with "), Span("-ltandem", "bold"), Span(", or with what "),
                  Span("pkg-config --cflags --libs tandem", "bold"), Span(" prints.")))
WIDTH = 72  # of declarations


def type_text(kind):
    """Returns a type as it stands before a name: "const tandem_tensor *"."""
    stars = "*const *" if kind.stars == 2 and kind.is_const else "*" * kind.stars
    return f"{'const ' if kind.is_const else ''}{kind.name} {stars}"


def is_status(function):
    """True if a function returns a status: its last parameter receives the error."""
    last = function.parameters[-1].type if function.parameters else None
    return last is not None and last.name == "tandem_error" and last.stars == 2


def is_init(function):
    """True if a function only fills in a struct's defaults."""
    return function.name.endswith("_init") and len(function.parameters) == 1


def prototype(function, is_callback=False):
    """Returns a declaration as lines of spans."""
    head = f"typedef {type_text(function.result)}(*" if is_callback else type_text(function.result)
    begin = [Span(head), Span(function.name, "bold"), Span(")(" if is_callback else "(")]
    width = sum(len(span.text) for span in begin)
    longest = max((len(type_text(field.type) + field.name) + 2 for field in function.parameters), default=0)
    indent = width if width + longest <= WIDTH else 4
    lines, line, at = [], begin, width
    if not function.parameters:
        return [tuple([*begin, Span("void);")])]
    for i, field in enumerate(function.parameters):
        end = ");" if i + 1 == len(function.parameters) else ","
        length = len(type_text(field.type) + field.name + end)
        if at + length + 1 > WIDTH and (i or indent == 4):
            lines.append(tuple(line))
            line, at = [Span(" " * indent)], indent
        elif i:
            line.append(Span(" "))
            at += 1
        line += [Span(type_text(field.type)), Span(field.name, "italic"), Span(end)]
        at += length
    return [*lines, tuple(line)]


def take_sentence(comment, label):
    """Splits off the sentence after a label. Returns the rest, and the sentence without the label on one line, or ""."""
    found = re.search(rf"(?<!\w){label}: ", comment)
    if found is None:
        return comment, ""
    depth, end = 0, len(comment)
    for at in range(found.end(), len(comment)):
        depth += {"(": 1, ")": -1}.get(comment[at], 0)
        if comment[at] == "." and depth <= 0 and comment[at + 1:at + 2] in ("", " ", "\n"):
            end = at + 1
            break
    before, after = comment[:found.start()], comment[end:]
    if before.endswith("\n\n") or after.startswith("\n\n") or not after.strip():
        rest = before.rstrip(" ") + after
    else:
        rest = (before.rstrip() + "\n" if before.strip() else "") + after.lstrip()
    return rest.strip("\n"), " ".join(comment[found.end():end].split())


def split_outside(text):
    """Splits a text at commas and semicolons outside brackets. Returns each part with the separator before it."""
    parts, depth, begin, before = [], 0, 0, ""
    for at, char in enumerate(text):
        depth += {"(": 1, ")": -1}.get(char, 0)
        if char in ",;" and depth == 0:
            parts.append((before, text[begin:at].strip()))
            begin, before = at + 1, char
    return parts + [(before, text[begin:].strip())]


class Reference:
    """header, notes: from tools/abi/header.py; summaries: by name, one line each."""

    def __init__(self, header, notes, summaries):
        self.header, self.notes, self.summaries = header, notes, summaries
        self.rules = Rules(notes.heads["tandem.h"], header)
        self.structs = {struct.name: struct for struct in header.structs}
        self.callbacks = {callback.name: callback for callback in header.callbacks}
        self.codes = [name.removeprefix("TANDEM_ERROR_") for name in header.constants if name.startswith("TANDEM_ERROR_")]
        self.homes = self.homes_of_callbacks()
        self.together = self.functions_by_page()
        pages = {name: name for name in self.structs} | self.homes
        pages |= {function.name: page for page, functions in self.together.items() for function in functions}
        pages |= {function.name: function.parameters[0].type.name for function in header.functions if is_init(function)}
        self.words = Words(pages, self.codes)
        self.constant_homes = {}
        for struct in header.structs:
            for _, names, _ in self.constants_of(struct):
                self.constant_homes |= {name: self.constant_homes.get(name, struct.name) for name in names}

    def homes_of_callbacks(self):
        """Finds the page that explains each callback: that of the first struct that has it, that has a callback which takes it,
        or that is passed to the first function which takes it.
        """
        homes = {}
        for struct in self.header.structs:
            for member in struct.members:
                if member.type.name in self.callbacks:
                    homes.setdefault(member.type.name, struct.name)
                    for field in self.callbacks[member.type.name].parameters:
                        if field.type.name in self.callbacks:
                            homes.setdefault(field.type.name, struct.name)
        for function in self.header.functions:
            taken = [field.type.name for field in function.parameters]
            structs = [name for name in taken if name in self.structs]
            for name in taken:
                if name in self.callbacks and structs:
                    homes.setdefault(name, structs[0])
        return homes

    def functions_by_page(self):
        """Groups functions that share a comment on one page, named after the first of them."""
        pages, last = {}, None
        for function in self.header.functions:
            if is_init(function):
                continue
            comment = self.notes.comments.get(function.name)
            if last and comment and comment == self.notes.comments.get(last) and len(comment) > 40:
                pages[last].append(function)
            else:
                last = function.name
                pages[last] = [function]
        return pages

    def pages(self):
        return [*(self.function_page(functions) for functions in self.together.values()),
                *(self.struct_page(struct) for struct in self.header.structs)]

    # ---- functions ----

    def function_page(self, functions):
        first, names = functions[0], [function.name for function in functions]
        words = self.words.about(*names)
        comment = self.notes.comments.get(first.name, "")
        comment, errors = take_sentence(sentence(comment) if "\n" not in comment and comment else comment, "Errors")
        comment, threads = take_sentence(comment, "Threads")
        handle = self.notes.comments.get(first.name.removesuffix("_create"), "") if first.name.endswith("_create") else ""
        group = self.notes.groups.get(first.name, "").replace("The functions below", "Functions of sequences")
        text = Reader(words).blocks("\n\n".join(part for part in (handle, comment, group) if part))
        prototypes = tuple(line for function in functions for line in prototype(function))
        sections = [Section("SYNOPSIS", [Lines((INCLUDE, (), *prototypes), True), LINK])]
        gives = first.result.name != "void" or first.result.stars
        if is_status(first) or not gives:
            sections.append(Section("DESCRIPTION", text))
        else:
            sections.append(Section("DESCRIPTION", [words.paragraph(self.summary(first.name, True))]))
            sections.append(Section("RETURN VALUE", text))
        sections += self.structs_section(first)
        if is_status(first):
            sections += self.error_sections(first, words, "\n\n".join((comment, group)), errors)
        sections += [Section("THREADS", self.thread_blocks(first, threads, words))]
        streams = self.rules.streams(first)
        sections += [Section("STREAM ORDER", [words.paragraph(" ".join(streams))])] if streams else []
        sections.append(self.see_also(first.name, [first], comment + " " + group + " " + errors))
        return Page(first.name, 3, self.summary(first.name), [one for one in sections if one.blocks], tuple(names[1:]))

    def summary(self, name, is_sentence=False):
        text = self.summaries.get(name, "")
        return text[:1].upper() + text[1:] + "." if is_sentence else text

    def structs_section(self, function):
        """Lists the structs that a function takes or fills, with the names of their members."""
        items = []
        for field in function.parameters:
            struct = self.structs.get(field.type.name)
            if struct is None or struct.name == "tandem_tensor":
                continue
            members = ", ".join(member.name for member in struct.members if member.name != "reserved")
            items.append(((Span(field.name, "italic"), Span(", a "), Span(struct.name, "page", 3)),
                          (Paragraph((Span("Members: "), Span(members, "italic"), Span("."))),)))
        return [Section("STRUCTS", [Terms(tuple(items))])] if items else []

    def error_sections(self, function, words, comment, errors):
        rule = self.rules.sentences("Errors")
        value = " ".join(rule[:2]).replace("*error", "*" + function.parameters[-1].name)
        always = " ".join(rule[2:]).replace(" _INVALID", " TANDEM_ERROR_INVALID").replace(" and are not repeated below", "")
        always = always.replace("call changes nothing", "call changes nothing, unless it is said otherwise above")
        lead, details = self.details_of(errors)
        for code in re.findall(r"(?<![\w])[A-Z_]+(?!\w)", comment):
            if code in self.codes:
                details.setdefault(code, []).append(None)
        blocks = [words.paragraph(lead)] if lead else []
        items = [((Span("TANDEM_ERROR_" + code, "bold"),), (words.paragraph(self.meaning(code, details[code])),))
                 for code in self.codes if code in details]
        blocks += [Terms(tuple(items))] if items else []
        if always:
            blocks += [words.paragraph(always), Paragraph((Span("See "), Span("tandem-errors", "page", 7), Span(".")))]
        return [Section("RETURN VALUE", [words.paragraph(value)] if value else []), Section("ERRORS", blocks)]

    def details_of(self, errors):
        """Parses "as f(); BUSY (why), CAPACITY". Returns the text that is no code as a sentence, and the texts of each code."""
        lead, details, last = "", {}, []
        for before, part in split_outside(errors.removesuffix(".")) if errors else []:
            found = re.match(r"((?:also )?[A-Z_]+(?: and [A-Z_]+)*)(?!\w)\s*(.*)", part)
            codes = [code for code in re.findall(r"[A-Z_]+", found[1]) if code in self.codes] if found else []
            if codes:
                text = found[2]
                text = text[1:-1] if re.fullmatch(r"\([^()]*(?:\([^()]*\)[^()]*)*\)", text) else text
                for code in codes:
                    details.setdefault(code, []).append(text)
                last = codes
            elif last:
                for code in last:
                    details[code][-1] = (details[code][-1] or "") + before + " " + part
            else:
                lead += (before + " " if lead else "") + part
        return lead[:1].upper() + lead[1:] + "." if lead else "", details

    def meaning(self, code, texts):
        general = self.notes.comments["TANDEM_ERROR_" + code]
        given = "; ".join(text for text in texts if text)
        tail = (f": {given}" if given else "") + ("; see DESCRIPTION" if None in texts else "")
        return f"{general[:1].upper()}{general[1:]}{tail}."

    def thread_blocks(self, function, own, words):
        rule = " ".join(self.rules.threads(function))
        own = f"Here: {own}" if own else ""
        return [words.paragraph(text) for text in (rule, own) if text]

    # ---- structs ----

    def struct_page(self, struct):
        inits = [function for function in self.header.functions if is_init(function) and
                 function.parameters[0].type.name == struct.name]
        callbacks = [name for name, home in self.homes.items() if home == struct.name]
        words = self.words.about(struct.name, *callbacks, *(function.name for function in inits))
        members = [(Span(f"  {type_text(member.type)}"), Span(member.name, "bold"),
                    Span(f"[{member.length}];" if member.length else ";")) for member in struct.members]
        macro = struct.name.upper() + "_INIT"
        synopsis = [INCLUDE, (), (Span(f"typedef struct {struct.name} {{"),), *members, (Span(f"}} {struct.name};"),), ()]
        synopsis += [line for function in inits for line in prototype(function)]
        if macro in self.notes.defaults:
            synopsis.append((Span(f"{struct.name} "), Span("value", "italic"), Span(" = "), Span(macro, "bold"), Span(";")))
        comment = self.notes.comments.get(struct.name, "")
        comment, errors = take_sentence(comment, "Errors")
        text = Reader(words).blocks(comment) or [words.paragraph(self.summary(struct.name, True))]
        sections = [Section("SYNOPSIS", [Lines(tuple(synopsis), True)]), Section("DESCRIPTION", text)]
        if errors:
            sections.append(Section("ERRORS", [words.paragraph("The call that is given the struct returns " + errors)]))
        sections += self.overview(struct, words)
        sections.append(Section("MEMBERS", [Terms(tuple(self.member_item(member, words) for member in struct.members))]))
        sections += self.callback_section(callbacks, words)
        sections += self.constant_section(struct, words)
        rule = self.rules.rows.get("Structs", "")
        sections += [Section("NOTES", [words.paragraph("Structs: " + rule)])] if rule else []
        users = [function for function in self.header.functions
                 if not is_init(function) and any(field.type.name == struct.name for field in function.parameters)]
        near = {other.name for other in self.header.structs
                if any(member.type.name == struct.name for member in other.members)}
        near |= {member.type.name for member in struct.members} & set(self.structs)
        sections.append(self.see_also(struct.name, users if len(users) < 8 else [], " ".join([comment, *sorted(near)])))
        return Page(struct.name, 3, self.summary(struct.name), [one for one in sections if one.blocks],
                    tuple([*(function.name for function in inits), *callbacks]))

    def member_item(self, member, words):
        length = f"[{member.length}]" if member.length else ""
        term = (Span(type_text(member.type)), Span(member.name, "bold"), *((Span(length),) if length else ()))
        if member.name == "struct_size":
            return term, (words.paragraph("Bytes of the struct, as the program was compiled with it."),)
        return term, (words.paragraph(sentence(member.comment)),) if member.comment else ()

    def overview(self, struct, words):
        """Returns the comment at the head of a part of the header, for the page of the struct that has the part's name."""
        head = self.notes.heads.get(struct.name.removeprefix("tandem_") + ".h", "")
        first, _, rest = re.sub(r"^SPDX.*\n+", "", head).partition("\n\n")
        del first  # the subject of the part, which its summary has
        return [Section("OVERVIEW", Reader(words).blocks(rest))] if rest.strip() else []

    def callback_section(self, callbacks, words):
        blocks = []
        for name in callbacks:
            blocks.append(Lines(tuple(prototype(self.callbacks[name], True)), True))
            blocks += Reader(words).blocks(self.notes.comments.get(name, ""))
        return [Section("CALLBACKS", blocks)] if blocks else []

    def constants_of(self, struct):
        """Returns the groups of constants that comments of a struct's page name: (comment, all names, those named)."""
        head = self.notes.heads.get(struct.name.removeprefix("tandem_") + ".h", "")
        callbacks = [name for name, home in self.homes.items() if home == struct.name]
        texts = [self.notes.comments.get(name, "") for name in (struct.name, *callbacks)]
        named = re.findall(r"TANDEM_[A-Z0-9_]+\*?", " ".join([*texts, *(member.comment for member in struct.members), head]))
        groups = [(comment, names, [name for name in names if is_named(name, named)])
                  for comment, names in self.notes.constants]
        return [group for group in groups if group[2] and group[1][0] != "TANDEM_OK"]

    def constant_section(self, struct, words):
        blocks = []
        for comment, names, named in self.constants_of(struct):
            home = self.constant_homes[names[0]]
            if home != struct.name:
                blocks.append(Paragraph((Span(named[0], "bold"), Span(" and others of its kind: see "),
                                         Span(home, "page", 3), Span("."))))
                continue
            blocks += Reader(words).blocks(comment)
            values = [(name, self.header.constants[name].rstrip("u")) for name in names]
            items = [((Span(name, "bold"), Span(f" {value}")), self.constant_body(name, words)) for name, value in values]
            blocks.append(Terms(tuple(items), is_compact=True))
        return [Section("CONSTANTS", blocks)] if blocks else []

    def constant_body(self, name, words):
        comment = " ".join(self.notes.comments.get(name, "").split())
        return (words.paragraph(sentence(comment)),) if comment else ()

    # ---- related pages ----

    def see_also(self, name, functions, text):
        """Lists pages of the same object, structs, names in the text, and overviews."""
        pages = set(self.together) | set(self.structs)
        stem = name.split("_")[1]
        own = {other for other in pages if other.split("_")[1] == stem}
        own |= {self.words.pages[found] for found in re.findall(r"tandem_\w+", text) if found in self.words.pages}
        own |= {self.constant_homes[found] for found in re.findall(r"TANDEM_\w+", text) if found in self.constant_homes}
        own |= {field.type.name for function in functions for field in function.parameters} & set(self.structs)
        own |= {function.name for function in functions}
        own |= {f"tandem_{kind}_create" for function in functions for kind in self.rules.objects(function)}
        if name.endswith("_create"):
            own |= {page for page, users in self.together.items() if stem in self.rules.objects(users[0])}
        overviews = ["tandem"]
        overviews += ["tandem-errors"] if any(map(is_status, functions)) or stem in ("error", "status") else []
        overviews += ["tandem-streams"] if any(self.rules.takes_stream(function) for function in functions) else []
        overviews += ["tandem-memory"] if stem in ("cache", "sequence", "plan", "engine", "weights", "memory") else []
        overviews += ["tandem-threads"] if stem in ("engine", "session", "cache", "step", "attend") else []
        found = [(other, 3) for other in sorted(own - {name})] + [(other, 7) for other in overviews]
        spans = [span for other, section in found for span in (Span(other, "page", section), Span(", "))]
        return Section("SEE ALSO", [Paragraph(tuple(spans[:-1]))])


def is_named(constant, named):
    return any(constant == one or (one.endswith("*") and constant.startswith(one[:-1])) for one in named)
