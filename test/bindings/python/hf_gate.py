# SPDX-License-Identifier: MIT
"""When the logits of a model with Tandem count as right.

Tandem is responsible for attention only, and its error is bounded there. On the queries, keys and values of a call, the
output may be no further from double precision than the gate of the C tests allows (test/reference/gate.h):

    max |o - truth| <= 2 max |plain - truth| + 1e-5        over the call's output; 3 times with a soft cap

The later layers multiply that error. In the models of these tests its root mean square grows 4 to 5 times, and the largest
logit has 25 to 35 times that. So 1e-5 would be no bound for a logit. Logits are therefore compared with a model in double
precision whose attention makes exactly the measured errors. Then only the other arithmetic, the positions and the order of
rows can differ. The distance may be at most twice that of the same model with eager attention.
"""
import copy
from contextlib import contextmanager

from hf_common import configuration, run, torch, transformers

_registered = transformers.AttentionInterface()["tandem"]
_watching: list | None = None  # the calls of Tandem's attention
_errors = None                 # the errors that plain attention adds to its outputs


def attention_of(query, key, value, hidden, scaling, softcap=None, s_aux=None):
    """Attention by its definition, [batch, n_columns, n_heads, head_dim]. Weights are summed as in eager attention, in f32
    or better."""
    group = query.shape[1] // key.shape[1]
    logits = query @ key.repeat_interleave(group, 1).transpose(2, 3) * scaling
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if hidden is not None:
        logits = logits.masked_fill(hidden, -torch.inf)
    if s_aux is not None:
        logits = torch.cat([logits, s_aux.to(logits.dtype).view(1, -1, 1, 1).expand(*logits.shape[:3], 1)], -1)
    weights = torch.softmax(logits, -1, dtype=torch.promote_types(logits.dtype, torch.float32)).to(value.dtype)
    weights = weights.nan_to_num(0)[..., :key.shape[2]]  # a row of padding attends nothing
    return (weights @ value.repeat_interleave(group, 1)).transpose(1, 2).contiguous()


def _plain_attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0, softcap=None, s_aux=None, **_):
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    output = attention_of(query, key, value, None if attention_mask is None else attention_mask != 0, scaling, softcap, s_aux)
    return (output if _errors is None else output + next(_errors)), None


class Call:
    """One call of Tandem's attention: its error and that of the plain computation, outside of padding."""

    def __init__(self, layer_idx, inputs, mask, window, options, output):
        query, key, _ = inputs
        n, n_new = key.shape[2], query.shape[2]
        queries, keys = torch.arange(n - n_new, n, device=key.device)[:, None], torch.arange(n, device=key.device)
        visible = ((keys <= queries) & (keys > queries - (window or n)))[None]
        visible = visible if mask is None else visible & mask.bool()[:, None]
        seen = torch.ones_like(output) if mask is None else mask.bool()[:, -n_new:, None, None].to(output.dtype)
        plain, truth = (attention_of(*(each.to(kind) for each in inputs), ~visible[:, None], **options)
                        for kind in (output.dtype, torch.float64))
        self.layer_idx, self.inputs, self.options, self.output = layer_idx, inputs, options, output
        self.visible, self.seen = visible, seen
        self.error = (output.double() - truth) * seen
        self.plain_error = (plain.double() - truth) * seen


def attend_and_note(calls, attend, module, query, key, value, mask, scaling=None, softcap=None, s_aux=None, sliding_window=None,
                    **others):
    """Calls `attend` and adds the call to `calls`, with all keys and values that the layer got in the calls before."""
    output, _ = attend(module, query, key, value, mask, scaling=scaling, softcap=softcap, s_aux=s_aux,
                       sliding_window=sliding_window, **others)
    before = next((call for call in reversed(calls) if call.layer_idx == module.layer_idx), None)
    stored = (key, value) if before is None else (torch.cat(pair, 2) for pair in zip(before.inputs[1:], (key, value)))
    options = {"scaling": query.shape[-1] ** -0.5 if scaling is None else scaling, "softcap": softcap, "s_aux": s_aux}
    calls.append(Call(module.layer_idx, (query, *stored), mask, sliding_window, options, output))
    return calls[-1]


def _watched(*arguments, **options):
    if _watching is None:
        return _registered(*arguments, **options)
    return attend_and_note(_watching, _registered, *arguments, **options).output, None


transformers.AttentionInterface.register("tandem", _watched)
transformers.AttentionInterface.register("plain", _plain_attention)
transformers.AttentionMaskInterface.register("plain", transformers.masking_utils.eager_mask)


def models(name, dtype, device, **changes):
    """Three models of the same weights, rounded to dtype: with Tandem, with eager attention, and plain in double precision."""
    torch.manual_seed(5)
    config = configuration(name, **changes)
    first = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter_name, parameter in first.named_parameters():
            if parameter_name.endswith("sinks"):  # the initial sinks have a width of 0.02, too little to matter
                parameter.normal_()
    state = {key: value.to(dtype) for key, value in first.state_dict().items()}
    made = []
    for implementation, kind in (("tandem", dtype), ("eager", dtype), ("plain", torch.float64)):
        # A copy, because the configuration stores which attention its models use.
        model = transformers.AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation=implementation, dtype=kind,
                                                              experts_implementation="eager")
        model.load_state_dict(state)
        made.append(model.to(device=device, dtype=kind).eval())
    return made


@contextmanager
def _during(**changes):
    globals().update(changes)
    try:
        yield
    finally:
        globals().update(dict.fromkeys(changes))


def calls_of(function):
    """Returns the calls of Tandem's attention in `function`, whose passes share no cache with earlier ones."""
    calls = []
    with _during(_watching=calls):
        function()
    return calls


def assert_within_gate(models, ids, mask, lens, past, soft_cap=False):
    """Runs the three of models() over the passes. Returns the logits of the first, whose cache is `past`, empty before."""
    mine, eager, exact = models
    factor, seen, calls = 3 if soft_cap else 2, mask.bool(), []
    with _during(_watching=calls):
        logits = run(mine, ids, mask, lens, past)
    assert len(calls) == len(lens) * mine.config.num_hidden_layers
    for i, call in enumerate(calls):
        error, bound = call.error.abs().max().item(), factor * call.plain_error.abs().max().item() + 1e-5
        assert error <= bound, f"attention of layer {call.layer_idx}, call {i}: {error} > {bound}"
    plain, truth = (run(model, ids, mask, lens, transformers.DynamicCache(config=model.config)) for model in (eager, exact))
    with _during(_errors=iter([call.error for call in calls])):
        expected = run(exact, ids, mask, lens, transformers.DynamicCache(config=exact.config))
    error = (logits.double() - expected)[seen].abs().max().item()
    bound = factor * (plain.double() - truth)[seen].abs().max().item() + 1e-5
    assert error <= bound, f"logits: {error} > {bound}"
    return logits
