# SPDX-License-Identifier: MIT
"""The rules for all functions: the table at the head of tandem.h, and the sentences of it that a manual page repeats.

This module has no texts of its own. If the header no longer has a sentence that a function needs, the page lacks the
section and test/packaging/man_test.py reports it.
"""
import re

# Sentences of the row Streams, by their first words.
WITH_STREAM, WITHOUT_STREAM = "`stream` is", "Functions without it take tensors"
OF_SESSIONS = ("On a device a call returns", "The caller orders calls of one session")


def sentences_of(text):
    """Splits a text into sentences. A sentence ends with a full stop outside brackets that a space or nothing follows."""
    made, depth, begin = [], 0, 0
    for at, char in enumerate(text):
        depth += {"(": 1, ")": -1}.get(char, 0)
        if char == "." and depth <= 0 and text[at + 1:at + 2] in ("", " ", "\n"):
            made.append(text[begin:at + 1].strip())
            begin = at + 1
    return made + ([text[begin:].strip()] if text[begin:].strip() else [])


def table_of(head):
    """Returns the rows of the table by their names."""
    rows, name = {}, None
    for line in head.splitlines():
        found = re.match(r"  ([A-Z]\w+) {2,}(\S.*)", line)
        if found:
            name = found[1]
            rows[name] = found[2]
        elif name and line.startswith("     "):
            rows[name] += " " + line.strip()
        else:
            name = None
    return rows


class Rules:
    """head: the comment at the head of tandem.h; header: from tools/abi/header.py."""

    def __init__(self, head, header):
        self.rows = table_of(head)
        self.structs = {struct.name: struct for struct in header.structs}
        self.kinds = [name.removeprefix("tandem_") for name in header.handles if name != "tandem_error"]

    def sentences(self, row):
        return sentences_of(self.rows.get(row, ""))

    def objects(self, function):
        """Returns the kinds of the handles that a function takes."""
        given = {field.type.name.removeprefix("tandem_") for field in function.parameters if field.type.stars == 1}
        return [kind for kind in self.kinds if kind in given]

    def threads(self, function):
        """Returns for each object that the function takes the sentence that names it, or that for functions without objects."""
        objects, found = self.objects(function), {}
        for sentence in self.sentences("Threads"):
            subjects = re.match(r"([A-Z][\w, ]*): ", sentence)
            words = re.findall(r"\w+", subjects[1].lower()) if subjects else []
            if words[:2] == ["functions", "without"]:
                found["none"] = sentence.replace("any of these", "an engine, a model, weights, a cache or a session")
            else:
                found |= {kind: sentence for kind in self.kinds if kind in words}
        wanted = objects or ["none"]
        return list(dict.fromkeys(found[kind] for kind in wanted)) if all(kind in found for kind in wanted) else []

    def members(self, function):
        """Returns the parameters, and the members of those that are structs of arguments."""
        fields = list(function.parameters)
        for field in function.parameters:
            if field.type.name.endswith("_args") and field.type.stars == 1:
                fields += self.structs[field.type.name].members
        return fields

    def takes_stream(self, function):
        return any(field.name == "stream" for field in self.members(function))

    def takes_tensors(self, function):
        return any(field.type.name == "tandem_tensor" for field in self.members(function)) and \
            not function.name.endswith("_init")

    def streams(self, function):
        """Returns the sentences on streams for a function; [] if it has nothing to do with streams, or the header lacks one."""
        wanted = []
        if self.takes_stream(function):
            wanted = [WITH_STREAM, *(OF_SESSIONS if "session" in self.objects(function) else ())]
        elif self.takes_tensors(function):
            wanted = [WITHOUT_STREAM]
        found = [next((one for one in self.sentences("Streams") if one.startswith(words)), None) for words in wanted]
        return [] if None in found else [one.replace("Functions without it", "Functions without `stream`") for one in found]
