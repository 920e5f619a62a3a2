# SPDX-License-Identifier: MIT
"""Every process on a machine computes the same bits: no measurement affects them."""
import subprocess
import sys

PROGRAM = """
import hashlib
import numpy as np
import tandem
digest = hashlib.sha256()
rng = np.random.default_rng(3)
for dtype in ("f32", "bf16", "q8_0"):
    model = tandem.Model([tandem.Layer(n_q_heads=8, n_kv_heads=2, k_head_dim=64)])
    cache = tandem.Cache(tandem.Engine(n_threads=2), model, k_type=dtype, v_type=dtype)
    session, sequence = tandem.Session(cache), cache.create_sequence()
    for n in (300, 1, 20, 32, 48):  # 4 query rows of a KV head each: both sides of where matrix products begin
        q, k, v = (rng.standard_normal((n, heads, 64), dtype=np.float32) for heads in (8, 2, 2))
        digest.update(session.attend(sequence, q, k, v).tobytes())
print(digest.hexdigest())
"""


def test_every_process_computes_the_same_bits():
    answers = {subprocess.run([sys.executable, "-c", PROGRAM], check=True, capture_output=True, text=True).stdout for _ in range(12)}
    assert len(answers) == 1 and len(answers.pop().strip()) == 64
