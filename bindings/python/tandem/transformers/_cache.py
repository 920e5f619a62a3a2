# SPDX-License-Identifier: MIT
"""A Transformers cache without tensors: a tandem cache, a session, and a sequence for each row of the batch."""
from __future__ import annotations

import os
from collections.abc import Sequence as Several
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from .. import _abi
from .._cache import Cache, Sequence
from .._engine import Engine
from .._errors import InvalidHandleError, InvalidStateError, TandemError, UnsupportedError, invalid
from .._model import Layer, Model
from .._options import CacheOptions, SessionOptions, integer, listed
from .._saving import replaced
from .._session import Session
from ._attention import Call, Update, note
from ._engines import shared_engine, stream_of
from ._layers import dense_layers_of, layers_of, policies_of, text_config, unsupported, window_of
from ._options_check import check_options
from ._pass import Change, Changes, Held, Pass
from ._reading import LayersOfCache, Readable
from ._rows import batch_of, read_rows, tokens_of, view_of
from ._saving import STORAGE, layers_in, read_held, read_text, write
from ._untraced import untraced

if TYPE_CHECKING:
    from typing_extensions import Unpack  # in typing from Python 3.11 on; only type checkers need it

_STORED = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
_GEOMETRY = ("n_q_heads", "n_kv_heads", "k_head_dim", "v_head_dim", "sm_scale", "soft_cap", "sliding_window_tokens")


def _state_error(what: str) -> InvalidStateError:
    return InvalidStateError(what, status=_abi.STATUS["INVALID_STATE"])


