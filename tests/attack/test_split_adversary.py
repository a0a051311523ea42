"""An executor that makes use of what it sees: texts from rows, adapters from products (Symbiosis, figure 8).

It knows the base's weights, and of a client only its calls. Recovery from plain traffic must work, or failing
against a mode of privacy would mean nothing.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from peft import LoraConfig, get_peft_model
from scipy import stats
from torch import Tensor, nn

from coserve.split.address import Address
from coserve.split.attach import attach
from coserve.split.batching import BatchingConfig
from coserve.split.executor import BaseExecutor, BaseLinears
from coserve.split.messages import LinearCall
from coserve.split.privacy.field import PRIME
from coserve.split.privacy.modes import Noise, Privacy, Shares
from coserve.split.service import SplitService
from models import tiny

TOKENS: Final = 2000  # in the vocabulary
SEQUENCES, LENGTH = 100, 100  # 10,000 tokens
WIDTH, HEADS = 64, 4
FIRST: Final = "model.layers.0.self_attn.q_proj"
VALUE: Final = "model.layers.0.self_attn.v_proj"
OUT: Final = "model.layers.0.self_attn.o_proj"
CHANCE: Final = 1e-6  # how improbable a finding must be to count
Traffic = list[tuple[LinearCall, list[Tensor], list[Tensor]]]


def base() -> Any:
    return tiny("llama", num_hidden_layers=1, vocab_size=TOKENS)


class Curious:
    """An executor that keeps its traffic."""

    def __init__(self, path: Path) -> None:
        linears = BaseLinears(base())
        self.traffic: Traffic = []
        compute = linears.compute

        def noted(call: LinearCall, tensors: Sequence[Tensor]) -> list[Tensor]:
            answer = compute(call, tensors)
            self.traffic.append((call, [tensor.clone() for tensor in tensors], answer))
            return answer

        linears.compute = noted  # type: ignore[method-assign]
        self.executor = BaseExecutor(linears, BatchingConfig("none"))
        self.service = SplitService(self.executor, Address(path=str(path)))
        self.address = str(self.service.address)

    def inputs(self, path: str, *, ahead: bool = False) -> Tensor:
        """The rows of calls at a linear, [rows, in]; those of the text, or those that prepared for it."""
        found = [
            given[0]
            for call, given, _ in self.traffic
            if call.direction == "forward" and path in call.paths and (len(given[0]) < 100) == ahead
        ]
        return torch.cat(found) if found else torch.empty(0)

    def outputs(self, path: str) -> Tensor:
        """The products of these rows, [rows, out]."""
        return torch.cat(
            [
                answer[call.paths.index(path)]
                for call, given, answer in self.traffic
                if call.direction == "forward" and path in call.paths and len(given[0]) >= 100
            ]
        )

    def close(self) -> None:
        self.service.close()
        self.executor.close()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Curious]]:
    folder = tmp_path_factory.mktemp("curious")
    pair = [Curious(folder / f"{number}.sock") for number in range(2)]
    yield pair
    for executor in pair:
        executor.close()


def with_lora() -> nn.Module:
    torch.manual_seed(1)
    return get_peft_model(base(), LoraConfig(r=4, target_modules=["v_proj"], init_lora_weights=False)).eval()


@torch.no_grad()
def secret_update(model: nn.Module) -> Tensor:
    """LoRA's update of the value projection, [out, in]: the secret that an adversary wants."""
    layer = model.get_submodule(f"base_model.model.{VALUE}")
    delta: Tensor = layer.get_delta_weight("default")  # type: ignore[operator]
    return delta


@pytest.fixture(scope="module", params=["plain", "noise", "shares"])
def seen(request: pytest.FixtureRequest, pair: list[Curious]) -> tuple[str, Tensor, Tensor, list[Curious]]:
    """A mode, the text [tokens] and LoRA's update that nobody should know, and the executors that look."""
    modes: dict[str, Privacy | None] = {
        "plain": None,
        "noise": Noise(),
        "shares": Shares(pair[1].address),
    }
    client = with_lora()
    for executor in pair:
        executor.traffic.clear()
    attach(client, pair[0].address, privacy=modes[request.param])
    ids = torch.randint(TOKENS, (SEQUENCES, LENGTH))
    with torch.no_grad():
        # Half at a time: of a call beyond 8,192 rows the later part may be computed first.
        for half in ids.chunk(2):
            client.base_model.model.model(half)  # type: ignore[union-attr, operator]
    looking = pair if request.param == "shares" else pair[:1]
    return request.param, ids.flatten(), secret_update(client), looking


