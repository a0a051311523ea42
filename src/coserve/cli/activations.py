"""`coserve plan --activations`: the tensors of a model's layers that training an adapter stores."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from coserve.cli.output import print_json, print_table
from coserve.errors import ConfigError

if TYPE_CHECKING:
    from coserve.train.pruning.table import Explained

_COLUMNS = ("tensor", "bytes a token", "is", "kept", "why")


def activations(
    config: Any, dtype: Any, parts: Sequence[Mapping[str, Any]], keep: str, as_json: bool
) -> None:
    """Prints the table for a transformers configuration, a torch type, an adapter's parts in the form of a
    request, and a save policy. Raises AdapterError, ConfigError or UnsupportedModel."""
    from coserve.adapters.settings import settings_of
    from coserve.train.pruning.plan import explain_model
    from coserve.train.save_policy import SavePolicy

    known = [each.value for each in SavePolicy if each is not SavePolicy.EVERYTHING]
    if keep not in known:
        raise ConfigError(f"--keep is {' or '.join(known)}, not {keep!r}")
    explained = explain_model(config, dtype, settings_of(parts), SavePolicy(keep))
    if as_json:
        print_json([asdict(layers) for layers in explained])
        return
    for layers in explained:
        print(_title(layers))
        rows = [
            (
                line.tensor,
                f"{line.nbytes:,.0f}",
                line.fate,
                f"{line.kept:,.0f}" if line.kept else "",
                line.why,
            )
            for line in layers.lines
        ]
        print_table(_COLUMNS, rows, "Nothing goes back through these layers.")
    whole = sum(len(layers.layers) * layers.kept for layers in explained)
    print(f"{whole:,.0f} bytes a token are kept of all layers together.")


def _title(layers: "Explained") -> str:
    first, last = layers.layers[0], layers.layers[-1]
    which = f"Layer {first}" if first == last else f"Layers {first} to {last}"
    return (
        f"{which}, bytes a token: {layers.autograd:,.0f} where all weights train, {layers.pruned:,.0f} once "
        f"their gradients are pruned, {layers.kept:,.0f} kept."
    )
