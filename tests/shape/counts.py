"""Counts of the package's size: python tests/shape/counts.py prints each beside its goal."""

import ast
import json
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

import coserve

SOURCE: Final = Path(coserve.__file__).parent
# Rooms through which a step runs.
STEP_ROOMS: Final = ("core", "schedule", "executors", "worker", "engine", "model", "attention", "train")
# Classes that carry one request from a route to the device and back. Bodies of dialects are not among them:
# nothing behind a route knows one (`test_structure.py`).
REQUESTS: Final = (
    "GenerationRequest",
    "Call",
    "AnswerRequest",
    "LiveRequest",
    "Submit",
    "Request",
    "Sequence",
    "SequenceStart",
    "SequenceState",
    "Completion",
)
# Classes that carry one fine-tuning job from a route to the device, but for messages about it, replies, and
# bodies of dialects.
JOBS: Final = (
    "AskedJob",
    "JobRecord",
    "JobSpec",
    "StartJob",
    "ServedJob",
    "ReadJob",
    "PreparedJob",
    "FineTuning",
    "JobSize",
    "_WaitingJob",
    "JobSteps",
    "QueueEntry",
    "OpenSession",
    "TrainingSession",
)
# Decorators that run a method in a transaction of its object's database.
_TRANSACTIONS: Final = {"reads": "_database", "writes": "_database"}
_MAKE: Final = {"__init__", "__post_init__"}
RECORDS: Final = {"Struct", "BaseModel", "BaseSettings", "Enum", "StrEnum", "NamedTuple", "Exception"}


@dataclass(frozen=True)
class Count:
    """One count: what was found, the most that a test lets it be, and the goal."""

    name: str
    found: int
    most: int
    goal: int


def lines(*rooms: str) -> int:
    """Lines of the package, or of some of its rooms."""
    places = [SOURCE / room for room in rooms] or [SOURCE]
    return sum(len(file.read_text().splitlines()) for place in places for file in place.rglob("*.py"))


@cache
def classes() -> tuple[ast.ClassDef, ...]:
    """Every class of the package; reading them takes two seconds."""
    files = sorted(SOURCE.rglob("*.py"))
    return tuple(made for file in files for made in classes_in(ast.parse(file.read_text())))


def classes_in(node: ast.AST) -> Iterator[ast.ClassDef]:
    """Classes among the statements of a module, function or class: expressions, most nodes, have none."""
    for inner in ast.iter_child_nodes(node):
        if isinstance(inner, ast.stmt | ast.excepthandler | ast.match_case):
            if isinstance(inner, ast.ClassDef):
                yield inner
            yield from classes_in(inner)


def names_in(node: ast.AST | None) -> set[str]:
    """Names in an annotation, also in one that is written as text."""
    if node is None:
        return set()
    found = {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}
    found |= {one.attr for one in ast.walk(node) if isinstance(one, ast.Attribute)}
    texts = [
        one.value for one in ast.walk(node) if isinstance(one, ast.Constant) and isinstance(one.value, str)
    ]
    return found.union(*(names_in(ast.parse(text, mode="eval")) for text in texts if text.isidentifier()))


def records(found: Iterable[ast.ClassDef]) -> set[str]:
    """Names of classes that hold data alone."""
    names, made = {*RECORDS}, list(found)
    while fresh := {one.name for one in made if one.name not in names and _is_record(one, names)}:
        names |= fresh
    return names


def _is_record(made: ast.ClassDef, known: set[str]) -> bool:
    marks = {name for one in made.decorator_list for name in names_in(one)}
    return "dataclass" in marks or bool(known & {name for base in made.bases for name in names_in(base)})


def actors() -> set[str]:
    """Names of classes with behaviour of their own, and of functions' type."""
    return {made.name for made in classes()} - records(classes()) | {"Callable"}


