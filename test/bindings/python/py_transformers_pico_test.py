# SPDX-License-Identifier: MIT
"""pico, a real model, through AutoModelForCausalLM: the golden logits, and a pass key in a text of 16,384 tokens under hgca."""
import random

import pytest
from conftest import ROOT
from hf_common import DEVICES, new_cache, torch, transformers

safetensors_torch = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")
PICO = ROOT / "examples/models/pico"
HAYSTACK = ROOT / "examples/data/haystack.txt"
MOST = 2e-3  # of logits: sums are in another order
pytestmark = pytest.mark.skipif(not PICO.is_dir(), reason="examples/models/pico is not there")


def pico(device):
    model = transformers.AutoModelForCausalLM.from_pretrained(PICO, dtype=torch.float32, attn_implementation="tandem")
    return model.to(device).eval()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("options", [{"window": 256}, {"window": 4096, "policy": "hgca"}], ids=["all", "hgca"])
def test_golden_logits(options, device):
    golden = safetensors_torch.load_file(PICO / "golden.safetensors")
    ids, logits = golden["prompt"].long()[None].to(device), golden["logits_last32"].to(device)
    model, past = pico(device), new_cache(device=device, **options)
    with torch.no_grad():
        mine = [model(ids[:, :1008], past_key_values=past).logits[0, -16:]]
        mine += [model(ids[:, i:i + 1], past_key_values=past).logits[0] for i in range(1008, 1024)]
    assert (torch.cat(mine) - logits).abs().max() <= MOST
    assert past.get_seq_length() == 1024


def haystack(n_bytes):
    """Returns the text, and then its paragraphs in other orders."""
    source = HAYSTACK.read_text()
    paragraphs, text, shuffled = source.split("\n\n"), source, random.Random(1)
    while len(text) < n_bytes:
        shuffled.shuffle(paragraphs)
        text += "\n" + "\n\n".join(paragraphs)
    return text[:n_bytes]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("options", [{}, {"prefill_chunk_size": 2000}], ids=["whole", "chunks"])
def test_pass_key(options, device):
    key, question, context, room = "73194", "\nWhat is the pass key? The pass key is ", 16384, 16
    n_text = context - len(question) - room
    text = haystack(n_text)
    place = text.rfind("\n", 0, n_text // 3)
    text = (text[:place] + f"\nThe pass key is {key}. Remember it. {key} is the pass key.\n" + text[place:])[:n_text] + question
    ids = torch.tensor([list(text.encode())], device=device)
    assert ids.shape[1] == context - room
    model, past = pico(device), new_cache(1024, device, policy="hgca")
    answer = model.generate(ids, past_key_values=past, max_new_tokens=len(key) + 1, do_sample=False, **options)[0, ids.shape[1]:]
    said = bytes(answer.tolist()).decode("latin-1")
    assert said.startswith(key) and not said[len(key)].isdigit()
    stats = past.session.stats()
    # Decode reads only a fraction of the keys and values, resident ones and others.
    assert stats.evicted_tokens > 6 * 15000
    assert (stats.n_device_attends > 0) == (device == "cuda")


def test_readme_example(monkeypatch, capsys):
    blocks = [block.split("```")[0] for block in (ROOT / "bindings/python/README.md").read_text().split("```python\n")[1:]]
    program = next(block for block in blocks if "tandem.transformers" in block)
    monkeypatch.chdir(ROOT)
    exec(compile(program, "README.md", "exec"), {})
    assert capsys.readouterr().out.startswith("b'73194.'\n")
