"""Run by `test_triton_compiled.py`: Triton compiles each kernel for a GPU that is not there, to machine
code."""

import sys
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, Final

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from coserve.kernels.triton import blocksparse, elementwise, pages, recurrent, rotary_pages, segmented

HOPPER: Final = GPUTarget("cuda", 90, 32)
SHARED: Final = 227 << 10  # bytes that a block may have there
# Arguments by their types; tensors of numbers are in the kernel's type, all others are counts.
PARTS: Final = frozenset({"sums", "tops", "totals"})  # the answer itself, where there is one
ELEMENTS: Final = frozenset({"weight", "grad", "cos", "sin", "gate", "up", "of_gate", "of_up"})
NUMBERS: Final = frozenset(
    {
        "x",
        "a",
        "h",
        "b",
        "y",
        "values",
        "q",
        "k",
        "v",
        "c",
        "d",
        "z",
        "u",
        "keys",
        "out",
        "sinks",
        "total",
        "normed",
        "beta",
        "bias",
    }
    | PARTS
    | ELEMENTS
)
FLOATS: Final = frozenset({"scale", "softcap", "eps"})
LONGS: Final = frozenset({"pages", "lengths", "slots", "before", "after"})
EXACT: Final = frozenset({"held", "log_decay", "dt"})  # in float32
COUNTS: Final = frozenset(
    {"width", "share", "page_size", "dk", "dv", "window", "q_batch", "q_head", "keys_group", "values_group"}
    | {
        "pages_batch",
        "splits",
        "x_stride",
        "h_stride",
        "y_stride",
        "x_row",
        "x_head",
        "heads",
        "half",
        "count",
        "second_width",
        "third_width",
        "channels",
        "states",
        "a_head",
        "a_state",
        "all_ranks",
        "z_stride",
        "u_stride",
        "q_row",
        "k_row",
        "k_head",
        "v_row",
        "v_head",
        "groups",
        "deep",
    }
)


def cases() -> Iterator[tuple[Any, Mapping[str, Any]]]:
    """Kernels with their constants: decode rows without matrix units, and tiles of rows with them."""
    for rows in (1, 16):
        block = {"ROWS": rows, "RANKS": 16, "WIDTH": 64, "DOT": rows == 16}
        for kernel in (segmented._shrink, segmented._expand, segmented._expand_siblings, segmented._outer):
            yield kernel, block
        for kernel in (blocksparse._dds, blocksparse._sdd, blocksparse._transposed):
            yield kernel, block
    for centred in (False, True):
        yield elementwise._rms_norm, {"CENTRED": centred, "BLOCK": 4096}
        yield elementwise._rms_norm_back, {"CENTRED": centred, "BLOCK": 16384}
        yield elementwise._add_rms_norm, {"CENTRED": centred, "BLOCK": 4096}
        yield elementwise._rotate, {"BACK": centred, "HEADS": 8, "HALF": 64}
        yield recurrent._conv_update, {"COLUMNS": 4, "BIAS": centred, "SILU": centred, "CHANNELS": 256}
        delta = {"BY_KEY": centred, "NORMED": centred, "KEYS": 128, "VALUES": 32}
        yield recurrent._delta_update, delta
        selective = {"ENDS": centred, "GATED": centred, "STATES": 128, "VALUES": 32}
        yield recurrent._selective_update, selective
    yield rotary_pages._rotate_into_pages, {"HEADS": 8, "HALF": 64, "DEEP": 128}
    yield elementwise._silu_mul, {"BLOCK": 1024}
    yield elementwise._silu_mul_back, {"BLOCK": 1024}
    for width, sinks in ((128, False), (64, True)):
        joined = {"DV": width, "KEYS": 64, "SPLIT": 512, "SINKS": sinks}
        for whole in (False, True):
            yield pages._attend, {"ROWS": 1, "HEADS": 16, "DK": width, "WHOLE": whole, **joined}
        yield pages._attend, {"ROWS": 16, "HEADS": 4, "DK": width, "WHOLE": True, **joined}
        yield pages._join, joined
    wide = {"ROWS": 16, "HEADS": 2, "DK": 256, "DV": 256, "KEYS": 64, "SPLIT": 512}
    yield pages._attend, {**wide, "SINKS": False, "WHOLE": True}


def type_of(name: str, constants: Mapping[str, Any], dtype: str) -> str:
    if name in constants:
        return "constexpr"
    if name in COUNTS:
        return "i32"
    if name in FLOATS:
        return "fp32"
    if name in EXACT:
        return "*fp32"
    if name == "found" and "CENTRED" in constants:
        return f"*{dtype}"
    if name == "found" or (name in PARTS and not constants.get("WHOLE")):
        return "*fp32"
    return f"*{dtype}" if name in NUMBERS else "*i64" if name in LONGS else "*i32"


def main(dtype: str, third: str) -> None:
    for kernel, constants in islice(cases(), int(third), None, 3):
        names = kernel.arg_names
        signature = {name: type_of(name, constants, dtype) for name in names}
        given = {(names.index(name),): value for name, value in constants.items()}
        found = compile(ASTSource(fn=kernel, signature=signature, constexprs=given), target=HOPPER)
        assert found.asm["cubin"], kernel.__name__
        shared = found.metadata.shared
        assert shared <= SHARED, f"{kernel.__name__} takes {shared} bytes of shared memory"
    print("compiled")


if __name__ == "__main__":
    main(*sys.argv[1:])
