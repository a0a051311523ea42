"""Requests counted by their callers, before a key is looked up."""

import h11
import pytest

from coserve.serve.answering.fair import FairQueue
from coserve.serve.errors import ApiError
from coserve.serve.http.shedding import LoadShedder


@pytest.mark.parametrize("name", ("authorization", "x-api-key", "cookie"))
def test_one_callers_requests_take_no_place_of_anothers(name: str) -> None:
    """Callers differ by a key's header, or by the cookie of a browser that is logged in."""
    shedder = LoadShedder(FairQueue(100, 3), ("/v1/completions",))

    def ask(who: str) -> h11.Request:
        return h11.Request(method="POST", target="/v1/completions", headers=[("host", "x"), (name, who)])

    held = [shedder.enter(ask("ann"), 0) for _ in range(3)]
    with pytest.raises(ApiError, match="Too many requests"):
        shedder.enter(ask("ann"), 0)
    assert shedder.enter(ask("bob"), 0) is not None
    for who in held:
        assert who is not None
        shedder.leave(who)
    assert shedder.enter(ask("ann"), 0) is not None
