"""Turns errors during loading and proof of a model into refusals."""

from collections.abc import Iterator
from contextlib import contextmanager

from coserve.errors import CoserveError, ModelError, UnsupportedModel
from coserve.memory.exhausted import is_out_of_memory


@contextmanager
def refusing(model: str, doing: str) -> Iterator[None]:
    """Turns every error of its block into a ModelError about `model`: UnsupportedModel with the error as its
    reason, unless memory ran out. `doing` says what fails, as in "cannot be loaded"."""
    try:
        yield
    except CoserveError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise ModelError(f"there is not enough memory for {model}") from error
        reason = str(error).strip().partition("\n")[0]
        raise UnsupportedModel(f"{model} {doing}: {type(error).__name__}: {reason}") from error
