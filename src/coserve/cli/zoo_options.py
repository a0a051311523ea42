"""Options and helpers of all `coserve zoo` commands."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from coserve.errors import ConfigError

if TYPE_CHECKING:
    from coserve.zoo.profile import Machine
    from coserve.zoo.store import Zoo

DEFAULT: Final = Path("zoo")
Folder = Annotated[Path, typer.Option("--zoo", help="Folder of the zoo.", metavar="FOLDER")]
Name = Annotated[str, typer.Argument(help="Name of a model or adapter in the zoo.", metavar="NAME")]
Picture = Annotated[
    Path | None, typer.Option("--picture", help="File for a picture, SVG or PNG by its ending.")
]


def open_zoo(folder: Path) -> "Zoo":
    """The zoo at a folder. Raises ZooError."""
    from coserve.zoo.store import Zoo

    return Zoo(folder)


def without_bars() -> None:
    """Loads models without transformers' progress bars from now on."""
    from transformers.utils import logging

    logging.disable_progress_bar()


def read_text(file: Path) -> str:
    """The text of `--text`. Raises ConfigError for what is no UTF-8."""
    try:
        return file.read_text(encoding="utf-8")
    except (ValueError, OSError) as error:
        raise ConfigError(f"--text {file}: expected UTF-8; {error}") from error


def this_machine() -> "Machine":
    """This machine, on which measured seconds depend."""
    import torch

    from coserve.engine.remembered import device_name
    from coserve.zoo.profile import Machine

    return Machine.of(device_name(torch.device("cpu")))


def say_step(step: int, steps: int, loss: float) -> None:
    """One line about a step of training."""
    print(f"step {step}/{steps}  loss {loss:.4f}", flush=True)


def as_builtins(value: Any) -> Any:
    """A struct for JSON."""
    import msgspec

    return msgspec.to_builtins(value)
