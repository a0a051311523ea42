"""Training through the `tinker` client: the whole server, with the embedded model."""

from collections.abc import Iterator

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
def service(address: str) -> tinker.ServiceClient:
    return tinker.ServiceClient(base_url=address, api_key="tml-unused")


def datum(tokens: list[int], weights: list[float] | None = None) -> types.Datum:
    """An example whose every token but the first is a target."""
    inputs = {"target_tokens": tokens[1:], "weights": weights or [1.0] * (len(tokens) - 1)}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


def test_a_run_learns_and_is_sampled(service: tinker.ServiceClient) -> None:
    run = service.create_lora_training_client(base_model="tiny", rank=8, seed=1).result()
    assert run.get_info().lora_rank == 8 and run.get_info().model_data.model_name == "tiny"
    text = list(range(20, 60))
    losses = []
    for _ in range(6):
        passed = run.forward_backward([datum(text)], "cross_entropy")
        stepped = run.optim_step(types.AdamParams(learning_rate=0.01))
        out = passed.result()
        assert stepped.result().metrics is not None
        (logprobs,) = [one["logprobs"] for one in out.loss_fn_outputs]
        assert logprobs.shape == [len(text) - 1]
        assert out.metrics["loss:sum"] == pytest.approx(-sum(logprobs.data), rel=1e-4)
        losses.append(out.metrics["loss:sum"])
    assert losses[-1] < losses[0] / 2
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
