# SPDX-License-Identifier: MIT
"""Makes the cache of a model whose caller gives none.

Otherwise Transformers makes its own cache, in generate() and in the model's forward pass, without asking the attention
implementation or its mask function. So three public methods of Transformers are wrapped once. They change nothing for models
without attention "tandem":

- PreTrainedModel.__init__ and set_attn_implementation() give such a model two hooks. One runs before a pass: it makes a
  TandemCache if the pass wants a cache and has none, and refuses a cache of another kind. The other runs after the pass and
  refuses a model that has not attended by Tandem.
- GenerationMixin.generate() makes a cache for the whole generation.
"""
from collections.abc import Callable, Sequence
from functools import lru_cache, wraps
from inspect import signature
from typing import Any

from transformers import GenerationMixin, PreTrainedModel

from ._attention import begin_pass
from ._cache import TandemCache
from ._layers import text_config, unsupported
from ._own_attention import count_from_here, refuse_own_attention, refuse_unattended
from ._untraced import untraced

NAME = "tandem"
_GROW = ("dynamic", "dynamic_full")  # caches by name; the second is what an assistant of Transformers 5.0 asks for


def _asks(config: Any) -> bool:
    return getattr(config, "_attn_implementation", None) == NAME


def _asks_for_tandem(model: Any) -> bool:
    return _asks(getattr(model, "config", None))


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
    if not _asks_for_tandem(model):
        return None
    count_from_here(model)
    name = _cache_name(model)
    if name is None:
        return None
    given = _given(model, arguments, named)
    if given is not None:
        _refuse_other(given)
    use_cache = _argument(model, arguments, named, "use_cache")
    if use_cache is None:
        use_cache = getattr(text_config(model.config), "use_cache", False)
    begin_pass(without_cache=given is None and not use_cache)
    if given is not None:
        given._model_name, given._has_passed = type(model).__name__, False
        return None
    if not use_cache or getattr(model.config, "is_encoder_decoder", False):
        return None
    made = TandemCache()
    made._model_name = type(model).__name__
    at = _parameters(model).index(name)
    if at < len(arguments):
        return (*arguments[:at], made, *arguments[at + 1:]), named
    return arguments, {**named, name: made}


@untraced
def _after_forward(model: Any, arguments: tuple[Any, ...], named: dict[str, Any], _output: Any) -> None:
    """The forward hook: refuses what no layer, or not every layer, has attended by Tandem."""
    if _asks_for_tandem(model):
        given = _given(model, arguments, named)
        refuse_unattended(model, _cache_name(model) is not None, given if isinstance(given, TandemCache) else None)


def _watch(model: Any) -> None:
    """Gives a model that asks for "tandem" its hooks, once."""
    if _asks_for_tandem(model) and _before_forward not in model._forward_pre_hooks.values():
        refuse_own_attention(model)
        model.register_forward_pre_hook(_before_forward, with_kwargs=True)
        model.register_forward_hook(_after_forward, with_kwargs=True)


def _option_of_generation(model: Any, arguments: Sequence[Any], named: dict[str, Any], name: str) -> Any:
    """Returns an option of generate(): as given, from the given configuration, or from the model's; None: in none of these."""
    given = named.get("generation_config", arguments[1] if len(arguments) > 1 else None)
    found = (named.get(name), getattr(given, name, None), getattr(getattr(model, "generation_config", None), name, None))
    return next((value for value in found if value is not None), None)


def _refuse_option(kind: Any) -> None:
    """Refuses a cache that is named, but for those that grow, and "hybrid", which Transformers takes for no name at all."""
    if kind not in (None, *_GROW, "hybrid"):
        raise unsupported("cache_implementation", f"= {kind!r}: with attn_implementation='tandem' keys and values are in a "
                          "TandemCache, which grows in host memory; leave it out (model.generation_config may have it too), or load "
                          "the model with another attention")


def _with_cache(generate: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(generate)
    def generate_with_cache(self: Any, *arguments: Any, **named: Any) -> Any:
        # Of a model of several parts it is the decoder that has the cache.
        name = _cache_name(self) if _asks_for_tandem(self) or _asks(text_config(getattr(self, "config", None))) else None
        if name is None or getattr(self.config, "is_encoder_decoder", False):
            return generate(self, *arguments, **named)
        given = _given(self, (), named)
        # From embeddings Transformers always generates with a cache.
        uses_cache = _option_of_generation(self, arguments, named, "use_cache") is not False or "inputs_embeds" in named
        kind = _option_of_generation(self, arguments, named, "cache_implementation")
        if given is not None:
            _refuse_other(given)
            if not uses_cache:
                raise unsupported("use_cache", "= False beside past_key_values: every step would append the whole text to the cache "
                                  "again; leave one of them out (model.generation_config may have use_cache too)")
            return generate(self, *arguments, **named)
        _refuse_option(kind)
        if not uses_cache:
            return generate(self, *arguments, **named)
        if kind in _GROW:  # which Transformers would refuse beside a cache that is given
            named = {**named, "cache_implementation": None}
        made = TandemCache()
        result = generate(self, *arguments, **{**named, name: made})
        if getattr(result, name, None) is not made:
            made.close()  # else its memory would wait for the garbage collector
        return result
    return generate_with_cache


def _refuse_left(model: Any, attn_implementation: Any, **_: Any) -> None:
    """Refuses what set_attn_implementation() was to set and Transformers has left as it was, with a warning alone."""
    parts = attn_implementation if isinstance(attn_implementation, dict) else {"": attn_implementation}
    for name, implementation in parts.items():
        config = getattr(model.config, name, None) if name else model.config
        if implementation == NAME and config is not None and not _asks(config):
            raise unsupported("attn_implementation", f"of {name or type(model).__name__} is still {config._attn_implementation!r}: "
                              "Transformers does not set it for this model, whose attention is code of its own, or is looked up in a "
                              "way that Transformers does not know; from_pretrained(attn_implementation='tandem') may set it")


def _then_watch(method: Callable[..., None], of_parts: bool) -> Callable[..., None]:
    @wraps(method)
    def method_then_watch(self: Any, *arguments: Any, **named: Any) -> None:
        method(self, *arguments, **named)
        for model in self.modules() if of_parts else (self,):
            if isinstance(model, PreTrainedModel):
                _watch(model)
        if of_parts:
            _refuse_left(self, *arguments, **named)
    return method_then_watch


def give_caches() -> None:
    """Wraps the methods of Transformers, once in a process."""
    PreTrainedModel.__init__ = _then_watch(PreTrainedModel.__init__, of_parts=False)
    PreTrainedModel.set_attn_implementation = _then_watch(PreTrainedModel.set_attn_implementation, of_parts=True)
    GenerationMixin.generate = _with_cache(GenerationMixin.generate)
