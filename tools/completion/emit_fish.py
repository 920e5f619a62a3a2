# SPDX-License-Identifier: MIT
"""Completion for fish: a line for each flag and word. fish loads a file by the name of the program."""

HEAD = "# fish completion of {}, made by tools/completion/make.py\n\n"


def quoted(text):
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def value_options(flag):
    if not flag.value:
        return "-f"
    if flag.words and flag.is_list:
        return f"-x -a '(__fish_append , {' '.join(flag.words)})'"
    if flag.words:
        return f"-x -a '{' '.join(flag.words)}'"
    if flag.takes_file:
        return "-r -F"
    return "-x -a '(__fish_complete_directories)'" if flag.takes_folder else "-x"


def lines_of(program, condition, scope, takes_words):
    """Returns the lines of a scope. condition: fish code that is true in this scope; empty: always."""
    when = f" -n {quoted(condition)}" if condition else ""
    lines = [f"complete -c {program}{when} -l {flag.name.removeprefix('--')} {value_options(flag)} -d {quoted(flag.text)}"
             for flag in scope.flags]
    if not scope.takes_file:
        lines.insert(0, f"complete -c {program}{when} -f")
    if takes_words:
        # Only while none of these words is on the line.
        absent = "not __fish_seen_subcommand_from " + " ".join(scope.words)
        when = quoted(f"{condition}; and {absent}" if condition else absent)
        lines += [f"complete -c {program} -n {when} -a {word} -d {quoted(text)}" for word, text in scope.words.items()]
    return lines


def all_lines(program, scopes, outer):
    """Returns the lines of all scopes. outer: for the program tandem, whose command's name is part of the condition."""
    lines = []
    for scope in scopes:
        names = scope.name.split()
        conditions = [f"__fish_seen_subcommand_from {name}" for name in (names if outer else names[1:])]
        parts = [other.name.split()[1] for other in scopes if other.name.startswith(scope.name + " ")]
        if parts:
            conditions.append("not __fish_seen_subcommand_from " + " ".join(parts))
        lines += lines_of(program, "; and ".join(conditions), scope, bool(scope.words)) + [""]
    return lines


def text_of_tandem(commands, scopes):
    known = " ".join([*commands, "help"])
    first = [f"complete -c tandem -n 'not __fish_seen_subcommand_from {known}' -f",
             f"complete -c tandem -n 'not __fish_seen_subcommand_from {known}' -l help -d 'this text'",
             f"complete -c tandem -n 'not __fish_seen_subcommand_from {known}' -l version -d 'the version of the program'"]
    first += [f"complete -c tandem -n 'not __fish_seen_subcommand_from {known}' -a {name} -d {quoted(text)}"
              for name, text in [*commands.items(), ("help", "the flags of a command")]]
    first += [f"complete -c tandem -n '__fish_seen_subcommand_from help' -f -a '{' '.join(commands)}'", ""]
    return HEAD.format("tandem") + "\n".join(first + all_lines("tandem", scopes, True))


def text_of_program(program, scopes):
    command = program.removeprefix("tandem-")
    own = [scope for scope in scopes if scope.name.split()[0] == command]
    return HEAD.format(program) + "\n".join(all_lines(program, own, False))
