# SPDX-License-Identifier: MIT
"""tandem.transformers in its users' hands: other families, ways to generate, mistakes in training and with two models."""
import copy
import types

import pytest
from hf_common import (DEVICES, FAMILIES, MORE_FAMILIES, OLD_MASKS, VERSION, batch, configuration, needs_cuda, new_cache, run, torch,
                       transformers)
from hf_gate import assert_within_gate, models

import tandem
from tandem.transformers import TandemCache, tandem_attention
from tandem.transformers._layers import window_of


@pytest.fixture(scope="module")
def llama():
    return models("llama", torch.float32, "cpu")


def eager_cache(model):
    return transformers.DynamicCache(config=model.config)


def skip_where_kernels_are_missing(family, device):
    if family.startswith("deepseek") and device == "cuda":
        pytest.skip("the CUDA module has kernels for K and V of the same dims alone: test_deepseek_on_a_device")


@needs_cuda
def test_deepseek_on_a_device():
    """K and V of different dims are refused before anything is stored. The error names the dims."""
    mine, _, _ = models("deepseek_v3", torch.float32, "cuda")
    ids, mask = batch("cuda")
    with torch.no_grad(), pytest.raises(tandem.UnsupportedError, match=r"k_head_dim = \d+ with v_head_dim = \d+"):
        mine(ids, attention_mask=mask, past_key_values=new_cache(8, "cuda"))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family, dtype", [*((name, torch.float32) for name in MORE_FAMILIES),
                                           *((name, torch.float16) for name in FAMILIES)])
def test_more_families_and_types(family, dtype, device):
    skip_where_kernels_are_missing(family, device)
    ids, mask = batch(device)
    assert_within_gate(models(family, dtype, device), ids, mask, [21, 9] + [1] * 7, new_cache(8, device),
                       soft_cap=family == "gemma2")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family, options", [
    ("gpt_oss", {"do_sample": True, "num_return_sequences": 3}), ("mistral", {"do_sample": True, "num_beams": 3}),
    ("qwen2", {"num_beams": 4, "num_return_sequences": 4}), ("gemma2", {"prefill_chunk_size": 8}),
    ("gpt_oss", {"num_beams": 2}), ("mistral", {"prefill_chunk_size": 5, "num_beams": 2}), ("deepseek_v3", {"num_beams": 2})],
    ids=["return", "beam_sample", "all_beams", "chunks", "beams", "chunks_beams", "mla_beams"])
def test_ways_to_generate(family, options, device):
    skip_where_kernels_are_missing(family, device)
    if "prefill_chunk_size" in options and OLD_MASKS:
        pytest.skip("Transformers before 5.4 counts a position twice after a prompt in chunks, which Tandem refuses")
    mine, eager, _ = models(family, torch.float32, device)
    ids, mask = batch(device)
    texts = []
    for model, past in ((mine, new_cache(8, device)), (eager, eager_cache(eager))):
        torch.manual_seed(3)
        texts.append(model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=10, min_new_tokens=10, past_key_values=past,
                                    **options))
    assert torch.equal(*texts)


@pytest.mark.parametrize("options, sleeps", [({}, True), ({"sleep_between_calls": False}, False)])
def test_workers_sleep_while_pytorch_computes(llama, monkeypatch, options, sleeps):
    """A pass is a step. It would keep Tandem's workers spinning on the cores that the model's own products need."""
    made = []

    class Watched(tandem.Session):
        def __init__(self, cache, **options):
            made.append(options["sleep_between_calls"])
            super().__init__(cache, **options)

    monkeypatch.setattr("tandem.transformers._cache.Session", Watched)
    ids, mask = batch("cpu")
    with torch.no_grad():
        llama[0](ids, attention_mask=mask, past_key_values=TandemCache(**options))
    assert made == [sleeps]


