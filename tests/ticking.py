"""A clock in place of the machine's for metered machines: however busy the machine is, no time passes but
what somebody waits for."""

import pytest

from coserve_benchmarks import metered_machine


class Clock:
    """A clock that whoever waits moves on, and whoever reads it by `tick` seconds. At `due[0]` it calls
    `due[1]`."""

    def __init__(self, tick: float = 0.0) -> None:
        self.now, self.tick = 0.0, tick
        self.due = (float("inf"), lambda: None)

    def __call__(self) -> float:
        self.now += self.tick
        return self.now

    def sleep(self, seconds: float) -> None:
        (at, call), end = self.due, self.now + seconds
        self.now = min(at, end)
        if at <= end:
            self.due = (float("inf"), lambda: None)
            call()

    # What a condition has.

    wait = sleep

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...

    def notify(self) -> None: ...


def ticking(patch: pytest.MonkeyPatch, tick: float = 0.0) -> Clock:
    """Has metered machines use such a clock."""
    made = Clock(tick)
    for name, own in (
        ("clock", made),
        ("time", made),
        ("processor", lambda: 0.0),
        ("Condition", lambda: made),
    ):
        patch.setattr(metered_machine, name, own)
    return made
