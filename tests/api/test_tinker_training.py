"""Training through the `tinker` client: the whole server, with the embedded model."""

import importlib
import math
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import tinker
from tinker import types

from coserve_benchmarks.training import compatibility
from tinkering import serving_tiny


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving_tiny(tmp_path_factory.mktemp("tinker")) as url:
        yield url


@pytest.fixture
def service(address: str) -> Iterator[tinker.ServiceClient]:
    with tinker.ServiceClient(base_url=address, api_key="tml-unused") as made:
        yield made


def datum(tokens: list[int], weights: list[float] | None = None) -> types.Datum:
    """An example whose every token but the first is a target."""
    inputs = {"target_tokens": tokens[1:], "weights": weights or [1.0] * (len(tokens) - 1)}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


def test_a_run_learns_and_is_sampled(service: tinker.ServiceClient) -> None:
    run = service.create_lora_training_client(base_model="tiny", rank=8, seed=1).result()
    assert run.get_info().lora_rank == 8 and run.get_info().model_data.model_name == "tiny"
    text = list(range(20, 60))
    losses = []
    for _ in range(20):
        passed = run.forward_backward([datum(text)], "cross_entropy")
        stepped = run.optim_step(types.AdamParams(learning_rate=0.004))
        out = passed.result()
        assert stepped.result().metrics is not None
        (logprobs,) = [one["logprobs"] for one in out.loss_fn_outputs]
        assert logprobs.shape == [len(text) - 1]
        assert out.metrics["loss:sum"] == pytest.approx(-sum(logprobs.data), rel=1e-4)
        losses.append(out.metrics["loss:sum"])
    assert losses[-1] < losses[0] / 10, losses
    sampler = run.save_weights_and_get_sampling_client().result()
    greedy = types.SamplingParams(max_tokens=8, temperature=0.0)
    (sample,) = sampler.sample(types.ModelInput.from_ints(text[:20]), 1, greedy).result().sequences
    assert sample.tokens == text[20:28]


