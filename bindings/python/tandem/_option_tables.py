# SPDX-License-Identifier: MIT
# Made by tools/abi/generate.py from include/tandem/; not to be edited.
"""Options of caches and sessions, and how each is turned into a member of the struct of C."""
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypedDict

from . import _abi
from ._patterns import Patterns
from ._pruning import Pruning


class OptionTable(NamedTuple):
    """Options that are no numbers or texts: by name, a name for each layer, flags and texts with the member that counts them."""

    names: Mapping[str, Mapping[str, int]]
    names_by_layer: Mapping[str, Mapping[str, int]]
    flags: Mapping[str, str]
    texts: Mapping[str, str]


class CacheOptions(TypedDict, total=False):
    """How keys and values are stored. Every key may be left out.

    Parameters
    ----------
    k_type : str
        Storage type of keys, not ``q4_64``; left out: bf16.
    v_type : str
        Storage type of values, not ``q4_64``; left out: ``k_type``.
    page_tokens : int
        Tokens in a page, a power of two from 16 to 4096; 0: 128.
    host_cap_bytes : int
        Hard cap on pages, MAW and selections in host memory (not on work space); 0: none.
    device_cap_bytes : int
        Hard cap on windows, buffers and work space in device memory (the driver's page tables are not counted); 0: none.
    layer_k_types : sequence of str
        ``[n_layers]`` or None: overrides ``k_type`` per layer.
    layer_v_types : sequence of str
        ``[n_layers]`` or None: overrides ``v_type`` per layer.
    k_rotation : str
        Rotation of keys before rounding, in all layers.
    x_type : str
        The cache keeps hidden states in this type, for layers with a projection, and every append brings them: f16, bf16;
        ``q8_0``, ``q4_0``, ``q4_64`` if ``hidden_dim`` is a multiple of 64; left out: none are kept.
    """

    k_type: str
    v_type: str
    page_tokens: int
    host_cap_bytes: int
    device_cap_bytes: int
    layer_k_types: Sequence[str]
    layer_v_types: Sequence[str]
    k_rotation: str
    x_type: str


CACHE = OptionTable(
    {"k_type": _abi.DTYPES, "v_type": _abi.DTYPES, "k_rotation": _abi.ROTATIONS, "x_type": _abi.DTYPES},
    {"layer_k_types": _abi.DTYPES, "layer_v_types": _abi.DTYPES},
    {},
    {})


class SessionOptions(TypedDict, total=False):
    """How a cache is attended. Every key may be left out.

    Parameters
    ----------
    sleep_between_calls : bool
        True: in a step without a stream the CPU workers sleep between calls, after they have spun for ``spin_ns``. Use it if
        the program's own threads compute on the same cores between calls, as PyTorch's do. False: they spin until the step
        ends.
    policy : str
        Default: "all"; or "streaming", "hgca", "hip", "patterns": which keys outside the window are attended.
    window_tokens : int
        Newest tokens, always attended, resident on the device; -1: 4096; 0: none. It does not change which keys "all"
        attends with host tensors. Under "hip" it only says where keys are: calls on device tensors need it as long as the
        longest sequence.
    sink_tokens : int
        First tokens, always attended; -1: 64; 0: none. Not used under "hip": its records have their own.
    route : str
        Default: "auto"; or "host", "stream", "host+stream", "recompute": who attends the keys outside the window, for device
        tensors.
    append_tokens : int
        Most tokens of an append that are attended together: at most 32768, in layers of policy "hip" 2048; 0: 16384, and
        memory plans have room for single queries only, else for appends of ``append_tokens``.
    layer_policies : sequence of str
        Names of policies, one for each layer; None: policy is for all layers. Use "all" where a layer's attention spreads
        over many keys.
    alpha : float
        "hgca": MAW factor in (0, 1]; 0: 0.3.
    beta : float
        "hgca": MAW threshold factor, >= 0; -1: 1.
    halo_tokens : int
        "hgca": keys kept after a strongly attended one; -1: 128; 0: none, as in the paper.
    stream_buffer_bytes : int
        Size of each buffer through which keys, or hidden states in 16 bits, cross the bus; 0: 16 MiB.
    stream_fraction : float
        Share of the keys outside the window that crosses the bus, 0 to 1, for route "host+stream" alone; -1: not given.
    stream_heads : int
        Most KV heads that are streamed at a time; 0: as many as take the least time.
    recompute_share : float
        Share of the keys outside the window that the device makes from hidden states, in (0, 1]; with route "recompute"; 0:
        1.
    streaming_heads : sequence of sequence of bool
        Flags of the KV heads of all layers, layer by layer; True: the head's queries see the first ``sink_tokens`` and the
        newest ``window_tokens`` up to their own; None: none. For policy "all".
    selection_indices : int
        Most indices of a ``tandem_selection``, per query and KV head, that planned steps have room for; 0: calls of planned
        steps name no keys. With it the CPU starts on a layer when its queries arrive, not with the step, as only they bring
        the keys.
    pruning : Pruning | str
        What policy "hip" prunes (pruning.h); None: its defaults; INVALID_ARGUMENT if no layer has that policy. Read when the
        session is created.
    patterns : Patterns | str
        What heads attend under policy "patterns" (patterns.h); None under others.
    """

    sleep_between_calls: bool
    policy: str
    window_tokens: int
    sink_tokens: int
    route: str
    append_tokens: int
    layer_policies: Sequence[str]
    alpha: float
    beta: float
    halo_tokens: int
    stream_buffer_bytes: int
    stream_fraction: float
    stream_heads: int
    recompute_share: float
    streaming_heads: Sequence[Sequence[bool]]
    selection_indices: int
    pruning: Pruning | str
    patterns: Patterns | str


SESSION = OptionTable(
    {},
    {},
    {"streaming_heads": "n_streaming_heads"},
    {"layer_policies": "n_layer_policies"})
