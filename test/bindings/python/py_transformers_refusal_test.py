# SPDX-License-Identifier: MIT
"""tandem.transformers refuses unsupported uses and names the reason, also masks that contradict the stored tokens."""
import pytest
from hf_common import OLD_MASKS, batch, new_cache, run, torch, transformers
from hf_gate import models

import tandem
from tandem.transformers import TandemCache, tandem_attention, tandem_mask


@pytest.fixture(scope="module")
def llama():
    return models("llama", torch.float32, "cpu")


def call(model, past, n=5, **arguments):
    with torch.no_grad():
        return model(torch.arange(3, 3 + n)[None], past_key_values=past, **arguments)


def refused(model, past, match, kind=tandem.UnsupportedError, **arguments):
    with pytest.raises(kind, match=match):
        call(model, past, **arguments)


def test_other_caches(llama):
    """A layer that is called outside of a model's pass has no cache, and Tandem cannot make one."""
    for given in (transformers.DynamicCache(), transformers.StaticCache(config=llama[0].config, max_cache_len=64)):
        refused(llama[0], given, f"past_key_values is a {type(given).__name__}: .*pass past_key_values=")
    call(llama[0], new_cache())  # a pass with a cache does not allow one without
    states = torch.zeros(1, 4, 3, 64)
    with pytest.raises(tandem.UnsupportedError, match="past_key_values is not a TandemCache"):
        tandem_attention(torch.nn.Module(), states, states, states, None)


def test_other_attention(llama):
    refused(llama[1], new_cache(), "keys of layer 0 were not attended .* attn_implementation='tandem'", tandem.InvalidStateError)


def test_other_attention_in_a_model_of_one_layer():
    """The second pass is refused whatever method was called in between, because the keys of the first are stored nowhere."""
    eager = models("llama", torch.float32, "cpu", num_hidden_layers=1)[1]
    for ask in (lambda past: past.get_seq_length(), lambda past: past.crop(0), lambda past: past.sequences, lambda past: past.fork()):
        past = new_cache()
        call(eager, past)
        ask(past)
        refused(eager, past, "keys of layer 0 were not attended", tandem.InvalidStateError)


def test_gradients_and_dropout(llama):
    with pytest.raises(tandem.UnsupportedError, match="requires_grad"):
        llama[0](torch.tensor([[3, 4]]), past_key_values=new_cache())
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**{**llama[0].config.to_dict(), "attention_dropout": 0.5})
    model = transformers.LlamaForCausalLM._from_config(config, attn_implementation="tandem").train()
    refused(model, new_cache(), "dropout = 0.5")
    call(model.eval(), new_cache())


def test_arguments(llama):
    refused(llama[0], new_cache(), "position_bias is an argument of attention that is not known", position_bias=torch.zeros(1))
    refused(llama[0], new_cache(), "not causal|is_causal = False", is_causal=False)
    refused(llama[0], new_cache(), r"attention_mask has 4 dimensions.* \[batch, columns\]", attention_mask=torch.zeros(1, 1, 5, 5))
    refused(llama[0], new_cache(), "attention_mask has 3 dimensions", tandem.InvalidArgumentError,
            attention_mask=torch.zeros(1, 5, 5))
    for options, field in (({"layers": 5}, "layers"), ({"storage": 5}, "storage"), ({"dense_layers": 5}, "dense_layers"),
                           ({"dense_layers": [0, "x"]}, "dense_layers[1]"),
                           ({"dense_layers": [0], "layer_policies": ["all"] * 4}, "dense_layers")):
        with pytest.raises(tandem.InvalidArgumentError) as raised:
            TandemCache(**options)
        assert raised.value.field == field
    for dense_layers, field in (([0, 4], r"dense_layers\[1\] = 4, the model has layers 0 to 3"), ([-1], r"dense_layers\[0\] = -1")):
        refused(llama[0], TandemCache(policy="hgca", dense_layers=dense_layers), field, tandem.InvalidArgumentError)


@pytest.mark.parametrize("options, match", [
    ({"windows": 3}, "no option 'windows'; did you mean 'window'"), ({"window_tokens": 5}, "TandemCache calls it window"),
    ({"dense_layer": [1]}, "did you mean 'dense_layers'"), ({"polices": "all"}, "did you mean 'policy'"),
    ({"n_streaming_heads": 1}, "no option 'n_streaming_heads'"), ({"zzz": 1}, "no option 'zzz'$"),
    ({"k_type": "f32"}, r"storage=\{'k_type': ...\}"), ({"storage": {"ktype": "f32"}}, "'ktype'; did you mean 'k_type'"),
], ids=str)
def test_options_that_do_not_exist(options, match):
    with pytest.raises(TypeError, match=match):
        TandemCache(**options)


