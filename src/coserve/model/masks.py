"""Attention masks that a model would make for its layers, and whether they say what its layers pass on.

Driven layers attend by what they pass on (a sliding window, or none), never by a mask, so masks are not made.
While they are `checked` they are, and each layer's must be that of its own window: a window, a chunk or a
bias that lives in the masks alone would otherwise go unnoticed until a sequence is longer than it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import sdpa_mask

from coserve.errors import UnsupportedModel
from coserve.kernels.attention import causal_mask


class Masks:
    """`windows` are those of all masks that the model has asked for; None is unlimited."""

    def __init__(self) -> None:
        self.windows: set[int | None] = set()
        self._checked = False

    @contextmanager
    def checked(self) -> Iterator[None]:
        """Context in which masks are made and compared."""
        self._checked = True
        try:
            yield
        finally:
            self._checked = False

    def make(self, *args: Any, local_size: int | None = None, **kwargs: Any) -> Tensor | None:
        """Makes a mask for transformers, with the arguments of its `sdpa_mask`."""
        self.windows.add(local_size)
        if not self._checked:
            return None
        kwargs |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        mask: Tensor | None = sdpa_mask(*args, local_size=local_size, **kwargs)
        return mask

    def check(self, layer: int, mask: Tensor | None, window: int | None) -> None:
        """Raises UnsupportedModel where a layer is given a mask [..., queries, keys] that is not that of its
        window over all keys."""
        if mask is None:
            return
        if not self._checked:
            raise UnsupportedModel("it makes attention masks of its own, which rows of many do not fit")
        allowed = mask if mask.dtype == torch.bool else mask == 0
        own = causal_mask(mask.shape[-2], mask.shape[-1], window or None, mask.device)
        if not torch.equal(allowed, own.expand_as(allowed)):
            raise UnsupportedModel(
                f"layer {layer} masks its attention otherwise than by the window it passes on ({window})"
            )
