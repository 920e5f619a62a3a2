# SPDX-License-Identifier: MIT
"""Shared by the tests of tandem.transformers: small models of random weights, their inputs and passes."""
import os

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
transformers = pytest.importorskip("transformers", reason="Transformers is not installed")
if int(transformers.__version__.split(".")[0]) < 5:
    pytest.skip(f"Transformers {transformers.__version__} is older than 5", allow_module_level=True)

import tandem  # noqa: E402
from tandem.transformers import TandemCache  # noqa: E402

transformers.utils.logging.disable_progress_bar()
VERSION = tuple(int(number) for number in transformers.__version__.split(".")[:2])
OLD_MASKS = VERSION < (5, 4)  # these versions ask for masks by cache_position
_WITHOUT_BACKEND = None


def _why_no_cuda():
    """Returns why there is no GPU to test on. With TANDEM_TEST_CUDA=1 a missing backend is a failure."""
    if not torch.cuda.is_available():
        return "no GPU that PyTorch can use"
    try:
        tandem.Engine(backend="cuda", n_threads=1).close()
    except tandem.BackendError as error:
        if os.environ.get("TANDEM_TEST_CUDA"):
            raise
        return f"Tandem's CUDA module: {error}"
    return None


WHY_NO_CUDA = _why_no_cuda()
needs_cuda = pytest.mark.skipif(WHY_NO_CUDA is not None, reason=str(WHY_NO_CUDA))
DEVICES = ["cpu", pytest.param("cuda", marks=needs_cuda)]

_SIZES = {"vocab_size": 97, "hidden_size": 128, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
          "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1,
          "eos_token_id": 2, "initializer_range": 0.15}


# These models compute head_dim as hidden_size / n_heads.
_WITHOUT_HEAD_DIM = {**{key: value for key, value in _SIZES.items() if key != "head_dim"}, "hidden_size": 256}
_CONFIGURATIONS = {
    "llama": ("LlamaConfig", _SIZES, {}),
    "qwen2": ("Qwen2Config", _WITHOUT_HEAD_DIM, {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2}),
    "mistral": ("MistralConfig", _SIZES, {"sliding_window": 11}),
    "gemma2": ("Gemma2Config", _SIZES, {"sliding_window": 10, "attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 48}),
    "gpt_oss": ("GptOssConfig", _SIZES, {"sliding_window": 12, "num_local_experts": 4, "num_experts_per_tok": 2,
                                         "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}),
    "gpt2": ("GPT2Config", {"vocab_size": 97, "n_embd": 256, "n_layer": 3, "n_head": 4, "n_positions": 512, "pad_token_id": 0,
                            "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.15}, {}),
    "phi3": ("Phi3Config", _WITHOUT_HEAD_DIM, {"sliding_window": 10}),
    "qwen3": ("Qwen3Config", _SIZES, {}),
    "gemma3": ("Gemma3TextConfig", _SIZES, {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2}),
    "cohere2": ("Cohere2Config", _SIZES, {"sliding_window": 8}),
    "olmo3": ("Olmo3Config", _WITHOUT_HEAD_DIM, {"sliding_window": 8}),
    "smollm3": ("SmolLM3Config", _WITHOUT_HEAD_DIM, {"no_rope_layer_interval": 2}),
    "granite": ("GraniteConfig", _WITHOUT_HEAD_DIM, {"attention_multiplier": 0.05}),
}


_MLA = {**_SIZES, "num_key_value_heads": 4, "kv_lora_rank": 64, "q_lora_rank": None, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 4,
        "n_group": 1, "topk_group": 1}
_MLA.pop("head_dim")
_CONFIGURATIONS |= {"deepseek_v2": ("DeepseekV2Config", _MLA, {}),
                    "deepseek_v3": ("DeepseekV3Config", _MLA, {"q_lora_rank": 48, "moe_intermediate_size": 32,
                                                               "first_k_dense_replace": 2})}


def configuration(name, **changes):
    """Returns the configuration of a small model of a family."""
    kind, sizes, own = _CONFIGURATIONS[name]
    return getattr(transformers, kind)(**{**sizes, **own, **changes})


FAMILIES = ["llama", "qwen2", "mistral", "gemma2", "gpt_oss"]
MORE_FAMILIES = [name for name in _CONFIGURATIONS if name not in FAMILIES]


def batch(device, n_tokens=(37, 20, 29), side="left"):
    """Returns token ids and mask of three rows of different lengths, padded on one side."""
    generator = torch.Generator().manual_seed(11)
    n = max(n_tokens)
    ids, mask = torch.zeros((len(n_tokens), n), dtype=torch.long), torch.zeros((len(n_tokens), n), dtype=torch.long)
    for row, length in enumerate(n_tokens):
        place = slice(n - length, n) if side == "left" else slice(0, length)
        ids[row, place] = torch.randint(3, 97, (length,), generator=generator)
        mask[row, place] = 1
    return ids.to(device), mask.to(device)


def run(model, ids, mask, lens, past):
    """Returns the logits [batch, columns, vocabulary] of passes of the given lengths."""
    parts, at = [], 0
    position_ids = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        for n in lens:
            there = at + n
            parts.append(model(input_ids=ids[:, at:there], attention_mask=mask[:, :there], position_ids=position_ids[:, at:there],
                               past_key_values=past, use_cache=True).logits)
            at = there
    return torch.cat(parts, 1)


_engines = {}


def new_cache(window=16, device="cpu", **options):
    """Returns a cache. There is one engine of two threads for each device."""
    if device not in _engines:
        _engines[device] = tandem.Engine(n_threads=2, pin_threads=0, backend="cuda" if device == "cuda" else None)
    return TandemCache(window, engine=_engines[device], **options)
