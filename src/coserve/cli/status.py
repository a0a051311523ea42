"""`coserve status`: base executors with their queues and clients, and servers, by their addresses."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coserve.cli.options import ApiKey, AsJson, ServerOptions, with_flags

if TYPE_CHECKING:
    from coserve.split.messages import ExecutorStatus, ProductStatus

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_ACCESS = ("base_ca", "base_pin", "base_certificate", "base_key")  # settings of an engine
Found = Mapping[str, Any]


@with_flags(*_ACCESS)
def status(
    context: typer.Context,
    addresses: Annotated[
        list[str],
        typer.Argument(
            metavar="ADDRESS...",
            help="unix:PATH, tcp:HOST:PORT or tls:HOST:PORT of executors, http://HOST:PORT of servers.",
        ),
    ],
    key: Annotated[
        str,
        typer.Option(
            envvar="COSERVE_EXECUTOR_KEY",
            help="What executors ask their clients for; of several, one each, with commas.",
        ),
    ] = "",
    *,
    flags: dict[str, Any],
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """Shows who runs where: batches of each product, bytes a second, clients and what waits for them.

    Exits with 1 if one of the addresses does not answer; the others are shown.
    """
    from coserve.cli.output import print_json
    from coserve.split.credentials import Credentials
    from coserve.split.status import ask_status

    asked = [address for address in addresses if not address.startswith("http")]
    access = flags.get("engine", {})
    credentials = Credentials(key, *(access.get(name, "") for name in _ACCESS))
    known = dict(zip(asked, credentials.of(asked, "--key", "--base-pin"), strict=True))

    def of_server(address: str) -> Found:
        with ServerOptions(context, address, api_key).connect() as client:
            return client.get("/health")

    def of_executor(address: str) -> Found:
        import msgspec

        from coserve.split.address import Address

        own_key, tls = known[address]
        answer = ask_status(Address.parse(address), own_key, tls=tls)
        found: dict[str, Any] = msgspec.to_builtins(answer)
        del found["type"]
        executors[address] = answer
        return found

    executors: dict[str, ExecutorStatus] = {}
    found = [
        {"address": address, **_asked(of_server if address.startswith("http") else of_executor, address)}
        for address in addresses
    ]
    if as_json:
        print_json(found)
    else:
        _print(found, executors)
    if any("error" in one for one in found):
        raise typer.Exit(1)


def _asked(ask: Callable[[str], Found], address: str) -> Found:
    from coserve.errors import CoserveError

    try:
        return ask(address)
    except CoserveError as error:
        return {"error": str(error)}


def _print(found: Sequence[Found], executors: Mapping[str, "ExecutorStatus"]) -> None:
    from coserve.cli.output import duration, print_table
    from coserve.core.size import show_size

    rows = []
    for one in found:
        executor = executors.get(one["address"])
        if executor is None:
            state = one.get("error") or f"{one.get('status')}, engine {one.get('engine')}"
            rows.append((one["address"], one.get("model", ""), state, "", "", "", "", ""))
            continue
        rows.append(
            (
                one["address"],
                executor.model,
                f"{executor.host}, process {executor.process}, for {duration(executor.seconds)}",
                f"{executor.linears}, {show_size(executor.weight_bytes)}, {executor.dtype}",
                executor.batching,
                show_size(executor.received_a_second) + "/s",
                show_size(executor.sent_a_second) + "/s",
                str(sum(product.waiting_calls for product in executor.products)),
            )
        )
    columns = ("address", "model", "where", "linears", "batching", "in", "out", "waiting calls")
    print_table(columns, rows, "")
    for address, executor in executors.items():
        _print_products(address, executor)
        _print_clients(address, executor)


def _print_products(address: str, executor: "ExecutorStatus") -> None:
    """Products of the same linears in different layers are one row."""
    from coserve.cli.output import print_table

    kinds: dict[tuple[str, str], list[ProductStatus]] = {}
    for product in executor.products:
        kinds.setdefault((_kind(product.paths), product.direction), []).append(product)
    rows = []
    for (kind, direction), products in kinds.items():
        batches = sum(product.batches for product in products)
        means = [
            f"{total / batches:.{digits}f}" if batches else ""
            for total, digits in (
                (sum(product.calls for product in products), 2),
                (sum(product.rows for product in products), 1),
                (sum(product.seconds for product in products) * 1e3, 3),
            )
        ]
        waiting = [sum(product.waiting_calls for product in products)]
        waiting.append(sum(product.waiting_rows for product in products))
        rows.append((kind, direction, str(batches), *means, *map(str, waiting)))
    columns = ("product", "direction", "batches", "calls", "rows", "ms each", "waiting calls", "rows waiting")
    print_table(columns, rows, f"{address} has computed nothing yet")


def _print_clients(address: str, executor: "ExecutorStatus") -> None:
    from coserve.cli.output import duration, print_table
    from coserve.core.size import show_size

    rows = [
        (
            client.name,
            client.work or "",
            duration(client.seconds),
            str(client.calls),
            str(client.rows),
            f"{client.waiting_calls}, {client.waiting_rows}",
            f"{client.held_seconds:.3f}",
            show_size(client.received_a_second) + "/s",
            show_size(client.sent_a_second) + "/s",
        )
        for client in executor.clients
    ]
    columns = ("client", "class", "for", "calls", "rows", "calls, rows waiting", "held (s)", "in", "out")
    print_table(columns, rows, f"{address} has no clients")


def _kind(paths: Sequence[str]) -> str:
    """The same for the same linears of all layers: model.layers.*.mlp.gate_proj, up_proj; and for as many
    whole layers: model.layers.* (3 whole)."""
    before, _, last = paths[0].rpartition(".")
    if last.isdigit():
        return f"{_NUMBER.sub('*', before)}.* ({len(paths)} whole)"
    first = _NUMBER.sub("*", paths[0])
    return ", ".join((first, *(path.rpartition(".")[2] for path in paths[1:])))
