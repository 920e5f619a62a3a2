# SPDX-License-Identifier: MIT
"""Models that compute attention by code of their own never pass for models with Tandem's, whatever their passes are to do."""
import copy
import inspect
import sys

import pytest
from hf_common import OLD_MASKS, new_cache, torch, transformers
from hf_gate import models

import tandem
from tandem.transformers import TandemCache

IDS = torch.arange(3, 8)[None]
_SIZES = {"vocab_size": 97, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
OF_TRANSFORMERS = {"Bloom": {"n_layer": 2, "n_head": 2}, "Mpt": {"d_model": 128, "n_layers": 2, "n_heads": 2}, "Falcon": {},
                   "GPTNeo": {"num_layers": 2, "num_heads": 2, "attention_types": [[["global", "local"], 1]]}, "GPTNeoXJapanese": {},
                   "XGLM": {"d_model": 128, "num_layers": 2, "attention_heads": 2, "ffn_dim": 64}, "CTRL": {}}


def model_of(family, implementation):
    config = getattr(transformers, f"{family}Config")(**{**_SIZES, **OF_TRANSFORMERS[family]})
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation=implementation).eval()


def attends_by_name(family):
    """Whether that version's attention of a family looks its implementation up."""
    kind = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING[getattr(transformers, f"{family}Config")]
    return "ALL_ATTENTION_FUNCTIONS" in inspect.getsource(sys.modules[kind.__module__])


@pytest.mark.parametrize("family", OF_TRANSFORMERS)
def test_models_of_transformers(family):
    """Refused as they are made, or when the attention is set: before any pass, with a cache or without the use of one."""
    if attends_by_name(family):
        pytest.skip(f"Transformers {transformers.__version__} looks the attention of {family} up")
    with pytest.raises(tandem.UnsupportedError, match=f"{family}.* computes attention by code of its own.*load it with another") as raised:
        model_of(family, "tandem")
    assert raised.value.field == "attn_implementation"
    model = model_of(family, "eager")
    with torch.no_grad():
        logits = model(IDS, use_cache=False).logits
    with pytest.raises(tandem.UnsupportedError, match="of .* is still 'eager': Transformers does not set it"):
        model.set_attn_implementation("tandem")
    with torch.no_grad():  # which is as it was
        assert torch.equal(model(IDS, use_cache=False).logits, logits)


def with_own_attention(layers, **changes):
    """A model of four layers, some of which do not ask for the attention that the model was loaded with."""
    model = models("llama", torch.float32, "cpu", **changes)[0]
    for i in layers:
        attention = model.model.layers[i].self_attn
        attention.config = copy.deepcopy(attention.config)
        attention.config._attn_implementation = "eager"
    return model


@pytest.mark.parametrize("options", [{"use_cache": False}, {}, {"past_key_values": 8}], ids=str)
@pytest.mark.parametrize("n_layers", [1, 4])
def test_models_that_no_rule_on_code_finds(options, n_layers):
    """Their first pass is refused, and so are the next."""
    model = with_own_attention(range(n_layers), num_hidden_layers=n_layers)
    if "past_key_values" in options:
        options = {"past_key_values": new_cache(8)}
    for _ in range(2):
        with torch.no_grad(), pytest.raises(tandem.UnsupportedError, match="no layer of Llama.* was attended|were not attended"):
            model(IDS, **options)
    if not OLD_MASKS:  # which hand eager attention the mask of padding, where it raises IndexError
        with pytest.raises(tandem.UnsupportedError):
            model.generate(IDS, max_new_tokens=3, **options)


def test_a_cache_after_a_model_with_its_own_attention():
    """It is as before the pass."""
    past, own = new_cache(8), with_own_attention([0], num_hidden_layers=1)
    mine = models("llama", torch.float32, "cpu", num_hidden_layers=1)[0]
    with torch.no_grad():
        mine(IDS, past_key_values=past)
        with pytest.raises(tandem.UnsupportedError, match="no layer of LlamaModel was attended by Tandem"):
            own(IDS, past_key_values=past)
        assert past.get_seq_length() == 5
        expected = mine(torch.cat([IDS, IDS], 1), past_key_values=new_cache(8)).logits[:, 5:]
        assert (mine(IDS, past_key_values=past).logits - expected).abs().max() < 1e-4


@pytest.mark.parametrize("given", [True, False])
def test_the_last_layer_alone(given):
    """No next layer's update would tell."""
    model, past = with_own_attention([3]), new_cache(8)
    for _ in range(2):
        with torch.no_grad(), pytest.raises(tandem.UnsupportedError, match="^layers 3 to 3 of 4 were not attended by Tandem"):
            model(IDS, past_key_values=past if given else None)
    assert past.get_seq_length() == 0


def test_layers_that_were_taken_away():
    model = models("llama", torch.float32, "cpu")[0]
    model.model.layers = model.model.layers[:2]
    with torch.no_grad():
        with pytest.raises(tandem.UnsupportedError, match=r"layers 2 to 3 of 4 were not.*num_hidden_layers"):
            model(IDS, past_key_values=(past := new_cache(8)))
        assert past.get_seq_length() == 0
        model.config.num_hidden_layers = 2
        past = model(IDS).past_key_values
    assert isinstance(past, TandemCache) and len(past) == 2 and past.get_seq_length() == 5


def test_layers_that_are_attended_twice():
    """The second round would attend the first one's keys as tokens before it."""
    model = models("llama", torch.float32, "cpu", num_hidden_layers=1)[0]
    layer = model.model.layers[0]
    forward = layer.forward
    layer.forward = lambda states, **named: forward(forward(states, **named), **named)
    with torch.no_grad():
        model(IDS, use_cache=False)  # which Tandem can do
        for past in (None, new_cache(8)):
            with pytest.raises(tandem.UnsupportedError, match="layers are attended again before the model returns"):
                model(IDS, past_key_values=past)


def test_models_without_attention():
    config = transformers.MambaConfig(vocab_size=97, hidden_size=64, num_hidden_layers=2, state_size=8)
    model = transformers.MambaForCausalLM._from_config(config, attn_implementation="tandem").eval()
    with torch.no_grad(), pytest.raises(tandem.UnsupportedError, match="no layer of Mamba.* was attended by Tandem.*or it has none"):
        model(IDS, use_cache=False)
    with pytest.raises(tandem.UnsupportedError):
        model.generate(IDS, max_new_tokens=3)


def test_a_mask_that_no_layer_takes():
    """Qwen2-MoE has its masks of sliding windows made where it has no such layer."""
    config = transformers.Qwen2MoeConfig(**_SIZES, intermediate_size=96, num_key_value_heads=2, num_experts=2, num_experts_per_tok=1,
                                         moe_intermediate_size=32, shared_expert_intermediate_size=32)
    torch.manual_seed(0)
    mine = transformers.Qwen2MoeForCausalLM._from_config(config, attn_implementation="tandem").eval()
    eager = copy.deepcopy(mine)
    eager.set_attn_implementation("eager")
    with torch.no_grad():
        for options in ({}, {"use_cache": False}):
            assert (mine(IDS, **options).logits - eager(IDS, **options).logits).abs().max() < 1e-4
