"""Chains: the components that an application runs through, in order."""

from collections.abc import Mapping, Sequence

from coserve.errors import ZooError
from coserve.zoo.manifest import Application, Component, ComponentKind


def model_of(application: Application) -> Application:
    """The application, if it is a model. Raises ZooError for an adapter."""
    if application.is_adapter:
        raise ZooError(f"{application.name} is an adapter, and a parent is a model")
    return application


def check_connects(application: Application, parent: Application | None) -> None:
    """Raises ZooError where a chain does not connect: a parent of another width, vocabulary, tokenizer or
    number of components."""
    if parent is None:
        return
    for what, own, theirs in (
        ("hidden size", application.width, parent.width),
        ("vocabulary", application.vocabulary, parent.vocabulary),
        ("number of components", len(application.chain), len(parent.chain)),
    ):
        if own != theirs:
            raise ZooError(
                f"the chain of {application.name} does not connect: its {what} is {own}, and that of "
                f"{parent.name} is {theirs}"
            )
    if application.tokenizer != parent.tokenizer:
        raise ZooError(f"{application.name} and {parent.name} have mixed tokenizers")


def parent_of(application: Application, others: Mapping[str, Application]) -> Application | None:
    """The parent of an application; None of a foundation. Raises ZooError where it is missing, or where the
    two do not connect."""
    if not application.parent:
        return None
    if application.parent not in others:
        raise ZooError(f"the foundation of {application.name}, {application.parent}, is not in the zoo")
    parent = model_of(others[application.parent])
    check_connects(application, parent)
    return parent


def keys_of(application: Application, others: Mapping[str, Application]) -> tuple[str, ...]:
    """Keys of the contents that each component of the chain computes with: equal keys, equal bytes. An
    adapter's are its parent's where it has no bypass. Raises ZooError."""
    own = tuple(component.key for component in application.chain)
    if not application.is_adapter:
        return own
    parent = parent_of(application, others)
    assert parent is not None, "an adapter has a parent"
    return tuple(
        f"{base.key}+{bypass}" if bypass else base.key for base, bypass in zip(parent.chain, own, strict=True)
    )


def label(chain: Sequence[Component], place: int) -> str:
    """A short name of a component: E, A1, F1, A2, ..., H."""
    kind = chain[place].kind
    if kind in (ComponentKind.EMBEDDING, ComponentKind.HEAD):
        return kind[0].upper()
    return f"{'A' if kind is ComponentKind.ATTENTION else 'F'}{(place + 1) // 2}"


def check_ancestry(applications: Mapping[str, Application]) -> None:
    """Raises ZooError for an application that is its own ancestor."""
    known = set[str]()
    for name in applications:
        line = dict[str, None]()  # from `name` upwards
        while name in applications and name not in known:
            if name in line:
                circle = [*line][[*line].index(name) :]
                others = ", ".join(circle[1:6]) or name
                raise ZooError(f"{name} is its own ancestor, by way of {others}: remove one of them")
            line[name] = None
            name = applications[name].parent
        known |= {*line}
