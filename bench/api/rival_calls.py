# SPDX-License-Identifier: MIT
"""Decode calls of Tandem, PyTorch, ONNX Runtime and ggml over the same keys and values in memory, for tensors_rivals.py.

A pool (tensors_rivals.py) has arrays [n_layers, K or V, ...] of each type and layout. Each function here returns contestants
and the versions of their library. Calls copy nothing: the tensors, bindings and graphs of all layers are made before.
"""

import ctypes
import pathlib
import sys
from collections import namedtuple

import numpy as np

# call(layer) computes. result() returns the output of the last call as floats [n_q_heads, head_dim].
Contestant = namedtuple("Contestant", "library type layout call result")


def left_out(name, why):
    print(f"left out: {name}: {str(why).splitlines()[0] if str(why) else type(why).__name__}", file=sys.stderr)


def aligned(shape, dtype):
    """Makes an array that starts on a cache line, as ggml requires."""
    n_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.empty(n_bytes + 64, np.uint8)
    begin = -raw.ctypes.data % 64
    return raw[begin:begin + n_bytes].view(dtype).reshape(shape)


def tandem_contestants(pool, engine, tandem):
    shape, made = pool.shape, []
    for dtype, layout in pool.arrays:
        q = pool.float_queries(dtype)[None]  # [1, n_q_heads, head_dim]
        out = np.empty_like(q)
        declared = dtype if dtype in ("bf16", "q8_0") else None
        layers = [[tandem.Tensor(x if layout == "token-major" else x.transpose(1, 0, 2), declared) for x in layer]
                  for layer in pool.arrays[dtype, layout]]
        assert layers[0][0].shape == (shape.n_keys, shape.n_kv_heads, shape.head_dim)
        q_tensor, o_tensor = tandem.Tensor(q), tandem.Tensor(out)

        def call(layer, layers=layers, q=q_tensor, out=o_tensor):
            tandem.attend_tensors(engine, q, *layers[layer], out=out)

        made.append(Contestant("tandem", dtype, layout, call, lambda out=out: out[0]))
    return made, {"tandem": ".".join(map(str, tandem.version()))}


def torch_contestants(pool, n_threads):
    """Two layouts: queries as heads with enable_gqa, and a KV head's queries as rows of one head, which reads K and V once."""
    import torch
    torch.set_num_threads(n_threads)
    attention = torch.nn.functional.scaled_dot_product_attention
    shape, made = pool.shape, []
    for dtype in (each for each in ("f32", "bf16") if (each, "head-major") in pool.arrays):
        as_torch = (lambda x: torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)) if dtype == "bf16" else torch.from_numpy
        layers = [[as_torch(x)[None] for x in layer] for layer in pool.arrays[dtype, "head-major"]]
        q = as_torch(pool.queries(dtype))
        for layout, rows in (("head-major", q[None, :, None]),
                             ("head-major, group as rows", q.reshape(1, shape.n_kv_heads, -1, shape.head_dim))):
            written = [None]

            def call(layer, layers=layers, rows=rows, written=written):
                with torch.inference_mode():
                    written[0] = attention(rows, *layers[layer], enable_gqa=rows.shape[1] != shape.n_kv_heads)

            made.append(Contestant("torch", dtype, layout, call,
                                   lambda written=written: written[0].float().numpy().reshape(-1, shape.head_dim)))
    return made, {"torch": torch.__version__}


def gqa_model(shape, dtype):
    from onnx import TensorProto, helper
    kind = {"f32": TensorProto.FLOAT, "f16": TensorProto.FLOAT16}[dtype]
    cache = [1, shape.n_kv_heads, shape.n_keys, shape.head_dim]
    row = [1, 1, shape.n_kv_heads * shape.head_dim]
    rows = {"query": [1, 1, shape.n_q_heads * shape.head_dim], "key": row, "value": row, "past_key": cache, "past_value": cache}
    inputs = [helper.make_tensor_value_info(name, kind, dims) for name, dims in rows.items()]
    inputs += [helper.make_tensor_value_info("seqlens_k", TensorProto.INT32, [1]),
               helper.make_tensor_value_info("total_sequence_length", TensorProto.INT32, [1])]
    outputs = [helper.make_tensor_value_info(name, kind, dims)
               for name, dims in (("output", rows["query"]), ("present_key", cache), ("present_value", cache))]
    node = helper.make_node("GroupQueryAttention", [each.name for each in inputs], [each.name for each in outputs],
                            domain="com.microsoft", num_heads=shape.n_q_heads, kv_num_heads=shape.n_kv_heads, do_rotary=0)
    graph = helper.make_graph([node], "decode", inputs, outputs)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9).SerializeToString()


