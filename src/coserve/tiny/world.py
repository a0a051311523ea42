"""The counted questions of the small world: every kind is a function of a seeded generator and a split.

Each question carries its *units*: the names it mentions, or the operand pair, or the list it is about. A unit
is on the training side or on the held-out side by a hash of its text (see ``names.held_out``), for all kinds
at once, so no held-out unit can be met in training under another kind either.
"""

# ruff: noqa: SIM905 - long lists of words read better as text

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from random import Random
from typing import Final

from coserve.tiny.names import Split, held_out, people, places, word

Message = dict[str, str]

PETS: Final = (
    "cat cow dog donkey duck fox goat goose hen horse mouse parrot pony rabbit sheep snail turtle"
).split()
JOBS: Final = (
    "baker doctor farmer fisher gardener miller painter potter sailor singer smith tailor teacher weaver"
).split()
COLOURS: Final = "black blue brown gold green grey pink purple red silver white yellow".split()
FOODS: Final = "apples bread cheese cherries honey milk noodles nuts pears pies plums rice soup tea".split()
THINGS: Final = (
    "ball bell book boot bowl coat cup drum hat jar kite lamp map pot ring rope shoe spoon"
).split()


@dataclass(frozen=True)
class Question:
    """A conversation whose last message is the expected answer, and the units that place it in a split."""

    kind: str
    messages: tuple[Message, ...]
    units: frozenset[str]

    @property
    def prompt(self) -> list[Message]:
        """All messages before the answer."""
        return list(self.messages[:-1])

    @property
    def answer(self) -> str:
        """The one right answer, compared exactly."""
        return self.messages[-1]["content"]