def test_options_of_a_fork_that_do_not_exist(llama):
    call(llama[0], past := new_cache())
    with pytest.raises(TypeError, match="no option 'windows'; did you mean 'window'"):
        past.fork(windows=3)
    past.fork(window=3).close()


@pytest.mark.parametrize("options, field, match", [
    ({"window": "x"}, "window", "= 'x' is not an integer"), ({"window": 1.5}, "window", "= 1.5 is not an integer"),
    ({"window": -7}, "window", "^window = -7 is not -1 or"), ({"policy": "hgac"}, "policy", "did you mean 'hgca'"),
    ({"policy": 5}, "policy", "= 5 is none of all, streaming"), ({"policy": ["all"]}, "policy", "is none of"),
    ({"layer_policies": ["all", "hgac"]}, "layer_policies[1]", "did you mean 'hgca'"),
    ({"layer_policies": "all"}, "layer_policies", "not a sequence"), ({"storage": {"k_type": "f33"}}, "k_type", "is none of f32"),
    ({"storage": {"layer_v_types": ["f32", "f1"]}}, "layer_v_types[1]", "is none of"), ({"storage": 5}, "storage", "is a int"),
    ({"alpha": 7}, "alpha", "^alpha = 7 is not in 0 to 1"), ({"alpha": "x"}, "alpha", "is not a number"),
    ({"sink_tokens": -5}, "sink_tokens", "^sink_tokens = -5"), ({"route": "streem"}, "route", "^route = .streem."),
    ({"pruning": "3k"}, "pruning", "no layer has a policy that prunes"), ({"pruning": 5, "policy": "hip"}, "pruning", ""),
    ({"patterns": 5}, "patterns", "is neither"), ({"streaming_heads": [[5]]}, "streaming_heads[0][0]", "is neither True"),
    ({"sleep_between_calls": "x"}, "sleep_between_calls", "is not an integer"), ({"engine": 5}, "engine", "is a int, not a Engine"),
    ({"layers": [5]}, "layers[0]", "is a int, not a Layer"), ({"layers": 5}, "layers", "is not a sequence"),
], ids=str)
def test_options_of_wrong_values(options, field, match):
    """Refused where they are given, with a ValueError as from Python's own constructors."""
    with pytest.raises(ValueError, match=match) as raised:
        TandemCache(**options)
    assert isinstance(raised.value, tandem.InvalidArgumentError) and raised.value.field == field
    with pytest.raises(tandem.InvalidHandleError), tandem.Engine(n_threads=1) as engine:
        engine.close()
        TandemCache(3, engine=engine)


def test_options_are_checked_by_one_engine(monkeypatch):
    """An engine takes milliseconds to make."""
    made = []
    monkeypatch.setattr("tandem.transformers._engines.Engine", lambda **options: made.append(options) or tandem.Engine(**options))
    monkeypatch.setattr("tandem.transformers._engines._asked", [])
    for window in range(1, 6):
        TandemCache(window, alpha=0.25)
        with pytest.raises(tandem.InvalidArgumentError, match="alpha"):
            TandemCache(window, alpha=7)
    assert len(made) == 1


@pytest.mark.parametrize("options", [
    {"layer_policies": ["all", "hip"], "pruning": "3k"}, {"policy": "hip", "pruning": "3k"}, {"policy": "patterns"},
    {"route": "host+stream", "stream_fraction": 0.5}, {"route": "recompute"}, {"streaming_heads": [[True, False]]},
    {"policy": None, "alpha": None}, {"storage": {"k_type": "q8_0", "layer_v_types": ["f16"] * 5, "k_rotation": "hadamard"}},
], ids=str)
def test_options_that_depend_on_the_model(options):
    """The first pass knows the model, and reports options that do not fit it."""
    TandemCache(**options)


def test_attention_weights_as_output(llama):
    with pytest.raises((tandem.UnsupportedError, ValueError)):
        call(llama[0], new_cache(), output_attentions=True)


@pytest.mark.skipif(OLD_MASKS, reason="Transformers before 5.4 makes every decoder causal")
def test_bidirectional_models(llama):
    config = transformers.LlamaConfig(**{**llama[0].config.to_dict(), "is_causal": False})
    model = transformers.LlamaForCausalLM._from_config(config, attn_implementation="tandem").eval()
    refused(model, new_cache(), "mask_function is not causal")


