# SPDX-License-Identifier: MIT
"""Makes the cache of a model whose caller gives none.

Otherwise Transformers makes its own cache, in generate() and in the model's forward pass, without asking the attention
implementation or its mask function. So three public methods of Transformers are wrapped once. They change nothing for models
without attention "tandem":

- PreTrainedModel.__init__ and set_attn_implementation() give such a model a forward pre-hook, which makes a TandemCache if
  the pass wants a cache and has none, and refuses a cache of another kind.
- GenerationMixin.generate() makes one for the whole generation.
"""
from collections.abc import Callable, Sequence
from functools import lru_cache, wraps
from inspect import signature
from typing import Any

from transformers import GenerationMixin, PreTrainedModel

from ._attention import begin_pass
from ._cache import TandemCache
from ._layers import text_config, unsupported
from ._untraced import untraced

NAME = "tandem"


def _asks_for_tandem(model: Any) -> bool:
    return getattr(getattr(model, "config", None), "_attn_implementation", None) == NAME


@lru_cache(maxsize=None)
def _parameters_of(kind: Any) -> tuple[str, ...]:
    return tuple(signature(kind.forward).parameters)[1:]


def _parameters(model: Any) -> tuple[str, ...]:
    """Returns the parameter names of a model's forward pass, without self."""
    kind: Any = type(model)
    return _parameters_of(kind)


def _cache_name(model: Any) -> str | None:
    """Returns the model's name for its cache. Transformers 5.24 renamed it, and still accepts the old name with a warning."""
    return next((name for name in ("cache", "past_key_values") if name in _parameters(model)), None)


def _argument(model: Any, arguments: Sequence[Any], named: dict[str, Any], name: str) -> Any:
    """Returns an argument of the forward pass, positional or named; None: not given."""
    names = _parameters(model)
    at = names.index(name) if name in names else len(arguments)
    return arguments[at] if at < len(arguments) else named.get(name)


def _given(model: Any, arguments: Sequence[Any], named: dict[str, Any]) -> Any:
    """Returns the cache that the caller gives, under either name."""
    found = (_argument(model, arguments, named, name) for name in ("cache", "past_key_values"))
    return next((cache for cache in found if cache is not None), None)


def _refuse_other(given: Any) -> None:
    """Refuses a cache that keeps keys itself. Tandem would be useless, or attend room that has no keys yet."""
    if isinstance(given, TandemCache):
        return
    raise unsupported("past_key_values", f"is a {type(given).__name__}: with attn_implementation='tandem' keys and values are in a "
                      "TandemCache; pass past_key_values=tandem.transformers.TandemCache(...), or none, and one is made")


@untraced
def _before_forward(model: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """The forward pre-hook: gives the pass a cache if it wants one."""
    name = _cache_name(model)
    if name is None or not _asks_for_tandem(model):
        return None
    given = _given(model, arguments, named)
    if given is not None:
        _refuse_other(given)
    use_cache = _argument(model, arguments, named, "use_cache")
    if use_cache is None:
        use_cache = getattr(text_config(model.config), "use_cache", False)
    begin_pass(without_cache=given is None and not use_cache)
    if given is not None:
        given._model_name = type(model).__name__
        return None
    if not use_cache or getattr(model.config, "is_encoder_decoder", False):
        return None
    made = TandemCache()
    made._model_name = type(model).__name__
    at = _parameters(model).index(name)
    if at < len(arguments):
        return (*arguments[:at], made, *arguments[at + 1:]), named
    return arguments, {**named, name: made}


def _watch(model: Any) -> None:
    """Gives a model that asks for "tandem" its hook, once."""
    if _asks_for_tandem(model) and _before_forward not in model._forward_pre_hooks.values():
        model.register_forward_pre_hook(_before_forward, with_kwargs=True)


def _option_of_generation(model: Any, arguments: Sequence[Any], named: dict[str, Any], name: str) -> Any:
    """Returns an option of generate(): as given, from the given configuration, or from the model's; None: in none of these."""
    given = named.get("generation_config", arguments[1] if len(arguments) > 1 else None)
    found = (named.get(name), getattr(given, name, None), getattr(getattr(model, "generation_config", None), name, None))
    return next((value for value in found if value is not None), None)


def _with_cache(generate: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(generate)
    def generate_with_cache(self: Any, *arguments: Any, **named: Any) -> Any:
        name = _cache_name(self) if _asks_for_tandem(self) else None
        if name is None or getattr(self.config, "is_encoder_decoder", False):
            return generate(self, *arguments, **named)
        given = _given(self, (), named)
        if given is not None:
            _refuse_other(given)
            return generate(self, *arguments, **named)
        kind = _option_of_generation(self, arguments, named, "cache_implementation")
        if kind not in (None, "dynamic"):
            raise unsupported("cache_implementation", f"= {kind!r}: with attn_implementation='tandem' keys and values are in a "
                              "TandemCache, which grows in host memory; leave it out, or load the model with another attention")
        if _option_of_generation(self, arguments, named, "use_cache") is False:
            return generate(self, *arguments, **named)
        made = TandemCache()
        result = generate(self, *arguments, **{**named, name: made})
        if getattr(result, name, None) is not made:
            made.close()  # else its memory would wait for the garbage collector
        return result
    return generate_with_cache


def _then_watch(method: Callable[..., None], of_parts: bool) -> Callable[..., None]:
    @wraps(method)
    def method_then_watch(self: Any, *arguments: Any, **named: Any) -> None:
        method(self, *arguments, **named)
        for model in self.modules() if of_parts else (self,):
            if isinstance(model, PreTrainedModel):
                _watch(model)
    return method_then_watch


def give_caches() -> None:
    """Wraps the methods of Transformers, once in a process."""
    PreTrainedModel.__init__ = _then_watch(PreTrainedModel.__init__, of_parts=False)
    PreTrainedModel.set_attn_implementation = _then_watch(PreTrainedModel.set_attn_implementation, of_parts=True)
    GenerationMixin.generate = _with_cache(GenerationMixin.generate)
