"""Predicts whether an engine would stream a model's base, and what that takes."""

from dataclasses import dataclass, replace
from typing import Any

import torch

from coserve.config import EngineConfig
from coserve.engine.base_memory import BaseNeeds
from coserve.errors import ConfigError
from coserve.memory.compiled import built_bytes
from coserve.model.base import Base
from coserve.plan.subject import Subject
from coserve.streamed.planner import Streaming
from coserve.streamed.shapes import ASSUMED_LINK, ASSUMED_RATE, least_streamed, stream_shapes
from coserve.streamed.trial import model_rate
from coserve.worker.opening import base_room, device_budget, host_room


@dataclass(frozen=True, slots=True)
class StreamedBase:
    """A base whose weights have `room` bytes of memory, of `whole`; at least `least` are needed. `streaming`
    is None where these are more than `room`, `is_measured` says whether its rate is. Beside a GPU `held`
    bytes of what a pass reads are in the host's memory."""

    room: int
    whole: int
    least: int
    blocks: int
    streaming: Streaming | None
    is_measured: bool
    held: int | None = None

    @property
    def freed(self) -> int:
        """Bytes that are not in memory, as it is streamed or, where it cannot be, would be with `least`."""
        return self.whole - (self.least if self.streaming is None else self.streaming.resident_nbytes)

    def as_dict(self) -> dict[str, Any]:
        """For JSON; sizes in bytes. Of a base that cannot be streamed in its room much is None."""
        found = self.streaming
        return {
            "room": self.room,
            "whole": self.whole,
            "least": self.least,
            "blocks": self.blocks,
            "resident_blocks": None if found is None else len(found.plan.resident),
            "resident": None if found is None else found.resident_nbytes,
            "read": None if found is None else found.plan.read_nbytes,
            "held": self.held,
            "rate": None if found is None else found.rate,
            "rate_measured": self.is_measured,
            "seconds": None if found is None else found.seconds,
        }


def plan_streaming(
    subject: Subject, base: Base, config: EngineConfig, link: float | None = None
) -> StreamedBase | None:
    """The way in which an engine with these settings streams the subject's base; None where it is in memory
    as a whole. `base` is the subject's on tensors without data, among which this has to be called; it counts
    as streamed afterwards. `link` is the measured rate of copies to a GPU. Reads some of the subject's files,
    to measure. Raises ConfigError for settings that are wrong."""
    on_cpu = torch.device(config.device).type == "cpu"
    room = base_room(config)
    if room is None:
        if config.memory == "auto":
            return None
        needs = BaseNeeds.of_base(
            base, subject.folder, replace(config, device="cpu"), 0, built_bytes() if on_cpu else 0
        )
        free = device_budget(config)
        try:
            room = needs.room(free)
        except ConfigError:
            room = max(free - needs.beside, 0)
        if room is None:
            return None
    whole, least = base.nbytes, least_streamed(base)
    measured = subject.folder and model_rate(subject.folder)
    host, to_device = 0, float("inf")
    if not on_cpu:
        host, to_device = host_room(config), link or ASSUMED_LINK
    try:
        streaming = stream_shapes(base, room, measured or ASSUMED_RATE, to_device, host)
    except ConfigError:
        return StreamedBase(room, whole, least, base.depth, None, bool(measured))
    read = streaming.plan.read_nbytes
    if not read:
        return None
    if on_cpu:
        return StreamedBase(room, whole, least, base.depth, streaming, bool(measured))
    held = min(host, read)
    is_measured = link is not None and bool(measured or held == read)
    return StreamedBase(room, whole, least, base.depth, streaming, is_measured, held)
