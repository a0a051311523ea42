"""Restarts: pauses before a dead process is started again, and the limit of failed starts."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """Times in seconds. A process that dies after it was ready is restarted at once; pauses follow deaths at
    start and repeated early deaths."""

    attempts: int = 6  # failed starts in a row that end the server
    first_pause: float = 0.5  # doubles with each further one
    longest_pause: float = 30.0
    settled: float = 10.0  # a life this long after being ready clears the record
    short_lives: int = 5  # short lives in a row without a pause


@dataclass(slots=True)
class Restarts:
    """The deaths of one kind of process."""

    policy: RestartPolicy = field(default_factory=RestartPolicy)
    failed_starts: int = 0
    short_lives: int = 0

    @property
    def is_exhausted(self) -> bool:
        """Tells whether the limit of restarts is reached."""
        return self.failed_starts >= self.policy.attempts

    def died_at_start(self) -> float:
        """Records a death at start and returns the pause before the next one."""
        self.failed_starts += 1
        return self._pause(self.failed_starts)

    def died_after(self, seconds: float) -> float:
        """Records a death after `seconds` of being ready, and returns the pause before the next start."""
        self.failed_starts = 0
        self.short_lives = 0 if seconds >= self.policy.settled else self.short_lives + 1
        excess = self.short_lives - self.policy.short_lives
        return self._pause(excess) if excess > 0 else 0.0

    def _pause(self, count: int) -> float:
        exponent = min(count - 1, 30)  # far beyond the longest pause, and short of an overflow
        return min(self.policy.first_pause * 2.0**exponent, self.policy.longest_pause)
