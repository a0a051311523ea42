"""Compiles the kernels in C where there is a C compiler, once for a machine and a type of numbers.

It takes half a second. A library stays in the user's cache directory, under a name made of the sources, the
compiler and the processor's capabilities. Without a compiler, or where anything fails, there is no library,
and everything is computed by torch.
"""

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Final

import platformdirs
import torch  # its OpenMP library must be there first: another one's threads would compete

_SOURCES: Final = sorted(Path(__file__).parent.glob("*.[ch]"))
# What is compiled in float32: the others are for bfloat16 alone, or for both as they are.
_WIDE: Final = (
    "attention.c", "conv_rows.c", "kernels.c", "layer.c", "layer_back.c", "linear.c", "lora.c", "lora_back.c",
    "recurrent.c", "scan_rows.c", "training.c",
)  # fmt: skip
NUMBERS: Final = (torch.bfloat16, torch.float32)  # types that there are kernels for
_FAST: Final = ("-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math")
_FLAGS: Final = (*_FAST, "-fopenmp", "-shared", "-fPIC")
_PATIENCE: Final = 60.0  # seconds
_KINDS: Final = {"p": ctypes.c_void_p, "l": ctypes.c_int64, "f": ctypes.c_float, "i": ctypes.c_int}
_SIGNATURES: Final = {  # the arguments of each function: pointers, numbers of 64 bits, floats, integers
    "rms_norm": "pppllfii",
    "rms_norm_back": "ppppllfii",
    "rotate": "pllpppllli",
    "rotate_back": "pllpppllli",
    "silu_mul": "pppli",
    "silu_mul_back": "pppppli",
    "softmax_keeping": "pplllfi",
    "softmax_back": "ppplllfi",
    "cross_entropy": "ppppllfi",
    "write_slots": "pllpplllli",
    "argmax": "pplli",
    "draw": "plipppplli",
    "attend_pages": "pllpplpllpllllllfpi",
    "linear": "plpppllli",
    "linear_unpacked": "plpppllli",
    "unpack_columns": "ppllllli",
    "add_lora": "plplplli",
    "lora_back": "plpplppplli",
    "decode_layers": "pppppplppppllli",
    "layer_begin": "pppppppppllli",
    "layer_end": "ppppppllli",
    "layer_slice": "pppppppplli",
    "layer_queries": "pppppplli",
    "layer_back_after": "pppppppplli",
    "layer_back_before": "ppppllpllppppplli",
    "layer_attend": "pppplpppppplli",
    "attends_chunks": "ll",
    "attend_chunks": "pppppplllllllflppi",
    "goes_back_chunks": "ll",
    "attend_chunks_back": "ppppppppppplllllllflpppi",
    "panel_outputs": "",
    "conv_update": "plpppppplllii",
    "delta_update": "ppplllpplppppllllllii",
    "delta_rows": "pppppppppllllllllfiii",
    "delta_rows_back": "ppppppppppppppllllllllfiii",
    "selective_update": "plppllplplpplppppllllli",
    "rms_norm_gated": "pplpplllfii",
    "rms_norm_gated_back": "ppplppplllfii",
    "conv_rows": "pllpppllllii",
    "conv_rows_back": "pllppppllllii",
    "scan_rows": "pppppppppllllli",
    "scan_rows_back": "pppppppppppppllllli",
}
_WIDE_ALONE: Final = ("lora_back", "layer_queries", "layer_back_after", "layer_back_before")  # in float32
_ANSWERS: Final = ("attends_chunks", "goes_back_chunks", "panel_outputs")  # functions that return an integer


class _ThreadState(threading.local):
    """Tells whether this thread computes without kernels."""

    is_off = False  # of the class, as a default of `getattr` takes ten times as long


_state = _ThreadState()
_log = logging.getLogger(__name__)


def kernels(dtype: torch.dtype = torch.bfloat16) -> ctypes.CDLL | None:
    """The compiled kernels, as `library`; None inside `torch_only`."""
    return None if _state.is_off else library(dtype)


@contextmanager
def torch_only() -> Iterator[None]:
    """Context in which this thread computes without compiled kernels, so that results do not depend on a
    compiler."""
    before = _state.is_off
    _state.is_off = True
    try:
        yield
    finally:
        _state.is_off = before


@cache
def library(dtype: torch.dtype = torch.bfloat16) -> ctypes.CDLL | None:
    """The compiled kernels for numbers of this type; None without a compiler, on other systems than Linux,
    for other types, or where `COSERVE_NATIVE` is 0 in the environment."""
    if (
        dtype not in NUMBERS
        or not sys.platform.startswith("linux")
        or os.environ.get("COSERVE_NATIVE") == "0"
    ):
        return None
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CC", ""), "cc", "gcc"))), None)
    if compiler is None:
        return None
    try:
        return _loaded(compiler, dtype)
    except (OSError, subprocess.SubprocessError) as error:
        _log.info("kernels are not compiled: %s", error)
        return None


def _loaded(compiler: str, dtype: torch.dtype) -> ctypes.CDLL | None:
    threads = _openmp_libraries()
    directory = platformdirs.user_cache_path("coserve") / "kernels"
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = directory / f"{_name(compiler, dtype)}.so"
        if not path.exists():
            _compile(compiler, dtype, path)
        found = ctypes.CDLL(str(path))
    except OSError:  # a home that cannot be written, or a damaged file
        with tempfile.TemporaryDirectory() as temporary:
            path = Path(temporary) / "kernels.so"
            _compile(compiler, dtype, path)
            found = ctypes.CDLL(str(path))
    if _openmp_libraries() != threads:
        return None
    for name, kinds in _SIGNATURES.items():
        if (function := getattr(found, name, None)) is None:
            assert _is_wide(dtype) or name in _WIDE_ALONE, f"no kernel {name}"
            continue
        function.argtypes = [_KINDS[kind] for kind in kinds]
        function.restype = ctypes.c_int if name in _ANSWERS else None
    return found


def _compile(compiler: str, dtype: torch.dtype, path: Path) -> None:
    """Writes the library in one move, as several processes may compile it at once."""
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    sources = [
        str(one) for one in _SOURCES if one.suffix == ".c" and (one.name in _WIDE or not _is_wide(dtype))
    ]
    defined = ["-DCOSERVE_FLOAT32"] if _is_wide(dtype) else []
    command = [compiler, *_FLAGS, *defined, "-o", str(draft), *sources, "-lm"]
    subprocess.run(command, check=True, capture_output=True, timeout=_PATIENCE)
    draft.replace(path)


def _is_wide(dtype: torch.dtype) -> bool:
    return dtype is torch.float32


def _name(compiler: str, dtype: torch.dtype) -> str:
    described = [path.read_bytes() for path in _SOURCES]
    described += [" ".join((compiler, *_FLAGS, platform.machine(), str(dtype))).encode()]
    capabilities = Path("/proc/cpuinfo").read_bytes().splitlines()
    described += {line for line in capabilities if line.startswith((b"flags", b"Features"))}
    return hashlib.sha256(b"\n".join(described)).hexdigest()[:32]


def _openmp_libraries() -> set[str]:
    """Files of OpenMP libraries in this process."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split()[-1] for line in lines if "libgomp" in line or "libomp" in line or "libiomp" in line}
