"""Git's checkout around this package: which commit a run measures.

Where there is no git, or no checkout around a file, there is no `Checkout`.
"""

import subprocess
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final, Self

_CODE: Final = ("src", "benchmarks", "pyproject.toml", "constraints.txt")
_PATIENCE: Final = 60.0  # seconds


@dataclass(frozen=True, slots=True)
class Checkout:
    """A git checkout, by its root."""

    root: Path

    @classmethod
    def around(cls, file: Path) -> Self | None:
        """The checkout that tracks a file; None without git, and for a file that git does not know."""
        folder = cls(file.parent)
        if folder.git("ls-files", "--error-unmatch", file.name) is None:
            return None
        root = folder.git("rev-parse", "--show-toplevel")
        return None if root is None else cls(Path(root))

    @property
    def commit(self) -> str | None:
        """Full name of the commit that is checked out; None before the first."""
        return self.git("rev-parse", "--verify", "HEAD")

    @property
    def is_dirty(self) -> bool:
        """Tells whether code differs from the commit's; results that a run writes are no code."""
        return bool(self.git("status", "--porcelain", "--", *_CODE))

    def git(self, *command: str) -> str | None:
        """The output of a command of git; None where it fails."""
        try:
            done = subprocess.run(
                ["git", "-C", str(self.root), *command], capture_output=True, text=True, timeout=_PATIENCE
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None


def measured_code(file: Path = Path(__file__)) -> dict[str, Any]:
    """Code that a run measures, for its JSON: the `commit` and whether code was `dirty`, both None outside of
    a checkout, and the package's `version`."""
    checkout = Checkout.around(file)
    try:
        installed = version("coserve")
    except PackageNotFoundError:
        installed = None
    if checkout is None or checkout.commit is None:
        return {"commit": None, "dirty": None, "version": installed}
    return {"commit": checkout.commit, "dirty": checkout.is_dirty, "version": installed}