def test_dense_layers_attend_every_key(llama):
    """With all layers dense, any policy is exact. With some, the logits are those of layer_policies with the same layers,
    also in a fork."""
    mine, eager, _ = llama
    ids, mask = (tensor[:1] for tensor in batch("cpu"))
    options = {"policy": "streaming", "sink_tokens": 2}
    lens = [20] + [1] * (ids.shape[1] - 20)

    def logits(model, past):
        return run(model, ids, mask, lens, past)

    n_layers = mine.config.num_hidden_layers
    exact, sparse = logits(eager, eager_cache(eager)), logits(mine, new_cache(4, **options))
    assert (logits(mine, new_cache(4, dense_layers=range(n_layers), **options)) - exact).abs().max() < 1e-4
    some = logits(mine, new_cache(4, dense_layers=[2, 0], **options))
    by_name = logits(mine, new_cache(4, layer_policies=["all", "streaming", "all", "streaming"], sink_tokens=2))
    assert n_layers == 4 and torch.equal(some, by_name)
    assert (some - exact).abs().max() > 1e-3 and (some - sparse).abs().max() > 1e-3
    forked = new_cache(4, dense_layers=[0, 2], **options).fork()
    assert torch.equal(logits(mine, forked), some)


def test_assisted_generation(llama):
    """A smaller model proposes tokens, and wrong ones are cropped."""
    mine, eager, _ = llama
    ids, mask = (tensor[:1] for tensor in batch("cpu"))
    torch.manual_seed(1)
    small = transformers.AutoModelForCausalLM.from_config(configuration("llama", num_hidden_layers=1),
                                                          attn_implementation="eager").eval()
    texts = []
    for model, options in ((mine, {"past_key_values": new_cache(8), "assistant_model": small}), (eager, {})):
        texts.append(model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=16, do_sample=False,
                                    eos_token_id=-1, **options))
    assert torch.equal(*texts) and texts[0].shape[1] > ids.shape[1] + 8


@pytest.mark.parametrize("policy", ["all", "hgca"])
@pytest.mark.parametrize("family", ["mistral", "gemma2"])
def test_another_text_after_the_same_beginning(family, policy):
    """Cropped to the common beginning of two prompts, the cache gives the text of one that has seen only the second."""
    mine = models(family, torch.float32, "cpu")[0]
    ids, mask = batch("cpu")
    other = torch.cat([ids[:, :25], ids[:, 25:].flip(1).roll(1, 0)], 1)
    window = {"all": 8, "hgca": 64}[policy]  # the window holds everything, so nothing is selected
    past, texts = new_cache(window, policy=policy), []
    options = {"attention_mask": mask, "max_new_tokens": 8, "min_new_tokens": 8}
    mine.generate(input_ids=ids, past_key_values=past, **options)
    past.crop(25)
    for cache in (past, new_cache(window, policy=policy)):
        texts.append(mine.generate(input_ids=other, past_key_values=cache, **options))
    assert torch.equal(*texts)


def call(model, past, n=5, **arguments):
    return model(torch.arange(3, 3 + n)[None], past_key_values=past, **arguments)


def test_attention_weights_are_refused_everywhere(llama):
    mine = llama[0]
    ids, mask = batch("cpu")
    with torch.no_grad(), pytest.raises(tandem.UnsupportedError, match="output_attentions"):
        call(mine, new_cache(), output_attentions=True)
    with pytest.raises(tandem.UnsupportedError, match="output_attentions"):
        mine.generate(ids, attention_mask=mask, past_key_values=new_cache(), output_attentions=True, max_new_tokens=2)
    with pytest.raises(ValueError, match="output_attentions"):  # raised by Transformers
        mine.config.output_attentions = True
    with torch.no_grad():
        assert len(call(mine, new_cache(), output_hidden_states=True).hidden_states) == 5


def test_other_caches_are_refused(llama):
    mine = llama[0]
    ids, mask = batch("cpu")
    for options, match in (({"cache_implementation": "static"}, "cache_implementation = 'static'.*leave it out"),
                           ({"generation_config": transformers.GenerationConfig(cache_implementation="offloaded")}, "= 'offloaded'"),
                           ({"past_key_values": transformers.StaticCache(config=mine.config, max_cache_len=64)},
                            "is a StaticCache.*pass past_key_values=tandem.transformers.TandemCache")):
        with pytest.raises(tandem.UnsupportedError, match=match):
            mine.generate(ids, attention_mask=mask, max_new_tokens=3, **options)
    with pytest.raises(ValueError, match="cache_implementation"):  # raised by Transformers
        mine.generate(ids, attention_mask=mask, max_new_tokens=3, cache_implementation="static", past_key_values=new_cache())


