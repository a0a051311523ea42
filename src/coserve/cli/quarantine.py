"""`coserve quarantine`: requests, jobs, training sessions and adapters that crashed engines and are not tried
again. Works on the state folder."""

from typing import Annotated

import typer

from coserve.cli.keys import StoreOptions
from coserve.cli.options import AsJson, ListsAlone, unfolded
from coserve.errors import ConfigError

app = typer.Typer(help="What crashed the engine more than once; alone it lists that.", cls=ListsAlone)


@app.command("list")
@unfolded
def list_quarantine(store: StoreOptions, as_json: AsJson = False) -> None:
    """Requests, jobs, sessions, adapters and checks that are not tried again, with the reason."""
    from coserve.cli.output import moment, print_json, print_table

    found = store.run(lambda store: store.quarantine.list())
    if as_json:
        return print_json([one.as_dict() for one in found])
    columns = ("id", "kind", "what", "tenant", "since", "reason")
    rows = [(q.id, q.kind, q.subject, q.tenant or "", moment(q.created), q.reason) for q in found]
    print_table(columns, rows, "nothing is quarantined")


@app.command()
@unfolded
def release(
    store: StoreOptions,
    which: Annotated[str, typer.Argument(help="Its id, or that of the job or adapter.", metavar="ID")],
    as_json: AsJson = False,
) -> None:
    """Lets something be tried again. A job is paused then: `coserve jobs resume` lets it go on."""
    from coserve.cli.output import print_json

    found = store.run(lambda store: store.quarantine.release(which))
    if found is None:
        raise ConfigError(f"nothing in quarantine has the id {which}: `coserve quarantine` lists it all")
    if as_json:
        return print_json({**found.as_dict(), "released": True})
    after = f"; `coserve jobs resume {found.subject}` lets it go on" if found.kind == "job" else ""
    print(f"released the {found.kind} {found.subject}{after}")
