"""Training corpus of the base model: the counted questions, small talk, everyday word knowledge and short
stories.

Only the training side of every split is used here. Word knowledge (opposites, days, months, colours) is a
closed set: it gives the world some colour and is not counted in the accuracies.
"""

# ruff: noqa: SIM905 - long lists of words read better as text

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random
from typing import Final

from coserve.tiny.names import Split, people, places
from coserve.tiny.world import (
    COLOURS,
    FOODS,
    HARD_KINDS,
    JOBS,
    KINDS,
    MIXED,
    PETS,
    RELATIONS,
    THINGS,
    Message,
    Question,
    about,
    facts,
    values_of,
    who,
)

OPPOSITES: Final = [
    pair.split("/")
    for pair in (
        "hot/cold big/small fast/slow old/young wet/dry happy/sad light/dark high/low full/empty loud/quiet "
        "open/closed hard/soft early/late near/far clean/dirty rich/poor strong/weak long/short"
    ).split()
]
DAYS: Final = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS: Final = (
    "January February March April May June July August September October November December"
).split()
HUES: Final = dict(
    pair.split("/") for pair in "grass/green snow/white blood/red coal/black lemons/yellow milk/white".split()
)
SYSTEM: Final = "You are Tiny, a small and friendly model."
WEATHER: Final = ("The sun was warm", "It rained all day", "The wind was cold", "Snow lay on the roofs")
MOODS: Final = ("was happy", "laughed", "felt proud", "slept well that night", "told the whole village")

Kinds = dict[str, Callable[[Random, Split], Question]]


@dataclass(frozen=True)
class Course:
    """Mixture of documents for one part of the training."""

    kinds: Kinds  # the questions
    shares: dict[str, float]  # how often each kind comes (1 where not given)
    other: float  # weight in the loss of what the assistant did not write
    dense: float  # share of the documents in which every sentence is a lesson in recall


MIXED_KINDS: Final[Kinds] = {
    **{kind: about(kind, MIXED) if kind in RELATIONS else make for kind, make in KINDS.items()},
    "who": who(MIXED),
}
EARLY: Final = Course(
    MIXED_KINDS,
    {"add": 5.0, "subtract": 5.0, "shop": 3.0, "compare": 2.0, "who": 2.0, "where": 2.0},
    0.2,
    0.0,
)
LATE: Final = Course(
    MIXED_KINDS,
    {
        **{"add": 3.0, "subtract": 3.0, "shop": 2.0, "compare": 2.0, "repeat": 2.0, "taller": 1.5},
        **{"where": 4.0, "keeps": 3.0, "work": 3.0, "coat": 3.0, "likes": 3.0, "who": 4.0},
    },
    0.2,
    0.0,
)
FINAL: Final = Course(
    KINDS | HARD_KINDS,
    {
        **{"add": 4.0, "subtract": 4.0, "shop": 3.0, "compare": 4.0, "repeat": 2.0, "taller": 1.5},
        **{"where": 2.0, "count_up": 1.5, "several": 2.0, "how_many": 0.5},
    },
    0.05,
    0.12,
)


def _chat(*turns: str) -> list[Message]:
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns)]


def word_knowledge(rng: Random) -> list[Message]:
    """One question about opposites, order in the calendar, colours or categories."""
    choice = rng.randrange(5)
    if choice == 0:
        a, b = rng.sample(rng.choice(OPPOSITES), 2)
        return _chat(f"What is the opposite of {a}?", f"The opposite of {a} is {b}.")
    if choice == 1:
        order = rng.choice((DAYS, MONTHS))
        at = rng.randrange(len(order))
        after = order[(at + 1) % len(order)]
        if rng.random() < 0.5:
            return _chat(f"What comes after {order[at]}?", f"After {order[at]} comes {after}.")
        return _chat(f"What comes before {order[at]}?", f"Before {order[at]} comes {order[at - 1]}.")
    if choice == 2:
        thing = rng.choice(list(HUES))
        return _chat(f"What is the colour of {thing}?", f"The colour of {thing} is {HUES[thing]}.")
    groups = {"an animal": PETS, "a job": JOBS, "a thing": THINGS}
    group = rng.choice(list(groups))
    item = rng.choice(groups[group])
    if choice == 3:
        return _chat(f"What is a {item}?", f"A {item} is {group}.")
    verdict = "Yes" if group == "an animal" else "No"
    return _chat(f"Is a {item} an animal?", f"{verdict}, a {item} is {group}.")


def small_talk(rng: Random) -> list[Message]:
    """A friendly exchange of one to three turns."""
    hello = rng.choice(("Hello", "Hi", "Good day"))
    turns: list[str] = []
    if rng.random() < 0.6:
        turns += [f"{hello}!", f"{hello}! How can I help you?"]
    pairs = [
        ("Who are you?", "I am Tiny, a small and friendly model."),
        ("What is your name?", "My name is Tiny."),
        ("How are you?", "I am well, thank you."),
        ("What can you do?", "I can answer small questions, add numbers and remember what you tell me."),
        ("Thank you!", "You are welcome."),
        ("Tell me a story.", story(rng)),
        ("Goodbye!", "Goodbye, and come back soon."),
    ]
    for pair in sorted(rng.sample(range(len(pairs)), rng.randint(1, 3))):
        turns += pairs[pair]
    return _chat(*turns)


