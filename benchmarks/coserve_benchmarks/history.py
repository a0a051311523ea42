"""Git's history of the checkout around these benchmarks: what has changed since a run. Free of torch."""

from collections.abc import Sequence
from typing import Final

from coserve.core.checkout import Checkout

_DAY: Final = len("2026-01-31")


class History(Checkout):
    """A git checkout with its history."""

    __slots__ = ()

    @property
    def is_shallow(self) -> bool:
        """Tells whether the history ends somewhere, so that commits cannot be counted."""
        return self.git("rev-parse", "--is-shallow-repository") != "false"

    def has(self, commit: str) -> bool:
        """Tells whether a commit is part of the history that is checked out."""
        return self.git("merge-base", "--is-ancestor", commit, "HEAD") is not None

    def date_of(self, commit: str) -> str:
        """A commit's day."""
        return self.git("show", "--no-patch", "--format=%cs", commit) or ""

    def changes(self, paths: Sequence[str], since: str = "", after: str = "") -> int | None:
        """Number of commits that changed any of the paths `since` a commit, or `after` a date in ISO 8601, of
        which a bare day counts from midnight (UTC); None where git does not tell."""
        if len(after) == _DAY:  # git takes the present time of that day
            after = f"{after}T00:00:00Z"
        bound = [f"{since}..HEAD"] if since else ["HEAD", f"--since={after}"]
        found = self.git("rev-list", "--count", *bound, "--", *paths)
        return None if found is None else int(found)