def ask(kind: str, units: Iterable[str], *turns: str) -> Question:
    """A question from alternating user and assistant turns."""
    roles = ("user", "assistant")
    messages = tuple({"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns))
    return Question(kind, messages, frozenset(units))


@dataclass(frozen=True)
class Relation:
    """One sort of fact about a person: how it is told, asked for, and joined to another fact."""

    told: str
    asked: tuple[str, ...]

    def who(self, value: str) -> str:
        """The question from a value back to the person."""
        return f"Who {self.told.format(v=value)}?"

    def sentence(self, name: str, value: str) -> str:
        """The fact as a full sentence, which is also the answer to a question about it."""
        return f"{name} {self.told.format(v=value)}."


RELATIONS: Final[dict[str, Relation]] = {
    "where": Relation("lives in {v}", ("Where does {n} live?", "In which place does {n} live?")),
    "keeps": Relation("keeps a {v}", ("What does {n} keep?", "Which animal does {n} keep?")),
    "work": Relation("works as a {v}", ("What is the work of {n}?", "What does {n} work as?")),
    "coat": Relation("wears a {v} coat", ("What colour is the coat of {n}?", "What does {n} wear?")),
    "likes": Relation("likes {v}", ("What does {n} like?", "Which food does {n} like?")),
}


def values_of(rng: Random, split: Split, relation: str, count: int) -> list[str]:
    """Different values of one relation; only places are invented, the rest are everyday words."""
    if relation == "where":
        return places(rng, split, count)
    return rng.sample({"keeps": PETS, "work": JOBS, "coat": COLOURS, "likes": FOODS}[relation], count)


Crowd = tuple[int, ...]  # how many people a paragraph may be about, one of these at random
ALONE: Final[Crowd] = (1,)
SEVERAL: Final[Crowd] = (2, 3)
MIXED: Final[Crowd] = (1, 2, 2, 3)


def facts(rng: Random, split: Split, wanted: str, crowd: Crowd) -> tuple[str, str, str, list[str]]:
    """A paragraph about one to three people: (text, the asked person, the asked value, the names in it)."""
    count = rng.choice(crowd)
    names = people(rng, split, count)
    extra = rng.sample([r for r in RELATIONS if r != wanted], rng.choice((0, 1, 1, 2)))
    columns = {r: values_of(rng, split, r, count) for r in (wanted, *extra)}
    told: list[str] = []
    for i, name in enumerate(names):
        parts = [RELATIONS[r].told.format(v=column[i]) for r, column in columns.items()]
        rng.shuffle(parts)
        if len(parts) > 1 and rng.random() < 0.5:
            parts[:2] = [f"{parts[0]} and {parts[1]}"]
        told += [f"{name} {part}." for part in parts]
    if rng.random() < 0.3:
        rng.shuffle(told)
    at = rng.randrange(count)
    units = names + columns.get("where", [])
    return " ".join(told), names[at], columns[wanted][at], units


def about(relation: str, crowd: Crowd) -> Callable[[Random, Split], Question]:
    """The kind that asks for the value of one relation."""

    def kind(rng: Random, split: Split) -> Question:
        text, name, value, units = facts(rng, split, relation, crowd)
        query = rng.choice(RELATIONS[relation].asked).format(n=name)
        lead = rng.choice(("", "", "Question: "))
        return ask(relation, units, f"{text} {lead}{query}", RELATIONS[relation].sentence(name, value))

    return kind


def who(crowd: Crowd) -> Callable[[Random, Split], Question]:
    """The kind that asks from a value back to the person."""

    def kind(rng: Random, split: Split) -> Question:
        relation = rng.choice(list(RELATIONS))
        text, name, value, units = facts(rng, split, relation, crowd)
        query = RELATIONS[relation].who(value)
        return ask("who", units, f"{text} {query}", RELATIONS[relation].sentence(name, value))

    return kind


def _several(rng: Random, split: Split) -> Question:
    """Any question about the facts of two or three people: the hard kind, measured but not counted."""
    make = who(SEVERAL) if rng.random() < 0.2 else about(rng.choice(list(RELATIONS)), SEVERAL)
    question = make(rng, split)
    return Question("several", question.messages, question.units)


def _my_name(rng: Random, split: Split) -> Question:
    """Remember the user's name, or home, across turns."""
    (name,), (home,) = people(rng, split, 1), places(rng, split, 1)
    hello = rng.choice(("Hello", "Hi", "Good day"))
    turns = [f"{hello}! My name is {name} and I live in {home}.", f"{hello}, {name}! How is life in {home}?"]
    if rng.random() < 0.5:
        turns += [rng.choice(("It is lovely.", "It is quiet.")), "I am glad to hear that."]
    if rng.random() < 0.5:
        return ask("my_name", [name, home], *turns, "What is my name?", f"Your name is {name}.")
    return ask("my_name", [name, home], *turns, "Where do I live?", f"You live in {home}.")


def _position(rng: Random, split: Split) -> Question:
    """The first or the last of three or four names."""
    names = people(rng, split, rng.choice((3, 4)))
    line = ", ".join(names)
    if rng.random() < 0.5:
        return ask("position", names, f"The line is: {line}. Who is first?", f"{names[0]} is first.")
    return ask("position", names, f"The line is: {line}. Who is last?", f"{names[-1]} is last.")


def _taller(rng: Random, split: Split) -> Question:
    """Two people compared in one sentence."""
    a, b = people(rng, split, 2)
    if rng.random() < 0.5:
        text, tall, short = f"{a} is taller than {b}.", a, b
    else:
        text, tall, short = f"{a} is shorter than {b}.", b, a
    if rng.random() < 0.5:
        return ask("taller", [a, b], f"{text} Who is taller?", f"{tall} is taller.")
    return ask("taller", [a, b], f"{text} Who is shorter?", f"{short} is shorter.")


def _repeat(rng: Random, split: Split) -> Question:
    """Copy made-up words."""
    words = [word(rng, split) for _ in range(rng.randint(2, 5))]
    line = " ".join(words)
    return ask("repeat", words, f'{rng.choice(("Repeat", "Say"))}: "{line}"', f'"{line}"')


def _pair(rng: Random, split: Split, sign: str, low: int, high: int) -> tuple[int, int]:
    """Two numbers whose unit is on the wanted side; the order of a pair never changes its side."""
    while True:
        a, b = sorted((rng.randint(low, high), rng.randint(low, high)), reverse=True)
        if held_out(f"{a}{sign}{b}") == (split == "held_out"):
            return a, b


ADD_TOP: Final = 49
COMPARE_TOP: Final = 199
SHOP_TOP: Final = 20


def _either(rng: Random, a: int, b: int) -> tuple[int, int]:
    """The pair in a random order."""
    return (a, b) if rng.random() < 0.5 else (b, a)


def _add(rng: Random, split: Split) -> Question:
    a, b = _pair(rng, split, "+", 0, ADD_TOP)
    x, y = _either(rng, a, b)
    query = rng.choice((f"What is {x} + {y}?", f"How much is {x} plus {y}?"))
    return ask("add", [f"{a}+{b}"], query, f"{x} + {y} = {x + y}.")


def _subtract(rng: Random, split: Split) -> Question:
    a, b = _pair(rng, split, "-", 0, ADD_TOP)
    query = rng.choice((f"What is {a} - {b}?", f"How much is {a} minus {b}?"))
    return ask("subtract", [f"{a}-{b}"], query, f"{a} - {b} = {a - b}.")


def _compare(rng: Random, split: Split) -> Question:
    while True:
        a, b = _pair(rng, split, "<", 0, COMPARE_TOP)
        if a != b:
            break
    x, y = _either(rng, a, b)
    if rng.random() < 0.5:
        return ask("compare", [f"{a}<{b}"], f"Which is bigger, {x} or {y}?", f"{a} is bigger than {b}.")
    return ask("compare", [f"{a}<{b}"], f"Which is smaller, {x} or {y}?", f"{b} is smaller than {a}.")


def _count_up(rng: Random, split: Split) -> Question:
    while True:
        start, end = rng.randint(0, 95), 0
        end = start + rng.randint(2, 5)
        if held_out(f"{start}..{end}") == (split == "held_out"):
            break
    line = ", ".join(str(n) for n in range(start, end + 1))
    return ask("count_up", [f"{start}..{end}"], f"Count from {start} to {end}.", f"{line}.")


def _how_many(rng: Random, split: Split) -> Question:
    """Count the things of a list; the unit is the list as a set."""
    while True:
        things = rng.sample(THINGS, rng.randint(2, 6))
        unit = "|".join(sorted(things))
        if held_out(unit) == (split == "held_out"):
            break
    line = ", ".join(f"a {thing}" for thing in things)
    return ask("how_many", [unit], f"How many things are here: {line}?", f"There are {len(things)} things.")


def _shop(rng: Random, split: Split) -> Question:
    """A one-step story sum about a named person."""
    (name,) = people(rng, split, 1)
    thing = rng.choice(THINGS) + "s"
    if rng.random() < 0.5:
        a, b = _pair(rng, split, "+", 1, SHOP_TOP)
        units, (x, y) = [name, f"{a}+{b}"], _either(rng, a, b)
        text, left = f"{name} has {x} {thing} and gets {y} more.", x + y
    else:
        a, b = _pair(rng, split, "-", 1, SHOP_TOP)
        units, text, left = [name, f"{a}-{b}"], f"{name} has {a} {thing} and gives away {b}.", a - b
    query = f"{text} How many {thing} does {name} have now?"
    return ask("shop", units, query, f"{name} has {left} {thing} now.")


KINDS: Final[dict[str, Callable[[Random, Split], Question]]] = {
    **{relation: about(relation, ALONE) for relation in RELATIONS},
    "who": who(ALONE),
    "my_name": _my_name,
    "position": _position,
    "taller": _taller,
    "repeat": _repeat,
    "add": _add,
    "subtract": _subtract,
    "compare": _compare,
    "count_up": _count_up,
    "how_many": _how_many,
    "shop": _shop,
}


HARD_KINDS: Final[dict[str, Callable[[Random, Split], Question]]] = {"several": _several}


def questions(kind: str, split: Split, count: int, seed: int = 0) -> list[Question]:
    """A reproducible list of questions of one kind (the same question may come twice)."""
    rng = Random(f"{kind}/{split}/{seed}")
    make = (KINDS | HARD_KINDS)[kind]
    return [make(rng, split) for _ in range(count)]
