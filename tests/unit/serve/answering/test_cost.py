import random
from dataclasses import replace
from typing import Any

import pytest

from coserve.serve.answering import cost as costs
from coserve.serve.answering.cost import RequestLimits, RequestSize, request_cost
from coserve.serve.errors import ApiError

LIMITS = RequestLimits(positions=2048, cache_tokens=4096, choices=16, sequences=64)


def test_the_price_grows_with_everything_that_makes_work() -> None:
    plain = RequestSize((100,), max_tokens=50)
    base = request_cost(plain, LIMITS).total
    assert base == 100 + 2 * 50
    dearer: dict[str, Any] = {
        "prompts": (101,), "choices": 2, "max_tokens": 51, "alternatives": 1, "biases": 1, "grammar_bytes": 1,
    }  # fmt: skip
    for name, value in dearer.items():
        assert request_cost(replace(plain, **{name: value}), LIMITS).total > base, name
    scored = replace(plain, alternatives=5, reads_prompt=True)
    assert (
        request_cost(scored, LIMITS).total > request_cost(replace(scored, reads_prompt=False), LIMITS).total
    )


def test_log_probabilities_are_charged_as_they_are_reported() -> None:
    asked = RequestSize((100, 200), 2, 50, reads_prompt=True, alternatives=20)
    plain, scored = (
        request_cost(replace(asked, reads_prompt=False, alternatives=None), LIMITS),
        0.3 + 20 * 0.03,
    )
    cost = request_cost(asked, LIMITS)
    assert (plain.prompts, plain.token) == ((100.0, 200.0), 2.0)
    assert cost.prompts == pytest.approx((100 * (1 + scored), 200 * (1 + scored)))
    assert cost.token == pytest.approx(2 + scored)
    assert cost.total == pytest.approx(2 * (sum(cost.prompts) + 2 * 50 * cost.token))


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("prompt", {"prompts": (1,) * 129}),
        ("n", {"choices": 17}),
        ("n", {"prompts": (1,) * 13, "choices": 5}),
        ("logprobs", {"alternatives": 21}),
        ("stop", {"stops": ("a",) * 17}),
        ("stop", {"stops": ("a" * 257,)}),
        ("logit_bias", {"biases": 1025}),
        ("response_format", {"grammar_bytes": 64 * 1024 + 1}),
        ("prompt", {"prompts": (2048,)}),
        ("prompt", {"max_tokens": 2000}),
    ],
)
def test_nothing_is_unbounded(param: str, fields: dict[str, Any]) -> None:
    with pytest.raises(ApiError) as refused:
        request_cost(RequestSize(**{"prompts": (100,), "max_tokens": 10, **fields}), LIMITS)
    assert (refused.value.status, refused.value.param) == (400, param)


def test_each_bound_is_reached_without_harm() -> None:
    ask = RequestSize(
        (1,) * 4, 16, 10, alternatives=20, stops=("a" * 256,) * 16, biases=1024, grammar_bytes=64 * 1024
    )
    assert request_cost(ask, LIMITS).max_tokens == (10,) * 4


def test_the_whole_has_a_bound_beyond_its_parts() -> None:
    large = RequestLimits(positions=10**6, cache_tokens=10**6, choices=16, sequences=64)
    assert request_cost(RequestSize((1000,), 1, 10**5), large).total < costs.MOST_COST
    with pytest.raises(ApiError, match="split it"):
        request_cost(RequestSize((1000,), 16, 10**6 - 1000), large)


def test_what_is_left_to_the_model_is_the_room_there_is() -> None:
    assert request_cost(RequestSize((48, 2047)), LIMITS).max_tokens == (2000, 1)
    assert request_cost(RequestSize((48,)), replace(LIMITS, cache_tokens=100)).max_tokens == (52,)
    with pytest.raises(ApiError, match="takes 2048 tokens"):
        request_cost(RequestSize((2048,)), LIMITS)


def test_scoring_a_prompt_needs_no_room_for_an_answer() -> None:
    assert request_cost(RequestSize((2048,), max_tokens=0, reads_prompt=True), LIMITS).max_tokens == (0,)


def test_a_price_is_that_of_its_parts_and_an_answer_has_the_room_that_there_is() -> None:
    """The second tier's room counts for prompts and answers that the device's is too small for."""
    seed = random.SystemRandom().randrange(2**31)
    print(f"seed {seed}")
    draw, refused, elsewhere = random.Random(seed), 0, 0
    for _ in range(300):
        positions, cached, offloaded = (draw.choice([100, 300, 900]) for _ in range(3))
        limits = RequestLimits(positions, cached, 16, 64, draw.choice([0, offloaded]))
        size = RequestSize(
            tuple(draw.randint(1, 320) for _ in range(draw.randint(1, 4))),
            draw.randint(1, 4),
            draw.choice([None, draw.randint(1, 320)]),
            alternatives=draw.choice([None, 0, 7]),
            reads_prompt=draw.random() < 0.5,
            biases=draw.choice([0, 9]),
            grammar_bytes=draw.choice([0, 50]),
        )
        least = (0 if size.reads_prompt else 1) if size.max_tokens is None else size.max_tokens
        most = list[int]()
        for length in size.prompts:
            on_device, anywhere = min(positions, cached), min(positions, max(cached, limits.offloaded_tokens))
            wanted = max(least, 1) if size.max_tokens is None else least
            room = on_device - length if length + wanted <= on_device else anywhere - length
            elsewhere += wanted <= room and length + wanted > on_device
            most.append(-1 if wanted > room else room if size.max_tokens is None else size.max_tokens)
        if -1 in most:
            refused += 1
            with pytest.raises(ApiError, match="tokens at most"):
                request_cost(size, limits)
            continue
        scores = 0.0 if size.alternatives is None else 0.3 + 0.03 * size.alternatives
        read = 1.0 + scores * size.reads_prompt
        token = 2.0 + scores + 0.5 * (size.grammar_bytes > 0)
        answers = [
            length * read + answer * token + 0.1 * size.biases
            for length, answer in zip(size.prompts, most, strict=True)
        ]
        cost = request_cost(size, limits)
        assert cost.max_tokens == tuple(most) and cost.token == pytest.approx(token)
        assert cost.prompts == pytest.approx([length * read for length in size.prompts])
        assert cost.total == pytest.approx(size.choices * sum(answers) + 0.02 * size.grammar_bytes)
    assert refused > 20 and elsewhere > 5