def onnxruntime_contestant(pool, n_threads, dtype, ort):
    """Each layer has its own binding, whose past and present are the same memory. Only the new row is copied: the operator
    writes it over the last row of the cache, which has the same numbers."""
    shape, options = pool.shape, ort.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = n_threads, 1
    options.log_severity_level = 3
    session = ort.InferenceSession(gqa_model(shape, dtype), options, providers=["CPUExecutionProvider"])
    value = ort.OrtValue.ortvalue_from_numpy
    out = np.empty((1, 1, shape.n_q_heads * shape.head_dim), pool.arrays[dtype, "head-major"].dtype)
    common = {"query": value(pool.queries(dtype).reshape(1, 1, -1)), "seqlens_k": value(np.array([shape.n_keys - 1], np.int32)),
              "total_sequence_length": value(np.array([shape.n_keys], np.int32))}
    bindings, held = [], [common]
    for layer in pool.arrays[dtype, "head-major"]:
        past = {name: value(cache[None]) for name, cache in zip(("key", "value"), layer)}
        rows = {name: value(np.ascontiguousarray(cache[:, -1]).reshape(1, 1, -1)) for name, cache in zip(past, layer)}
        binding, written = session.io_binding(), value(out)
        for name, bound in {**common, **rows, **{f"past_{name}": bound for name, bound in past.items()}}.items():
            binding.bind_ortvalue_input(name, bound)
        for name, bound in {"output": written, **{f"present_{name}": bound for name, bound in past.items()}}.items():
            binding.bind_ortvalue_output(name, bound)
        bindings.append(binding)
        held.append((past, rows, written))

    def call(layer, held=held):  # held: keeps the bindings' memory alive as long as the contestant
        session.run_with_iobinding(bindings[layer])

    return Contestant("onnxruntime", dtype, "head-major", call,
                      lambda: out.astype(np.float32).reshape(-1, shape.head_dim))


def onnxruntime_contestants(pool, n_threads):
    import onnx
    import onnxruntime as ort
    made = []
    for dtype in (each for each in ("f32", "f16") if (each, "head-major") in pool.arrays):
        try:
            made.append(onnxruntime_contestant(pool, n_threads, dtype, ort))
        except Exception as error:  # the package's errors have no common class of their own
            left_out(f"onnxruntime {dtype}", error)
    return made, {"onnxruntime": ort.__version__, "onnx": onnx.__version__}


