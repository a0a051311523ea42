"""Packages that a machine without a network lacks, from wheels in a folder."""

import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

from coserve.errors import ConfigError

MOST: Final = 60 * 2**20  # bytes of all wheels together


def install_missing(folder: Path, into: Path) -> list[str]:
    """Unpacks those wheels of `folder` into `into` whose packages are not installed; returns their names.
    Raises ConfigError where there are none, too many bytes, or one that does not fit this Python."""
    wheels = sorted(folder.glob("*.whl"))
    if not wheels:
        raise ConfigError(f"there are no wheels in {folder}")
    if (nbytes := sum(wheel.stat().st_size for wheel in wheels)) > MOST:
        raise ConfigError(f"the wheels in {folder} have {nbytes >> 20} MB, more than {MOST >> 20}")
    missing = [wheel for wheel in wheels if not _is_installed(wheel.name.partition("-")[0])]
    if missing:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
        command += ["--no-compile", "--upgrade", "--target", str(into), *map(str, missing)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            said = done.stderr.strip().splitlines() or ["pip says nothing"]
            raise ConfigError(f"the wheels in {folder} cannot be installed: {said[-1]}")
    return [wheel.name for wheel in missing]


def _is_installed(name: str) -> bool:
    try:
        version(name)
    except PackageNotFoundError:
        return False
    return True
