"""Attention masks that a model would make, checked against its layers' windows.

Driven layers attend by the sliding window that they pass to attention, so masks are not made, except while
they are `checked`: then each layer's mask must be that of its window. A window, chunk or bias in the masks
alone would otherwise be missed until a sequence is longer than it.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import sdpa_mask

from coserve.kernels.attention import causal_mask
from coserve.model.indexed_attention import NO_MASK
from coserve.model.refusal import encoder, unsupported


class _Own(threading.local):
    checked = False


class Masks:
    """Of a model of type `name`. `windows` are those of all masks that it has requested; None is
    unlimited."""

    def __init__(self, name: str) -> None:
        self._name, self._none = name, NO_MASK if name == "mpt" else None  # which MPT would convert
        self.windows: set[int | None] = set()
        self._own = _Own()

    @contextmanager
    def checked(self) -> Iterator[None]:
        """Context in which masks are made and compared, on this thread."""
        self._own.checked = True
        try:
            yield
        finally:
            self._own.checked = False

    def make(self, *args: Any, local_size: int | None = None, **kwargs: Any) -> Tensor | None:
        """Mask for transformers, with the arguments of its `sdpa_mask`."""
        self.windows.add(local_size)
        if not self._own.checked or not (args or kwargs):
            return self._none
        kwargs |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        mask: Tensor | None = sdpa_mask(*args, local_size=local_size, **kwargs)
        return mask

    def check(self, attention: Any, mask: Tensor | None, window: int | None) -> None:
        """Raises UnsupportedModel where the module that attends looks ahead, or a layer's mask [..., queries,
        keys] is not that of its window over all keys.

        The module tells that it looks ahead: in a model with little training that changes less than low
        precision, so the probe might miss it.
        """
        if getattr(attention, "is_causal", True) is False and not getattr(attention, "is_decoder", False):
            raise encoder(self._name)
        if mask is None or mask is NO_MASK:
            return
        if not self._own.checked:
            raise unsupported(self._name, "it makes attention masks of its own")
        allowed = mask if mask.dtype == torch.bool else mask == 0
        own = causal_mask(mask.shape[-2], mask.shape[-1], window or None, mask.device)
        if not torch.equal(allowed, own.expand_as(allowed)):
            layer = attention.layer_idx
            part = f"layer {layer} masks its attention otherwise than by the window it passes on ({window})"
            raise unsupported(self._name, part)
