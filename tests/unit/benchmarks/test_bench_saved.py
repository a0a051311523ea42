import torch
from torch import nn

from coserve_benchmarks.saved import SavedBytes

ROWS, WIDTH, VOCABULARY = 5, 8, 32


def test_activations_logits_and_no_weights() -> None:
    """Of relu(x W) V: the first product saves x, relu its output, the second product saves that same
    storage again, and the sum of squares its input, which is logits."""
    first, second = (nn.Linear(WIDTH, out, bias=False) for out in (WIDTH, VOCABULARY))
    counter = SavedBytes([first.weight, second.weight], VOCABULARY)
    x = torch.randn(ROWS, WIDTH)
    with counter.counting():
        loss = second(first(x).relu()).square().sum()
    assert counter.activations == 2 * ROWS * WIDTH * 4
    assert counter.logits == ROWS * VOCABULARY * 4
    loss.backward()
    assert first.weight.grad is not None


def test_only_what_is_still_held_counts() -> None:
    counter = SavedBytes([], VOCABULARY)
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    with counter.counting():
        y = x.exp()
    assert counter.activations == ROWS * WIDTH * 4
    del y
    assert counter.activations == 0


def test_views_count_their_storage_once() -> None:
    counter = SavedBytes([], VOCABULARY)
    x = torch.randn(ROWS, WIDTH)
    scale = torch.ones(1, requires_grad=True)
    with counter.counting():
        loss = (x[:2] * scale).sum() + (x[2:] * scale).sum()
    assert counter.activations == ROWS * WIDTH * 4
    assert loss.requires_grad
