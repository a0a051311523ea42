"""Times of a call's answers, for its client: where it waited, and whether its own bounds were kept."""

from dataclasses import dataclass

from coserve.core.request import SLO


@dataclass(slots=True, eq=False)
class CallClock:
    """The longest times of a call's answers, in seconds: in the queue, to a first token, between two tokens,
    and in all. `place` is the number of the tenant's own
    sequences that waited when the call came."""

    place: int = 0
    queued: float = 0.0
    first: float = 0.0
    slowest: float = 0.0
    whole: float = 0.0

    def kept(self, stated: SLO) -> bool:
        """Tells whether the bounds were kept, as far as a server sees them: deferral is the engine's."""
        pairs = (
            (stated.first_token, self.first),
            (stated.between_tokens, self.slowest),
            (stated.end_to_end, self.whole),
        )
        return all(bound is None or taken <= bound for bound, taken in pairs)

    def kept_by_first(self, stated: SLO) -> bool | None:
        """The same when the first token is there; None where it cannot be known yet."""
        if self.first > (stated.first_token or self.first):
            return False
        known = stated.between_tokens is None and stated.end_to_end is None
        return self.kept(stated) if known else None
