"""Checks histories of work on several servers, in the way of Jepsen: facts are noted in the order in which
they took effect, and compared with what leases and acknowledgements promise."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

What = Literal["acknowledged", "taken", "written", "ended"]


@dataclass(frozen=True)
class Fact:
    """Something that took effect. `server` names one life of a process, `fence` is the number of its lease,
    and `step` the progress that was written."""

    what: What
    subject: str
    server: str = ""
    fence: int = 0
    step: int = 0


@dataclass
class _Seen:
    fence: int = 0
    server: str = ""
    acknowledged: bool = False
    ends: list[Fact] = field(default_factory=list)


def violations(facts: Iterable[Fact], is_over: bool = False) -> list[str]:
    """Sentences about what must not be: two owners at once, a number that comes again, a write of an owner
    that has lost its lease, work that ends twice. After a history that `is_over` also acknowledged work that
    has not ended."""
    found, seen = list[str](), dict[str, _Seen]()
    for fact in facts:
        one = seen.setdefault(fact.subject, _Seen())
        if fact.what == "acknowledged":
            one.acknowledged = True
        elif fact.what == "taken":
            if fact.fence < one.fence or (fact.fence == one.fence and fact.server != one.server):
                before = f"{one.server} {one.fence}"
                found.append(f"{fact.server} took {fact.subject} by {fact.fence} after {before}")
            one.fence, one.server = fact.fence, fact.server
        else:
            if (fact.server, fact.fence) != (one.server, one.fence):
                found.append(f"{fact.server} {fact.what} {fact.subject}, which is {one.server}'s")
            if one.ends:
                found.append(f"{fact.subject} was {fact.what} after its end")
            if fact.what == "ended":
                one.ends.append(fact)
    if is_over:
        found += [f"{name} was lost" for name, one in seen.items() if one.acknowledged and not one.ends]
    return found