def test_masks_that_are_not_causal():
    from transformers import masking_utils as m
    sizes = {"batch_size": 2, "q_length": 6, "kv_length": 10, "q_offset": 4}
    padding = torch.ones((2, 10), dtype=torch.bool)
    assert tandem_mask(**sizes, attention_mask=padding) is padding
    assert tandem_mask(**sizes, mask_function=m.sliding_window_causal_mask_function(3), local_size=3) is None
    packed = torch.tensor([[0] * 5 + [1] * 5] * 2)
    blocks = torch.tensor([[-1] * 6 + [0, 0] + [-1] * 2] * 2)
    blockwise = [] if OLD_MASKS else [(m.or_masks(causal, m.blockwise_overlay(blocks)), window) for causal, window in (
        (m.causal_mask_function, None), (m.sliding_window_causal_mask_function(3), 3))]
    for function, window in [(m.bidirectional_mask_function, None), (m.sliding_window_causal_mask_function(3), None),
                             (m.sliding_window_causal_mask_function(3), 4), (m.sliding_window_causal_mask_function(4), 3),
                             *((getattr(m, name)(3), 3) for name in ("sliding_window_bidirectional_mask_function",)
                               if hasattr(m, name)),
                             (m.chunked_causal_mask_function(4, torch.zeros(2, dtype=torch.long)), 4),
                             (m.and_masks(m.causal_mask_function, m.packed_sequence_mask_function(packed)), None),
                             *blockwise]:
        with pytest.raises(tandem.UnsupportedError, match="mask_function"):
            tandem_mask(**sizes, mask_function=function, local_size=window)
    with pytest.raises(tandem.UnsupportedError, match="caller's own"):
        tandem_mask(**sizes, use_vmap=True)
    with pytest.raises(tandem.UnsupportedError, match="queries are the last"):
        tandem_mask(**{**sizes, "kv_length": 12})


def test_masks_that_contradict_what_is_stored(llama):
    ids, mask = batch("cpu")
    past = new_cache()
    run(llama[0], ids, mask, [37], past)
    lengths = [s.length() for s in past.sequences]

    def next_pass(mask, match, kind=tandem.InvalidArgumentError):
        with pytest.raises(kind, match=match), torch.no_grad():
            llama[0](torch.full((3, 1), 5), attention_mask=mask, past_key_values=past)
        assert [s.length() for s in past.sequences] == lengths and past.get_seq_length() == 37

    shown = torch.cat([mask, torch.ones((3, 1), dtype=torch.long)], 1)
    next_pass(None, "attention_mask is None, but columns")
    next_pass(shown[:, 1:], r"has shape \[3, 37\], must be \[3, 37 \+ 1\]")
    for row, column, value in ((0, 3, 0), (1, 0, 1)):
        other = shown.clone()
        other[row, column] = value
        next_pass(other, "is not that of the calls before in its first 37 columns")
    with pytest.raises(tandem.InvalidArgumentError, match="batch = 2, the cache has 3"), torch.no_grad():
        llama[0](torch.full((2, 1), 5), past_key_values=past)
    with torch.no_grad():  # a pass that fits still works
        llama[0](torch.full((3, 1), 5), attention_mask=shown, past_key_values=past)


def test_rows_that_are_not_there(llama):
    ids, mask = batch("cpu")
    past = new_cache()
    run(llama[0], ids, mask, [37], past)
    before = [s.digest() for s in past.sequences]
    for change, field in ((lambda: past.reorder_cache(torch.tensor([0, 1, 9])), "beam_idx[2]"),
                          (lambda: past.reorder_cache(torch.tensor([0, -1, 1])), "beam_idx[1]"),
                          (lambda: past.reorder_cache(torch.tensor([0.0, 0.5, 1.0])), "beam_idx[0]"),
                          (lambda: past.reorder_cache(torch.tensor([[0], [1], [2]])), "beam_idx[0]"),
                          (lambda: past.batch_select_indices(torch.tensor([3])), "indices[0]"),
                          (lambda: past.batch_select_indices(torch.tensor([True, False])), "indices"),
                          (lambda: past.batch_repeat_interleave(0), "repeats"), (lambda: past.crop(None), "tokens_to_remove"),
                          (lambda: past.crop(1.5), "tokens_to_remove"), (lambda: past.crop(-38), "tokens_to_remove")):
        with pytest.raises(tandem.InvalidArgumentError) as raised:
            change()
        assert raised.value.field == field and [s.digest() for s in past.sequences] == before
    past.batch_select_indices(torch.tensor([True, False, True]))
    assert [s.digest() for s in past.sequences] == [before[0], before[2]]


