"""Models by the names that a scheduler gives them, where a worker finds them."""

from collections.abc import Callable
from pathlib import Path

from coserve.errors import ModelNotFound, ZooError
from coserve.zoo.store import Zoo
from coserve.zoo.views import view_of


def finder_of(zoo: Path | None) -> Callable[[str], Path]:
    """The way from a model's name to its folder: the folder itself where it is there; else, in the worker's
    own zoo, that of the model which a scheduler's zoo has written there, which is named by its content. The
    worker checks afterwards that the files are the scheduler's."""

    def find(name: str) -> Path:
        folder = Path(name)
        if folder.is_dir():
            return folder
        if zoo is not None:
            opened = Zoo(zoo)
            try:
                for one in opened.applications().values():
                    if not one.is_adapter and one.digest == folder.name:
                        return view_of(opened, one)
            except ZooError as error:
                raise ModelNotFound(str(error)) from error
        where = "" if zoo is None else f", and its zoo at {zoo} has no model of that content"
        raise ModelNotFound(f"the worker has no folder {name}{where}")

    return find
