# SPDX-License-Identifier: MIT
"""Ctrl-C at any moment of a long call raises KeyboardInterrupt and nothing else: no crash, and no damage that shows later.

A child process makes calls and gets SIGINT again and again, at random moments. A handler may run on the calling thread while
that thread executes another library's machine code. This shows whether that code keeps the stack pointer in the stack.
"""
import random
import signal
import subprocess
import sys
import time

import pytest

SECONDS = 8

COMMON = """
import signal, sys, time

armed = False

def handler(*arguments):
    if armed:  # between two calls there is nobody to catch it
        signal.default_int_handler(*arguments)

def repeat(call, check):
    global armed
    call()
    check()
    signal.signal(signal.SIGINT, handler)
    print("ready", flush=True)
    n_calls = n_interrupted = 0
    deadline = time.monotonic() + float(sys.argv[1])
    while time.monotonic() < deadline:
        try:
            armed = True
            call()
            armed = False
        except KeyboardInterrupt:
            armed = False
            n_interrupted += 1
        n_calls += 1
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    call()
    check()
    print("finished", n_calls, n_interrupted, flush=True)
"""

NUMPY = COMMON + """
import numpy as np
import tandem

N, HEADS, DIM = 1500, 8, 64
generator = np.random.default_rng(3)
q, k, v = (generator.standard_normal((N, heads, DIM)).astype(np.float32) for heads in (HEADS, 2, 2))
engine = tandem.Engine(n_threads=2, pin_threads=0, matmul_rows=1)  # always by matrix products
cache = tandem.Cache(engine, tandem.Model(tandem.Layer(n_q_heads=HEADS, n_kv_heads=2, k_head_dim=DIM)), k_type="f32")
session, sequence, out = tandem.Session(cache), cache.create_sequence(), np.empty_like(q)

def call():
    assert sequence.length() in (0, N)
    sequence.truncate(0)
    session.attend(sequence, q, k, v, out=out)

def check():
    logits = q[-1, 0].astype(float) @ k[:, 0].T.astype(float) / 8
    weights = np.exp(logits - logits.max())
    np.testing.assert_allclose(out[-1, 0], weights / weights.sum() @ v[:, 0], rtol=1e-4, atol=1e-5)

repeat(call, check)
"""

TRANSFORMERS = COMMON + """
import torch, transformers
import tandem, tandem.transformers

transformers.utils.logging.set_verbosity_error()
torch.manual_seed(0)
config = transformers.LlamaConfig(vocab_size=97, hidden_size=256, intermediate_size=128, num_hidden_layers=3, num_attention_heads=8,
                                  num_key_value_heads=2, head_dim=64, max_position_embeddings=2048, pad_token_id=0, bos_token_id=1,
                                  eos_token_id=2)
model = transformers.LlamaForCausalLM._from_config(config, attn_implementation="tandem").eval()
prompt = torch.randint(3, 97, (1, 1000))
past = tandem.transformers.TandemCache(256, engine=tandem.Engine(n_threads=2, pin_threads=0, matmul_rows=1))
texts = []

def call():
    past.reset()
    text = model.generate(prompt, attention_mask=torch.ones_like(prompt), past_key_values=past, max_new_tokens=3,
                          min_new_tokens=3, do_sample=False)
    texts[1:] = [text]  # the first stays

def check():
    assert torch.equal(texts[0], texts[-1])

repeat(call, check)
"""


def interrupted(program):
    """Runs the program and sends SIGINT at random moments. Returns the number of its calls and of interrupted ones."""
    child = subprocess.Popen([sys.executable, "-c", program, str(SECONDS)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    moments = random.Random(4)
    try:
        ready = child.stdout.readline()
        while ready and child.poll() is None:
            time.sleep(moments.uniform(0.001, 0.02))
            child.send_signal(signal.SIGINT)
        said, errors = child.communicate(timeout=120)
    finally:
        child.kill()
    if child.returncode < 0:
        pytest.fail(f"the child died from {signal.Signals(-child.returncode).name}: {errors[-300:]}")
    assert child.returncode == 0, errors[-2000:]
    name, n_calls, n_interrupted = said.split()
    assert name == "finished"
    return int(n_calls), int(n_interrupted)


def test_ctrl_c_in_a_long_attend():
    n_calls, n_interrupted = interrupted(NUMPY)
    assert n_calls > 5 and n_interrupted > 5


def test_ctrl_c_in_generate():
    pytest.importorskip("torch", reason="PyTorch is not installed")
    pytest.importorskip("transformers", reason="Transformers is not installed")
    n_calls, n_interrupted = interrupted(TRANSFORMERS)
    assert n_calls > 3 and n_interrupted > 3
