"""`coserve bench stale`: which committed results are older than what they depend on. Free of torch."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from coserve_benchmarks.history import History

_DEVICE: Final = ("attention", "executors", "kernels", "memory", "model", "worker")
_CORE: Final = ("adapters", "core", "engine", *_DEVICE)
_ENGINE: Final = (
    *(f"src/coserve/{room}" for room in (*_CORE, "schedule", "train", "workload")),
    "src/coserve/config.py",
)
_SERVER: Final = (*_ENGINE, *(f"src/coserve/{room}" for room in ("jobs", "serve", "text", "wire")))


def _bench(*names: str) -> tuple[str, ...]:
    return tuple(f"benchmarks/coserve_benchmarks/{name}" for name in names)


_MEASURING: Final = (*_bench("ours.py", "settings.py", "timing.py"), "src/coserve/simulate/intervals.py")
_LOADS: Final = (
    *_bench("drive.py"),
    "src/coserve/simulate/driven.py",
    "src/coserve/simulate/replay.py",
)
_FINETUNE: Final = (*_ENGINE, *_MEASURING, *_bench("finetune.py", "peers.py", "saved.py", "plans.py"))
_SPLIT: Final = (
    *(*_ENGINE, "src/coserve/split", "src/coserve/wire"),
    *(*_MEASURING, *_bench("split", "folder.py")),
)


@dataclass(frozen=True, slots=True)
class Presented:
    """A result's `page` beside it (a path in the repository), and the files and folders of what it measured
    and how."""

    page: str
    depends: tuple[str, ...]


# Every JSON in docs/results; a shape test looks that none is missing and that all paths are there.
RESULTS: Final[Mapping[str, Presented]] = {
    "adapters.json": Presented(
        "docs/results/adapters.md",
        (*_ENGINE, *_MEASURING, *_LOADS, *_bench("adapters", "peers.py")),
    ),
    "contest.json": Presented(
        "docs/results/policies.md",
        (
            *(f"src/coserve/{room}" for room in ("core", "schedule", "workload")),
            "src/coserve/simulate",
            *_LOADS,
            *_bench("policies", "simulated.py", "timing.py"),
        ),
    ),
    "cluster.json": Presented(
        "docs/results/cluster.md",
        (
            *_ENGINE,
            *(f"src/coserve/{room}" for room in ("cluster", "simulate")),
            *_bench("clustered", "simulation/clustered", "simulation/papers", "folder.py", "ours.py"),
        ),
    ),
    "conformance.json": Presented(
        "docs/results/conformance.md",
        (*(f"src/coserve/{room}" for room in ("jobs", "serve", "text")), "tests/clients/conformance"),
    ),
    "demo.json": Presented("docs/results/demo.md", (*_ENGINE, "src/coserve/demo", "src/coserve/tiny")),
    "engine.json": Presented(
        "docs/results/engine.md",
        (
            *_FINETUNE,
            *_LOADS,
            *_bench("blocking.py", "coserving.py", "inference.py", "metered.py", "outside", "remote.py"),
            *_bench(
                "slowdown.py",
                "stepping.py",
                "drafts.py",
                "gpu/sizes.py",
                "gpu_times.py",
                "metered_machine.py",
            ),
        ),
    ),
    "gpu.json": Presented("docs/results/gpu.md", (*_ENGINE, *_MEASURING, *_bench("gpu"))),
    "instead.json": Presented(
        "docs/results/policies.md",
        (*_ENGINE, *_MEASURING, *_LOADS, *_bench("policies")),
    ),
    "memory.json": Presented(
        "docs/results/memory.md",
        (*_ENGINE, "src/coserve/plan", *_MEASURING, *_bench("memory", "peers.py", "saved.py", "plans.py")),
    ),
    "methods.json": Presented("docs/results/methods.md", (*_ENGINE, *_MEASURING, *_bench("methods"))),
    "models.json": Presented("docs/models.md", (*_ENGINE, "src/coserve/streamed", *_bench("models"))),
    "plan.json": Presented(
        "docs/results/plan.md",
        tuple(f"src/coserve/{room}" for room in ("adapters", "kernels", "memory", "model", "plan", "train")),
    ),
    "policies.json": Presented(
        "docs/results/policies.md",
        (*_ENGINE, *_MEASURING, *_LOADS, *_bench("policies")),
    ),
    "hybrid.json": Presented("docs/recurrent.md", (*_ENGINE, *_MEASURING, *_bench("models", "peers.py"))),
    "ranks.json": Presented(
        "docs/results/ranks.md",
        (
            *_SERVER,
            *(f"src/coserve/{room}" for room in ("parallel", "plan", "simulate")),
            *_bench("ranks", "folder.py", "ours.py"),
        ),
    ),
    "replicas.json": Presented(
        "docs/results/replicas.md",
        (*_SERVER, "src/coserve/simulate", "examples/endpoint_picker.py", *_bench("replicas", "served.py")),
    ),
    "server.json": Presented(
        "docs/results/server.md",
        (
            *_SERVER,
            *_MEASURING,
            *_bench(
                "client.py",
                "firstbyte.py",
                "overhead.py",
                "restart.py",
                "served.py",
                "streams.py",
                "viewers.py",
            ),
        ),
    ),
    "simulate.json": Presented(
        "docs/results/simulate.md",
        (
            *_ENGINE,
            "src/coserve/simulate",
            "src/coserve/split",
            *_MEASURING,
            *_LOADS,
            *_bench("simulation", "policies", "zoo/provision.py"),
        ),
    ),
    "split.json": Presented("docs/results/split.md", _SPLIT),
    "split-clients.json": Presented("docs/results/split.md", _SPLIT),
    "streamed.json": Presented(
        "docs/results/streamed.md",
        (*_ENGINE, "src/coserve/streamed", *_MEASURING, *_LOADS, *_bench("streamed", "folder.py")),
    ),
    "tiny.json": Presented("docs/tiny.md", ("src/coserve/tiny", *_bench("tiny"))),
    "training.json": Presented(
        "docs/results/training.md",
        (
            *_ENGINE,
            "src/coserve/serve",
            "src/coserve/tiny",
            *_MEASURING,
            *_bench("training"),
        ),
    ),
    "trains.json": Presented(
        "docs/results/methods.md",
        (*_ENGINE, "src/coserve/tiny", *_MEASURING, *_bench("methods")),
    ),
    "zoo.json": Presented(
        "docs/results/zoo.md",
        (*_ENGINE, "src/coserve/zoo", "src/coserve/tiny", *_MEASURING, *_LOADS, *_bench("zoo", "folder.py")),
    ),
}
_MARK: Final = re.compile(r"^> \*\*[\w.-]+\.json\*\* .*\n\n?", re.MULTILINE)
_SHOWN: Final = 10  # characters of a commit's name


@dataclass(frozen=True, slots=True)
class Standing:
    """A result beside the history of what it depends on.

    `commit` is the oldest that any of its figures was measured at, empty where one has none; `changes` the
    number of commits since, None where git does not tell, for the reason `unknown`. `is_dirty` where code was
    measured that had not been committed.
    """

    name: str
    commit: str
    date: str
    changes: int | None
    unknown: str = ""
    is_dirty: bool = False

    @property
    def is_current(self) -> bool:
        return bool(self.commit) and self.changes == 0 and not self.is_dirty

    @property
    def verdict(self) -> str:
        """Verdict in a few words."""
        if self.changes is None and self.commit:
            return f"cannot tell: {self.unknown}"
        if not self.commit:
            since = "" if self.changes is None else f", {_commits(self.changes)} since its day"
            return f"stale: no commit recorded{since}"
        if self.changes:
            return f"stale: {_commits(self.changes)} to what it depends on since"
        return "stale: measured with changes that were not committed" if self.is_dirty else "current"

    def sentence(self) -> str:
        """Line for readers of a page."""
        day = f" on {self.date}" if self.date else ""
        dirty = " with changes that were not committed" if self.is_dirty else ""
        begun = f"was measured at commit {self.commit[:_SHOWN]}{dirty}{day}"
        if not self.commit:
            begun = f"was measured{day} at a commit that is not recorded"
        if self.changes is None:
            return f"{begun}; how much of what it depends on has changed since cannot be told."
        if not self.changes and self.commit:
            return f"{begun}; nothing that it depends on has changed since then."
        verb = "changes" if self.changes == 1 else "change"
        return f"{begun}; {_commits(self.changes)} since then {verb} what it depends on."


def _commits(count: int) -> str:
    return f"{count} commit{'' if count == 1 else 's'}"


def standings(folder: Path, checkout: History | None) -> list[Standing]:
    """The state of each result of a folder. A file that `RESULTS` does not name depends on everything."""
    return [_standing(file, checkout) for file in sorted(folder.glob("*.json"))]


def _standing(file: Path, checkout: History | None) -> Standing:
    runs = _runs(json.loads(file.read_text(encoding="utf-8")))
    codes = [run.get("code") or {} for run in runs]
    commits = [str(code.get("commit") or "") for code in codes]
    date = min((str(run.get("date") or "") for run in runs), default="")
    day, is_dirty = date[:10], any(code.get("dirty") for code in codes)
    commit = commits[0] if all(commits) else ""
    if checkout is None:
        return Standing(file.name, commit, day, None, "there is no git, or no checkout", is_dirty)
    if checkout.is_shallow:
        return Standing(file.name, commit, day, None, "the clone is shallow", is_dirty)
    depends = RESULTS[file.name].depends if file.name in RESULTS else (".",)
    if not commit:
        changes = checkout.changes(depends, after=date) if date else None
        return Standing(file.name, "", day, changes, "", is_dirty)
    if not all(map(checkout.has, commits)):
        return Standing(file.name, commit, day, None, "its commit is not in this history", is_dirty)
    counted = {one: checkout.changes(depends, since=one) or 0 for one in commits}
    oldest = max(counted, key=counted.__getitem__)
    return Standing(file.name, oldest, day, counted[oldest], "", is_dirty)


def _runs(found: Any) -> Sequence[Mapping[str, Any]]:
    """The runs that a result is made of: the last one, and earlier ones that it goes on with."""
    return [found, *found.get("earlier", ())] if isinstance(found, dict) else [{}]


def mark(root: Path, found: Sequence[Standing]) -> list[Path]:
    """Writes a line for each result below the title of its page, in place of an older one; the pages that
    were changed. Results that `RESULTS` does not name have no page."""
    pages: dict[Path, list[str]] = {}
    for standing in found:
        if standing.name in RESULTS:
            page = root / RESULTS[standing.name].page
            pages.setdefault(page, []).append(f"> **{standing.name}** {standing.sentence()}\n")
    return [page for page, lines in pages.items() if _write(page, lines)]


def mark_page(results: Path, page: Path) -> None:
    """Marks `page` where it is the one that presents `results`, with every result that it presents; any other
    page stays as it is."""
    presented = RESULTS.get(results.name)
    folder, page = results.resolve().parent, page.resolve()
    if presented is None or len(folder.parents) < 2 or folder.parents[1] / presented.page != page:
        return
    found = standings(folder, History.around(results))
    beside = {name for name, other in RESULTS.items() if other.page == presented.page}
    mark(folder.parents[1], [one for one in found if one.name in beside])


def _write(page: Path, lines: Sequence[str]) -> bool:
    before = page.read_text(encoding="utf-8")
    title, _, rest = _MARK.sub("", before).partition("\n")
    after = f"{title}\n\n" + "\n".join(lines) + "\n" + rest.lstrip("\n")
    page.write_text(after, encoding="utf-8")
    return after != before


def print_standings(found: Sequence[Standing]) -> None:
    """Prints a line for each result."""
    width = max((len(standing.name) for standing in found), default=0)
    for standing in found:
        at = standing.commit[:_SHOWN] or "-" * _SHOWN
        print(f"{standing.name:{width}}  {at}  {standing.date:10}  {standing.verdict}")
