"""Float64 stays float64 while `Exact` holds, and nothing of it is left behind."""

import threading

import torch
from torch import Tensor
from torch.nn import functional

from models import Exact, inexact


def types() -> set[torch.dtype]:
    """Types of what a float64 tensor becomes that is asked for as float32, in ways that models use."""
    x, narrow = torch.ones(2, 2, dtype=torch.float64), torch.float32
    found = (
        x.float(), x.to(narrow), x.to("cpu", narrow), x.to(dtype=narrow), x.type(narrow),
        x.sum(0, dtype=narrow), functional.softmax(x, -1, dtype=narrow), torch.softmax(x, -1, narrow),
        x.new_zeros(2, dtype=narrow), torch.zeros_like(x, dtype=narrow),
        functional.log_softmax(x, -1, dtype=narrow),
    )  # fmt: skip
    return {made.dtype for made in found}


def test_float64_stays_float64_on_all_threads_until_the_last_has_left() -> None:
    before, elsewhere = dict(vars(Tensor)), list[set[torch.dtype]]()
    assert types() == {torch.float32}
    with Exact():
        with Exact():
            thread = threading.Thread(target=lambda: elsewhere.append(types()))
            thread.start()
            thread.join()
        assert types() == elsewhere[0] == {torch.float64}
        with inexact():
            assert types() == {torch.float32}
        assert types() == {torch.float64}
        assert (
            torch.ones(2).double().dtype == torch.float64
            and torch.ones(2).half().float().dtype == torch.float32
        )
    assert types() == {torch.float32} and dict(vars(Tensor)) == before
    with inexact():
        assert types() == {torch.float32}
