"""Backward of all jobs' windows in a step: from the top layer down, windows at the same layer in groups."""

import logging
from collections.abc import Iterator, Sequence

from coserve.engine.pausing import TrainingPause
from coserve.engine.shortage import Shortages
from coserve.memory.exhausted import is_out_of_memory
from coserve.train import window_group
from coserve.train.backward import BackwardWindow

_log = logging.getLogger(__name__)
Windows = Sequence[tuple[str, BackwardWindow]]  # each with its job


def backward_windows(windows: Windows, most: int, short: Shortages, pause: TrainingPause) -> None:
    """Takes windows back through their layers, in groups of at most `most` rows. A job that fails or runs out
    of memory stops there; the windows of other jobs go on. At a pause all stop above the next layer."""
    top = max((r.layers.start for _, r in windows), default=-1)
    for layer in range(top, -1, -1):
        for group in _groups(layer, windows, most):
            _through(layer, group, short)
            pause.passed()
        if pause.is_due:
            for _, window in windows:
                window.stop(layer)
            break
    for job, window in windows:
        if job not in short:
            with short.of(job):
                window.backward.finish(window)


def _groups(layer: int, windows: Windows, most: int) -> Iterator[Windows]:
    """Groups windows at this layer: distinct jobs, at most `most` rows, and all or none of them need the
    gradient of the layer's input."""
    for asks in (True, False):
        group: list[tuple[str, BackwardWindow]] = []
        rows = 0
        for job, window in windows:
            if layer not in window.layers or window.asks(layer) is not asks:
                continue
            if group and (rows + window.window.rows > most or job in (other for other, _ in group)):
                yield group
                group, rows = [], 0
            group.append((job, window))
            rows += window.window.rows
        if group:
            yield group


def _through(layer: int, windows: Windows, short: Shortages) -> None:
    """Takes a group through a layer in one pass; where that fails, one window after the other."""
    windows = [window for window in windows if window[0] not in short]  # by another window of theirs
    shares = _shares(layer, [r for _, r in windows]) if len(windows) > 1 else None
    for number, (job, window) in enumerate(windows):
        with short.of(job):
            if shares is None:
                window.backward.through_layer(layer, window)
            else:
                window.take(layer, *shares[number])


def _shares(layer: int, windows: Sequence[BackwardWindow]) -> list[window_group.Share] | None:
    """Gradients of each window's part; None where the pass fails, since it cannot tell whose fault that is:
    the caller then tries one window after the other."""
    try:
        return window_group.through_layer(layer, windows)
    except Exception as error:
        if not is_out_of_memory(error):
            _log.exception("windows of several jobs cannot go back through layer %d together", layer)
    return None
