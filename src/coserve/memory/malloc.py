"""Controls how the C library keeps freed memory, and reads resident sizes.

A layer's temporaries are a few megabytes each. glibc gives blocks of that size back to the system when they
are freed, and every 4 KiB taken again costs a page fault: with these settings a step of 512 prompt rows on
the bench's 255M shape took 310 instead of 350 ms, and element-wise products half as long. Threads share one
arena: memory in other arenas is not kept, and training beside answers was 26 % faster with one.
"""

import ctypes
import resource
import sys
from collections.abc import Mapping
from pathlib import Path

# glibc's names and numbers (mallopt(3)); 32 MiB is the largest threshold it accepts.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -2, -3, -8
_SETTINGS = {_TRIM_THRESHOLD: 2**31 - 1, _TOP_PAD: 64 << 20, _MMAP_THRESHOLD: 32 << 20, _ARENA_MAX: 1}
_KEEPING_NOTHING = {_TRIM_THRESHOLD: 64 << 10, _TOP_PAD: 0, _MMAP_THRESHOLD: 64 << 10}


def keep_freed_memory() -> bool:
    """Tells the C library to keep freed blocks of up to 32 MiB; False where unsupported."""
    return _advise(_SETTINGS)


def keep_no_freed_memory() -> bool:
    """Tells the C library to return freed memory at once, for measuring: the resident size is then that of
    the memory in use. False where unsupported."""
    return _advise(_KEEPING_NOTHING)


def _advise(settings: Mapping[int, int]) -> bool:
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:  # musl has none
        return False
    return all(mallopt(name, value) == 1 for name, value in settings.items())


def return_freed_memory() -> bool:
    """Returns all free memory to the system, such as that of loaded weights that were replaced; False where
    nothing was returned."""
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, TypeError):  # glibc's own; other systems have no such function
        return False
    return bool(trim(0))


def private_bytes() -> int:
    """Resident bytes of this process that no file holds: without mapped libraries and weights, whose pages
    the system drops where memory is short. All resident bytes where the system does not tell."""
    try:
        resident, shared = map(int, Path("/proc/self/statm").read_text().split()[1:3])
    except OSError:
        return resident_bytes()
    return (resident - shared) * resource.getpagesize()


def resident_bytes(pid: int | None = None) -> int:
    """Resident bytes of this process (the peak where the system reports no more), or of process `pid` (0
    where unknown or gone)."""
    try:
        pages = int(Path(f"/proc/{pid or 'self'}/statm").read_text().split()[1])
    except OSError:
        if pid is not None:
            return 0
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else most * 1024
    return pages * resource.getpagesize()
