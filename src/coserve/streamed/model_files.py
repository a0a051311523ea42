"""A model's files, from which its skeleton and then a layer at a time are loaded.

Names, shapes and types of weights in files are not those of the model: transformers renames, merges and
converts them while it loads. So its own loader runs here too, for the layers' surroundings first and then for
each layer's tensors alone.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.utils import logging as transformers_logging

from coserve.adapters.sites import decoder_layers
from coserve.adapters.text_part import keep_text
from coserve.errors import ModelError, UnsupportedModel
from coserve.model.block import Block
from coserve.model.dequantized.form import Form, Slice, Whole, dense_state, slices_of
from coserve.model.dequantized.forms import form_for, quantized_fields
from coserve.model.foreign import read_config
from coserve.model.load import OwnLoader, hooked_class, load_class
from coserve.streamed.files import FileTensor, WeightFile, ranges, read_header, tensor_in
from coserve.streamed.stored import Read, ReadBuffer

_BYTES: Final = {"none": None, "8bit": 1.0, "4bit": 0.55}  # of a weight; None: as saved


class ModelFiles:
    """Tensors in the files of one model. `model` has everything but its decoder layers' parameters, which are
    on the meta device."""

    model: PreTrainedModel
    _form: Form | None  # in which weights were saved, where they are quantized

    def __init__(
        self, model: str | Path, dtype: torch.dtype | str, change: Callable[[PreTrainedModel], None]
    ) -> None:
        """`change` is given the model while all its parameters are on the meta device: where they are cut,
        a rank's part of each is loaded. Raises ModelError, and UnsupportedModel for files of another kind."""
        self._change = change
        self._stored: dict[str, tuple[WeightFile, FileTensor]] = {}
        config = read_config(model)
        self._saved, self._form = quantized_fields(config.to_dict()), None
        self.model = load_class(hooked_class(config, self._begin), model, config, dtype)

    def _begin(
        self,
        own: OwnLoader,
        model: PreTrainedModel,
        state_dict: Any,
        files: list[str] | None,
        options: Any,
        *args: Any,
    ) -> tuple[Any, Any]:
        """Loads what is around the layers. Takes the place of transformers' own loader."""
        self._own_loader = own
        if not files or not all(file.endswith(".safetensors") for file in files):
            raise UnsupportedModel("only a model in files of safetensors can be streamed")
        keep_text(model)
        self._change(model)
        headers = {Path(file): read_header(Path(file)) for file in files}
        if self._saved is not None:
            self._form = form_for(self._saved, {name for found in headers.values() for name in found})
        has_place = _places(model, options, self._form)
        for file, found in headers.items():
            weights = WeightFile(file)
            self._stored |= {name: (weights, tensor) for name, tensor in found.items() if has_place(name)}
        self._files, self._options = files, options
        layers = decoder_layers(model)
        self._tails = {path: ".".join(path.split(".")[-2:]) for path in layers}
        around = {
            name: _read_alone(*stored) for name, stored in self._stored.items() if not self._layer_of(name)
        }
        info, index = self._own_loader(model, self._dense(around), files, options)
        inside = {f"{path}.{name}" for path, layer in layers.items() for name in layer.state_dict()}
        if not inside <= info.missing_keys:
            raise UnsupportedModel("the model's files give its layers other names than it does")
        info.missing_keys -= inside
        for layer in layers.values():
            for parameter in layer.parameters():
                parameter._is_hf_initialized = True  # type: ignore[attr-defined]  # nothing is drawn for it
        return info, index

    def nbytes_of(self, block: Block) -> int:
        """Bytes of a buffer for a block's tensors in the files."""
        return max((read.end for read in self.reads(block)), default=0)

    def reads(self, block: Block) -> list[Read]:
        """The ranges of files that hold a block's tensors, one after the other."""
        by_file: dict[int, tuple[WeightFile, list[FileTensor]]] = {}
        for file, tensor in self._of(block).values():
            by_file.setdefault(id(file), (file, []))[1].append(tensor)
        found, end = [], 0
        for file, tensors in by_file.values():
            for start, stop in ranges(tensors):
                found.append(Read(file, start, end, end + stop - start))
                end += stop - start
        return found

    def load(self, block: Block, buffer: ReadBuffer) -> list[Read]:
        """Fills a buffer with a block's tensors, and has the block use them, converted where the model has
        them otherwise; returns what was read. Raises ModelError and WeightsUnreadable."""
        reads = self.reads(block)
        for read in reads:
            read.file.read(read.start, buffer.bytes[read.into : read.end])
        state = {name: _found(buffer, reads, *stored) for name, stored in self._of(block).items()}
        _quietly(lambda: self._own_loader(self.model, self._dense(state), self._files, self._options))
        block.module.requires_grad_(False)
        tensors = block.module.state_dict()
        if missing := [name for name, tensor in tensors.items() if tensor.is_meta]:
            raise ModelError(
                f"{self.model.config.name_or_path!r} lacks {len(missing)} of the model's tensors, such as "
                f"{block.path}.{missing[0]}"
            )
        return reads

    def _dense(self, state: Mapping[str, Tensor]) -> Mapping[str, Tensor | Slice]:
        """Tensors of files as transformers' loader is given them."""
        if self._form is None:
            return state
        stored = {name: Whole(tensor) for name, tensor in state.items()}
        return dense_state(self._form, stored, self._options.dtype)

    def _of(self, block: Block) -> Mapping[str, tuple[WeightFile, FileTensor]]:
        return {name: stored for name, stored in self._stored.items() if self._layer_of(name) == block.path}

    def _layer_of(self, name: str) -> str | None:
        """The path of the layer that has the tensor of this name: files may leave out or rename what is
        before and after "layers.7"."""
        return next((path for path, tail in self._tails.items() if f".{tail}." in f".{name}"), None)


