# SPDX-License-Identifier: MIT
"""Tensors in device memory, of PyTorch and of plain interfaces: attention, streams, planned steps, CUDA graphs, refusals."""
import numpy as np
import pytest
from conftest import DIM, KV_HEADS, Q_HEADS, reference
from hf_common import WHY_NO_CUDA, torch

import tandem

pytestmark = pytest.mark.skipif(WHY_NO_CUDA is not None, reason=str(WHY_NO_CUDA))
CLOSE = {"rtol": 1e-4, "atol": 1e-4}
N_LAYERS = 2


class CudaInterface:
    """An object that has only __cuda_array_interface__."""

    def __init__(self, tensor, **changes):
        self.held = tensor
        self.shape = tuple(tensor.shape)
        self.__cuda_array_interface__ = {**tensor.__cuda_array_interface__, **changes}


class OldDlpack:
    """DLPack from before version 1."""

    __module__ = "cupy"  # this package's arrays may be written

    def __init__(self, tensor):
        self.held = tensor
        self.shape = tuple(tensor.shape)

    def __dlpack__(self, stream=None):
        return self.held.__dlpack__(stream=stream)

    def __dlpack_device__(self):
        return self.held.__dlpack_device__()


class World:
    def __init__(self, window=64, **options):
        self.engine = tandem.Engine(n_threads=2, pin_threads=0, backend="cuda")
        layer = tandem.Layer(n_q_heads=Q_HEADS, n_kv_heads=KV_HEADS, k_head_dim=DIM)
        self.cache = tandem.Cache(self.engine, tandem.Model([layer] * N_LAYERS), k_type="f32")
        self.session = tandem.Session(self.cache, window_tokens=window, **options)
        self.generator = torch.Generator("cuda").manual_seed(3)

    def qkv(self, n):
        return [torch.randn((n, heads, DIM), device="cuda", generator=self.generator) for heads in (Q_HEADS, KV_HEADS, KV_HEADS)]


@pytest.fixture
def world():
    return World()


def spread(tensor):
    """The same numbers with gaps between tokens and heads. The gaps are NaN."""
    n, heads, dim = tensor.shape
    wide = torch.full((2 * n, 3 * heads, dim + 8), torch.nan, device=tensor.device, dtype=tensor.dtype)
    view = wide[::2, ::3, 4:-4]
    view.copy_(tensor)
    return view


def of_cupy(tensor):
    return pytest.importorskip("cupy", reason="CuPy is not installed").from_dlpack(tensor)


@pytest.mark.parametrize("wrap", [lambda t: t, spread, tandem.Tensor, CudaInterface, lambda t: CudaInterface(spread(t)), OldDlpack,
                                  of_cupy],
                         ids=["torch", "strides", "views", "interface", "interface_strides", "old_dlpack", "cupy"])