def test_padding_inside_a_sliding_window():
    model = models("mistral", torch.float32, "cpu")[0]
    ids, mask = batch("cpu", side="right")
    past = new_cache()
    run(model, ids, mask, [37], past)  # padding at the end is allowed, too
    with pytest.raises(tandem.UnsupportedError, match="padding between tokens of a row"), torch.no_grad():
        model(torch.full((3, 1), 5), attention_mask=torch.cat([mask, torch.ones((3, 1), dtype=torch.long)], 1), past_key_values=past)


def test_geometry_that_differs(llama):
    layer = tandem.Layer(n_q_heads=4, n_kv_heads=2, k_head_dim=64, sm_scale=0.5)
    refused(llama[0], TandemCache(layers=[layer] * 4), r"layers\[0\].sm_scale = 0.5, the model's layer has 0.125",
            tandem.InvalidArgumentError)
    right = tandem.Layer(n_q_heads=4, n_kv_heads=2, k_head_dim=64, sm_scale=0.125)
    call(llama[0], TandemCache(layers=[right] * 4))


def test_linear_layers_and_offload():
    past = new_cache()
    for refuse in (lambda: past.update_conv_state(torch.zeros(1), 0), lambda: past.offload(0), lambda: past.prefetch(0),
                   lambda: past.early_initialization(1, 1, 64, torch.float32, "cpu"), lambda: past.get_conv_state(1),
                   lambda: past.update_recurrent_state(torch.zeros(1), 0), lambda: past.get_recurrent_state(0),
                   lambda: past.update_indexer(torch.zeros(1), 0), lambda: past.layers[0], lambda: past.conv_states):
        with pytest.raises(tandem.UnsupportedError):
            refuse()
    assert not any(past.layers) and len(past.layers) == 0


_SIZES = {"vocab_size": 97, "hidden_size": 128, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
          "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_n_groups": 1}
_EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1}
OTHER_LAYERS = {
    "Jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8, "use_mamba_kernels": False, **_EXPERTS},
    "Bamba": {"attn_layer_indices": [1, 3], "mamba_expand": 2, **_MAMBA2},
    "Qwen3Next": {"head_dim": 64, "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16,
                  "linear_value_head_dim": 16, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, **_EXPERTS},
    "FalconH1": {"head_dim": 64, **_MAMBA2, "mamba_d_ssm": 128, "mamba_n_heads": 4},
    "Lfm2": {"full_attn_idxs": [0, 3]},
    "GraniteMoeHybrid": {"layer_types": ["attention", "mamba"] * 2, "num_local_experts": 2, "num_experts_per_tok": 1,
                         "shared_intermediate_size": 64, **_MAMBA2},
    "Zamba2": {"layers_block_type": ["mamba", "hybrid"] * 2, "hybrid_layer_ids": [1, 3], "n_mamba_heads": 8, "mamba_headdim": 32,
               "mamba_d_state": 16, "mamba_ngroups": 1, "use_mamba_kernels": False},
    "Llama4Text": {"head_dim": 64, "num_local_experts": 2, "intermediate_size_mlp": 96, "attention_chunk_size": 16},
    "Gemma3nText": {"head_dim": 64, "hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": 97, "intermediate_size": [96] * 4,
                    "num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 2, "laurel_rank": 8,
                    "activation_sparsity_pattern": [0.0] * 4},
    "DeepseekV32": {"num_key_value_heads": 4, "kv_lora_rank": 64, "q_lora_rank": 64, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32,
                    "v_head_dim": 64, "n_routed_experts": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 4, "n_group": 1,
                    "topk_group": 1, "index_n_heads": 2, "index_head_dim": 64, "index_topk": 8},
}


@pytest.mark.parametrize("family", OTHER_LAYERS)
def test_models_with_layers_of_another_kind(family):
    """Mixtures of attention and state spaces, chunked attention, keys of other layers, an index of keys: refused before
    anything is stored."""
    kind = getattr(transformers, f"{family}Config", None)
    if kind is None:
        pytest.skip(f"Transformers {transformers.__version__} has no {family}")
    if family == "Zamba2" and OLD_MASKS:
        pytest.skip("Transformers before 5.4 cannot make so small a Zamba2")
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(kind(**{**_SIZES, **OTHER_LAYERS[family]}), attn_implementation="tandem")
    past = new_cache()
    with torch.no_grad(), pytest.raises(tandem.UnsupportedError) as raised:
        model.eval()(torch.arange(3, 8)[None], past_key_values=past)
    assert raised.value.field in ("layers", "layer_types", "layers_block_type", "num_kv_shared_layers")
    assert past.get_seq_length() == 0 and past.sequences == []
