"""`coserve keys`: API keys of a server. Works on its state folder, whether the server runs or not."""

from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from coserve.cli.options import AsJson, ListsAlone, State, config_of, given
from coserve.errors import ConfigError

if TYPE_CHECKING:
    from coserve.serve.store.store import Store

app = typer.Typer(help="API keys, in the server's state folder; alone it lists them.", cls=ListsAlone)
Model = Annotated[
    str | None, typer.Option(help="The model that the server serves, which decides where its state is.")
]
T = TypeVar("T")


@app.command()
def create(
    context: typer.Context,
    tenant: Annotated[str, typer.Argument(help="Who it is for; a tenant sees its own things only.")],
    weight: Annotated[
        float | None, typer.Option(help="The tenant's share of the machine, beside others' (1).")
    ] = None,
    state: State = None,
    model: Model = None,
    as_json: AsJson = False,
) -> None:
    """Makes a key and prints it, this once. From the first key on the server requires keys."""
    from coserve.cli.output import print_json

    key, secret = with_store(context, state, model, lambda store: store.tenants.create_key(tenant, weight))
    if as_json:
        return print_json({**asdict(key), "secret": secret})
    print(secret)


@app.command("list")
def list_keys(
    context: typer.Context, state: State = None, model: Model = None, as_json: AsJson = False
) -> None:
    """Lists all keys, revoked ones too. The secrets themselves are kept nowhere."""
    from coserve.cli.output import moment, print_json, print_table

    found = with_store(context, state, model, lambda store: store.tenants.keys())
    if as_json:
        return print_json([asdict(key) for key in found])
    rows = [(key.id, key.prefix + "…", key.tenant, moment(key.created), moment(key.revoked)) for key in found]
    print_table(("id", "key", "tenant", "created", "revoked"), rows, "no keys: this machine alone may ask")


@app.command()
def revoke(
    context: typer.Context,
    key: Annotated[str, typer.Argument(help="The key's id, or the beginning that `list` shows.")],
    state: State = None,
    model: Model = None,
    as_json: AsJson = False,
) -> None:
    """Takes a key out of force, at once."""
    from coserve.cli.output import print_json

    if not with_store(context, state, model, lambda store: store.tenants.revoke_key(key.rstrip("…"))):
        raise ConfigError(f"no key in force has the id or beginning {key}: `coserve keys list` shows them")
    if as_json:
        return print_json({"id": key, "revoked": True})
    print(f"revoked {key}")
    if not with_store(context, state, model, lambda store: store.tenants.any_keys()):
        print(
            "no key is in force now, and the server answers nobody: make one with `coserve keys create`, or "
            "have it serve this machine without keys again with `coserve keys forget`"
        )


@app.command()
def forget(context: typer.Context, state: State = None, model: Model = None, as_json: AsJson = False) -> None:
    """Forgets revoked keys, once all are: from its next start the server requires none again.

    Tenants keep what they own, for the next key that is made for them.
    """
    from coserve.cli.output import print_json

    if not with_store(context, state, model, lambda store: store.tenants.forget_keys()):
        raise ConfigError("there are keys in force: revoke them first, with `coserve keys revoke`")
    if as_json:
        return print_json({"forgotten": True})
    print("no keys any more: from its next start the server asks for none on loopback")


def with_store(
    context: typer.Context,
    state: "State",
    model: str | None,
    work: "Callable[[Store], Awaitable[T]]",
) -> T:
    """Opens the store of the state folder that `coserve serve` would use with the same flags."""
    import asyncio

    from coserve.cli.config import load_server_settings

    flags = given(state=None if state is None else str(state), model=model)
    settings = load_server_settings(flags, config_of(context))
    from coserve.serve.store.store import Store

    async def run(store: Store) -> T:
        return await work(store)

    with Store(settings.state, database=settings.database) as store:
        return asyncio.run(run(store))