class Ggml:
    """The few ggml functions that a graph of one operator needs. Tensors are opaque, and the caller owns their memory."""

    TYPES = {"f32": 0, "f16": 1, "q8_0": 8, "bf16": 30}  # enum ggml_type
    POINTER = ctypes.c_void_p

    class InitParams(ctypes.Structure):
        _fields_ = [("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool)]

    def __init__(self, folder, n_threads):
        def load(name):
            found = sorted(pathlib.Path(folder).glob(f"{name}.so*"), key=lambda path: len(path.name))
            if not found:
                raise OSError(f"no {name}.so in {folder}")
            return ctypes.CDLL(str(found[0]), ctypes.RTLD_GLOBAL)

        self.base = load("libggml-base")
        self.cpu = load("libggml-cpu")
        self.backend = self.function("ggml_backend_cpu_init", self.POINTER, library=self.cpu)()
        set_threads = self.function("ggml_backend_cpu_set_n_threads", None, self.POINTER, ctypes.c_int, library=self.cpu)
        set_threads(self.backend, n_threads)

    def function(self, name, result, *arguments, library=None):
        function = getattr(library or self.base, name)
        function.restype, function.argtypes = result, list(arguments)
        return function

    def version(self):
        return " ".join(self.function(name, ctypes.c_char_p)().decode() for name in ("ggml_version", "ggml_commit"))

    def place(self, tensor, array):
        """Makes the array the tensor's memory."""
        pointer = self.POINTER
        buffer = self.function("ggml_backend_cpu_buffer_from_ptr", pointer, pointer, ctypes.c_size_t)
        alloc = self.function("ggml_backend_tensor_alloc", ctypes.c_int, pointer, pointer, pointer)
        if alloc(buffer(array.ctypes.data, array.nbytes), tensor, array.ctypes.data) != 0:
            raise ValueError("ggml_backend_tensor_alloc failed")
        return tensor

    def tensor(self, context, dtype, lengths, array):
        """Makes a tensor over the array. lengths: the fastest dimension first."""
        pointer, long = self.POINTER, ctypes.c_int64
        make = self.function("ggml_new_tensor_3d", pointer, pointer, ctypes.c_int, long, long, long)
        return self.place(make(context, self.TYPES[dtype], *lengths), array)

    def graph(self, shape, dtype, layout, arrays):
        """Makes a graph that attends one layer. arrays: K, V, q and the output. None: ggml's CPU backend lacks the type."""
        pointer, real, head_dim = self.POINTER, ctypes.c_float, shape.head_dim
        context = self.function("ggml_init", pointer, self.InitParams)(self.InitParams(1 << 16, None, True))
        if layout == "head-major":
            k, v = (self.tensor(context, dtype, (head_dim, shape.n_keys, shape.n_kv_heads), x) for x in arrays[:2])
        else:  # llama.cpp's view of its cache: rows of tokens, with the dimensions of heads and tokens swapped
            permute = self.function("ggml_permute", pointer, pointer, pointer, *[ctypes.c_int] * 4)
            k, v = (permute(context, self.tensor(context, dtype, (head_dim, shape.n_kv_heads, shape.n_keys), x), 0, 2, 1, 3)
                    for x in arrays[:2])
        q = self.tensor(context, "f32", (head_dim, 1, shape.n_q_heads), arrays[2])
        attend = self.function("ggml_flash_attn_ext", pointer, *[pointer] * 5, real, real, real)
        o = self.place(attend(context, q, k, v, None, head_dim ** -0.5, 0.0, 0.0), arrays[3])
        if not self.function("ggml_backend_supports_op", ctypes.c_bool, pointer, pointer)(self.backend, o):
            return None
        graph = self.function("ggml_new_graph_custom", pointer, pointer, ctypes.c_size_t, ctypes.c_bool)(context, 16, False)
        self.function("ggml_build_forward_expand", None, pointer, pointer)(graph, o)
        return graph


def ggml_contestants(pool, folder, n_threads):
    if folder is None:
        raise ValueError("--ggml-lib is not given")
    ggml, shape, made = Ggml(folder, n_threads), pool.shape, []
    compute = ggml.function("ggml_backend_graph_compute", ctypes.c_int, ggml.POINTER, ggml.POINTER)
    for dtype, layout in (each for each in pool.arrays if each[0] != "f32"):
        q, out = (aligned((shape.n_q_heads, shape.head_dim), np.float32) for _ in range(2))
        q[:] = pool.float_queries(dtype)
        graphs = [ggml.graph(shape, dtype, layout, [*layer, q, out]) for layer in pool.arrays[dtype, layout]]
        if None in graphs:
            left_out(f"ggml {dtype} {layout}", "its CPU backend does not have it")
            continue

        def call(layer, graphs=graphs, held=q):  # held: the graphs read the queries
            if compute(ggml.backend, graphs[layer]) != 0:
                raise RuntimeError("ggml_backend_graph_compute failed")

        made.append(Contestant("ggml", dtype, layout, call, lambda out=out: out))
    return made, {"ggml": ggml.version()}
