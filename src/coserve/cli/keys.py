"""`coserve keys`: API keys of a server. Works on its state folder, whether the server runs or not."""

from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from coserve.cli.options import AsJson, DatabaseUrl, ListsAlone, State, config_of, given, unfolded
from coserve.errors import ConfigError

if TYPE_CHECKING:
    from coserve.serve.store.store import Store

app = typer.Typer(help="API keys, in the server's state folder; alone it lists them.", cls=ListsAlone)
Model = Annotated[
    str | None, typer.Option(help="The model that the server serves, which decides where its state is.")
]
T = TypeVar("T")


@dataclass(frozen=True)
class StoreOptions:
    """The options of a command that reads a server's store (`unfolded`)."""

    context: typer.Context
    state: State = None
    database: DatabaseUrl = None
    model: Model = None

    def run(self, work: "Callable[[Store], Awaitable[T]]") -> T:
        """Opens the store that `coserve serve` would use with the same flags, for some work."""
        import asyncio
        from getpass import getuser

        from coserve.cli.config import load_server_settings

        state = None if self.state is None else str(self.state)
        flags = given(state=state, model=self.model, database=self.database)
        settings = load_server_settings(flags, config_of(self.context))
        from coserve.serve.store.store import Store
        from coserve.wire.logs import CONTEXT, WorkContext

        async def run(store: Store) -> T:
            return await work(store)

        CONTEXT.set(WorkContext(tenant=f"operator {getuser()}"))
        with Store(settings.state, database=settings.database) as store:
            return asyncio.run(run(store))


@app.command()
@unfolded
def create(
    store: StoreOptions,
    tenant: Annotated[str, typer.Argument(help="Who it is for; a tenant sees its own things only.")],
    weight: Annotated[
        float | None, typer.Option(help="The tenant's share of the machine, beside others' (1).")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Makes a key and prints it, this once. From the first key on the server requires keys."""
    from coserve.cli.output import print_json

    key, secret = store.run(lambda store: store.tenants.create_key(tenant, weight))
    if as_json:
        return print_json({**asdict(key), "secret": secret})
    print(secret)


@app.command("list")
@unfolded
def list_keys(store: StoreOptions, as_json: AsJson = False) -> None:
    """Lists all keys, revoked ones too. The secrets themselves are kept nowhere."""
    from coserve.cli.output import moment, print_json, print_table

    found = store.run(lambda store: store.tenants.keys())
    if as_json:
        return print_json([asdict(key) for key in found])
    rows = [(key.id, key.prefix + "…", key.tenant, moment(key.created), moment(key.revoked)) for key in found]
    print_table(("id", "key", "tenant", "created", "revoked"), rows, "no keys: this machine alone may ask")


@app.command()
@unfolded
def revoke(
    store: StoreOptions,
    key: Annotated[str, typer.Argument(help="The key's id, or the beginning that `list` shows.")],
    as_json: AsJson = False,
) -> None:
    """Takes a key out of force, at once."""
    from coserve.cli.output import print_json

    if not store.run(lambda store: store.tenants.revoke_key(key.rstrip("…"))):
        raise ConfigError(f"no key in force has the id or beginning {key}: `coserve keys list` shows them")
    if as_json:
        return print_json({"id": key, "revoked": True})
    print(f"revoked {key}")
    if not store.run(lambda store: store.tenants.any_keys()):
        print(
            "no key is in force now, and the server answers nobody: make one with `coserve keys create`, or "
            "have it serve this machine without keys again with `coserve keys forget`"
        )


@app.command()
@unfolded
def forget(store: StoreOptions, as_json: AsJson = False) -> None:
    """Forgets revoked keys, once all are: from its next start the server requires none again.

    Tenants keep what they own, for the next key that is made for them.
    """
    from coserve.cli.output import print_json

    if not store.run(lambda store: store.tenants.forget_keys()):
        raise ConfigError("there are keys in force: revoke them first, with `coserve keys revoke`")
    if as_json:
        return print_json({"forgotten": True})
    print("no keys any more: from its next start the server asks for none on loopback")
