"""Slices (the modules between two layers' attention) as one call, and the models that have them."""

import threading

import pytest
import torch
from torch import Tensor, nn

from coserve.errors import RequestError
from coserve.split import slices as own
from coserve.split.batching import BatchingConfig
from coserve.split.connection import call_of
from coserve.split.executor import BaseLinears
from coserve.split.layers import LayerChoice
from coserve.split.messages import VERSION, BaseHello, GroupShape, GroupTable, LinearCall, SliceShape
from coserve.split.queues import CallQueues
from coserve.split.shard import Shard
from coserve.split.slice_calls import LayerRun
from coserve.split.work import Work
from models import tiny

LLAMA = [f"model.layers.{layer}.self_attn" for layer in range(3)]
ATTENTION = {
    "llama": LLAMA,
    "qwen3": LLAMA,  # norms over heads, which are attention's
    "gemma2": LLAMA,
    "phi3": LLAMA,  # one linear before attention
    "opt": [f"model.decoder.layers.{layer}.self_attn" for layer in range(3)],
    "gpt2": [f"transformer.h.{layer}.attn" for layer in range(3)],
    "gpt_neox": [f"gpt_neox.layers.{layer}.attention" for layer in range(3)],  # beside the feed-forward layer
    "mixtral": [],  # experts are one tensor, which the executor does not have
}


@pytest.mark.parametrize("kind", ATTENTION)
def test_they_are_found_in_models_nobody_edited(kind: str) -> None:
    hello = BaseLinears(tiny(kind)).hello
    assert [shape.path for shape in hello.slices] == [f"{path}.after" for path in ATTENTION[kind]]
    offered = {path: out for group in hello.groups for path, out in group.outputs.items()}
    for shape in hello.slices:
        assert shape.width == 64 and {*shape.linears, *shape.following} <= offered.keys()
        assert all(path.startswith(f"{shape.layer}.") for path in shape.linears)
        assert all(offered[path] == out for path, out in shape.following.items())
    assert [bool(shape.following) for shape in hello.slices] == [True, True, False][: len(ATTENTION[kind])]


def test_only_those_of_which_the_executor_has_all() -> None:
    chosen = BaseLinears(tiny("llama"), choice=LayerChoice("0,2")).hello.slices
    assert [(shape.layer, *shape.following) for shape in chosen] == [("model.layers.0",), ("model.layers.2",)]
    assert not BaseLinears(tiny("llama"), choice=LayerChoice(r".*mlp.*")).hello.slices
    assert not BaseLinears(tiny("llama"), shard=Shard(1, 2)).hello.slices


class Mixing(nn.Module):
    """A feed-forward layer whose rows are not alone."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.inner = mlp

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + x.mean(1, keepdim=True)  # type: ignore[no-any-return]


def test_what_does_not_pass_the_trial_is_none() -> None:
    model = tiny("llama")
    model.model.layers[1].mlp = Mixing(model.model.layers[1].mlp)
    assert [shape.layer for shape in BaseLinears(model).hello.slices] == ["model.layers.0", "model.layers.2"]


def noted(kind: str, shape: SliceShape) -> tuple[list[Tensor], list[Tensor]]:
    """A layer's input and what attention gives its last linear, in the model's own pass; and the layer's
    output with the products of the next layer's first linears."""
    model, found = tiny(kind), dict[str, Tensor]()

    def note(path: str, of_input: bool) -> None:
        def hook(_: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor], out: Tensor) -> None:
            given = args[0] if args else kwargs["hidden_states"]
            found[path] = given if of_input else (out[0] if isinstance(out, tuple) else out)

        model.get_submodule(path).register_forward_hook(hook, with_kwargs=True)

    note(shape.output, True)
    for path in shape.following:
        note(path, False)
    outputs = dict[str, Tensor]()
    layer = model.get_submodule(shape.layer)
    layer.register_forward_pre_hook(lambda _, args: outputs.update(into=args[0]))
    layer.register_forward_hook(
        lambda _, args, out: outputs.update(out=out[0] if isinstance(out, tuple) else out)
    )
    with torch.no_grad():
        model(torch.arange(1, 10)[None])
    rows = [outputs["into"], found[shape.output], outputs["out"], *(found[path] for path in shape.following)]
    flat = [tensor.reshape(9, -1) for tensor in rows]
    return flat[:2], flat[2:]


