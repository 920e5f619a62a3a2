# SPDX-License-Identifier: MIT
"""A causal language model with two attention implementations, and the tokens of a text.

The model is loaded once, in f32. Transformers looks up the attention's name in each layer's call, so the same weights run dense
("eager") or through Tandem. A byte model (vocabulary of 256, no tokenizer in its folder) takes each byte as a token.
"""
import inspect
import pathlib
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, DynamicCache

from .._engine import dtype_row_bytes
from ..transformers import TandemCache
from ._settings import Setting

EAGER_CHUNK = 1024  # queries of one call of a dense prefill, whose weights are [heads, queries, keys]


class ModelError(ValueError):
    """The model cannot be measured, or Transformers cannot load it."""


class Tokenizer:
    """Converts text to tokens and back, by the model's tokenizer or by bytes."""

    def __init__(self, own: Any = None) -> None:
        self.own = own

    @property
    def has_chat(self) -> bool:
        """Whether the model was taught to answer in a chat."""
        return bool(getattr(self.own, "chat_template", None))

    def tokens(self, text: str, begins: bool = True) -> list[int]:
        """Returns the tokens of a text, which begins the sequence or continues it."""
        if self.own is None:
            return list(text.encode())
        return list(self.own(text, add_special_tokens=begins).input_ids)

    def text(self, tokens: list[int]) -> str:
        """Returns the text of tokens, to look at answers."""
        if self.own is None:
            return bytes(tokens).decode("utf-8", "replace")
        return str(self.own.decode(tokens, skip_special_tokens=True))

    def chat(self, content: str) -> str:
        """Returns a user's message in the model's chat template, up to where the answer begins."""
        return str(self.own.apply_chat_template([{"role": "user", "content": content}], tokenize=False,
                                                add_generation_prompt=True))


class LanguageModel:
    """The model, and forward passes of it.

    Parameters
    ----------
    model : PreTrainedModel
    tokenizer : Tokenizer
    name : str
        The name that the user gave.
    """

    def __init__(self, model: Any, tokenizer: Tokenizer, name: str) -> None:
        self.model, self.tokenizer, self.name = model.eval(), tokenizer, name
        self._keeps = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._attention = ""

    @property
    def is_of_bytes(self) -> bool:
        """Whether tokens, and so perplexities, are of bytes."""
        return self.tokenizer.own is None

    @property
    def n_layers(self) -> int:
        """Number of the decoder's layers."""
        return int(self.model.config.get_text_config(decoder=True).num_hidden_layers)

    @property
    def n_heads(self) -> int:
        """Number of a layer's query heads."""
        return int(self.model.config.get_text_config(decoder=True).num_attention_heads)

    @property
    def n_positions(self) -> int:
        """Longest context that the model was made for; 0: its configuration does not say."""
        return int(getattr(self.model.config, "max_position_embeddings", 0) or 0)

    def attend_by(self, attention: str) -> None:
        """Chooses the attention implementation of later passes."""
        if attention != self._attention:
            self.model.set_attn_implementation(attention)
            self._attention = attention

    def forward(self, ids: torch.Tensor, past: Any, n_logits: int = 0, **options: Any) -> Any:
        """Runs a pass over tokens [n_tokens] and returns the logits of the last `n_logits`; 0: of all."""
        self.attend_by("tandem" if isinstance(past, TandemCache) else options.pop("attention", "eager"))
        kept = {"logits_to_keep": n_logits} if self._keeps and n_logits else {}
        with torch.inference_mode():
            return self.model(ids[None].to(self.model.device), past_key_values=past, use_cache=True, **kept, **options)

    def prefill(self, ids: torch.Tensor, past: Any, **options: Any) -> torch.Tensor:
        """Runs all tokens in one call, as generate() does; dense attention in chunks. Returns the last token's logits,
        [vocabulary]."""
        size = len(ids) if isinstance(past, TandemCache) else EAGER_CHUNK
        for first in range(0, len(ids), size):
            logits = self.forward(ids[first:first + size], past, 1, **options).logits
        last: torch.Tensor = logits[0, -1].float()
        return last

    def step(self, token: torch.Tensor, past: Any, **options: Any) -> torch.Tensor:
        """Runs one call over a token, or a few. Returns the last token's logits, [vocabulary]."""
        logits: torch.Tensor = self.forward(token, past, 1, **options).logits[0, -1].float()
        return logits

    def new_cache(self, setting: Setting | None) -> Any:
        """Returns an empty cache. None: Transformers' own, for dense attention."""
        if setting is None:
            return DynamicCache(config=self.model.config)
        options = setting.session
        return TandemCache(window=options.pop("window_tokens", -1), storage=setting.storage,  # type: ignore[arg-type]
                           dense_layers=setting.dense_layers, **options)


def close(past: Any) -> None:
    """Releases a cache's memory. Transformers' own cache needs no close()."""
    if isinstance(past, TandemCache):
        past.close()


def token_bytes(past: TandemCache) -> list[int]:
    """Returns the bytes of a token's keys and values in each layer."""
    assert past.cache is not None
    k_type = past._storage.get("k_type", "f32")  # default: the model's type
    v_type = past._storage.get("v_type", k_type)
    return [layer.n_kv_heads * (dtype_row_bytes(k_type, layer.k_head_dim) + dtype_row_bytes(v_type, layer.v_dim))
            for layer in past.cache.layers]


def pattern_pairs(past: Any) -> dict[str, float]:
    """Returns the (query, key) pairs that prompts attended under head patterns, by the session's statistics, and their share of
    all."""
    stats = past.session.stats() if isinstance(past, TandemCache) and past.session is not None else None
    if stats is None or not stats.pattern_dense_pairs:
        return {}
    return {"pattern_pairs": stats.pattern_pairs, "pattern_dense_pairs": stats.pattern_dense_pairs,
            "pattern_pairs_share": stats.pattern_pairs / stats.pattern_dense_pairs}


def memory(past: Any) -> dict[str, int]:
    """Returns the bytes of the rows of keys and values, and of the memory held for them. Tandem takes larger blocks."""
    if not isinstance(past, TandemCache):
        n_bytes = sum(layer.keys.nbytes + layer.values.nbytes for layer in past.layers)
        return {"kv_row_bytes": n_bytes, "kv_held_bytes": n_bytes}
    assert past.cache is not None
    rows = sum(sequence.length(layer_idx) * n_bytes for layer_idx, n_bytes in enumerate(token_bytes(past))
               for sequence in past.sequences)
    return {"kv_row_bytes": rows, "kv_held_bytes": past.cache.stats().host_kv_bytes}


def _has_tokenizer(name: str) -> bool:
    folder = pathlib.Path(name)
    return not folder.is_dir() or any(folder.glob("token*")) or any(folder.glob("*.model")) or any(folder.glob("vocab*"))


def load(name: str, gguf_file: str | None, device: str = "cpu") -> LanguageModel:
    """Loads a model from a folder or by its hub name, onto a device.

    Raises
    ------
    ModelError
    """
    options: dict[str, Any] = {"gguf_file": gguf_file} if gguf_file else {}
    try:
        own = AutoTokenizer.from_pretrained(name, **options) if gguf_file or _has_tokenizer(name) else None
        if own is None:
            n_tokens = AutoConfig.from_pretrained(name).vocab_size
            if n_tokens != 256:
                raise ModelError(f"{name}: has no tokenizer, and vocab_size = {n_tokens} is not that of bytes, 256")
        model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32, attn_implementation="eager", **options)
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise error if isinstance(error, ModelError) else ModelError(f"{name}: {error}") from error
    return LanguageModel(model.to(device), Tokenizer(own), name)