def test_every_method_of_the_client_works(
    address: str, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but those that the table names, and these are few; a method without an entry fails here."""
    assert {name: set(own) for name, own in compatibility.METHODS.items()} == {
        name: set(own) for name, own in compatibility.discovered().items()
    }
    monkeypatch.chdir(tmp_path_factory.getbasetemp() / "tinker0")  # where the base's name is its folder
    results = compatibility.check(address, "tml-unused", "tiny")
    broken = [one for one in results if not one.works]
    expected = {
        (client, name)
        for client, own in compatibility.METHODS.items()
        for name, call in own.items()
        if isinstance(call, compatibility.Unsupported)
    }
    assert {(one.client, one.method) for one in broken} == expected, broken
    assert not any("not as expected" in one.note for one in broken)
    assert compatibility.share(results) >= 0.95
    page = compatibility.page(results)
    assert f"{len(results) - len(broken)} of {len(results)} work" in page
    if asked := os.environ.get("COSERVE_TINKER_PAGE"):
        Path(asked).write_text(page)


def test_passes_score_as_the_sampler_does(service: tinker.ServiceClient) -> None:
    """Log-probabilities of a pass are those of the weights, which the sampler then computes too; weights
    saved before a step stay what they were."""
    run = service.create_lora_training_client(base_model="tiny", rank=4, seed=2).result()
    tokens = [9, 40, 77, 120, 33, 9, 8]
    before = run.save_weights_for_sampler("before").result().path
    passes = []
    for _ in range(2):
        passes.append(run.forward_backward([datum(tokens)], "cross_entropy"))
        run.optim_step(types.AdamParams(learning_rate=0.001))
    after = run.save_weights_for_sampler("after")
    last = run.forward([datum(tokens)], "cross_entropy")
    prompt = types.ModelInput.from_ints(tokens)
    for path, out in ((before, passes[0]), (after.result().path, last)):
        sampler = service.create_sampling_client(model_path=path).result()
        scores = sampler.compute_logprobs(prompt).result()[1:]
        assert out.result().loss_fn_outputs[0]["logprobs"].data == pytest.approx(scores, abs=2e-4)
    assert passes[0].result().metrics["loss:sum"] > last.result().metrics["loss:sum"]


def test_a_state_goes_on_as_if_nothing_had_happened(service: tinker.ServiceClient) -> None:
    adam = types.AdamParams(learning_rate=0.02)
    data = [datum(list(range(30, 50))), datum(list(range(80, 60, -1)))]
    run = service.create_lora_training_client(base_model="tiny", rank=4, seed=3).result()

    def losses(run: tinker.TrainingClient, steps: int) -> list[float]:
        found = []
        for _ in range(steps):
            found.append(run.forward_backward(data, "cross_entropy").result().metrics["loss:sum"])
            run.optim_step(adam).result()
        return found

    losses(run, 2)
    state = run.save_state("middle").result().path
    expected = losses(run, 2)
    resumed = service.create_training_client_from_state_with_optimizer(state).result()
    assert losses(resumed, 2) == pytest.approx(expected, rel=1e-4)
    weights_only = service.create_training_client_from_state(state).result()
    again = losses(weights_only, 2)
    assert again[0] == pytest.approx(expected[0], rel=1e-4)
    assert again[1] != pytest.approx(expected[1], rel=1e-4)  # its moments began anew
    run.load_state_with_optimizer(state).result()
    assert losses(run, 2) == pytest.approx(expected, rel=1e-4)


def test_a_run_goes_on_without_the_checkpoint_that_it_began_with(service: tinker.ServiceClient) -> None:
    run = service.create_lora_training_client(base_model="tiny", rank=4, seed=7).result()
    data = [datum(list(range(40, 50)))]
    run.forward_backward(data, "cross_entropy").result()
    run.optim_step(types.AdamParams(learning_rate=0.01)).result()
    state, weights = run.save_state("gone").result().path, run.save_weights_for_sampler("gone").result().path
    began = service.create_training_client_from_state_with_optimizer(state).result()
    sampler = service.create_sampling_client(model_path=weights).result()
    rest = service.create_rest_client()
    for path in (state, weights):
        rest.delete_checkpoint_from_tinker_path(path).result()
    losses = [one.forward(data, "cross_entropy").result().metrics["loss:sum"] for one in (run, began)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    with pytest.raises(tinker.RequestFailedError, match="does not exist"):
        sampler.sample(types.ModelInput.from_ints([5]), 1, types.SamplingParams(max_tokens=1)).result()
    with pytest.raises(tinker.RequestFailedError, match="no checkpoint"):
        began.load_state(state).result()
    with pytest.raises(tinker.RequestFailedError, match="no checkpoint"):
        service.create_training_client_from_state(state).result()
    with pytest.raises(tinker.NotFoundError, match="does not exist"):
        service.create_sampling_client(model_path=weights).result()


def test_gradients_add_up_until_the_step(service: tinker.ServiceClient) -> None:
    """Two passes and a step are one pass over both data and a step; client-side losses are the server's."""
    data = [datum(list(range(30, 40))), datum(list(range(90, 110)))]

    def negative(data: list[types.Datum], logprobs: list[Any]) -> tuple[Any, dict[str, float]]:
        loss = -sum(one.sum() for one in logprobs)
        return loss, {}

    def norm(*passes: Callable[[tinker.TrainingClient], Any]) -> float:
        run = service.create_lora_training_client(base_model="tiny", rank=4, seed=4).result()
        for one in passes:
            one(run).result()
        metrics = run.optim_step(types.AdamParams(learning_rate=0.0)).result().metrics
        assert metrics is not None
        return float(metrics["grad_norm"])

    together = norm(lambda run: run.forward_backward(data, "cross_entropy"))
    apart = norm(*(partial(_pass, one) for one in data))
    by_client = norm(lambda run: run.forward_backward_custom(data, negative))
    assert apart == pytest.approx(together, rel=1e-3) and by_client == pytest.approx(together, rel=1e-3)


def _pass(one: types.Datum, run: tinker.TrainingClient) -> Any:
    return run.forward_backward([one], "cross_entropy")


@pytest.mark.parametrize("loss", ["importance_sampling", "ppo", "cispo", "dro"])
def test_policies_move_towards_what_is_rewarded(service: tinker.ServiceClient, loss: str) -> None:
    run = service.create_lora_training_client(base_model="tiny", rank=4, seed=5).result()
    sampler = run.save_weights_and_get_sampling_client().result()
    prompt = types.ModelInput.from_ints([5, 6, 7])
    sampled = sampler.sample(prompt, 1, types.SamplingParams(max_tokens=6, seed=1)).result().sequences[0]
    assert sampled.logprobs is not None
    tokens = [5, 6, 7, *sampled.tokens]
    pad = [0.0] * 2
    one = types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": tokens[1:],
            "logprobs": [*pad, *sampled.logprobs],
            "advantages": [*pad, *[1.0] * len(sampled.tokens)],
        },
    )
    first = run.forward_backward([one], loss).result().loss_fn_outputs[0]["logprobs"].data[2:]
    assert first == pytest.approx(sampled.logprobs, abs=2e-4)  # on policy
    run.optim_step(types.AdamParams(learning_rate=0.01)).result()
    later = run.forward([one], loss).result().loss_fn_outputs[0]["logprobs"].data[2:]
    assert sum(later) > sum(first)