# What an executor can do.


@torch.no_grad()
def all_rows() -> Tensor:
    """The input of the first linears for each token of the vocabulary, [tokens, width]: public."""
    model = base().model
    rows: Tensor = model.layers[0].input_layernorm(model.embed_tokens.weight)
    return rows


def nearest(rows: Tensor, known: Tensor) -> Tensor:
    """The token whose row is nearest to each of the rows."""
    return torch.cdist(rows.double(), known.double()).argmin(1)


def numbers(rows: Tensor) -> Tensor:
    """Elements of the field as numbers around zero, of size one in the mean; other rows as they are."""
    if rows.dtype != torch.int64:
        return rows.double()
    near = torch.where(rows > PRIME // 2, rows - PRIME, rows).double()
    return near / near.square().mean().sqrt()


def without_clusters(rows: Tensor, values: int = 4) -> Tensor:
    """Rows without the means of the `values` clusters that they fall into: an adversary that has not seen
    the noise, but knows that there is little of it."""
    centers = rows[:1]
    while len(centers) < values:  # the row farthest from all centers begins another one
        centers = torch.cat([centers, rows[torch.cdist(rows, centers).amin(1).argmax()][None]])
    for _ in range(20):
        own = torch.cdist(rows, centers).argmin(1)
        centers = torch.stack(
            [rows[own == k].mean(0) if (own == k).any() else centers[k] for k in range(values)]
        )
    return rows - centers[own]


def without_noise(rows: Tensor, known: Tensor, calls: Sequence[int]) -> Tensor:
    """Rows without the noise values [values + 1, width] that the executor was asked about, the last of which
    are zeros; the noise has one size in each call, of so many rows."""
    noise = known[:-1]
    size = rows @ noise.t() / noise.square().sum(1)
    own = size.argmax(1)
    found = size.gather(1, own[:, None]).split(list(calls))
    sizes = torch.cat([part.mean().expand(len(part)) for part in found])
    return rows - sizes[:, None] * noise[own]


def calls_of(executor: Curious, path: str) -> list[int]:
    return [len(g[0]) for c, g, _ in executor.traffic if path in c.paths and len(g[0]) >= 100]


def first_positions(rows: Tensor) -> Tensor:
    """Rows of tokens that attend to themselves alone: there attention gives back its values."""
    return rows.view(SEQUENCES, LENGTH, -1)[:, 0]


def extracted(inputs: Tensor, products: Tensor, outputs: Tensor) -> Tensor:
    """(C - B) / A of figure 8: the update by which the next linear's input differs from the product."""
    heads = outputs.view(len(outputs), HEADS, -1)[:, ::2].flatten(1)  # two heads share their keys and values
    return torch.linalg.lstsq(inputs.double(), (heads - products).double()).solution.t()


def error(found: Tensor, update: Tensor) -> float:
    return float((found - update).norm() / update.norm())


def likeness_of(found: Tensor, update: Tensor) -> float:
    return float(torch.cosine_similarity(found.flatten(), update.flatten().double(), 0))


# What comes of it.


def rate(found: Tensor, ids: Tensor) -> float:
    return float((found == ids).double().mean())


def test_tokens_from_the_first_rows(seen: tuple[str, Tensor, Tensor, list[Curious]]) -> None:
    mode, ids, _, executors = seen
    known = all_rows()
    for executor in executors:
        rows = numbers(executor.inputs(FIRST))
        assert len(rows) == len(ids) == SEQUENCES * LENGTH
        naive = rate(nearest(rows, known), ids)
        clustered = rate(nearest(without_clusters(rows), known), ids)
        print(f"{mode}: nearest rows give {naive:.4f} of the tokens, clusters {clustered:.4f}")
        if mode == "plain":
            assert naive >= 0.99
        elif mode == "noise":
            ahead = executor.inputs(FIRST, ahead=True).double()
            taken_out = rate(nearest(without_noise(rows, ahead, calls_of(executor, FIRST)), known), ids)
            print(f"{mode}: subtracted, {taken_out:.4f}")
            assert naive < 0.05 and clustered >= 0.9 and taken_out >= 0.99
        else:
            for found in (naive, clustered):
                assert stats.binom.sf(round(found * len(ids)) - 1, len(ids), 1 / TOKENS) > CHANCE


def test_an_adapter_from_two_linears(seen: tuple[str, Tensor, Tensor, list[Curious]]) -> None:
    mode, _, update, executors = seen
    for executor in executors:
        inputs, products, outputs = executor.inputs(FIRST), executor.outputs(VALUE), executor.inputs(OUT)
        if mode == "noise":
            inputs, outputs = (
                without_noise(rows, executor.inputs(path, ahead=True), calls_of(executor, path))
                for path, rows in ((FIRST, inputs), (OUT, outputs))
            )
            products = inputs @ base().get_submodule(VALUE).weight.detach().t()
        a, b, c = (numbers(first_positions(rows)) for rows in (inputs, products, outputs))
        found = extracted(a, b, c)
        likeness = likeness_of(found, update)
        print(f"{mode}: the update with an error of {error(found, update):.2e}, its cosine {likeness:.4f}")
        if mode == "plain":
            assert error(found, update) < 1e-3
        elif mode == "noise":
            assert error(found, update) < 0.2
        else:
            others = [
                likeness_of(found, torch.randn(len(update), 4) @ torch.randn(4, WIDTH)) for _ in range(400)
            ]
            assert abs(likeness) < stats.t.isf(CHANCE / 2, 399) * torch.tensor(others).std()


@pytest.mark.parametrize("seen", ["shares"], indirect=True)
def test_shares_are_uniform_whatever_the_rows_are(seen: tuple[str, Tensor, Tensor, list[Curious]]) -> None:
    _, ids, _, executors = seen
    rows = all_rows()[ids].double()
    for executor in executors:
        for path in (FIRST, OUT):
            share = executor.inputs(path)
            counts = torch.bincount((share >> 49).flatten(), minlength=256).numpy()
            assert stats.chisquare(counts).pvalue > CHANCE
            low = torch.bincount((share & 255).flatten(), minlength=256).numpy()
            assert stats.chisquare(low).pvalue > CHANCE
        given = numbers(executor.inputs(FIRST))
        together = float(torch.corrcoef(torch.stack([given.flatten(), rows.flatten()]))[0, 1])
        assert abs(together) < stats.norm.isf(CHANCE / 2) / rows.numel() ** 0.5
        # The same token again and again: means of its shares tell nothing.
        means = torch.stack([given[ids == token].mean(0) for token in ids.unique()[:200]])
        found = rate(nearest(means, all_rows()), ids.unique()[:200])
        assert stats.binom.sf(round(found * 200) - 1, 200, 1 / TOKENS) > CHANCE


def gradients_seen(executor: Curious) -> Mapping[str, Tensor]:
    found: dict[str, list[Tensor]] = {}
    for call, given, _ in executor.traffic:
        if call.direction == "backward" and call.rows > 2:
            for path, grad in zip(call.paths, given, strict=True):
                found.setdefault(path, []).append(grad)
    return {path: torch.cat(grads) for path, grads in found.items()}


def test_gradients_go_as_shares_too(pair: list[Curious]) -> None:
    client, ids = with_lora(), torch.randint(TOKENS, (2, 20))
    attach(client, pair[0].address, privacy=Shares(pair[1].address))
    for executor in pair:
        executor.traffic.clear()
    client(input_ids=ids, labels=ids).loss.backward()
    plain = with_lora()
    grads: list[Tensor] = []
    head = plain.get_submodule("base_model.model.lm_head")
    head.register_full_backward_hook(lambda *args: grads.append(args[2][0].flatten(0, 1)))
    plain(input_ids=ids, labels=ids).loss.backward()
    for executor in pair:
        assert all(call.dtype == "field" for call, _, _ in executor.traffic)
        share = gradients_seen(executor)["lm_head"]
        assert share.shape == grads[0].shape
        counts = torch.bincount((share >> 49).flatten(), minlength=256).numpy()
        assert stats.chisquare(counts).pvalue > CHANCE
        pair_of = torch.stack([numbers(share).flatten(), grads[0].double().flatten()])
        assert abs(float(torch.corrcoef(pair_of)[0, 1])) < stats.norm.isf(CHANCE / 2) / share.numel() ** 0.5
