# SPDX-License-Identifier: MIT
"""Every way to generate gives the tokens of the model with its own attention, or is refused with what to do."""
import pytest
from hf_common import batch, configuration, new_cache, torch, transformers
from hf_gate import models

import tandem

# Transformers takes a token of padding that an assistant has generated for padding of its next prompt.
LENGTH = {"max_new_tokens": 12, "eos_token_id": -1, "suppress_tokens": [0]}


@pytest.fixture(scope="module", params=["llama", "qwen2"])
def pair(request):
    """A model with Tandem's attention and one of the same weights with eager attention; rows of one, or of three with padding."""
    mine, eager, _ = models(request.param, torch.float32, "cpu")
    return mine, eager


@pytest.fixture(scope="module")
def llama():
    return models("llama", torch.float32, "cpu")[:2]


def assistant(implementation):
    torch.manual_seed(1)
    return transformers.AutoModelForCausalLM.from_config(configuration("llama", num_hidden_layers=1),
                                                         attn_implementation=implementation).eval()


def texts(models_, n_rows, options, caches=(None,)):
    """What the first model generates, with each of the caches, then what the other one does."""
    ids, mask = (tensor[:n_rows] for tensor in batch("cpu"))
    found = []
    for model in models_:
        # A cache that keeps every token: one of sliding windows cannot be cropped in Transformers 5.0.
        for cache in caches if model is models_[0] else (transformers.DynamicCache,):
            torch.manual_seed(3)
            given = {} if cache is None else {"past_key_values": cache()}
            found.append(model.generate(ids, attention_mask=mask, **{**LENGTH, **options, **given}))
    return found


def assert_same(models_, n_rows, options):
    *mine, eager = texts(models_, n_rows, options, (None, lambda: new_cache(8)))
    assert len(mine) == 2 and all(torch.equal(text, eager) for text in mine)


@pytest.mark.parametrize("n_rows, options", [
    (1, {"prompt_lookup_num_tokens": 3}), (1, {"prompt_lookup_num_tokens": 3, "do_sample": True}),
    (3, {"num_beams": 3}), (3, {"num_beams": 3, "do_sample": True}), (3, {"num_return_sequences": 2, "do_sample": True}),
    (3, {"guidance_scale": 1.5}), (3, {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2})], ids=str)
def test_ways_to_generate(pair, n_rows, options):
    assert_same(pair, n_rows, options)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_an_assistant_that_is_the_first_layers(family):
    """It has a cache of so many layers, though the configuration names the kinds of all."""
    two = models(family, torch.float32, "cpu")[:2]
    try:
        texts([two[1]], 1, {"assistant_early_exit": 2})
    except TypeError as error:
        pytest.skip(f"Transformers {transformers.__version__} fails itself: {error}")
    assert_same(two, 1, {"assistant_early_exit": 2})


@pytest.mark.parametrize("implementation", ["tandem", "eager", "sdpa"])
@pytest.mark.parametrize("options", [{}, {"do_sample": True}, {"num_beams": 2}], ids=str)
def test_assistants(llama, implementation, options):
    """With beams Transformers takes no notice of the assistant, which reaches the attention as an argument."""
    assert_same(llama, 1, {"assistant_model": assistant(implementation), **options})


@pytest.mark.parametrize("name", ["dynamic", "hybrid"])
def test_names_of_caches_that_grow(pair, name, monkeypatch):
    """Asked for by the call, by its configuration or by the model's (as Gemma's checkpoints do): Tandem's cache takes its place."""
    mine, eager = pair
    expected = texts([eager], 3, {}, (transformers.DynamicCache,))[0]
    config = transformers.GenerationConfig(cache_implementation=name, **LENGTH)
    assert torch.equal(texts([mine], 3, {"cache_implementation": name})[0], expected)
    ids, mask = batch("cpu")
    assert torch.equal(mine.generate(ids, attention_mask=mask, generation_config=config), expected)
    monkeypatch.setattr(mine.generation_config, "cache_implementation", name)
    assert torch.equal(texts([mine], 3, {})[0], expected)