def test_weights_and_the_loss_of_each_token(service: tinker.ServiceClient) -> None:
    """A token of weight 0 is absent, whatever else it has; a run without any weights has ones."""
    run = service.create_lora_training_client(base_model="tiny", rank=4, seed=8).result()
    tokens, weights = [5, 6, 7, 8, 9], [0.0, 1.0, 0.5, -2.0]
    (known,) = run.forward([datum(tokens)], "cross_entropy").result().loss_fn_outputs
    assert known["elementwise_loss"].data == pytest.approx([-one for one in known["logprobs"].data])
    inputs: dict[str, Any] = {
        "target_tokens": tokens[1:],
        "logprobs": [-1e20, *[one + 0.1 for one in known["logprobs"].data[1:]]],
        "advantages": [3.0, 1.0, -1.0, 2.0],
        "weights": weights,
    }
    ratios = [math.exp(-0.1)] * 4
    for loss in ("importance_sampling", "ppo", "cispo", "gspo"):
        factors = known["logprobs"].data if loss == "cispo" else [1.0] * 4
        parts = zip(weights, ratios, inputs["advantages"], factors, strict=True)
        wanted = [-weight * ratio * advantage * factor for weight, ratio, advantage, factor in parts]
        one = types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)
        for go in (run.forward, run.forward_backward):
            out = go([one], loss).result()
            assert out.loss_fn_outputs[0]["elementwise_loss"].data == pytest.approx(wanted, rel=1e-4)
            assert out.metrics["loss:sum"] == pytest.approx(sum(wanted), rel=1e-4)
    run.optim_step(types.AdamParams(learning_rate=0.001)).result()


def test_wrong_data_and_losses_are_told(service: tinker.ServiceClient) -> None:
    run = service.create_lora_training_client(base_model="tiny", rank=4, seed=6).result()
    good = datum([5, 6, 7])
    wrong: list[tuple[types.Datum, types.LossFnType, dict[str, float | str] | None, str]] = [
        (datum([5, 6, 4000]), "cross_entropy", None, "4000"),
        (good, "importance_sampling", None, "advantages"),
        (good, "stable_reinforce", None, "there is no loss"),
        (good, "ppo", {"clip": 1.0}, "clip"),
        (datum(list(range(20, 24)) * 600), "cross_entropy", None, "tokens"),
    ]
    for one, loss, config, says in wrong:
        with pytest.raises(tinker.RequestFailedError, match=says):
            run.forward_backward([one], loss, config).result()
    with pytest.raises(tinker.RequestFailedError, match="gradient"):
        run.optim_step(types.AdamParams()).result()
    assert run.forward_backward([good], "cross_entropy").result().metrics["loss:sum"] > 0
    with pytest.raises(tinker.NotFoundError, match="trains 'tiny'"):
        service.create_lora_training_client(base_model="other").result()


@pytest.mark.parametrize(("name", "steps"), [("tinker_supervised", 12), ("tinker_reinforced", 10)])
def test_the_examples_learn(address: str, name: str, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Short runs of the programs in `examples`."""
    monkeypatch.setenv("TINKER_API_KEY", "tml-unused")
    monkeypatch.setenv("TINKER_BASE_URL", address)
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
    seen = importlib.import_module(name).train(None, steps, model="tiny")
    first, last = fmean(seen[:3]), fmean(seen[-3:])
    assert last < first / 2 if name == "tinker_supervised" else last > first + 0.05, seen
