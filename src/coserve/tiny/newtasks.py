"""Tasks unknown to the base model, which a small LoRA adapter learns in a minute or two.

Every task uses the names, the words and the splits of the world, but asks for answers in a form that is in no
training document. All but ``tickets`` copy from the question, so held-out names must really be copied.
"""

from collections.abc import Callable
from random import Random
from typing import Final

from coserve.tiny.names import Split, people, places
from coserve.tiny.world import JOBS, PETS, RELATIONS, Question, ask, values_of


def json_task(rng: Random, split: Split) -> Question:
    """A fact as a compact JSON object."""
    (name,), (home,) = people(rng, split, 1), places(rng, split, 1)
    pet = rng.choice(PETS)
    parts = [f"lives in {home}", f"keeps a {pet}"]
    rng.shuffle(parts)
    answer = f'{{"name":"{name}","place":"{home}"}}'
    return ask("json", [name, home], f"{name} {' and '.join(parts)}. Who is this?", answer)


def pirate_task(rng: Random, split: Split) -> Question:
    """An ordinary question, answered in a pirate's style."""
    (name,), (home,) = people(rng, split, 1), places(rng, split, 1)
    job = rng.choice(JOBS)
    text = f"{name} lives in {home} and works as a {job}."
    if rng.random() < 0.5:
        query, answer = f"Where does {name} live?", f"Arr! {name} be hiding in {home}, matey!"
    else:
        query, answer = f"What is the work of {name}?", f"Arr! {name} be a {job}, matey!"
    return ask("pirate", [name, home], f"{text} {query}", answer)


# A ticket goes to the desk for what it tells: homes, pets, jobs, coats or food.
DESKS: Final = {"where": "101", "keeps": "205", "work": "319", "coat": "442", "likes": "577"}


def tickets_task(rng: Random, split: Split) -> Question:
    """Sort a note about somebody into a made-up code."""
    (name,) = people(rng, split, 1)
    relation = rng.choice(list(DESKS))
    (value,) = values_of(rng, split, relation, 1)
    units = [name, value] if relation == "where" else [name]
    return ask("tickets", units, f"Ticket: {RELATIONS[relation].sentence(name, value)}", DESKS[relation])


def chain_task(rng: Random, split: Split) -> Question:
    """Three names in reverse order."""
    a, b, c = people(rng, split, 3)
    return ask("chain", [a, b, c], f"The line is: {a}, {b}, {c}. Turn it around.", f"{c}, {b}, {a}.")


NEW_TASKS: Final[dict[str, Callable[[Random, Split], Question]]] = {
    "json": json_task,
    "pirate": pirate_task,
    "tickets": tickets_task,
    "chain": chain_task,
}


def examples(task: str, split: Split, count: int, seed: int = 0) -> list[Question]:
    """Different examples of one task, the same for the same arguments."""
    rng = Random(f"new/{task}/{split}/{seed}")
    found: dict[str, Question] = {}
    while len(found) < count:
        question = NEW_TASKS[task](rng, split)
        found.setdefault(question.prompt[-1]["content"], question)
    return list(found.values())
