# SPDX-License-Identifier: MIT
"""Each public object has a docstring. Its numpydoc sections name every parameter, and every member of results."""
import dataclasses
import inspect
import re

import pytest

import tandem

OBJECTS = {name: getattr(tandem, name) for name in tandem.__all__ if not name.startswith("LOG_")}
MADE_BY_CALLS = (tandem.Sequence, tandem.Step, tandem.Block)  # users get these from calls and do not construct them
METHODS = {f"{name}.{method}": function for name, kind in OBJECTS.items() if inspect.isclass(kind)
           for method, function in vars(kind).items() if inspect.isfunction(function) and not method.startswith("_")}


def documented(text):
    """Returns the names in the numpydoc sections that list names."""
    names = set()
    for section, body in re.findall(r"^(\w+)\n-{3,}\n(.*?)(?=^\w+\n-{3,}\n|\Z)", inspect.cleandoc(text) + "\n", re.M | re.S):
        assert section in ("Parameters", "Attributes", "Returns", "Raises"), section
        if section in ("Parameters", "Attributes"):
            names |= {name.strip(" *") for line in re.findall(r"^(\S.*)", body, re.M) for name in line.split(" : ")[0].split(",")}
    return names


def wanted(thing):
    """Returns the names that the sections must have: parameters of calls, members of results."""
    if dataclasses.is_dataclass(thing):
        return {field.name for field in dataclasses.fields(thing)}
    if inspect.isclass(thing) and issubclass(thing, tuple):
        return set(thing._fields)
    if inspect.isclass(thing) and issubclass(thing, dict):
        return set(thing.__annotations__)
    if inspect.isclass(thing) and (thing in MADE_BY_CALLS or issubclass(thing, tandem.TandemError)):
        return set()
    return {name for name in inspect.signature(thing).parameters if name != "self"}


@pytest.mark.parametrize("name", [*OBJECTS, *METHODS])
def test_docstring(name):
    thing = OBJECTS.get(name) or METHODS[name]
    assert thing.__doc__ and thing.__doc__.strip()[0].isupper()
    missing = wanted(thing) - documented(thing.__doc__)
    assert not missing, f"{name} leaves out {sorted(missing)}"
