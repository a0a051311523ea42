"""Part `equivalence`: the device gives what the processor gives in float64, within rounding.

The allowed error of each comparison is measured, not chosen: `SLACK` times that of the same program in the
same type on the processor. The tests compare the processor in float64 with transformers and PEFT; here the
first comparison has transformers' own forward, too.
"""

from collections.abc import Callable, Mapping
from functools import cache
from importlib.util import find_spec
from typing import Any, Final

import torch
from torch import Tensor

from coserve.errors import CoserveError, InternalError
from coserve_benchmarks.gpu import attention
from coserve_benchmarks.gpu.log import PartLog
from coserve_benchmarks.gpu.models import (
    ADAPTERS,
    KINDS,
    ROUTED,
    VOCABULARY,
    add_adapters,
    first_gradients,
    graphed_gradients,
    log_probabilities,
    make_engine,
    make_model,
)
from coserve_benchmarks.plans import local_worker

SLACK: Final = 4.0
_LEAST: Final = {torch.float32: 1e-5, torch.bfloat16: 2e-2}  # errors that are rounding in any case, relative
_RESERVE: Final = 12.0
_REFERENCE: Final = torch.float64

Found = dict[str, Tensor]
Case = Callable[[str, torch.dtype], Found]  # of a device and a type


def run_bare(log: PartLog, device: str) -> None:
    """All cases in float32, then in bfloat16."""
    if not _has_four_bits():
        log.note("bitsandbytes is not installed: nothing was compared in four bits")
    for dtype in (torch.float32, torch.bfloat16):
        for name, worst in attention.errors(device, dtype).items():
            _report(log, f"attention, {name}, {_called(dtype)}", worst, attention.TOLERANCE[dtype])
        for name, case in _cases(dtype).items():
            if log.left < _RESERVE:
                log.note(f"no time was left for {name}, {_called(dtype)}")
                continue
            try:
                _compare(log, f"{name}, {_called(dtype)}", case, device, dtype)
            except CoserveError as error:
                log.failure(f"{name}, {_called(dtype)}: {type(error).__name__}: {error}")


def _cases(dtype: torch.dtype) -> Mapping[str, Case]:
    kinds = [kind for kind in KINDS if dtype == torch.float32 or kind not in ROUTED]
    found: dict[str, Case] = {"llama, own forward": _own, "adapters of every method": _adapters}
    found["gradients of every method"] = _gradients
    found["gradients by graph"] = _graphed
    found |= {f"{kind}, answers": _answers(kind) for kind in kinds}
    bits = ("8bit", "4bit") if _has_four_bits() else ("8bit",)
    found |= {f"llama, {quantize}": _answers("llama", quantize=quantize) for quantize in bits}
    found["llama, eight-bit cache"] = _answers("llama", cache_dtype="int8")
    found["llama, deterministic"] = _answers("llama", deterministic=True)
    return found


def _has_four_bits() -> bool:
    return find_spec("bitsandbytes") is not None


def _called(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _answers(kind: str, **config: Any) -> Case:
    """Log-probabilities of prompts in chunks and decoded tokens."""

    @cache
    def case(device: str, dtype: torch.dtype) -> Found:
        return log_probabilities(make_engine(kind, dtype, device, **config), [None])

    return case


@cache
def _adapters(device: str, dtype: torch.dtype) -> Found:
    """Log-probabilities of adapters of all methods side by side."""
    engine = make_engine("llama", dtype, device)
    add_adapters(engine)
    return log_probabilities(engine, [None, *ADAPTERS])


@cache
def _gradients(device: str, dtype: torch.dtype) -> Found:
    """Gradients of jobs of several methods that pass the layers together."""
    return first_gradients(make_engine("llama", dtype, device))


@cache
def _graphed(device: str, dtype: torch.dtype) -> Found:
    """Gradients of a job alone after some steps, on a GPU by graph. Raises InternalError where none was."""
    engine = make_engine("llama", dtype, device)
    found = graphed_gradients(engine)
    graphs = local_worker(engine).training.graphs
    if device != "cpu" and (graphs is None or not graphs.count):
        raise InternalError("no graph of training was captured")
    return found


def _own(device: str, dtype: torch.dtype) -> Found:
    """Log-probabilities of one text; in float64 by transformers' own forward, else by an engine."""
    tokens = [(7 * i + 3) % (VOCABULARY - 1) + 1 for i in range(41)]
    if dtype == _REFERENCE:
        with torch.no_grad():
            logits = make_model("llama", dtype)(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
        return {"text": logits[:-1].log_softmax(-1)}
    engine = make_engine("llama", dtype, device)
    return {"text": _scored(engine, tokens)}


def _scored(engine: Any, tokens: list[int]) -> Tensor:
    from coserve.core.request import SamplingParams

    sampling = SamplingParams(max_tokens=0, prompt_logprobs=VOCABULARY)
    answer = engine.generate(tokens, sampling=sampling, text=False)
    engine.run()
    found = torch.full((len(tokens) - 1, VOCABULARY), torch.nan, dtype=torch.float64)
    for row, of_row in enumerate(answer.prompt_logprobs):
        for token, logprob in of_row.top:
            found[row, token] = logprob
    return found


def _compare(log: PartLog, name: str, case: Case, device: str, dtype: torch.dtype) -> None:
    exact = case("cpu", _REFERENCE)
    allowed = max(SLACK * worst_error(case("cpu", dtype), exact)[0], _LEAST[dtype])
    worst, where = worst_error(case(device, dtype), exact)
    _report(log, name, worst, allowed, where)


def _report(log: PartLog, name: str, worst: float, allowed: float, where: str = "") -> None:
    log.figure(f"equivalence[{name}]", worst, "largest error", allowed, note=where)
    if not worst <= allowed:
        log.failure(f"{name}: off by {worst:.2e} where {allowed:.2e} is rounding {where}".rstrip())


def worst_error(found: Found, exact: Found) -> tuple[float, str]:
    """The largest difference of any tensor relative to its own largest number, and the tensor's name;
    infinite where one is missing or not finite."""
    if found.keys() != exact.keys():
        return float("inf"), ", ".join(sorted(found.keys() ^ exact.keys()))
    errors = []
    for name, wanted in exact.items():
        got = found[name].double()
        if got.shape != wanted.shape:
            return float("inf"), f"{name}: {tuple(got.shape)} for {tuple(wanted.shape)}"
        error = (got - wanted.double()).abs().max() / wanted.abs().max().clamp_min(1e-6)
        errors.append((float(error.nan_to_num(torch.inf)), name))
    return max(errors)
