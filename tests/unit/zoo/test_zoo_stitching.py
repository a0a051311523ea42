"""Stitching blocks: a known answer is found, all else stays frozen, and the zoo is whole whatever happens."""

import json
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook
from transformers import PreTrainedModel

from coserve.errors import ConfigError, LossNotFinite, ZooError
from coserve.model.stitched import Stitch
from coserve.zoo.adding import add
from coserve.zoo.alternatives import Stitching
from coserve.zoo.distilling import DistillationSettings, distil, fidelity, windows_of
from coserve.zoo.layered import LayeredModel
from coserve.zoo.stitching import (
    Stitched,
    StitchingBlock,
    fit_states,
    stitch,
    stitch_points,
    stitched_models,
    with_position,
)
from coserve.zoo.store import Zoo
from coserve.zoo.views import serve_from
from models import VOCABULARY, tiny
from zoo_made import make_lora, make_model

TEXT = "The quick brown fox jumps over the lazy dog; pack my box with five dozen jugs. " * 6
SHORT = DistillationSettings(epochs=1, batch_size=4, window=16, max_steps=2)


@pytest.fixture(scope="module")
def two(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a zoo with models of two widths and depths."""
    zoo = Zoo.create(tmp_path_factory.mktemp("two") / "zoo")
    add(zoo, sources / "base", "small")
    add(zoo, sources / "wide", "large")
    return zoo.folder


@pytest.fixture
def zoo(two: Path, tmp_path: Path) -> Zoo:
    return Zoo(shutil.copytree(two, tmp_path / "zoo"))


def everything(zoo: Zoo) -> tuple[list[str], list[str], list[str]]:
    return zoo.names(), zoo.alternatives.names(), sorted(zoo.tensors.all_keys())


def drawn(count: int, length: int = 16) -> Tensor:
    return torch.randint(1, VOCABULARY, (count, length), generator=torch.Generator().manual_seed(3))


@torch.no_grad()
def permuted(model: PreTrainedModel, order: Tensor) -> PreTrainedModel:
    """The same function with its hidden features in another order."""
    twin = tiny("llama", **{"num_hidden_layers": model.config.num_hidden_layers})
    for (name, own), theirs in zip(twin.named_parameters(), model.parameters(), strict=True):
        writes = name.endswith(("o_proj.weight", "down_proj.weight"))
        along = 0 if theirs.ndim == 1 or writes else 1
        own.copy_(theirs.index_select(along, order))
    return twin


def test_least_squares_find_the_known_block_between_twins() -> None:
    model = tiny("llama")
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0))
    first, second = LayeredModel(model), LayeredModel(permuted(model, order))
    tokens = drawn(24)
    torch.testing.assert_close(first.logits(tokens), second.logits(tokens), atol=1e-3, rtol=1e-3)
    stitched = Stitched(first, second, StitchingBlock(64, 64))
    points = stitch_points(3, 3)
    before = fidelity(stitched.at(points[0]), second.logits, tokens).similarity
    fit_states(stitched, points, tokens, 8)
    for point in points:
        found = fidelity(stitched.at(point), second.logits, drawn(4, 20))
        assert before < 0.9 < 0.999 < found.similarity and found.agreement > 0.95


def test_least_squares_are_those_of_a_plain_computation() -> None:
    first, second = LayeredModel(tiny("llama")), LayeredModel(tiny("gpt2", n_embd=32, seed=2))
    stitched = Stitched(first, second, StitchingBlock(64, 32))
    points, tokens = stitch_points(3, 3), drawn(16)
    fit_states(stitched, points, tokens, 5)
    rows, wanted = [], []
    for point in points:
        target = second.state_behind(point.enters - 1, tokens).flatten(0, 1).double()
        given = with_position(first.state_behind(point.layers - 1, tokens), point.position).flatten(0, 1)
        size = target.square().mean().sqrt()
        rows.append(torch.cat([given, given.new_ones(len(given), 1)], 1).double() / size)
        wanted.append(target / size)
    expected = torch.linalg.lstsq(torch.cat(rows), torch.cat(wanted)).solution
    torch.testing.assert_close(stitched.block.linear.weight, expected[:-1].T.float(), atol=2e-3, rtol=2e-3)


def test_training_brings_it_nearer_and_changes_nothing_else() -> None:
    first, second = LayeredModel(tiny("llama")), LayeredModel(tiny("llama", seed=1, hidden_size=96))
    frozen = [p.clone() for m in (first, second) for p in m.model.parameters()]
    stitched = Stitched(first, second, StitchingBlock(64, 96))
    points, tokens = stitch_points(3, 3), drawn(32)
    fit_states(stitched, points, tokens, 8)
    stages = [stitched.at(point) for point in points]
    before = [fidelity(stage, second.logits, tokens).similarity for stage in stages]
    seen: list[tuple[int, int]] = []
    settings = DistillationSettings(4, 8, 3e-3, 16)
    distil(
        stages, second.logits, list(stitched.block.parameters()), tokens, settings,
        lambda step, steps, loss: seen.append((step, steps)),
    )  # fmt: skip
    after = [fidelity(stage, second.logits, tokens).similarity for stage in stages]
    assert all(b > a + 0.01 for a, b in zip(before, after, strict=True)), (before, after)
    assert seen == [(step, 32) for step in range(1, 33)]
    now = [p for m in (first, second) for p in m.model.parameters()]
    assert all(torch.equal(a, b) and b.grad is None for a, b in zip(frozen, now, strict=True))


@contextmanager
def counted_steps() -> Iterator[list[object]]:
    """Context that counts the steps of all optimizers of torch."""
    steps: list[object] = []
    hook = register_optimizer_step_post_hook(lambda *one: steps.append(one[0]))
    try:
        yield steps
    finally:
        hook.remove()


def test_each_epoch_goes_from_shallow_to_deep() -> None:
    weight, tokens = torch.nn.Parameter(torch.zeros(5)), torch.zeros(4, 3, dtype=torch.long)
    order: list[int] = []

    def stage(number: int) -> Callable[[Tensor], Tensor]:
        return lambda given: (order.append(number), weight.expand(given.numel(), 5))[1]

    def teacher(given: Tensor) -> Tensor:
        return torch.arange(5.0).expand(given.numel(), 5)

    distil([stage(1), stage(2)], teacher, [weight], tokens, DistillationSettings(2, 2, 0.1, 3))
    assert order == [1, 1, 2, 2, 1, 1, 2, 2]
    order.clear()
    shares = ((1, [2]), (2, [2, 2]), (3, [2, 1, 2]), (5, [1, 2, 1, 2, 2]), (100, [1, 1, 2, 2] * 2))
    told = list[tuple[int, int]]()
    for most, wanted in shares:
        order.clear()
        told.clear()
        settings, both = DistillationSettings(2, 2, 0.1, 3, max_steps=most), [stage(1), stage(2)]
        with counted_steps() as steps:
            made = distil(both, teacher, [weight], tokens, settings, lambda *one: told.append(one[:2]))
        assert order == wanted and made == len(steps) == len(wanted), order
        assert told == [(step, made) for step in range(1, made + 1)]
    order.clear()
    with pytest.raises(LossNotFinite, match="step 1"):
        distil([lambda given: teacher(given) * weight * torch.nan], teacher, [weight], tokens, SHORT)


def test_fidelity_is_that_of_a_plain_computation() -> None:
    tokens = drawn(3, 5)
    one, other = (torch.randn(15, VOCABULARY, dtype=torch.float64) for _ in range(2))
    found = fidelity(lambda given: one, lambda given: other, tokens, batch_size=3)
    p, q = one.softmax(-1), other.softmax(-1)
    cosines = (p * q).sum(-1) / p.norm(dim=-1) / q.norm(dim=-1)
    following = p.reshape(3, 5, -1)[:, :-1]
    chosen = following.gather(2, tokens[:, 1:, None])
    assert found.similarity == pytest.approx(float(cosines.mean()))
    assert found.agreement == pytest.approx(float((one.argmax(-1) == other.argmax(-1)).double().mean()))
    assert found.accuracy == pytest.approx(float((following.argmax(-1) == tokens[:, 1:]).double().mean()))
    assert found.loss == pytest.approx(float(-chosen.log().mean()))


def test_the_end_of_a_text_is_held_out(zoo: Zoo) -> None:
    small, text = zoo.application("small"), "".join(chr(33 + n % 90) for n in range(95))
    found = windows_of(zoo, small, text, 8)
    assert found.trained.shape == (9, 8) and found.held_out.shape == (2, 8) and found.tokens == 88
    together = torch.cat([found.trained, found.held_out]).flatten().tolist()
    assert together == [2 + n % 90 for n in range(88)]
    assert windows_of(zoo, small, text[:17], 8).trained.shape == (1, 8)


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (2, 2, [(1, 1)]),
        (3, 3, [(1, 1), (2, 2)]),
        (2, 3, [(1, 1)]),
        (3, 6, [(1, 2), (2, 4)]),
        (6, 3, [(2, 1), (4, 2)]),
        (4, 6, [(1, 1), (2, 3), (3, 4)]),
    ],
)
def test_points_are_borders_of_what_corresponds(
    first: int, second: int, expected: list[tuple[int, int]]
) -> None:
    points = stitch_points(first, second)
    assert [(point.layers, point.enters) for point in points] == expected
    positions = [point.position for point in points]
    assert positions == sorted(set(positions)) and positions[0] > 0 and positions[-1] < 1
    assert points[0].position == pytest.approx((expected[0][0] + expected[0][1] + 1) / (first + second))


def test_the_position_is_an_input() -> None:
    block, hidden = StitchingBlock(4, 3), torch.randn(2, 4)
    shallow, deep = block(hidden, 0.25), block(hidden, 0.75)
    assert torch.allclose(deep - shallow, 0.5 * block.linear.weight[:, 4].expand(2, 3), atol=1e-6)


@pytest.mark.parametrize(("first", "second"), [("small", "large"), ("large", "small")])
def test_a_block_is_stored_and_comes_back(zoo: Zoo, first: str, second: str) -> None:
    steps: list[int] = []
    found = stitch(zoo, first, second, TEXT, settings=SHORT, on_step=lambda step, *_: steps.append(step))
    made = found.made
    assert isinstance(made, Stitching) and made.teacher == "large" and made.steps == len(steps) == 2
    assert found.name == f"{first}-to-{second}" and zoo.verify() == []
    again = Zoo(zoo.folder)
    assert again.alternatives.all() == {found.name: found}
    windows = windows_of(again, again.application("small"), TEXT, SHORT.window)
    with stitched_models(again, found.name) as (stitched, points):
        assert [(p.layers, p.enters) for p in points] == [(p.layers, p.enters) for p in made.points]
        teacher = stitched.first if first == "large" else stitched.second
        same = fidelity(stitched.at(points[0]), teacher.logits, windows.held_out)
        assert same.similarity == pytest.approx(made.points[0].fidelity.similarity, abs=1e-6)
    zoo.gc()
    assert zoo.verify() == [], "what an alternative needs stays"
    with pytest.raises(ZooError, match=f"{found.name} belong to small: remove these first"):
        zoo.remove("small")
    before = set(zoo.tensors.all_keys())
    zoo.remove(found.name)
    zoo.gc()
    assert zoo.alternatives.names() == [] and len(before - set(zoo.tensors.all_keys())) == 2


def test_the_same_seed_gives_the_same_block(zoo: Zoo) -> None:
    one, other = (stitch(zoo, "small", "large", TEXT, name, settings=SHORT) for name in ("one", "other"))
    assert one.tensors == other.tensors


def test_what_cannot_be_stitched_is_refused(zoo: Zoo, sources: Path, tmp_path: Path) -> None:
    add(zoo, make_model(tmp_path / "shallow", num_hidden_layers=1), "shallow")
    add(zoo, make_model(tmp_path / "words", vocab_size=VOCABULARY + 8), "words")
    other = make_model(tmp_path / "other", seed=5)
    tokenizer = other / "tokenizer.json"
    fields = json.loads(tokenizer.read_text())
    fields["model"]["vocab"] = dict(zip(fields["model"]["vocab"], reversed(range(VOCABULARY)), strict=False))
    tokenizer.write_text(json.dumps(fields))
    add(zoo, other, "other")
    add(zoo, make_lora(tmp_path / "lora", sources / "base"), "lora", "small")
    add(zoo, sources / "base", "copy")
    before = everything(zoo)
    for second, why in (
        ("shallow", "need two layers each"),
        ("words", "has a vocabulary of 96 and words one of 104"),
        ("other", "mixed tokenizers"),
        ("lora", "lora is an adapter"),
        ("copy", "the same model"),
        ("small", "the same model"),
        ("gone", "has no 'gone'"),
    ):
        with pytest.raises(ZooError, match=why):
            stitch(zoo, "small", second, TEXT, "block", settings=SHORT)
    for text, why in (("", "has 0 tokens"), ("too short", "has 9 tokens .* and 32 are needed")):
        with pytest.raises(ZooError, match=f"the text is too short: it {why}"):
            stitch(zoo, "small", "large", text, settings=SHORT)
    for layer in (2, 3, 99):
        with pytest.raises(ConfigError, match=f"behind layer {layer} of small, which has 2: .* be behind 1"):
            stitch(zoo, "small", "large", TEXT, layers=[layer], settings=SHORT)
    with pytest.raises(ZooError, match="has 'large' already"):
        stitch(zoo, "small", "large", TEXT, "large", settings=SHORT)
    with pytest.raises(ZooError, match="cannot be a name"):
        stitch(zoo, "small", "large", TEXT, "../up", settings=SHORT)
    for wrong in ({"epochs": 0}, {"window": 1}, {"batch_size": 0}, {"max_steps": 0}, {"learning_rate": 1.0}):
        with pytest.raises(ConfigError):
            DistillationSettings(**wrong)  # type: ignore[arg-type]
    assert everything(zoo) == before and zoo.verify() == []


def test_an_interrupted_training_leaves_nothing(zoo: Zoo) -> None:
    before = everything(zoo)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stitch(zoo, "small", "large", TEXT, settings=SHORT, on_step=interrupt)
    assert everything(zoo) == before and zoo.verify() == []
    with zoo.writing():
        pass  # nothing holds the lock


def test_another_process_that_writes_stops_the_start_and_not_the_end(zoo: Zoo) -> None:
    other = Zoo(zoo.folder)
    with other.writing(), pytest.raises(ZooError, match="another process changes"):
        stitch(zoo, "small", "large", TEXT, settings=SHORT, on_step=lambda *_: pytest.fail("it trains"))
    held, release = threading.Event(), threading.Event()

    def hold() -> None:
        with other.writing():
            held.set()
            release.wait()

    holder = threading.Thread(target=hold)

    def begin(step: int, steps: int, loss: float) -> None:
        if step == steps:
            holder.start()
            held.wait()
            threading.Timer(0.3, release.set).start()

    stitch(zoo, "small", "large", TEXT, settings=SHORT, on_step=begin)
    holder.join()
    assert zoo.alternatives.names() == ["small-to-large"]


def test_a_model_that_went_meanwhile_is_an_error(zoo: Zoo) -> None:
    with pytest.raises(ZooError, match="belongs to large, which is not in the zoo"):
        stitch(zoo, "small", "large", TEXT, settings=SHORT, on_step=lambda step, *_: gone(zoo, step))
    assert zoo.alternatives.names() == []


def gone(zoo: Zoo, step: int) -> None:
    if step == 1:
        zoo.remove("large")


def test_damage_is_named(zoo: Zoo) -> None:
    found = stitch(zoo, "small", "large", TEXT, "block", settings=SHORT)
    weight = zoo.tensors.path(found.tensors["weight"])
    whole = weight.read_bytes()
    weight.write_bytes(whole[:-4] + b"oops")
    assert any("block: " in problem and "damaged" in problem for problem in zoo.verify())
    with pytest.raises(ZooError, match="damaged"), stitched_models(zoo, "block"):
        pass
    weight.write_bytes(whole)
    manifest = zoo.folder / "alternatives" / "block.json"
    manifest.write_text(manifest.read_text().replace('"steps":2', '"steps":3'))
    assert any(str(manifest) in problem for problem in zoo.verify())
    collected = zoo.gc()
    assert any("block.json is damaged" in one for one in collected.left) and weight.read_bytes() == whole
    with pytest.raises(ZooError, match="has no alternative 'other'; it has block"):
        zoo.alternatives.get("other")


def test_its_points_are_chains_of_a_server(zoo: Zoo) -> None:
    """Of the larger model, the most accurate first; those that are not near enough are named and left out."""
    for pair in (("small", "large"), ("large", "small")):
        stitch(zoo, *pair, TEXT, settings=SHORT)
    found = {name: one.made for name, one in zoo.alternatives.all().items()}
    near = {
        f"{name}@{point.layers}": point.fidelity.similarity
        for name, made in found.items()
        if isinstance(made, Stitching)
        for point in made.points
    }
    served = serve_from(zoo, least=-1.0)
    assert [*served.chains] == ["large"] and [*served.chains["large"]] == sorted(near, key=lambda n: -near[n])
    assert not served.left_out and set(served.stitched) == set(near)
    for name, chain in served.stitched.items():
        assert f"{chain.first}-to-{chain.second}" == name.partition("@")[0]
        read = Stitch.read(chain.folder)
        with stitched_models(zoo, name.partition("@")[0]) as (made, points):
            (point,) = [point for point in points if f"@{point.layers}" == name[name.index("@") :]]
            assert (read.layers, read.enters) == (point.layers, point.enters)
            hidden = torch.randn(2, read.weight.shape[1])
            expected = made.block(hidden, point.position)
        torch.testing.assert_close(torch.nn.functional.linear(hidden, read.weight, read.bias), expected)
    assert serve_from(zoo, least=-1.0) == served, "the folders are there"
    left_out = serve_from(zoo, least=1.1).left_out
    assert set(left_out) == set(near) and all("1.1 is asked for" in why for why in left_out.values())
    alone = serve_from(zoo, "large", least=-1.0)
    assert not alone.stitched and not alone.chains, "both models are needed"


def test_a_changed_or_damaged_block_is_not_served(zoo: Zoo) -> None:
    (_, tensor), *_ = sorted(stitch(zoo, "small", "large", TEXT, settings=SHORT).tensors.items())
    (path,) = zoo.folder.glob(f"tensors/*/{tensor}*")
    path.write_bytes(path.read_bytes()[:-3])
    served = serve_from(Zoo(zoo.folder), least=-1.0)
    assert set(served.left_out) == {"small-to-large"} and not served.stitched and served.bases