@pytest.mark.parametrize("name", ["static", "offloaded", "offloaded_static", "quantized", "sliding_window", "paged"])
def test_names_of_other_caches(llama, name):
    with pytest.raises(tandem.UnsupportedError, match=f"cache_implementation = '{name}'.*leave it out") as raised:
        texts(llama[:1], 1, {"cache_implementation": name})
    assert raised.value.field == "cache_implementation"


@pytest.mark.parametrize("n_rows", [1, 3])
@pytest.mark.parametrize("by_config", [False, True])
def test_a_cache_that_is_not_to_be_used(llama, n_rows, by_config):
    """Each step would append the whole text once more, and without padding nothing would tell."""
    options = {"generation_config": transformers.GenerationConfig(use_cache=False)} if by_config else {"use_cache": False}
    past = new_cache(8)
    with pytest.raises(tandem.UnsupportedError, match="use_cache = False beside past_key_values.*leave one of them out") as raised:
        texts(llama[:1], n_rows, options, (lambda: past,))
    assert raised.value.field == "use_cache" and past.get_seq_length() == 0


@pytest.mark.parametrize("options", [{}, {"use_cache": False}], ids=str)
def test_embeddings(llama, options):
    """Transformers generates from embeddings with a cache, whatever it is told."""
    ids, mask = batch("cpu")
    mine, eager = (model.generate(inputs_embeds=model.get_input_embeddings()(ids), attention_mask=mask, **LENGTH, **options)
                   for model in llama)
    assert torch.equal(mine, eager)


@pytest.mark.parametrize("name", ["past_key_values", "cache"])
def test_a_cache_that_grows_from_call_to_call(pair, name):
    ids, mask = batch("cpu")
    caches = [new_cache(8), transformers.DynamicCache(config=pair[1].config)]
    if name == "cache" and name not in transformers.generation.utils.ALL_CACHE_NAMES:
        pytest.skip("this version of Transformers has the old name alone")
    for turn in range(3):
        mine, eager = (model.generate(ids, attention_mask=mask, **LENGTH, **{name: past}) for model, past in zip(pair, caches))
        assert torch.equal(mine, eager) and caches[0].get_seq_length() == mine.shape[1] - 1
        ids = torch.cat([mine, torch.full((3, 2 + turn), 7)], 1)
        mask = torch.cat([mask, torch.ones((3, ids.shape[1] - mask.shape[1]), dtype=torch.long)], 1)


@pytest.mark.parametrize("options", [{"penalty_alpha": 0.6, "top_k": 4}, {"dola_layers": "low"},
                                     {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5}], ids=str)
def test_ways_that_are_code_from_the_hub(llama, options):
    """Transformers loads that code where it may; it is refused before any cache is used."""
    with pytest.raises(ValueError, match="trust_remote_code"):
        texts(llama[:1], 1, options)


def llava(implementation):
    """A small model of images and text."""
    text = {"model_type": "llama", "vocab_size": 99, "hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 2,
            "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    images = {"model_type": "clip_vision_model", "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
              "num_attention_heads": 2, "image_size": 16, "patch_size": 8, "projection_dim": 32}
    torch.manual_seed(0)
    config = transformers.LlavaConfig(vision_config=images, text_config=text, image_token_id=98, vision_feature_layer=-1)
    return transformers.LlavaForConditionalGeneration._from_config(config, attn_implementation=implementation).eval()


def test_models_of_several_parts():
    """The decoder may ask for Tandem alone; the encoder of images cannot."""
    inputs = {"input_ids": torch.tensor([[1, 98, 98, 98, 98, 5, 6, 7]]), "pixel_values": torch.ones(1, 3, 16, 16), **LENGTH}
    expected = llava("eager").generate(**inputs)
    later = llava("eager")
    later.set_attn_implementation({"text_config": "tandem"})
    for model in (llava({"text_config": "tandem", "vision_config": "eager"}), later):
        for options in ({}, {"past_key_values": new_cache(8)}, {"use_cache": False}):
            assert torch.equal(model.generate(**inputs, **options), expected)
        result = model.generate(**inputs, return_dict_in_generate=True)
        assert type(result.past_key_values).__name__ == "TandemCache"
    with pytest.raises(tandem.UnsupportedError, match="is_causal = False.*{'text_config': 'tandem'}"):
        llava("tandem").generate(**inputs)
