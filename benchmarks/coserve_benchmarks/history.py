"""Git's history of the checkout around these benchmarks: what a run measured, and what has changed since.

Free of torch. Where there is no git, or no checkout around this file, there is no `Checkout`.
"""

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

_CODE: Final = ("src", "benchmarks", "pyproject.toml", "constraints.txt")
_PATIENCE: Final = 60.0  # seconds


@dataclass(frozen=True, slots=True)
class Checkout:
    """A git checkout, by its root."""

    root: Path

    @staticmethod
    def around(file: Path) -> "Checkout | None":
        """The checkout that tracks a file; None without git, and for a file that git does not know."""
        folder = Checkout(file.parent)
        if folder._git("ls-files", "--error-unmatch", file.name) is None:
            return None
        root = folder._git("rev-parse", "--show-toplevel")
        return None if root is None else Checkout(Path(root))

    @property
    def commit(self) -> str | None:
        """Full name of the commit that is checked out; None before the first."""
        return self._git("rev-parse", "--verify", "HEAD")

    @property
    def is_dirty(self) -> bool:
        """Tells whether code differs from the commit's; results that a run writes are no code."""
        return bool(self._git("status", "--porcelain", "--", *_CODE))

    @property
    def is_shallow(self) -> bool:
        """Tells whether the history ends somewhere, so that commits cannot be counted."""
        return self._git("rev-parse", "--is-shallow-repository") != "false"

    def has(self, commit: str) -> bool:
        """Tells whether a commit is part of the history that is checked out."""
        return self._git("merge-base", "--is-ancestor", commit, "HEAD") is not None

    def date_of(self, commit: str) -> str:
        """A commit's day."""
        return self._git("show", "--no-patch", "--format=%cs", commit) or ""

    def changes(self, paths: Sequence[str], since: str = "", after: str = "") -> int | None:
        """Number of commits that changed any of the paths `since` a commit, or `after` a date in ISO 8601;
        None where git does not tell."""
        bound = [f"{since}..HEAD"] if since else ["HEAD", f"--since={after}"]
        found = self._git("rev-list", "--count", *bound, "--", *paths)
        return None if found is None else int(found)

    def _git(self, *command: str) -> str | None:
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