def _places(model: PreTrainedModel, options: Any, form: Form | None) -> Callable[[str], bool]:
    """Tells by its name in the files whether the model has a place for a tensor, or for the weight that it
    is a part of, as transformers' own loader does: not for towers of images, which may have layers of the
    same names."""
    mapping, state = options.weight_mapping or (), model.state_dict()
    renamings = [one for one in mapping if isinstance(one, WeightRenaming)]
    converters = [one for one in mapping if isinstance(one, WeightConverter)]

    def has_place(name: str) -> bool:
        if form is not None and (owner := form.weight_of(name)) is not None:
            name = owner[0]
        renamed, _ = rename_source_key(name, renamings, converters, model.base_model_prefix, state)
        return renamed in state or name in state

    return has_place


def stored_bytes(folder: Path, paths: Iterable[str]) -> dict[str, int]:
    """Bytes of the ranges of a folder's files that hold the layers at these paths, by path."""
    tails = {".".join(path.split(".")[-2:]): path for path in paths}
    found = dict.fromkeys(tails.values(), 0)
    for file in folder.glob("*.safetensors"):
        own: dict[str, list[FileTensor]] = {}
        for name, tensor in read_header(file).items():
            parts = name.split(".")
            if tail := next((t for t in map(".".join, pairwise(parts)) if t in tails), None):
                own.setdefault(tails[tail], []).append(tensor)
        for path, tensors in own.items():
            found[path] += sum(end - start for start, end in ranges(tensors))
    return found


def saved_bytes(model: object, quantize: str, saved: Mapping[str, Any] | None = None) -> int:
    """Bytes of the weights in a model's folder once they are loaded, roughly; 0 for anything else. `saved`
    says how they were saved quantized, None that they were not."""
    if not isinstance(model, str | Path) or not Path(model).is_dir():
        return 0
    each = _BYTES[quantize]
    files = [*Path(model).glob("*.safetensors")]
    if saved is not None:
        with ExitStack() as closing:
            slices = slices_of(files, closing)
            dense = dense_state(form_for(saved, slices), slices, torch.bfloat16)
            return int(sum(math.prod(own.get_shape()) for own in dense.values()) * (each or 2))
    found = [tensor for file in files for tensor in read_header(file).values()]
    if each is None:
        return sum(tensor.nbytes for tensor in found)
    return int(sum(tensor.nbytes / tensor.dtype.itemsize for tensor in found) * each)


def _read_alone(file: WeightFile, stored: FileTensor) -> Tensor:
    """A tensor of a file, in memory of its own."""
    ((start, end),) = ranges([stored])
    buffer = ReadBuffer(end - start)
    file.read(start, buffer.bytes[: end - start])
    return tensor_in(buffer.tensor, stored.start - start, stored)


def _found(buffer: ReadBuffer, reads: list[Read], file: WeightFile, stored: FileTensor) -> Tensor:
    """A tensor in a buffer that was filled by `reads`."""
    own = (
        read for read in reads if read.file is file and 0 <= stored.start - read.start < read.end - read.into
    )
    read = next(own)
    return tensor_in(buffer.tensor, read.into + stored.start - read.start, stored)


def _quietly(load: Callable[[], object]) -> None:
    """Loads without a progress bar for each layer."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        load()
    finally:
        if shown:
            transformers_logging.enable_progress_bar()