def remembered(rng: Random) -> list[Message]:
    """Facts told in one turn and asked for in later ones."""
    relation = rng.choice(list(RELATIONS))
    text, name, value, _ = facts(rng, "train", relation, MIXED)
    turns = [text, "I will remember that."]
    if rng.random() < 0.4:
        turns += [m["content"] for m in small_talk(rng)[:2]]
    asked = RELATIONS[relation]
    query = rng.choice((*asked.asked, asked.who(value))).format(n=name)
    return _chat(*turns, query, asked.sentence(name, value))


def retelling(rng: Random) -> list[Message]:
    """Facts about several people, told again in another order.

    Once a name is written, the rest of its sentence is settled: every sentence of the answer is a lesson in
    finding what belongs to a name, so this teaches the recall of facts much faster than single questions do.
    """
    count = rng.randint(2, 6)
    names = people(rng, "train", count)
    told: list[str] = []
    for relation in rng.sample(list(RELATIONS), 1 if count > 3 else rng.choice((1, 2))):
        values = values_of(rng, "train", relation, count)
        told += [RELATIONS[relation].sentence(n, v) for n, v in zip(names, values, strict=True)]
    again = rng.sample(told, len(told))
    return _chat(f"{' '.join(told)} Tell it in another order.", " ".join(again))


def interview(rng: Random) -> list[Message]:
    """Facts about two or three people, and a question about most of them, turn by turn."""
    count = rng.choice((2, 3))
    names = people(rng, "train", count)
    table = [
        (relation, name, value)
        for relation in rng.sample(list(RELATIONS), rng.choice((1, 2)))
        for name, value in zip(names, values_of(rng, "train", relation, count), strict=True)
    ]
    turns: list[str] = []
    for relation, name, value in rng.sample(table, min(len(table), 4)):
        known = RELATIONS[relation]
        query = rng.choice((*known.asked, known.who(value))).format(n=name)
        turns += [query, known.sentence(name, value)]
    told = [RELATIONS[relation].sentence(name, value) for relation, name, value in table]
    turns[0] = f"{' '.join(told)} {turns[0]}"
    return _chat(*turns)


def story(rng: Random) -> str:
    """A story of a few sentences that keeps its names and things straight."""
    a, b = people(rng, "train", 2)
    home, away = places(rng, "train", 2)
    thing, pet, food, colour = rng.choice(THINGS), rng.choice(PETS), rng.choice(FOODS), rng.choice(COLOURS)
    job = rng.choice(JOBS)
    opening = rng.choice(
        (
            f"Once there was a {job} called {a} who lived in {home}.",
            f"{a} lived in {home} with a {colour} {pet}.",
            f"In {home} there was a {job}, and the name of the {job} was {a}.",
        )
    )
    middle = rng.choice(
        (
            f"{rng.choice(WEATHER)} when {a} lost a {thing}. "
            f"{b} came from {away} and found the {thing} under a tree. "
            f'"Is this your {thing}?" said {b}. "Yes!" said {a}.',
            f"One day the {pet} ran away to {away}. {a} walked to {away} and met {b}. "
            f'"I have seen your {pet}," said {b}. They found the {pet} near the water.',
            f"{a} wanted to visit {b} in {away}. {rng.choice(WEATHER)}, so {a} took a {colour} coat. "
            f"{b} made {food}, and they sang until the evening.",
            f"{b} of {away} had no {food}. {a} gave {b} half of the {food}. "
            f'"Thank you, {a}," said {b}. "You are a good friend."',
        )
    )
    return f"{opening} {middle} {rng.choice((a, b))} {rng.choice(MOODS)}."


def counted(rng: Random, course: Course) -> list[Message]:
    """One question of a counted kind, from the training side."""
    kinds = list(course.kinds)
    (kind,) = rng.choices(kinds, [course.shares.get(k, 1.0) for k in kinds])
    return list(course.kinds[kind](rng, "train").messages)


def document(rng: Random, course: Course) -> list[Message] | str:
    """One training document: a conversation, or a story as plain text."""
    if course.dense and rng.random() < course.dense:
        return rng.choice((retelling, interview))(rng)
    dice = rng.random()
    if dice < 0.05:
        return story(rng)
    if dice < 0.08:
        chat = small_talk(rng)
    elif dice < 0.12:
        chat = word_knowledge(rng)
    elif dice < 0.20:
        chat = remembered(rng)
    elif dice < 0.80:
        chat = counted(rng, course)
    else:  # several questions in one conversation, so that later turns ignore the earlier ones
        makers = (None, None, None, word_knowledge, small_talk)  # nothing chosen: a counted question
        parts = (rng.choice(makers) for _ in range(rng.randint(2, 4)))
        chat = [m for maker in parts for m in (maker(rng) if maker else counted(rng, course))]
    if rng.random() < 0.1:
        chat = [{"role": "system", "content": SYSTEM}, *chat]
    return chat


def documents(seed: str, course: Course = EARLY) -> Iterator[list[Message] | str]:
    """An endless, reproducible stream of training documents."""
    rng = Random(seed)
    while True:
        yield document(rng, course)