def test_attends_device_tensors(world, wrap):
    sequence = world.cache.create_sequence()
    keys, values = [], []
    for n in (200, 1, 7, 1):
        q, k, v = world.qkv(n)
        o, lse = torch.full_like(q, torch.nan), torch.full(q.shape[:2], torch.nan, device="cuda")
        torch.cuda.synchronize()
        out = wrap(o)
        assert world.session.attend(sequence, wrap(q), wrap(k), wrap(v), out=out, lse=lse) is out
        keys.append(k)
        values.append(v)
        expected, expected_lse = reference(*(t.cpu().numpy() for t in (q, torch.cat(keys), torch.cat(values))))
        got = out if wrap is spread else getattr(out, "held", o)  # spread() copies
        np.testing.assert_allclose(got.cpu().numpy(), expected, **CLOSE)
        np.testing.assert_allclose(lse.cpu().numpy(), expected_lse, **CLOSE)
    stored_k, stored_v = sequence.read()
    assert np.array_equal(stored_k, torch.cat(keys).cpu().numpy()) and np.array_equal(stored_v, torch.cat(values).cpu().numpy())
    stats = world.session.stats()
    assert stats.n_device_attends == 4 and stats.n_host_parts + stats.n_stream_parts > 0
    assert world.cache.stats().device_window_bytes > 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_types(dtype):
    world = World()
    q, k, v = (t.to(dtype) for t in world.qkv(150))
    o = torch.empty_like(q)
    world.session.attend(world.cache.create_sequence(), q, k, v, out=o)
    expected, _ = reference(*(t.float().cpu().numpy() for t in (q, k, v)))
    np.testing.assert_allclose(o.float().cpu().numpy(), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("wrap", [lambda t, stream: t, lambda t, stream: tandem.Tensor(t, stream=stream),
                                  lambda t, stream: CudaInterface(t, stream=stream)], ids=["torch", "views", "interface"])
def test_call_is_ordered_after_its_stream(world, wrap):
    """Inputs are written on the stream after other work, and outputs are read on it."""
    sequence, stream = world.cache.create_sequence(), torch.cuda.Stream()
    q, k, v = world.qkv(300)
    late = [torch.zeros_like(t) for t in (q, k, v)]
    o = torch.zeros_like(q)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        for to, source in zip(late, (q, k, v)):
            to.copy_(source)
        number = stream.cuda_stream
        world.session.attend(sequence, *(wrap(t, number) for t in late), out=wrap(o, number), stream=number)
        got = o.clone()
    stream.synchronize()
    expected, _ = reference(*(t.cpu().numpy() for t in (q, k, v)))
    np.testing.assert_allclose(got.cpu().numpy(), expected, **CLOSE)


def test_producer_on_another_stream_is_waited_for(world):
    """The call's stream sees data that torch writes on its current stream: __dlpack__ makes the one wait for the other."""
    sequence, writer, reader = world.cache.create_sequence(), torch.cuda.Stream(), torch.cuda.Stream()
    q, k, v = world.qkv(300)
    late, o = [torch.zeros_like(t) for t in (q, k, v)], torch.zeros_like(q)
    torch.cuda.synchronize()
    with torch.cuda.stream(writer):
        torch.cuda._sleep(50_000_000)
        for to, source in zip(late, (q, k, v)):
            to.copy_(source)
        world.session.attend(sequence, *late, out=o, stream=reader.cuda_stream)
    reader.synchronize()
    np.testing.assert_allclose(o.cpu().numpy(), reference(*(t.cpu().numpy() for t in (q, k, v)))[0], **CLOSE)


def test_foreign_stream_of_an_interface_is_refused(world):
    q, k, v = world.qkv(3)
    with pytest.raises(tandem.UnsupportedError, match="the array is used on stream"):
        world.session.attend(world.cache.create_sequence(), CudaInterface(q, stream=torch.cuda.Stream().cuda_stream), k, v,
                             out=torch.empty_like(q))


def decode(world, sequences, stream, attend, n_steps, prompts=(100, 90)):
    """Prompts and `n_steps` planned steps of one token a sequence. Compares every output with the reference."""
    kept = [[[] for _ in range(2)] for _ in range(N_LAYERS)]
    for i, (sequence, n) in enumerate(zip(sequences, prompts)):
        for layer in range(N_LAYERS):
            q, k, v = world.qkv(n)
            torch.cuda.synchronize()
            with torch.cuda.stream(stream):
                world.session.attend(sequence, q, k, v, layer_idx=layer, out=torch.empty_like(q), stream=stream.cuda_stream)
            kept[layer][i].append((k, v))
    stream.synchronize()
    for _ in range(n_steps):
        tokens = [world.qkv(len(sequences)) for _ in range(N_LAYERS)]
        torch.cuda.synchronize()
        with torch.cuda.stream(stream), world.session.step(sequences, 1, stream=stream.cuda_stream):
            outputs = attend(tokens)
        stream.synchronize()
        for layer, (q, k, v) in enumerate(tokens):
            for i in range(len(sequences)):
                kept[layer][i].append((k[i:i + 1], v[i:i + 1]))
                all_k, all_v = (torch.cat(parts).cpu().numpy() for parts in zip(*kept[layer][i]))
                expected, _ = reference(q[i:i + 1].cpu().numpy(), all_k, all_v)
                np.testing.assert_allclose(outputs[layer][i:i + 1].cpu().numpy(), expected, **CLOSE)


def test_planned_steps(world):
    sequences, stream = [world.cache.create_sequence() for _ in range(2)], torch.cuda.Stream()

    def attend(tokens):
        return [world.session.attend(sequences, q, k, v, q_lens=[1, 1], layer_idx=layer, out=torch.empty_like(q),
                                     stream=stream.cuda_stream) for layer, (q, k, v) in enumerate(tokens)]

    decode(world, sequences, stream, attend, 12)
    assert [s.length(1) for s in sequences] == [112, 102]


def test_planned_steps_in_a_graph(world):
    sequences, stream = [world.cache.create_sequence() for _ in range(2)], torch.cuda.Stream()
    fixed = [world.qkv(2) for _ in range(N_LAYERS)]
    out = [torch.empty_like(q) for q, _, _ in fixed]
    graph = torch.cuda.CUDAGraph()
    captured = []

    def attend(tokens):
        for to, source in zip(fixed, tokens):
            for x, y in zip(to, source):
                x.copy_(y)
        if not captured:
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                for layer, (q, k, v) in enumerate(fixed):
                    world.session.attend(sequences, q, k, v, q_lens=[1, 1], layer_idx=layer, out=out[layer],
                                         stream=stream.cuda_stream)
            captured.append(True)
        graph.replay()
        return out

    decode(world, sequences, stream, attend, 9)
    assert [s.length(0) for s in sequences] == [109, 99]


def test_a_planned_step_that_is_not_done_is_taken_back(world):
    sequence, stream = world.cache.create_sequence(), torch.cuda.Stream()
    q, k, v = world.qkv(40)
    number = stream.cuda_stream
    torch.cuda.synchronize()
    for layer in range(N_LAYERS):
        world.session.attend(sequence, q, k, v, layer_idx=layer, out=torch.empty_like(q), stream=number)
    with world.session.step(sequence, 1, stream=number):
        world.session.attend(sequence, q[:1], k[:1], v[:1], out=torch.empty_like(q[:1]), stream=number)
    world.engine.drain()  # the stream may have ended before the library's thread has noticed
    with pytest.raises(tandem.InvalidStateError), world.session.step(sequence, 1, stream=number):
        pass
    assert [sequence.length(i) for i in range(N_LAYERS)] == [40, 40]


def test_states_of_the_device_merge_on_the_host(world):
    q, k, v = world.qkv(40)
    parts = []
    for some in (slice(0, 25), slice(25, 40)):
        half = world.cache.create_sequence()
        o, lse = torch.empty_like(q[-1:]), torch.empty((1, Q_HEADS), device="cuda")
        half.append(k[some].cpu(), v[some].cpu())
        world.session.attend(half, q[-1:], out=o, lse=lse)
        parts.append((o, lse))
    with pytest.raises(tandem.UnsupportedError, match="host memory alone"):
        tandem.merge(world.engine, *zip(*parts), out=torch.empty_like(parts[0][0]), lse_out=torch.empty_like(parts[0][1]))
    out, lse = tandem.merge(world.engine, *zip(*((o.cpu(), lse.cpu()) for o, lse in parts)))
    expected, expected_lse = reference(*(t.cpu().numpy() for t in (q[-1:], k, v)))
    np.testing.assert_allclose(out, expected, **CLOSE)
    np.testing.assert_allclose(lse, expected_lse, **CLOSE)


def test_refusals(world):
    sequence = world.cache.create_sequence()
    q, k, v = world.qkv(3)
    with pytest.raises(tandem.InvalidArgumentError, match="in device memory the output is the caller's"):
        world.session.attend(sequence, q, k, v)
    with pytest.raises(tandem.InvalidArgumentError):
        world.session.attend(sequence, q, k.cpu(), v, out=torch.empty_like(q))
    with pytest.raises(tandem.TandemError):
        world.session.attend(sequence, q, k, v, out=torch.empty_like(q), cancel=tandem.CancelFlag())
    with pytest.raises(tandem.UnsupportedError, match="host memory alone"):
        sequence.append(k, v)
    with pytest.raises(tandem.InvalidArgumentError):
        world.session.attend(sequence, q.double(), k, v, out=torch.empty_like(q))
    host = tandem.Session(tandem.Cache(tandem.Engine(n_threads=1), tandem.Model(world.cache.layers)))
    with pytest.raises(tandem.TandemError):
        host.attend(host.cache.create_sequence(), q, k, v, out=torch.empty_like(q))
    assert sequence.length() == 0


def test_device_memory_is_the_plan(world):
    plan = tandem.plan_memory(world.engine, tandem.Model(world.cache.layers), [3000], cache={"k_type": "f32"},
                              session={"window_tokens": 64})
    sequence = world.cache.create_sequence()
    for layer in range(N_LAYERS):
        _, k, v = world.qkv(2999)
        sequence.append(k.cpu(), v.cpu(), layer_idx=layer)  # an append on the device would take room there
    for layer in range(N_LAYERS):
        q, k, v = world.qkv(1)
        world.session.attend(sequence, q, k, v, layer_idx=layer, out=torch.empty_like(q))
    world.engine.drain()
    stats = world.cache.stats()
    assert 0 < stats.device_window_bytes == plan.device_window_bytes
    assert stats.host_kv_bytes == plan.host_kv_bytes


def test_offloaded_weights_are_arrays_of_torch():
    """A token's products with matrices on a stream of its own, round after round. Most matrices cross the bus."""
    engine, stream = tandem.Engine(n_threads=2, pin_threads=0, backend="cuda"), torch.cuda.Stream()
    generator = torch.Generator().manual_seed(5)
    matrices = [torch.randn((256, 256), generator=generator) / 16 for _ in range(9)]
    weights = tandem.Weights(engine, [m.numpy() for m in matrices], resident_bytes=2 * 256 * 256 * 4)
    x = torch.randn((1, 256), generator=generator)
    expected, got = x.double(), x.cuda()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for i in range(27):
            expected = torch.tanh(expected @ matrices[i % 9].double())
            with weights.use(i % 9, stream.cuda_stream) as block:
                got = torch.tanh(got @ torch.as_tensor(block, device="cuda").view(torch.float32).view(256, 256))
    stream.synchronize()
    np.testing.assert_allclose(got.cpu().numpy(), expected.numpy(), rtol=1e-3, atol=1e-5)
    stats = weights.stats()
    assert stats.n_resident == 2 and stats.n_streamed_uses == 21 and stats.n_ahead > 0


@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_keys_are_made_of_hidden_states(where):
    """Keys outside the window are rebuilt, with matrices in host or device memory. The store has NaN in their place."""
    n, hidden, window = 400, 128, 64
    generator = torch.Generator().manual_seed(6)
    x = torch.randn((n, hidden), generator=generator).bfloat16()
    w_k, w_v = (torch.randn((KV_HEADS * DIM, hidden), generator=generator).div(16).bfloat16() for _ in range(2))
    k, v = ((x.double() @ w.double().T).float().view(n, KV_HEADS, DIM) for w in (w_k, w_v))
    given = [w.cuda() if where == "cuda" else tandem.Tensor(w.view(torch.uint16).numpy(), "bf16") for w in (w_k, w_v)]
    layer = tandem.Layer(n_q_heads=Q_HEADS, n_kv_heads=KV_HEADS, k_head_dim=DIM, projection=tandem.Projection(
        hidden_dim=hidden, w_k=given[0], w_v=given[1], w_order="out_in"))
    cache = tandem.Cache(tandem.Engine(n_threads=2, pin_threads=0, backend="cuda"), tandem.Model(layer), x_type="bf16")
    session, sequence = tandem.Session(cache, window_tokens=window, route="recompute"), cache.create_sequence()
    stored = [array[:-1].clone() for array in (k, v)]
    for array in stored:
        array[:n - 1 - window - 8] = torch.nan
    sequence.append(*stored, x=x[:-1].float())
    q = torch.randn((1, Q_HEADS, DIM), generator=generator)
    o = torch.full((1, Q_HEADS, DIM), torch.nan, device="cuda")
    session.attend(sequence, q.cuda(), k[-1:].cuda(), v[-1:].cuda(), x=x[-1:].cuda(), out=o)
    np.testing.assert_allclose(o.cpu().numpy(), reference(q, k, v)[0], rtol=2e-2, atol=2e-2)
    stats = session.stats()
    assert stats.streamed_x_bytes > 0 and stats.n_host_parts == 0