def collaborators() -> Mapping[str, int]:
    """Constructor arguments of each class that are objects with behaviour of their own: instances of the
    package's classes that are no records, and functions."""
    acting, counts = actors(), {}
    for made in classes():
        for function in made.body:
            if isinstance(function, ast.FunctionDef) and function.name == "__init__":
                given = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
                counts[made.name] = sum(bool(acting & names_in(one.annotation)) for one in given)
    return counts


def unrelated(made: ast.ClassDef) -> list[set[str]]:
    """Groups of two or more methods of a class that share no attribute with those of another group. A class
    with several of them is two things, however few methods it has."""
    groups: list[tuple[set[str], set[str]]] = []  # names of methods, and of the attributes that they use
    for method in made.body:
        if not isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef) or method.name in _MAKE:
            continue
        inside = (node for node in ast.walk(method) if isinstance(node, ast.Attribute))
        used = {node.attr for node in inside if isinstance(node.value, ast.Name) and node.value.id == "self"}
        used |= {
            _TRANSACTIONS[mark.id]
            for mark in method.decorator_list
            if getattr(mark, "id", "") in _TRANSACTIONS
        }
        if used:
            names, attributes = {method.name}, used | {method.name}
            for group in [group for group in groups if group[1] & attributes]:
                groups.remove(group)
                names, attributes = names | group[0], attributes | group[1]
            groups.append((names, attributes))
    return [names for names, _ in groups if len(names) > 1]


def counted() -> list[Count]:
    """All counts. `most` is what was there when the count was last looked at: it may only shrink."""
    widest = collaborators()
    in_parts = sum(len(unrelated(made)) > 1 for made in classes())
    present = {made.name for made in classes()}
    return [
        # Of the first 1,416 are recurrent layers, 1,145 tensor parallelism, 589 pipelines, 1,097 other
        # attention, positions and text parts, 1,200 graphs on a GPU, 500 drafts. Of the second 1,617 are
        # recurrent layers, 3,596 tensor parallelism, 929 pipelines, 2,120 adapter methods, 2,250 tools and
        # reasoning, 360 Anthropic's
        # dialect, 2,698 Responses, 2,666 OpenAI's graders, evals and further fields of jobs, 2,294 batches,
        # embeddings and forms of answers, 1,560 the page, 2,600 what operators expect, 3,450 replicas, 3,900
        # a cluster's workers and policies, 780 drafts and channels, 1,100 GGUF, graders and accuracies.
        Count("lines of the rooms that a step runs through", lines(*STEP_ROOMS), 41_559, 28_000),
        Count("lines of the package", lines(), 135_403, 82_000),
        Count("most collaborators of a constructor", max(widest.values()), 7, 7),
        Count("constructors with more than seven", sum(n > 7 for n in widest.values()), 0, 0),
        Count("classes whose methods have nothing in common", in_parts, 8, 0),
        Count("types of a request", len(present.intersection(REQUESTS)), 5, 4),
        Count("types of a job", len(present.intersection(JOBS)), 9, 4),
    ]


def passed() -> list[Count]:
    """Modules that a prompt and a training example are handed to on their way (`passed.py`). The goals are
    those of docs/structure.md's list, which names the main ones alone."""
    script = Path(__file__).with_name("passed.py")
    found = json.loads(subprocess.run([sys.executable, script], stdout=subprocess.PIPE, check=True).stdout)
    prompt, example = len(found["prompt"]), len(found["example"])
    return [
        Count("modules that a prompt is handed to", prompt, 65, 20),
        # Two of these say what of an adapter's gradients ranks add: adapters/sharded.py, parallel/ranks.py.
        # Others show its loss, count its tokens and tell of it: telemetry.py, store/usage.py, webhooks/.
        Count("modules that a training example is handed to", example, 98, 20),
    ]


if __name__ == "__main__":
    for count in [*counted(), *passed()]:
        print(f"{count.found:>7,}  {count.name} (goal {count.goal:,})")
    for name, number in sorted(collaborators().items(), key=lambda item: -item[1])[:12]:
        print(f"{number:>7}  collaborators of {name}")