def test_training(llama):
    """A pass is refused if its gradients would be lost. Without gradients a model may be in training mode."""
    trained = copy.deepcopy(llama[0]).train()
    with pytest.raises(tandem.UnsupportedError, match="requires_grad"):
        call(trained, new_cache())
    with torch.no_grad():
        logits = call(trained, new_cache()).logits
        assert torch.equal(logits, call(llama[0], new_cache()).logits)
    frozen = models("llama", torch.float32, "cpu")[0].requires_grad_(False)
    assert torch.equal(call(frozen, new_cache()).logits, logits)
    prompt = frozen.get_input_embeddings()(torch.tensor([[3, 4]])).requires_grad_()
    with pytest.raises(tandem.UnsupportedError, match="requires_grad"):
        frozen(inputs_embeds=prompt, past_key_values=new_cache())
    with torch.inference_mode():
        assert torch.equal(call(llama[0], new_cache()).logits, logits)
    trained.gradient_checkpointing_enable()
    with pytest.raises(tandem.UnsupportedError, match="gradient checkpointing|requires_grad"):
        call(trained, new_cache())
    with torch.no_grad():
        if VERSION < (5, 24):  # there the cache is removed, too
            with pytest.raises(tandem.UnsupportedError, match="gradient checkpointing"):
                call(trained, new_cache())
        else:
            past = new_cache()
            assert torch.equal(call(trained, past).logits, logits) and past.get_seq_length() == 5
    sinks = models("gpt_oss", torch.float32, "cpu")[0].requires_grad_(False)
    sinks.model.layers[1].self_attn.sinks.requires_grad_(True)
    with pytest.raises(tandem.UnsupportedError, match="requires_grad"):
        call(sinks, new_cache())


def test_models_that_have_no_kernels(llama):
    """The pass is refused. A supported model can still use the cache."""
    past, odd = new_cache(), models("llama", torch.float32, "cpu", head_dim=72)[0]
    with torch.no_grad():
        with pytest.raises(tandem.UnsupportedError, match="head_dim = 72 has no kernels"):
            call(odd, past)
        with pytest.raises(tandem.UnsupportedError, match="dtype = torch.float64"):
            call(models("llama", torch.float64, "cpu")[0], past)
        call(llama[0], past)
    assert past.get_seq_length() == 5


@pytest.mark.parametrize("n_layers", [2, 6])
def test_two_models_with_one_cache(llama, n_layers):
    """A model of fewer layers would never complete a pass, so each pass would roll back the one before."""
    past, other = new_cache(), models("llama", torch.float32, "cpu", num_hidden_layers=n_layers)[0]
    with torch.no_grad():
        call(llama[0], past)
        with pytest.raises(tandem.InvalidArgumentError, match=f"layers are 4 in the cache, the model has {n_layers}"):
            call(other, past)
        call(llama[0], past)
        layer = tandem.Layer(n_q_heads=4, n_kv_heads=2, k_head_dim=64)
        with pytest.raises(tandem.InvalidArgumentError, match=f"layers are {n_layers} in the cache, the model has 4"):
            call(llama[0], TandemCache(layers=[layer] * n_layers))
    assert past.get_seq_length() == 10


def test_layers_that_are_more_than_are_attended():
    """If no configuration says how many layers there are, an incomplete pass is not rolled back unless it is asked for."""
    layer = tandem.Layer(n_q_heads=4, n_kv_heads=2, k_head_dim=64)
    past = new_cache(layers=[layer] * 2)

    def attend():
        key, value = past.update(torch.ones(1, 2, 3, 64), torch.ones(1, 2, 3, 64), 0)
        return tandem_attention(torch.nn.Module(), torch.ones(1, 4, 3, 64), key, value, None)[0]

    assert torch.equal(attend(), torch.ones(1, 3, 4, 64))
    with pytest.raises(tandem.InvalidStateError, match="layer 0 is attended again after layer 0 of 2"):
        attend()
    past.crop(0)
    attend()