class TandemCache(Readable):
    """Keys and values of a batch in Tandem, for models loaded with ``attn_implementation="tandem"``.

    Pass it as ``past_key_values``. It is made empty; the first forward pass describes the model. A pass that an exception or
    Ctrl-C interrupts before its last layer has attended does not count: its tokens are dropped, and the cache then answers as
    before the pass. ``copy.copy``, ``copy.deepcopy`` and :meth:`fork` make a cache with the same tokens, which shares pages
    with this one. Use the cache from one thread at a time.

    Parameters
    ----------
    window : int
        Newest tokens of each row, always attended; on a GPU only these are in its memory. -1: 4,096; 0: none. Under
        ``policy="hip"`` the window only places keys, and a GPU must have all keys of a row. There -1 means as many tokens as
        the model's configuration says it was made for (``max_position_embeddings``, or its value after RoPE scaling; 131,072 if
        it does not say), at least 4,096. A longer row is refused with CAPACITY. GPU memory is taken as tokens come, whatever
        the window.
    engine : Engine, optional
        None: an engine that all such caches share, with ``backend="cuda"`` if the model is on a GPU.
    layers : sequence of Layer, optional
        Geometry, for models whose configuration does not tell it. Each call must match it.
    storage : CacheOptions, optional
        How keys and values are stored. Types default to that of the model's keys.
    dense_layers : sequence of int, optional
        Layers that attend every key (policy ``"all"``); ``policy`` is for the others. ``python -m tandem.eval
        --find-dense-layers`` finds them. Not together with ``layer_policies``, which names each layer's policy.
    **options
        The other :class:`tandem.SessionOptions`, such as ``policy``: ``"all"`` (exact), ``"streaming"``, ``"hgca"``, ``"hip"``
        with ``pruning``, or ``"patterns"`` with ``patterns``. ``patterns`` without ``policy`` and ``layer_policies`` implies
        the policy.

    Attributes
    ----------
    engine, cache, session
        The :mod:`tandem` objects behind the cache, with their statistics. None before the first pass.
    sequences : list of Sequence
        One sequence for each row.

    Raises
    ------
    TypeError
        An option's name is unknown. The message suggests the nearest name.
    InvalidArgumentError
        A value has the wrong type, is out of range, or names no policy. Errors that depend on the model are raised by the first
        forward pass, as by the objects that it makes.
    """

    def __init__(self, window: int = -1, *, engine: Engine | None = None, layers: Several[Layer] | None = None,
                 storage: CacheOptions | None = None, dense_layers: Several[int] | None = None,
                 **options: Unpack[SessionOptions]) -> None:
        super().__init__(layers=LayersOfCache(self))
        check_options(engine, layers, storage, options, window)
        if options.get("patterns") is not None and options.get("policy") is None and options.get("layer_policies") is None:
            options["policy"] = "patterns"
        self._options: SessionOptions = {**options, "window_tokens": window}
        self._storage: CacheOptions = {} if storage is None else storage
        self._dense_layers = dense_layers_of(dense_layers, options)
        self._given = None if layers is None else list(listed("layers", layers))
        self.engine = engine
        self.cache: Cache | None = None
        self.session: Session | None = None
        self._made_for: tuple[Any, bool] = (None, False)  # the model's configuration, and whether its tensors are on a GPU
        self._model_type = ""  # type of the model's keys
        self._is_closed = False
        self._owns = self._owns_session = False  # true for the cache that closes the shared cache or session
        self._held = Held()
        self._changes = Changes()  # shared by all caches of the session
        self._pending: int | None = None  # the layer whose update has not been attended yet
        self._stored: CacheOptions = {}  # storage options of the cache
        self._model_name: str | None = None  # model of the running pass, if loaded with attention "tandem"
        self._has_passed = False  # a pass of such a model is complete, and the model has not returned yet

    # ---- a forward pass ----

    @untraced
    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_args: Any,
               **_kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the new keys and values unchanged. The attention function appends them when it attends.

        Raises
        ------
        InvalidStateError
            Keys of an earlier update were never attended: the model has another attention implementation.
        UnsupportedError
            The model computes its attention itself.
        """
        self._check_open()
        # A pending update means that nobody attended its keys: the model has another attention. The exception is an update of
        # layer 0 after a pass that was interrupted before its last layer. In a model of one layer the two cases look alike, so
        # both are refused.
        if self._pending is not None and not (layer_idx == 0 and self._pending < len(self) - 1):
            self._refuse_update()
        note(Update(self, layer_idx, key_states, value_states))
        self._pending = layer_idx
        return key_states, value_states

    def _refuse_update(self) -> NoReturn:
        """Refuses a pass whose layers did not attend their keys by Tandem."""
        keys = f"update: keys of layer {self._pending} were not attended by Tandem"
        if self._model_name is None:
            raise _state_error(f"{keys}: load the model with attn_implementation='tandem' (after a pass that was broken off: reset())")
        raise UnsupportedError(f"{keys}, though {self._model_name} was loaded with attn_implementation='tandem': its attention is code "
                               "of its own (as BLOOM's, which adds ALiBi), so load it without, and with another cache (after a pass "
                               "that was broken off: reset())", status=_abi.STATUS["UNSUPPORTED"], field="attn_implementation")

    def _make(self, config: Any, call: Call) -> None:
        if self.cache is not None:
            return
        if call.key.device.type not in ("cpu", "cuda"):
            raise unsupported("device", f"= {call.key.device}: tensors are in host memory or on a CUDA device")
        stored = _STORED.get(call.key.dtype)
        if stored is None:
            raise unsupported("dtype", f"= {call.key.dtype}: keys are f32, f16 or bf16")
        layers = layers_of(config, call) if self._given is None else self._given
        self._make_of(layers, {"k_type": stored, **self._storage}, config, call.key.device.type == "cuda")
        self._model_type = stored

    def _make_of(self, layers: list[Layer], storage: CacheOptions, config: Any, on_device: bool) -> None:
        engine = self.engine or shared_engine("cuda" if on_device else None)
        cache = Cache(engine, Model(layers), **storage)
        # A pass is a step. On the CPU, PyTorch's threads need the cores between its layers.
        self._options = {"sleep_between_calls": not on_device, **self._options}
        self._made_for = (config, on_device)
        self.session = self._new_session(cache)
        self._stored = storage
        self.engine, self.cache, self._owns, self._owns_session = engine, cache, True, True

    def _new_session(self, cache: Cache) -> Session:
        options: SessionOptions = {**self._options}
        if self._dense_layers:
            options["layer_policies"] = policies_of(self._dense_layers, options.get("policy") or "all", len(cache.layers))
        given = options.get("layer_policies")
        policies = [options.get("policy") or "all"] if given is None else listed("layer_policies", given)
        options["window_tokens"] = window_of(options["window_tokens"], policies, *self._made_for)
        return Session(cache, **options)

    def _begin(self, config: Any, call: Call) -> Pass:
        config = text_config(config)
        under_way = self._changes.under_way
        if config is None and isinstance(under_way, Pass) and under_way.owner is self:
            raise _state_error(f"layer_idx: layer 0 is attended again after layer {under_way.n_done - 1} of {len(self)}: layers= "
                               "are not the model's, or a pass was broken off, after which crop(0) goes on")
        self._settle()
        self._make(config, call)
        assert self.cache is not None and self.session is not None
        if self._has_passed:
            raise unsupported("layers", "are attended again before the model returns: a cache holds the keys of one round")
        n_layers = getattr(config, "num_hidden_layers", len(self))
        if n_layers != len(self):  # else a pass would never be complete, and the next would roll it back
            raise invalid("layers", f"are {len(self)} in the cache, the model has {n_layers}")
        batch, n_columns = call.query.shape[0], call.query.shape[2]
        held = self._held
        if held.sequences and batch != len(held.sequences):
            raise invalid("batch", f"= {batch}, the cache has {len(held.sequences)} rows")
        rows = read_rows(held.mask, held.columns, call.mask, batch, n_columns)
        if rows.has_gaps and any(layer.sliding_window_tokens for layer in self.cache.layers):
            raise unsupported("attention_mask", "has padding between tokens of a row, and a layer has a sliding window, which "
                              "counts tokens that are stored")
        sequences = held.sequences or [self.cache.create_sequence() for _ in range(batch)]
        begun = Pass(self, sequences, self.session.step(sequences, rows.q_lens), rows, n_columns, masks=[call.mask])
        self._changes.under_way = begun
        try:
            begun.step.__enter__()
        except TandemError:  # refused: nothing has changed
            self._changes.under_way = None
            raise
        return begun

    def _settle(self) -> None:
        """Rolls back an unfinished pass of this cache, or of one that shares its session. Refuses a closed cache."""
        self._check_open()
        under_way = self._changes.under_way
        if under_way is None:
            return
        if isinstance(under_way, Pass) and under_way.n_done:
            owner = under_way.owner
            if owner._pending == under_way.n_done:  # the layers before were attended, so this layer's update is not forgotten
                owner._pending = None
        self._changes.settle()

    def _take_back(self) -> int | None:
        """Rolls back a pass that ended before all layers were attended. Returns the first layer that was not, or None."""
        self._has_passed = False
        if self.closed:
            return None
        under_way = self._changes.under_way
        unfinished = under_way.n_done if isinstance(under_way, Pass) and under_way.owner is self else None
        if unfinished is not None:
            self._settle()
        self._pending = None
        return unfinished

    def _commit(self, done: Pass) -> None:
        done.step.__exit__(None, None, None)
        lengths = self._held.lengths or [0] * len(done.sequences)
        self._held = Held(done.sequences, [length + n for length, n in zip(lengths, done.rows.q_lens, strict=True)],
                          self._held.columns + done.n_columns, done.rows.mask)
        self._changes.under_way = None
        self._has_passed, self._model_name = self._model_name is not None, None

    def _check_layer(self, layer_idx: int, call: Call) -> None:
        """Checks a layer's geometry, which was taken from the configuration and the first layer's call."""
        assert self.cache is not None
        layer = self.cache.layer(layer_idx)
        ours = (layer.n_q_heads, layer.n_kv_heads, layer.k_head_dim, layer.v_dim,
                layer.sm_scale or layer.k_head_dim ** -0.5, layer.soft_cap,
                layer.sliding_window_tokens)
        theirs = (call.query.shape[1], call.key.shape[1], call.key.shape[3], call.value.shape[3], call.sm_scale, call.soft_cap,
                  call.sliding_window_tokens)
        for name, mine, asked in zip(_GEOMETRY, ours, theirs, strict=True) if ours != theirs else ():
            if mine != asked:
                raise invalid(f"layers[{layer_idx}].{name}", f"= {mine}, the model's layer has {asked}: pass layers=")

    def _under_way(self, layer_idx: int) -> Pass:
        """Returns the pass in which this layer comes next."""
        under_way = self._changes.under_way
        n_done = under_way.n_done if isinstance(under_way, Pass) and under_way.owner is self else 0
        if self.cache is None:  # no pass has begun
            raise unsupported("layers", f"before layer {layer_idx} have no attention, or one that does not ask for 'tandem': every "
                              "layer must be attention")
        if not isinstance(under_way, Pass) or n_done != layer_idx:
            raise _state_error(f"layer_idx: layer {layer_idx} is attended, expected was layer {n_done}: layers are attended in "
                               "order, once in a pass, and a pass is taken back when the cache's rows, or the length of a layer "
                               "that has been attended, are asked for before its last layer")
        return under_way

    def _attend(self, layer_idx: int, config: Any, call: Call) -> torch.Tensor:
        """Attends one layer. The attention function calls it once for each layer, in order."""
        under_way = self._begin(config, call) if layer_idx == 0 else self._under_way(layer_idx)
        assert self.cache is not None and self.session is not None
        self._check_layer(layer_idx, call)
        rows = under_way.rows
        if not any(call.mask is mask for mask in under_way.masks):
            again = read_rows(self._held.mask, self._held.columns, call.mask, len(under_way.sequences), under_way.n_columns)
            if again.q_lens != rows.q_lens or (again.mask is None) != (rows.mask is None) or (
                    rows.mask is not None and not torch.equal(rows.mask, again.mask)):
                raise unsupported("attention_mask", f"of layer {layer_idx} hides other tokens than that of layer 0")
            under_way.masks.append(call.mask)
        q, k, v = (tokens_of(states, rows) for states in (call.query, call.key, call.value))
        has_sinks = call.sinks is not None
        o = q.new_empty((*q.shape[:2], v.shape[2]), dtype=torch.float32 if has_sinks else q.dtype)
        lse = q.new_empty(q.shape[:2], dtype=torch.float32) if has_sinks else None
        self.session.attend(under_way.sequences, view_of("query", q), view_of("key", k), view_of("value", v), layer_idx=layer_idx,
                            q_lens=rows.q_lens, out=view_of("out", o), lse=None if lse is None else view_of("lse", lse),
                            stream=stream_of(q))
        if call.sinks is not None and lse is not None:  # merges the state (0, sink), which takes its share of the weight
            o = (o * torch.sigmoid(lse - call.sinks.detach().float())[..., None]).to(q.dtype)
        under_way.n_done += 1
        if under_way.n_done == len(self.cache.layers):
            self._commit(under_way)
        return batch_of(o, rows, len(under_way.sequences), under_way.n_columns)

    # ---- what Transformers asks a cache ----

    @property
    def sequences(self) -> list[Sequence]:
        """One sequence for each row, without the tokens of an interrupted pass."""
        self._settle()
        return list(self._held.sequences)

    @untraced
    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the layer's columns of complete passes, padding included.

        A pass is complete when its last layer has been attended. A call in the middle of a pass, for a layer that has been
        attended, rolls the pass back, because it looks like an interrupted one. The pass's next layer then raises
        InvalidStateError.
        """
        self._check_open()
        under_way = self._changes.under_way
        if isinstance(under_way, Pass) and under_way.owner is self and layer_idx < under_way.n_done:
            self._settle()
        return self._held.columns

    @untraced
    def get_mask_sizes(self, query_length: int | torch.Tensor, layer_idx: int) -> tuple[int, int]:
        """Return the number of all columns, and 0 as the first. Transformers before 5.4 passes the queries' positions, not
        their number."""
        n_queries = len(query_length) if isinstance(query_length, torch.Tensor) else query_length
        return self.get_seq_length(layer_idx) + n_queries, 0

    def __len__(self) -> int:
        return 0 if self.cache is None else len(self.cache.layers)

    def __repr__(self) -> str:
        return "<TandemCache, closed>" if self.closed else (f"<TandemCache of {len(self)} layers, {len(self._held.sequences)} rows, "
                f"{self._held.columns} columns>")

    @property
    def batch_size(self) -> int:
        """Number of rows; -1 before the first pass."""
        self._check_open()
        return len(self._held.sequences) or -1

    @property
    def is_initialized(self) -> bool:
        """Whether the cache has rows."""
        self._check_open()
        return bool(self._held.sequences)

    # ---- changes between passes ----

    def reset(self) -> None:
        """Drop all rows. The next pass starts anew, with any number of rows."""
        self._settle()
        sequences, self._held, self._pending = self._held.sequences, Held(), None
        for sequence in sequences:
            sequence.close()

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` columns, as assisted generation does. A positive number: the length kept."""
        self._settle()
        held = self._held
        tokens_to_remove = integer("tokens_to_remove", tokens_to_remove)  # assisted generation passes a tensor, on any device
        n_removed = -tokens_to_remove if tokens_to_remove <= 0 else max(held.columns - tokens_to_remove, 0)
        if n_removed > held.columns:
            raise invalid("tokens_to_remove", f"= {tokens_to_remove}, the cache has {held.columns} columns")
        if not n_removed:
            return
        kept, lost, mask = held.columns - n_removed, [n_removed] * len(held.sequences), held.mask
        if mask is not None:
            lost = mask[:, kept:].sum(1).tolist()
            mask = mask[:, :kept]
        lengths = [length - n for length, n in zip(held.lengths, lost, strict=True)]
        self._changes.under_way = Change(self, held.sequences)
        self._held = replace(held, lengths=lengths, columns=kept, mask=mask)
        self._settle()  # truncates

    def _take_rows(self, name: str, idx: list[int]) -> None:
        """Replaces the rows by those at idx. A row that is used again is forked; an unused row is dropped."""
        held = self._held
        for i, row in enumerate(idx):
            if not 0 <= integer(f"{name}[{i}]", row) < len(held.sequences):
                raise invalid(f"{name}[{i}]", f"= {row}, the cache has {len(held.sequences)} rows")
        self._settle()
        taken: set[int] = set()
        rows: list[Sequence] = []
        for i in idx:
            rows.append(held.sequences[i].fork() if i in taken else held.sequences[i])
            taken.add(i)
        self._held = Held(rows, [held.lengths[i] for i in idx], held.columns, None if held.mask is None else held.mask[idx])
        for i, sequence in enumerate(held.sequences):
            if i not in taken:
                sequence.close()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Replace the rows by those at `beam_idx`, with forks that share pages."""
        self._check_open()
        if self._held.sequences:
            self._take_rows("beam_idx", beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row `repeats` times, with forks."""
        if integer("repeats", repeats) < 1:
            raise invalid("repeats", f"= {repeats} leaves no row")
        self._take_rows("repeats", [i for i in range(len(self._held.sequences)) for _ in range(repeats)])

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows at `indices`."""
        self._check_open()
        if self._held.sequences:
            indices = indices.cpu()
            if indices.dtype == torch.bool and tuple(indices.shape) != (len(self._held.sequences),):
                raise invalid("indices", f"has shape {list(indices.shape)}, the cache has {len(self._held.sequences)} rows")
            self._take_rows("indices", (indices.nonzero()[:, 0] if indices.dtype == torch.bool else indices).tolist())

    def fork(self, **options: Any) -> "TandemCache":
        """Return a cache with the same tokens. Both share pages; a page is copied when one of them writes.

        Parameters
        ----------
        **options
            Without options, the fork shares the session too. With options of a :class:`TandemCache` (``window``,
            ``dense_layers`` and the session's), it has its own session: tokens that were prefilled once continue under another
            policy. Policies that judge keys by earlier queries ("hgca") then start without queries. Close such a fork before
            this cache.

        Raises
        ------
        InvalidStateError
            Options are given before the first pass.
        """
        self._settle()
        if options and self.cache is None:
            raise _state_error("fork: before the first pass there are no tokens to go on with under other options")
        other = TandemCache(engine=self.engine, layers=self._given, storage=self._storage, **(
            {"sleep_between_calls": self._options["sleep_between_calls"], **options} if options else {}))
        other.cache, other.session, other._changes = self.cache, self.session, self._changes
        other._made_for, other._stored, other._model_type = self._made_for, self._stored, self._model_type
        if not options:
            other._options, other._dense_layers = self._options, self._dense_layers
        elif self.cache is not None:
            other.session, other._changes, other._owns_session = other._new_session(self.cache), Changes(), True
        held = self._held
        other._held = Held([sequence.fork() for sequence in held.sequences], list(held.lengths), held.columns,
                           None if held.mask is None else held.mask.clone())
        return other

    def save(self, path: str | os.PathLike[str], *, model_id: int = 0) -> None:
        """Write all rows to a file for :meth:`load`, with what the session has learned of them.

        The path holds the old file, or none, until the new one is complete and on disk.

        Parameters
        ----------
        path : path
        model_id : int
            A number for the model's weights; load() compares it.

        Raises
        ------
        InvalidStateError
            There has been no pass yet.
        OSError
        """
        self._settle()
        if self.cache is None or self.session is None:
            raise _state_error("save: before the first pass there is nothing to save")
        storage = {name: value for name, value in self._stored.items() if name in STORAGE}
        with replaced(path) as file:
            write(file, self.cache, self.session, self._held, storage, model_id)

    @classmethod
    def load(cls, path: str | os.PathLike[str], model: Any, *, window: int = -1, learned: bool = True, model_id: int = 0,
             engine: Engine | None = None, layers: Several[Layer] | None = None, storage: CacheOptions | None = None,
             dense_layers: Several[int] | None = None, **options: Unpack[SessionOptions]) -> "TandemCache":
        """Make a cache of the rows that :meth:`save` has written, to continue with a model.

        Parameters
        ----------
        path : path
        model : PreTrainedModel
            The model that made the rows. It says where tensors are.
        learned : bool
            True: also take what the saved session had learned; policies must be the same. False: the rows alone.
        model_id : int
            The number that was saved.
        layers : sequence of Layer, optional
            Needed if the saved cache was given layers with arrays or projections.
        storage : CacheOptions, optional
            More options of the cache, such as caps and page lengths. Types are taken from the file.
        window, engine, dense_layers, **options
            As for a :class:`TandemCache`: the file does not contain them.

        Raises
        ------
        CorruptError
            The file is cut off, changed, or no saved TandemCache.
        InvalidArgumentError
            The file is of another model, or has other policies. `field` names the member.
        """
        made = cls(window, engine=engine, layers=layers, storage=storage, dense_layers=dense_layers, **options)
        try:
            with open(path, "rb", buffering=1 << 16) as file:
                found = read_text(file)
                known = layers_in(found) if made._given is None else made._given
                if known is None:
                    raise invalid("layers", "are not in the file, as they have arrays or projections: give them")
                made._make_of(known, {**found["storage"], **made._storage}, text_config(model.config),
                              model.device.type == "cuda")
                made._model_type = _STORED.get(model.dtype, "f32")
                assert made.cache is not None
                made._held = read_held(file, made.cache, made.session if learned else None, found, model.device, model_id)
        except BaseException:
            made.close()
            raise
        return made

    @property
    def closed(self) -> bool:
        """Whether this cache, or the one that it was forked from, has been closed."""
        return self._is_closed or any(part is not None and part.closed for part in (self.cache, self.session))

    def _check_open(self) -> None:
        if self.closed:
            raise InvalidHandleError("past_key_values is a TandemCache that has been closed" + (
                "" if self._is_closed else ", with the one that it is a fork of"), status=_abi.STATUS["INVALID_HANDLE"],
                field="past_key_values")

    def close(self) -> None:
        """Release the memory. Closing the original cache releases its forks' memory too. It cannot be used afterwards."""
        if not self.closed:
            self.reset()
        self._is_closed, self._held = True, Held()
        if self._owns_session and self.session is not None:
            self.session.close()
        if self._owns and self.cache is not None:
            self.cache.close()
        self.cache = self.session = None
