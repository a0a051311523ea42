"""Watches a job until it is over or the user presses Ctrl-C."""

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

import typer

from coserve.cli.options import INTERRUPTED

if TYPE_CHECKING:
    from coserve.cli.client import Client
    from coserve.cli.follow import Watched

QUESTION = "[d]etach (it goes on), [p]ause, [c]ancel, or Enter to keep watching? "


def attach(
    client: "Client",
    job: str,
    ask: Callable[[str], str] | None = None,
    in_words: Callable[[str], str] = lambda message: message,
) -> None:
    """Shows a job until it is over. Exits with 0 if the job succeeded or was paused, 1 otherwise, and 130 if
    the user detached.

    `ask` puts a question to the user; at a terminal it is `input`, elsewhere Ctrl-C detaches at once. What
    the server says is told `in_words` of the command.
    """
    from rich.console import Console

    from coserve.cli.follow import Follower
    from coserve.cli.progress import make_progress

    ask = ask or (input if sys.stdin.isatty() else None)
    progress = make_progress(Console(highlight=False))
    follower = Follower(client, job)

    def show(watched: "Watched") -> None:
        watched.messages = [in_words(message) for message in watched.messages]
        progress.show(watched)

    while True:
        try:
            _close(follower.follow(show), in_words)
            return
        except KeyboardInterrupt:
            progress.pause()
            if _interrupted(client, job, ask):
                print(f"detached: `coserve jobs attach {job}` comes back to it")
                raise typer.Exit(INTERRUPTED) from None


def _interrupted(client: "Client", job: str, ask: Callable[[str], str] | None) -> bool:
    """Asks what to do after Ctrl-C and does it; returns whether to stop watching."""
    from coserve.cli.client import in_path

    if ask is None:
        return True
    try:
        answer = ask(QUESTION).strip().lower()[:1]
    except (KeyboardInterrupt, EOFError):
        print()
        return True
    verb = {"p": "pause", "c": "cancel"}.get(answer)
    if verb is not None:
        client.post(f"/v1/fine_tuning/jobs/{in_path(job)}/{verb}")
    return answer == "d"


def _close(watched: "Watched", in_words: Callable[[str], str]) -> None:
    """Prints the outcome of a job. Raises typer.Exit with status 1 if it neither succeeded nor was paused."""
    match watched.status:
        case "succeeded":
            name = watched.job.get("fine_tuned_model")
            print(f"the adapter is {name}\n  coserve chat --model {name}")
        case "paused":
            print(f"paused: `coserve jobs resume {watched.id}` goes on from its checkpoint")
        case status:
            error = watched.job.get("error") or {}
            print(f"{status}: {in_words(error['message'])}" if error.get("message") else status)
            raise typer.Exit(1)
