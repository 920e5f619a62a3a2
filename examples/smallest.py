# SPDX-License-Identifier: MIT
import numpy as np
import tandem
k, v, q = (np.ones((n, heads, 64), np.float32) for n, heads in ((4096, 2), (4096, 2), (1, 8)))
cache = tandem.Cache(tandem.Engine(), tandem.Model(tandem.Layer(n_q_heads=8, n_kv_heads=2, k_head_dim=64)))
sequence = cache.create_sequence()
sequence.append(k, v)
o = tandem.Session(cache).attend(sequence, q)
print(o.shape, o[0, 0, 0])
