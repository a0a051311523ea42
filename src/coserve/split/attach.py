"""Makes a transformers model, with PEFT's adapters or without, a client of a base executor:

    from coserve.split.attach import attach

    model = get_peft_model(AutoModelForCausalLM.from_pretrained(name), LoraConfig(...))
    attach(model, "unix:/run/base.sock")

Its frozen linears become virtual layers (Symbiosis, 3.2): products and gradients of inputs come from the
executor, all else stays in this process.
"""

import weakref
from collections.abc import Mapping, Sequence
from typing import Final, Literal, get_args

from torch import nn

from coserve.errors import AdapterMismatch, ConfigError
from coserve.model.origin import linears_digest
from coserve.model.placing import put
from coserve.split.absent import check_methods
from coserve.split.calls import Calls, Source
from coserve.split.gather import Where, check_access, connect
from coserve.split.linears import digests_of, find_linears, shape_of
from coserve.split.messages import other_weights
from coserve.split.privacy.modes import Privacy, mode_of, private
from coserve.split.remote_group import RemoteGroup
from coserve.split.script_kernels import use_script_kernels
from coserve.split.script_spans import Spans, put_spans
from coserve.split.tls import ClientTls
from coserve.split.virtual import Siblings, virtual

_SHOWN: Final = 20  # paths in an error


def attach(
    model: nn.Module,
    address: Where,
    key: str | Sequence[str] = "",
    patience: float = 60.0,
    privacy: Privacy | Literal["none", "noise"] | None = None,
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
    executor, "noise" being `Noise()`; None hides nothing. At a unix socket tensors are in shared memory,
    where the executor offers some. `tls` is the settings for a `tls:` address.

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
    check_access(address, key, patience, tls)
    flags = {"shared_memory": shared_memory, "blocks": blocks, "kernels": kernels}
    if wrong := [name for name, given in flags.items() if not isinstance(given, bool)]:
        raise ConfigError(f"{wrong[0]} must be True or False, not {flags[wrong[0]]!r}")
    mode = mode_of(privacy)
    if not isinstance(model, nn.Module):
        raise ConfigError(f"a model must be a torch module, not {model!r}")
    found = find_linears(model)
    check_methods(model, {path: module for path, (_, module) in found.items()})
    source = connect(address, key, tls, patience, shared_memory)
    calls: Calls = source
    try:
        _check(source, {path: module for path, (_, module) in found.items()})
        if mode is not None:
            calls = private(
                source,
                mode,
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
    put_spans(model, calls, spans, blocks)
    if kernels:
        use_script_kernels(model)
    weakref.finalize(model, calls.close)
    return calls


def _check(source: Source, own: Mapping[str, nn.Module]) -> None:
    """Raises AdapterMismatch where the executor has a linear that the model lacks or has in another shape or
    with other weights, and where the model has no weights for a linear that the executor lacks."""
    base, where = source.base, f"the executor at {source.address}"
    for group in base.groups:
        for path, out in group.outputs.items():
            shape = shape_of(own[path]) if path in own else None
            if shape != (out, group.inputs):
                shown = "x".join(map(str, shape)) if shape else "not in this model"
                raise AdapterMismatch(f"{path} of {where} is {out}x{group.inputs}, here it is {shown}")
    offered = {path for group in base.groups for path in group.outputs}
    digests = digests_of({path: own[path] for path in offered})
    if digests is not None and linears_digest(digests) != base.fingerprint:
        types = {str(x.dtype).removeprefix("torch.") for path in offered for x in own[path].parameters(False)}
        said = other_weights(base.digests, digests)
        if types != {base.dtype}:
            said = [f"its linears are {base.dtype}, here they are {' and '.join(sorted(types))}"]
        raise AdapterMismatch(f"{where} has another base than the model: {' and '.join(said)}")
    kept = {path: module for path, module in own.items() if path not in offered}
    missing = [path for path, module in kept.items() if any(p.is_meta for p in module.parameters(False))]
    if missing:
        shown = ", ".join(missing[:_SHOWN]) + f" and {len(missing) - _SHOWN} more" * (len(missing) > _SHOWN)
        raise AdapterMismatch(
            f"the executor does not have {shown}: load their weights, which are on the meta device, before"
        )
