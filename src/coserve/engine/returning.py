"""Windows of all jobs on their way back in one step, layer by layer from the top: those that are at the same
layer pass it together."""

import logging
from collections.abc import Iterator, Sequence

from coserve.engine.shortage import Shortages
from coserve.memory.exhausted import is_out_of_memory
from coserve.train import company
from coserve.train.walk import Returning

_log = logging.getLogger(__name__)
Windows = Sequence[tuple[str, Returning]]  # each with its job


def back(windows: Windows, most: int, short: Shortages) -> None:
    """All windows back through their layers, at most so many rows together. A job that fails, or runs out of
    memory, goes no further, and nobody else notices."""
    top = max((r.layers.start for _, r in windows), default=-1)
    for layer in range(top, -1, -1):
        for group in _groups(layer, windows, most):
            _through(layer, group, short)
    for job, returning in windows:
        if job not in short:
            with short.of(job):
                returning.walk.arrive(returning)


def _groups(layer: int, windows: Windows, most: int) -> Iterator[Windows]:
    """Those that pass the layer: of different jobs, no more rows than may go together, and all or none of
    them waited for below."""
    for asks in (True, False):
        group: list[tuple[str, Returning]] = []
        rows = 0
        for job, returning in windows:
            if layer not in returning.layers or returning.asks(layer) is not asks:
                continue
            if group and (rows + returning.window.rows > most or job in (other for other, _ in group)):
                yield group
                group, rows = [], 0
            group.append((job, returning))
            rows += returning.window.rows
        if group:
            yield group


def _through(layer: int, windows: Windows, short: Shortages) -> None:
    """A layer, in one pass; where there is no memory for that, one after the other."""
    windows = [window for window in windows if window[0] not in short]  # by another window of theirs
    shares = _shares(layer, [r for _, r in windows]) if len(windows) > 1 else None
    for number, (job, returning) in enumerate(windows):
        with short.of(job):
            if shares is None:
                returning.walk.through_layer(layer, returning)
            else:
                returning.take(layer, *shares[number])


def _shares(layer: int, windows: Sequence[Returning]) -> list[company.Share] | None:
    """What each is to take, None where that fails and it cannot be told whose fault it is: then one after the
    other is tried."""
    try:
        return company.through_layer(layer, windows)
    except Exception as error:
        if not is_out_of_memory(error):
            _log.exception("windows of several jobs cannot go back through layer %d together", layer)
    return None