@pytest.mark.parametrize("kind", [kind for kind in ATTENTION if ATTENTION[kind]])
def test_results_are_the_models(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in pieces: nine rows, four at once."""
    linears = BaseLinears(tiny(kind))
    for shape in linears.hello.slices[1:]:
        given, wanted = noted(kind, shape)
        call = call_of([shape.path], given, "float32", direction="forward", work="inference")
        GroupTable(linears.hello).check_call(call)
        for most in (2048, 4):
            monkeypatch.setattr(own, "_ROWS", most)
            found = linears.compute(call, given)
            for one, other in zip(found, wanted, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
                assert not one.requires_grad


def test_whole_layers_can_be_computed_beside_them() -> None:
    """On another thread: attention is left out on that of a slice alone."""
    linears = BaseLinears(tiny("llama"))
    shape, x = linears.hello.slices[1], torch.randn(6, 64)
    given = [x, torch.randn(6, 64)]
    slice_call = call_of([shape.path], given, "float32", direction="forward", work="inference")
    block = call_of([shape.layer], [x], "float32", direction="forward", work="inference", lengths=(4, 2))
    wanted = linears.compute(slice_call, given), linears.compute(block, [x])
    failures = []

    def blocks() -> None:
        for _ in range(30):
            if not torch.equal(linears.compute(block, [x])[0], wanted[1][0]):
                failures.append("a layer")

    thread = threading.Thread(target=blocks)
    thread.start()
    for _ in range(60):
        if not all(map(torch.equal, linears.compute(slice_call, given), wanted[0])):
            failures.append("a slice")
    thread.join()
    assert not failures


SHAPE = SliceShape("l.attn.after", "l", 8, "l.out", 6, ("l.out", "l.up"), ("1", "2"), {"m.in": 5})
GROUPS = (GroupShape(6, {"l.out": 8}), GroupShape(8, {"l.up": 9}), GroupShape(8, {"m.in": 5}))


def test_a_call_is_checked_as_others_are() -> None:
    table = GroupTable(BaseHello(VERSION, "", "float32", GROUPS, slices=(SHAPE,)))
    call = LinearCall(0, ("l.attn.after",), "forward", 3, "float32", "inference", 3 * 14 * 4)
    table.check_call(call)
    assert (table.call_widths(call), table.answer_bytes(call)) == ([8, 6], 3 * 13 * 4)
    for fields, reason in (
        ({"paths": ("l.attn.after", "l.up")}, "'l.attn.after' is a call of its own"),
        ({"paths": ("l.up", "l.attn.after")}, "is no linear of this base"),
        ({"direction": "backward"}, "'l.attn.after' is computed forward alone"),
        ({"dtype": "field"}, "is no linear, so shares"),
        ({"lengths": (3,)}, "lengths of sequences are for decoder layers"),
        ({"nbytes": 3 * 8 * 4}, "96 bytes came for 3 rows, which have 168"),
    ):
        changed = {name: getattr(call, name) for name in call.__struct_fields__} | fields
        with pytest.raises(RequestError, match=reason):
            table.check_call(LinearCall(**changed))


def test_an_executor_with_other_slices_is_no_successor() -> None:
    one, other = (BaseHello(VERSION, "", "float32", GROUPS, slices=own) for own in ((SHAPE,), ()))
    assert one.is_same_base(one) and not one.is_same_base(other)


def test_a_client_that_calls_slices_has_come_as_far_as_others() -> None:
    """Its progress decides the order, so that clients of both kinds meet."""
    queues = CallQueues(BatchingConfig(), (*GROUPS, GroupShape(5, {"m.out": 8})), 10, slices=[SHAPE])
    progress = []
    for calls in (("l.attn.after", "m.out"), ("l.out", "l.up", "m.in", "m.out")):
        account = queues.join("client")
        for path in calls:
            call = LinearCall(0, (path,), "forward", 1, "float32", "inference", 32)
            work = Work(call, [], lambda outcome: None, account)
            queues.put(work)
        progress.append(work.progress)
    assert progress == [4, 4]
    assert ["l.attn.after"] in [list(product.paths) for product in queues.status()[0]]


def test_products_are_those_of_the_next_layer_alone() -> None:
    """Other rows may join what the slice gave, and a step may end between two layers."""
    y, product = torch.zeros(1, 2, 4), torch.zeros(1, 2, 3)
    run = LayerRun()
    for hidden, expected in ((y, {"m.in": product}), (torch.cat([y, y], 1), {}), (y.clone(), {})):
        run.output, run.ahead = y, {"m.in": product}
        run.begin(hidden)
        assert run.products == expected
        run.begin(y)
        assert not run.products
