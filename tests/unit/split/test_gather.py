"""Shards of linears, and what several of them give together."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from coserve.errors import AdapterMismatch, ConfigError
from coserve.split.connection import Rows, call_of
from coserve.split.executor import BaseLinears
from coserve.split.gather import assembled, connect
from coserve.split.messages import Direction, GroupTable, LinearCall
from coserve.split.privacy.field import uniform
from coserve.split.shard import Shard
from models import tiny

QKV = tuple(f"model.layers.1.self_attn.{name}_proj" for name in "qkv")


class Direct:
    """An executor without a connection, which checks calls and computes them at once."""

    def __init__(self, linears: BaseLinears, address: str = "one") -> None:
        self.linears, self.base, self.address = linears, linears.hello, address
        self.calls: list[LinearCall] = []
        self.is_closed = False

    def submit(self, call: LinearCall, rows: Rows, widths: Sequence[int]) -> "Ready":
        table = GroupTable(self.base)
        assert [part.shape[1] for part in rows] == table.check_call(call)[0]
        self.calls.append(call)
        answer = self.linears.compute(call, rows)
        assert [part.shape for part in answer] == [(call.rows, width) for width in widths]
        return Ready(answer)

    def close(self) -> None:
        self.is_closed = True


class Ready:
    def __init__(self, tensors: list[Tensor]) -> None:
        self._tensors = tensors

    def result(self, timeout: float | None = None) -> list[Tensor]:
        return self._tensors


def shards(count: int, kind: str = "llama", dtype: torch.dtype = torch.float32) -> list[Direct]:
    return [
        Direct(BaseLinears(tiny(kind, dtype), shard=Shard(number, count)), f"at {number}")
        for number in range(1, count + 1)
    ]


def asked(
    source: object, paths: Sequence[str], rows: Rows, direction: Direction, widths: Sequence[int]
) -> list[Tensor]:
    call = call_of(paths, rows, source.base.dtype, direction=direction, work="training")  # type: ignore[attr-defined]
    found: list[Tensor] = source.submit(call, rows, widths).result()  # type: ignore[attr-defined]
    return found


@pytest.mark.parametrize(("outputs", "count"), [(12, 1), (12, 3), (13, 4), (3, 5), (1, 7)])
def test_rows_of_all_shards_are_all_rows_once(outputs: int, count: int) -> None:
    rows = [Shard(number, count).rows(outputs) for number in range(1, count + 1)]
    assert [row for own in rows for row in range(outputs)[own]] == list(range(outputs))
    sizes = [own.stop - own.start for own in rows]
    assert sizes == sorted(sizes, reverse=True) and max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("text", ["0/2", "3/2", "1", "1/", "a/b", "-1/2", "1/2/3", "1/0"])
def test_what_is_no_shard_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=f"--shard '{text}' is not I/N"):
        Shard.parse(text)
    assert Shard.parse("") is None and Shard.parse("2/3") == Shard(2, 3)


@pytest.mark.parametrize(("kind", "count"), [("llama", 2), ("llama", 40), ("gpt2", 3)])
def test_products_and_gradients_are_those_of_whole_linears(kind: str, count: int) -> None:
    """With 40 shards those beyond the 32nd have none of the keys' 32 outputs. A shard has its part of the
    bytes."""
    whole, parts = Direct(BaseLinears(tiny(kind))), shards(count, kind)
    (together,) = assembled(list(reversed(parts)))
    assert together.base == whole.base.of_linears()
    assert sum(part.linears.nbytes for part in parts) == whole.linears.nbytes
    assert max(part.linears.nbytes for part in parts) < whole.linears.nbytes / count * 1.5
    for group in whole.base.groups:
        paths, widths = tuple(group.outputs), list(group.outputs.values())
        x = [torch.randn(5, group.inputs)]
        grads = [torch.randn(5, width) for width in widths]
        for rows, direction, out in ((x, "forward", widths), (grads, "backward", [group.inputs])):
            found, wanted = (asked(source, paths, rows, direction, out) for source in (together, whole))  # type: ignore[arg-type]
            for one, other in zip(found, wanted, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    assert all(part.calls for part in parts)


def test_elements_of_the_field_are_exact() -> None:
    """All shards have the exponent of the whole weight, so that the two parties may cut differently."""
    whole, (together,) = Direct(BaseLinears(tiny("llama"))), assembled(shards(3))
    group = next(group for group in whole.base.groups if QKV[0] in group.outputs)
    widths = list(group.outputs.values())
    for rows, direction, out in (
        ([uniform(4, group.inputs)], "forward", widths),
        ([uniform(4, width) for width in widths], "backward", [group.inputs]),
    ):
        nbytes = sum(part.nbytes for part in rows)
        call = LinearCall(0, QKV, direction, 4, "field", "training", nbytes)
        found, wanted = (source.submit(call, rows, out).result() for source in (together, whole))
        assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


def test_half_precision_is_rounded_once_more_at_most() -> None:
    whole, (together,) = (
        Direct(BaseLinears(tiny("llama", torch.bfloat16))),
        assembled(shards(4, dtype=torch.bfloat16)),
    )
    grads = [torch.randn(6, 64).bfloat16()]
    path = ["model.layers.0.self_attn.o_proj"]
    exact = grads[0].double() @ tiny("llama", torch.bfloat16).get_submodule(path[0]).weight.double()  # type: ignore[operator]
    (found,), (wanted,) = (asked(source, path, grads, "backward", [64]) for source in (together, whole))
    assert (found - exact).norm() < 2 * (wanted - exact).norm()


def test_a_missing_shard_is_named() -> None:
    one, two, three = shards(3)
    with pytest.raises(ConfigError, match="shard 2/3 of the linears is missing: at 1 has 1/3, at 3 has 3/3"):
        assembled([one, three])
    with pytest.raises(ConfigError, match=r"shard 2/3 of the linears is missing: at 1 has 1/3$"):
        assembled([one])
    with pytest.raises(ConfigError, match="at 1 and at 1 both have shard 1/3"):
        assembled([one, two, three, Direct(one.linears, "at 1")])
    halves = shards(2)
    with pytest.raises(ConfigError, match="shard 2/2 of the linears is missing"):
        assembled([halves[0], one, two, three])
    assert [source.address for source in assembled([halves[1], one, two, three, halves[0]])] == [
        "at 2, at 1",
        "at 1, at 2, at 3",
    ]


def test_shards_of_other_weights_are_not_joined() -> None:
    """Each tells the hash of whole linears, which it has computed when it loaded them."""
    changed = tiny("llama")
    changed.model.layers[0].mlp.up_proj.weight.data[0, 0] += 1
    one, other = (
        Direct(BaseLinears(tiny("llama"), shard=Shard(1, 2))),
        Direct(BaseLinears(changed, shard=Shard(2, 2))),
    )
    assert one.base.fingerprint == BaseLinears(tiny("llama")).hello.fingerprint != other.base.fingerprint
    with pytest.raises(AdapterMismatch, match=r"1 linear with other weights, of 22 \(model.layers.0.mlp.up"):
        assembled([one, other])


def test_shards_that_were_cut_otherwise_are_refused() -> None:
    one, two = shards(2)
    del two.base.groups[0].outputs[next(iter(two.base.groups[0].outputs))]
    with pytest.raises(AdapterMismatch, match="do not make up a whole"):
        assembled([one, two])


def test_keys_for_some_executors_are_refused() -> None:
    with pytest.raises(ConfigError, match="3 keys are given for 2 executors"):
        connect(["unix:/nowhere", "unix:/nowhere2"], ["a", "b", "c"])


def test_closing_closes_all() -> None:
    parts = shards(2)
    (together,) = assembled(parts)
    together.close()
    assert all(part.is_closed for part in parts)
