"""Makes a transformers model, with PEFT's adapters or without, a client of a base executor:

    from coserve.split.attach import attach

    model = get_peft_model(AutoModelForCausalLM.from_pretrained(name), LoraConfig(...))
    attach(model, "unix:/run/base.sock")

Its frozen linears become virtual layers (Symbiosis, 3.2): products and gradients of inputs come from the
executor, all else stays in this process.
"""

import weakref
from collections.abc import Mapping, Sequence
from typing import Final, get_args

from torch import nn

from coserve.adapters.sites import decoder_of
from coserve.errors import AdapterMismatch, ConfigError
from coserve.model.placing import put
from coserve.split.absent import check_methods
from coserve.split.block_calls import BlockCalls
from coserve.split.calls import Calls
from coserve.split.gather import Where, connect
from coserve.split.linears import find_linears, fingerprint_of_linears, shape_of, transformers_model
from coserve.split.messages import BaseHello
from coserve.split.privacy.modes import Privacy, private
from coserve.split.remote_group import RemoteBlocks, RemoteGroup, RemoteSpan
from coserve.split.script_kernels import use_script_kernels
from coserve.split.span_calls import ScriptSpan, Spans
from coserve.split.tls import ClientTls
from coserve.split.virtual import Siblings, virtual

_SHOWN: Final = 20  # paths in an error


def attach(
    model: nn.Module,
    address: Where,
    key: str | Sequence[str] = "",
    patience: float = 60.0,
    privacy: Privacy | None = None,
    *,
    shared_memory: bool = True,
    tls: ClientTls | Sequence[ClientTls] | None = None,
    spans: Spans = "forward",
    blocks: bool = False,
    kernels: bool = True,
) -> Calls:
    """Replaces the model's linears that the executor at `address` has by virtual layers, and frees their
    weights; others stay as they are.

    `address` is the executor's, or a transport to it. Where several executors have a shard each, it is those
    of all, with one `key` and `tls` for all or one for each. `patience` is the seconds that a call waits for
    an executor that went away or gives no sign of life. `privacy` is the mode that hides rows from the
    executor; None hides nothing. At a unix socket tensors are in shared memory, where the executor offers
    some. `tls` is the settings for a `tls:` address.

    `spans` tells when a feed-forward layer without an adapter is one call: "forward" where no gradient goes
    back through it, "always" (the backward pass computes it anew), or "never". With `blocks` consecutive
    decoder layers without an adapter are one call, in passes without a cache, and in those with a graph,
    whose cache stays empty for these layers. The backward pass computes them anew. With `kernels` norms,
    gated layers, rotary embedding and attention that stay here compute by coserve's kernels where these give
    the same but for rounding: in bfloat16, on a processor that multiplies it. Elsewhere gated layers keep
    less for the way back, with the same bits.

    The linears must have the content hash of the executor's. Where the model was made on the meta device,
    only paths and widths are compared, and linears that the executor lacks must be loaded before. Parameters
    of virtual layers do not require a gradient and have no data. Methods that read, change or train them
    (DoRA, PiSSA, merging) raise NotOffered: here where their adapter is in the model already, else when they
    do so. Raises AdapterMismatch, ConfigError and Unreachable; WrongAnswer in a call.
    """
    if spans not in get_args(Spans):
        raise ConfigError(f"spans {spans!r} is none of {', '.join(get_args(Spans))}")
    found = find_linears(model)
    check_methods(model, {path: module for path, (_, module) in found.items()})
    source = connect(address, key, tls, patience, shared_memory)
    calls: Calls = source
    try:
        _check(source.base, {path: module for path, (_, module) in found.items()})
        if privacy is not None:
            calls = private(
                source,
                privacy,
                lambda other: connect(other.address, other.key, other.tls or tls, patience, shared_memory),
            )
    except BaseException:
        source.close()
        raise
    for shape in calls.base.groups:
        rows = Siblings(RemoteGroup(calls, shape))
        for path in shape.outputs:
            place, module = found[path]
            put(model, place, virtual(path, module, rows))
    if spans != "never":
        _put_spans(model, calls, spans)
    if blocks:
        _put_blocks(model, calls)
    if kernels:
        use_script_kernels(model)
    weakref.finalize(model, calls.close)
    return calls


def _put_spans(model: nn.Module, calls: Calls, spans: Spans) -> None:
    """Makes one call of each module of the model that the executor computes as a whole."""
    _, own = transformers_model(model)
    for shape in calls.base.spans:
        try:
            module = own.get_submodule(shape.path)
        except AttributeError:  # the client's model is made of other modules
            continue
        if "forward" not in vars(module):
            module.forward = ScriptSpan(module, RemoteSpan(calls, shape), spans)


def _put_blocks(model: nn.Module, calls: Calls) -> None:
    """Makes calls of the decoder layers of the model that the executor computes as a whole."""
    _, own = transformers_model(model)
    shape = calls.base.blocks
    if shape is None:
        return
    try:
        layers = {layer.number: own.get_submodule(layer.path) for layer in shape.layers}
    except AttributeError:  # the client's model is made of other modules
        return
    if not any("forward" in vars(layer) for layer in layers.values()):
        BlockCalls(decoder_of(own), layers, RemoteBlocks(calls, shape))


def _check(base: BaseHello, own: Mapping[str, nn.Module]) -> None:
    """Raises AdapterMismatch where the executor has a linear that the model lacks or has in another shape or
    with other weights, and where the model has no weights for a linear that the executor lacks."""
    for group in base.groups:
        for path, out in group.outputs.items():
            shape = shape_of(own[path]) if path in own else None
            if shape != (out, group.inputs):
                shown = "x".join(map(str, shape)) if shape else "not in this model"
                raise AdapterMismatch(f"the executor's {path} is {out}x{group.inputs}, here it is {shown}")
    offered = {path for group in base.groups for path in group.outputs}
    mark = fingerprint_of_linears({path: own[path] for path in offered})
    if mark is not None and mark != base.fingerprint:
        raise AdapterMismatch(f"the client's base is {mark}, the executor's {base.fingerprint}")
    kept = {path: module for path, module in own.items() if path not in offered}
    missing = [path for path, module in kept.items() if any(p.is_meta for p in module.parameters(False))]
    if missing:
        shown = ", ".join(missing[:_SHOWN]) + f" and {len(missing) - _SHOWN} more" * (len(missing) > _SHOWN)
        raise AdapterMismatch(
            f"the executor does not have {shown}: load their weights, which are on the meta device, before"
        )