def test_layers_that_are_not_alike():
    """layers= gives each layer a factor of its own."""
    changes = {"scale_attn_by_inverse_layer_idx": True}
    three = models("gpt2", torch.float32, "cpu", **changes)
    ids, mask = batch("cpu")
    if OLD_MASKS:  # there the attention does not get the factor
        with pytest.raises(tandem.UnsupportedError, match="scale_attn_by_inverse_layer_idx = True"):
            run(three[0], ids, mask, [37], new_cache())
        return
    with pytest.raises(tandem.InvalidArgumentError, match=r"layers\[1\].sm_scale = 0.125, the model's layer has 0.0625"):
        run(three[0], ids, mask, [37], new_cache())
    layers = [tandem.Layer(n_q_heads=4, n_kv_heads=4, k_head_dim=64, sm_scale=0.125 / (i + 1)) for i in range(3)]
    assert_within_gate(three, ids, mask, [30, 7], new_cache(8, layers=layers))


@pytest.mark.parametrize("given, policies, on_device, window", [
    ({"max_position_embeddings": 20000}, ["hip"], True, 20000),
    ({"max_position_embeddings": 20000}, ["all", "hip", "hip"], True, 20000),
    ({"max_position_embeddings": 512}, ["hip"], True, 4096),
    ({"max_position_embeddings": 1 << 40}, ["hip"], True, (1 << 30) - 1),
    ({}, ["hip"], True, 131_072),
    ({"max_position_embeddings": 32768, "rope_parameters": {"factor": 4.0, "original_max_position_embeddings": 32768}}, ["hip"], True,
     131_072),
    ({"max_position_embeddings": 131_072, "rope_scaling": {"factor": 8.0, "original_max_position_embeddings": 8192}}, ["hip"], True,
     131_072),
    ({"max_position_embeddings": 20000}, ["hip"], False, -1),  # the CPU prunes wherever the keys are
    ({"max_position_embeddings": 20000}, ["patterns", "all"], True, 20000),
    ({"max_position_embeddings": 20000}, ["all"], True, -1),
    ({"max_position_embeddings": 20000}, ["hip", "hgca"], True, -1),
])
def test_a_gpu_that_prunes_has_all_keys_in_the_window(given, policies, on_device, window):
    assert window_of(-1, policies, types.SimpleNamespace(**given), on_device) == window
    assert window_of(700, policies, types.SimpleNamespace(**given), on_device) == 700


RECORD = tandem.PruningRecord([tandem.PruningStage("bounds", 16, 128, 4), tandem.PruningStage("exact", 8, 64, 2)], 16, 64)
PRUNED = tandem.Pruning(decode=[RECORD], append=[RECORD])


@pytest.mark.parametrize("device", DEVICES)
def test_pruned_layers_on_either_processor(device):
    """The default window is as long as the rows become. Both processors keep the same keys, except for ties."""
    mine = models("llama", torch.float32, device)[0]
    ids, mask = batch(device, (300, 220, 260))
    exact = {"storage": {"k_type": "f32", "v_type": "f32"}}  # with bf16, sums of CPU and GPU would round to different keys
    past = new_cache(-1, device, policy="hip", pruning=PRUNED, dense_layers=[0], **exact)
    logits = run(mine, ids, mask, [280] + [1] * 20, past)
    stats = past.session.stats()
    assert stats.n_refreshes > 0 and stats.judged_kv_bytes > 0 and 0 < stats.selected_keys < 3 * 2 * 3 * 260
    assert (stats.n_device_attends > 0) == (device == "cuda")
    mine = models("llama", torch.float32, "cpu")[0]
    other = new_cache(-1, "cpu", policy="hip", pruning=PRUNED, dense_layers=[0], **exact)
    expected = run(mine, ids.cpu(), mask.cpu(), [280] + [1] * 20, other)
    far = (logits.cpu() - expected).abs().amax(2)[mask.cpu() == 1]
    assert (far < 1e-3).float().mean() > 0.95
    dense = run(mine, ids.cpu(), mask.cpu(), [280] + [1] * 20, new_cache(-1, "cpu", **exact))
    assert (dense - expected).abs().max() > 1e-2  # otherwise the test would not show pruning


@needs_cuda
def test_rows_outgrow_a_window_that_was_given():
    mine = models("llama", torch.float32, "cuda")[0]
    ids, mask = batch("cuda", (300,))
    with pytest.raises(tandem.CapacityError) as raised:
        run(mine, ids, mask, [300], new_cache(128, "cuda", policy="hip", pruning=PRUNED))
    assert raised.value.field == "window_tokens"
