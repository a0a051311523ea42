"""The seam between virtual layers and the computation of their rows: one executor, or a mode of privacy."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from coserve.split.connection import Rows
from coserve.split.messages import BaseHello, LinearCall


class Answer(Protocol):
    """The tensors [rows, width] of an answer to come, such as a `concurrent.futures.Future` of them."""

    def result(self, timeout: float | None = None) -> list[Tensor]:
        """Waits for at most `timeout` seconds; raises the call's error, and TimeoutError."""


class Calls(Protocol):
    """Has products of frozen linears computed."""

    @property
    def base(self) -> BaseHello:
        """The linears that there are, and limits of one call."""

    def submit(self, call: LinearCall, rows: Rows, widths: Sequence[int]) -> Answer:
        """Starts a call with these rows, of the base's type; `widths` are those of the answer's tensors.
        Raises CoserveError, as the answer does."""

    def close(self) -> None:
        """Ends; calls without an answer fail."""


class Source(Calls, Protocol):
    """An executor, or several that are called as one."""

    @property
    def address(self) -> str:
        """Names it in errors."""
