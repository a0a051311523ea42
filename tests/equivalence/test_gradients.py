"""Windowed gradients against whole-sequence autograd in float64: relative error at most 1e-10.

The rounding of float64 leaves about 1e-15 here; a wrong window, mask or put-down shows at 1e-3 and above.
"""

import itertools
import random
from dataclasses import replace

import pytest

from adapters import lora_adapter
from coserve.core.sequence import Span
from coserve.train.save_policy import SavePolicy
from models import ARCHITECTURES, SHARING, Exact
from passages import LORA, Case, Passage, make_case, windows, worst

TOLERANCE = 1e-10
LENGTHS = (5, 22, 1, 23)  # packed end to end; some longer than the sliding windows
ROWS = sum(LENGTHS)
SHORT = (9, 14, 1, 5)
BEYOND = (3, 24, 1)  # one longer than the sliding windows


def travel(case: Case, keep: SavePolicy, there: int, back: int, draws: random.Random | None) -> float:
    passage = Passage(case, keep)
    passage.travel(there, back, draws)
    return passage.error()


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", [*ARCHITECTURES, *SHARING])
def test_windows_give_the_gradients_of_whole_sequences(name: str) -> None:
    """Small windows put down anywhere, large ones and whole micro-batches, each with another save policy."""
    draws = random.Random(f"windows/{name}")
    errors = {}
    with Exact():
        case = make_case(name, LENGTHS)
        errors["inputs", 7] = travel(case, SavePolicy.INPUTS, 7, 7, draws)
        errors["pruned", 40] = travel(case, SavePolicy.PRUNED, 40, 40, draws)
        errors["everything", ROWS] = travel(case, SavePolicy.EVERYTHING, ROWS, ROWS, None)
        # The way back need not be cut like the way there.
        errors["everything", "7 and 40"] = travel(case, SavePolicy.EVERYTHING, 7, 40, draws)
        errors["pruned", "40 and 7"] = travel(case, SavePolicy.PRUNED, 40, 7, None)
    assert max(errors.values()) <= TOLERANCE, errors


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", [*ARCHITECTURES, *SHARING])
def test_windows_of_any_size_with_any_save_policy(name: str) -> None:
    """All sizes with all save policies, put down and not."""
    draws = random.Random(f"any/{name}")
    errors = {}
    with Exact():
        case = make_case(name, LENGTHS)
        for keep, size, pieces in itertools.product(SavePolicy, (7, 40, ROWS), (None, draws)):
            errors[keep.value, size, pieces is not None] = travel(case, keep, size, size, pieces)
        errors["products", "7 and 40", True] = travel(case, SavePolicy.EVERYTHING, 7, 40, draws)
        errors["inputs", "40 and 7", False] = travel(case, SavePolicy.INPUTS, 40, 7, None)
        case = make_case(name, BEYOND)  # of single rows each is a window that takes as long as one of many
        errors["inputs", 1, True] = travel(case, SavePolicy.INPUTS, 1, 1, draws)
        errors["products", 1, False] = travel(case, SavePolicy.EVERYTHING, 1, 1, None)
    assert max(errors.values()) <= TOLERANCE, errors


@pytest.mark.parametrize("keep", SavePolicy)
def test_windows_of_one_row_without_put_downs(keep: SavePolicy) -> None:
    with Exact():
        case = make_case("llama", SHORT)
        assert travel(case, keep, 1, 1, None) <= TOLERANCE


@pytest.mark.parametrize("keep", SavePolicy)
def test_put_down_windows_go_on_as_one(keep: SavePolicy) -> None:
    """Windows that rest between the same two layers can be picked up together, and apart again."""
    with Exact():
        case = make_case("mistral", LENGTHS)
        passage = Passage(case, keep)
        whole = Span(0, case.depth)
        passage.forward(0, ROWS, whole)
        middle = Span(1, case.depth - 1)
        for start, rows in reversed(windows(7, ROWS)):
            passage.backward(start, rows, Span(middle.last, case.depth))
        for start, rows in reversed(windows(30, ROWS)):
            passage.backward(start, rows, middle)
        for start, rows in reversed(windows(11, ROWS)):
            passage.backward(start, rows, Span(0, middle.first))
        assert passage.error() <= TOLERANCE


def test_an_adapter_on_some_layers_only_has_the_gradients_it_has_among_others() -> None:
    """The walk stops below the lowest adapter; the other adapters are there in one run, with B at zero."""
    with Exact():
        case = make_case("qwen2", LENGTHS)
        layers = {path: case.engine.base.sites[path].stage for path in case.adapter.bypasses.outputs}
        for layer in range(case.depth):
            some = {path for path, of in layers.items() if of == layer and "up_proj" not in path}
            for path, bypass in case.adapter.bypasses.outputs.items():
                if path not in some:
                    bypass.b.zero_()
            bypasses = {path: case.adapter.bypasses.outputs[path] for path in layers if path in some}
            alone = replace(case, adapter=lora_adapter("probe", 0, LORA, bypasses))
            whole, part = Passage(case, SavePolicy.INPUTS), Passage(alone, SavePolicy.EVERYTHING)
            for passage, size in ((whole, ROWS), (part, 16)):
                passage.travel(size, size)
                passage.finish()
            assert part.gradients.keys() == {f"{path}.lora_{letter}" for path in some for letter in "AB"}
            assert worst(part.gradients, whole.gradients) <= TOLERANCE
            case = make_case("qwen2", LENGTHS)
