# SPDX-License-Identifier: MIT
"""Settings, such as "policy=hgca,window_tokens=512,k_type=q8_0". The library checks them before a model is loaded.

"dense_layers=0+1+11" names layers that attend every key; the policy is for the others. "patterns=FILE" names a file of head
patterns and implies the policy "patterns".
"""
from dataclasses import dataclass
from typing import Any, get_type_hints

from .._cache import Cache
from .._engine import Engine
from .._errors import TandemError
from .._model import Layer, Model
from .._options import CacheOptions, SessionOptions
from .._patterns import Patterns
from .._session import Session
from ._pruning_text import pruning_of

_PLAIN = (str, int, float)  # lists with one value a layer have no short text
_STORAGE = {name: kind for name, kind in get_type_hints(CacheOptions).items() if kind in _PLAIN}
_SESSION = {name: kind for name, kind in get_type_hints(SessionOptions).items() if kind in _PLAIN} | {
    "pruning": str, "patterns": str}  # see _pruning_text; a file of head patterns
_DENSE = "dense_layers"  # an option of TandemCache, which makes layer_policies of it
KNOWN = {**_SESSION, **_STORAGE, _DENSE: tuple}
DEFAULTS = ("policy=all", "policy=hgca,window_tokens=512", "policy=streaming,window_tokens=512", "k_type=q8_0,k_rotation=none",
            "k_type=q4_0,k_rotation=none", "k_type=q4_0,k_rotation=hadamard")


class SettingError(ValueError):
    """A setting that cannot be measured. The message names the option and its value."""


@dataclass(frozen=True)
class Setting:
    """Options of a TandemCache.

    Attributes
    ----------
    options : tuple of (name, value)
        Sorted by name. The names are those of :class:`tandem.SessionOptions`, :class:`tandem.CacheOptions` and
        :class:`tandem.transformers.TandemCache`.
    """

    options: tuple[tuple[str, Any], ...]

    @property
    def storage(self) -> dict[str, Any]:
        """The options of storage."""
        return {name: value for name, value in self.options if name in _STORAGE}

    @property
    def session(self) -> dict[str, Any]:
        """The options that choose the attended keys."""
        return {name: pruning_of(value) if name == "pruning" else value for name, value in self.options if name in _SESSION}

    @property
    def dense_layers(self) -> tuple[int, ...]:
        """Layers that attend every key, ascending."""
        return tuple(dict(self.options).get(_DENSE, ()))

    @property
    def patterns_file(self) -> str | None:
        """The file of head patterns for prompts."""
        return dict(self.options).get("patterns")

    @property
    def stores_only(self) -> "Setting":
        """The same storage under policy "all", which prefills are measured with."""
        return Setting(tuple(sorted({**self.storage, "policy": "all"}.items())))

    @property
    def label(self) -> str:
        """A short name for tables and pictures."""
        given = dict(self.options)
        k_type, v_type = given.pop("k_type", ""), given.pop("v_type", "")
        dense_layers = given.pop(_DENSE, ())
        policy, rotation = given.pop("policy", "all"), given.pop("k_rotation", "none")
        words = [policy] if policy != "all" or not k_type + v_type else []
        if "window_tokens" in given:
            words.append(f"w{given.pop('window_tokens')}")
        words += [f"{name.removesuffix('_tokens')} {value:g}" if isinstance(value, (int, float)) else f"{name} {value}"
                  for name, value in given.items()]
        if dense_layers:
            words.append("dense " + "+".join(map(str, dense_layers)))
        if k_type or v_type:
            words.append(k_type if v_type in ("", k_type) else f"{k_type or 'own type'}/{v_type}")
        return " ".join(words + ([rotation] if rotation != "none" else []))


def _layers(text: str) -> tuple[int, ...]:
    words = [word.strip() for word in text.split("+")]
    if not all(word.isdecimal() for word in words):
        raise SettingError(f"{_DENSE} = {text!r} is not a list of layers such as 0+1+11")
    indices = sorted(map(int, words))
    for before, index in zip(indices, indices[1:], strict=False):
        if before == index:
            raise SettingError(f"{_DENSE} = {text!r} names layer {index} twice")
    return tuple(indices)


def _value(name: str, text: str) -> Any:
    kind = KNOWN[name]
    if name == _DENSE:
        return _layers(text)
    if name == "pruning":
        try:
            pruning_of(text)
        except ValueError as error:
            raise SettingError(f"pruning = {text!r}: {error}") from None
    try:
        return kind(text)
    except ValueError:
        raise SettingError(f"{name} = {text!r} is not {'a number' if kind is float else 'an integer'}") from None


def parse(text: str) -> Setting:
    """Returns the setting that a text describes.

    Raises
    ------
    SettingError
        A name is unknown or given twice, or a value is not of the option's type.
    """
    options: dict[str, Any] = {}
    for word in text.split(","):
        name, separator, value = (part.strip() for part in word.partition("="))
        if not separator or not value:
            raise SettingError(f"{word.strip()!r} is not NAME=VALUE")
        if name not in KNOWN:
            raise SettingError(f"{name!r} is no option; options are {', '.join(sorted(KNOWN))}")
        if name in options:
            raise SettingError(f"{name} is given twice")
        options[name] = _value(name, value)
    if _DENSE in options and options.get("policy", "all") == "all":
        raise SettingError(f"{_DENSE} needs a policy for the other layers, such as policy=hgca")
    if "patterns" in options:
        options.setdefault("policy", "patterns")
    return Setting(tuple(sorted(options.items())))


def check(setting: Setting) -> None:
    """Checks the values by the library, with a small model.

    Raises
    ------
    SettingError
    """
    session, n_q_heads = setting.session, 2
    try:
        if setting.patterns_file is not None:
            heads = Patterns.read(setting.patterns_file).layers[0]
            session["patterns"], n_q_heads = Patterns((heads,)), len(heads)
        layer = Layer(n_q_heads=n_q_heads, n_kv_heads=1, k_head_dim=64)
        with Engine(n_threads=1) as engine, Cache(engine, Model(layer), **setting.storage) as cache:
            Session(cache, **session).close()
    except TandemError as error:
        raise SettingError(str(error)) from None
