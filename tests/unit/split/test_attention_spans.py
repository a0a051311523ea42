"""Spans between two layers' attention as one call, and the models that have them."""

import threading

import pytest
import torch
from torch import Tensor, nn

from coserve.errors import RequestError
from coserve.split import spans as own
from coserve.split.batching import BatchingConfig
from coserve.split.connection import call_of
from coserve.split.engine_spans import LayerRun
from coserve.split.executor import BaseLinears
from coserve.split.layers import LayerChoice
from coserve.split.messages import VERSION, BaseHello, GroupShape, GroupTable, LinearCall, SpanShape
from coserve.split.queues import CallQueues
from coserve.split.shard import Shard
from coserve.split.work import Work
from models import tiny
from split_served import Mixing, spans_of

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
    spans = spans_of(hello, "attention")
    assert [shape.path for shape in spans] == [f"{path}.after" for path in ATTENTION[kind]]
    offered = {path: out for group in hello.groups for path, out in group.outputs.items()}
    for shape in spans:
        layer, *after = shape.layers
        assert shape.inputs[0] == 64 and {*shape.linears} <= offered.keys()
        assert shape.outputs == (64, *(offered[path] for path in shape.following))
        for path in shape.linears:
            assert path.startswith(f"{after[0] if path in shape.following else layer}.")
    assert [bool(shape.following) for shape in spans] == [True, True, False][: len(ATTENTION[kind])]


def test_only_those_of_which_the_executor_has_all() -> None:
    chosen = spans_of(BaseLinears(tiny("llama"), choice=LayerChoice("0,2")).hello, "attention")
    assert [(*shape.layers, *shape.following) for shape in chosen] == [
        ("model.layers.0",),
        ("model.layers.2",),
    ]
    mlp = BaseLinears(tiny("llama"), choice=LayerChoice(r".*mlp.*"))
    assert not spans_of(mlp.hello, "attention")
    assert not BaseLinears(tiny("llama"), shard=Shard(1, 2)).hello.spans


def test_what_does_not_pass_the_trial_is_none() -> None:
    model = tiny("llama")
    model.model.layers[1].mlp = Mixing(model.model.layers[1].mlp)
    found = spans_of(BaseLinears(model).hello, "attention")
    assert [next(iter(shape.layers)) for shape in found] == ["model.layers.0", "model.layers.2"]


def noted(kind: str, shape: SpanShape) -> tuple[list[Tensor], list[Tensor]]:
    """A layer's input and what attention gives its last linear, in the model's own pass; and the layer's
    output with the products of the next layer's first linears."""
    model, found = tiny(kind), dict[str, Tensor]()

    def note(path: str, of_input: bool) -> None:
        def hook(_: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor], out: Tensor) -> None:
            given = args[0] if args else kwargs["hidden_states"]
            found[path] = given if of_input else (out[0] if isinstance(out, tuple) else out)

        model.get_submodule(path).register_forward_hook(hook, with_kwargs=True)

    note(shape.linears[0], True)
    for path in shape.following:
        note(path, False)
    outputs = dict[str, Tensor]()
    layer = model.get_submodule(next(iter(shape.layers)))
    layer.register_forward_pre_hook(lambda _, args: outputs.update(into=args[0]))
    layer.register_forward_hook(
        lambda _, args, out: outputs.update(out=out[0] if isinstance(out, tuple) else out)
    )
    with torch.no_grad():
        model(torch.arange(1, 10)[None])
    rows = [
        outputs["into"],
        found[shape.linears[0]],
        outputs["out"],
        *(found[path] for path in shape.following),
    ]
    flat = [tensor.reshape(9, -1) for tensor in rows]
    return flat[:2], flat[2:]


@pytest.mark.parametrize("kind", [kind for kind in ATTENTION if ATTENTION[kind]])
def test_results_are_the_models(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in pieces: nine rows, four at once."""
    linears = BaseLinears(tiny(kind))
    for shape in spans_of(linears.hello, "attention")[1:]:
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
    """On another thread: attention is left out on that of a span alone."""
    linears = BaseLinears(tiny("llama"))
    shape, x = spans_of(linears.hello, "attention")[1], torch.randn(6, 64)
    layer = next(iter(shape.layers))
    given = [x, torch.randn(6, 64)]
    span_call = call_of([shape.path], given, "float32", direction="forward", work="inference")
    block = call_of([layer], [x], "float32", direction="forward", work="inference", lengths=(4, 2))
    wanted = linears.compute(span_call, given), linears.compute(block, [x])
    failures = []

    def blocks() -> None:
        for _ in range(30):
            if not torch.equal(linears.compute(block, [x])[0], wanted[1][0]):
                failures.append("a layer")

    thread = threading.Thread(target=blocks)
    thread.start()
    for _ in range(60):
        if not all(map(torch.equal, linears.compute(span_call, given), wanted[0])):
            failures.append("a span")
    thread.join()
    assert not failures


SHAPE = SpanShape(
    "attention", "l.attn.after", (8, 6), (8, 5), ("l.out", "l.up", "m.in"), {"l": "1", "m": "2"}
)
GROUPS = (GroupShape(6, {"l.out": 8}), GroupShape(8, {"l.up": 9}), GroupShape(8, {"m.in": 5}))


def test_a_call_is_checked_as_others_are() -> None:
    table = GroupTable(BaseHello(VERSION, "", "float32", GROUPS, spans=(SHAPE,)))
    call = LinearCall(0, ("l.attn.after",), "forward", 3, "float32", "inference", 3 * 14 * 4)
    assert table.check_call(call) == ([8, 6], 3 * 13 * 4)
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


def test_an_executor_with_other_spans_is_no_successor() -> None:
    one, other = (BaseHello(VERSION, "", "float32", GROUPS, spans=own) for own in ((SHAPE,), ()))
    assert one.is_same_base(one) and not one.is_same_base(other)


def test_a_client_that_calls_spans_has_come_as_far_as_others() -> None:
    """Its progress decides the order, so that clients of both kinds meet."""
    queues = CallQueues(BatchingConfig(), (*GROUPS, GroupShape(5, {"m.out": 8})), 10, spans=[SHAPE])
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
    """Other rows may join what the span gave, and a step may end between two layers."""
    y, product = torch.zeros(1, 2, 4), torch.zeros(1, 2, 3)
    run = LayerRun()
    for hidden, expected in ((y, {"m.in": product}), (torch.cat([y, y], 1), {}), (y.clone(), {})):
        run.output, run.ahead = y, {"m.in": product}
        run.begin(hidden)
        assert run.products == expected
        run.begin(y)
        assert not run.products
