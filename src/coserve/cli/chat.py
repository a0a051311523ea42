"""`coserve chat`: a conversation with the base model or adapters."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coserve.cli.options import ModelName, ServerOptions, given, tell_wait, unfolded
from coserve.errors import ConfigError, CoserveError

if TYPE_CHECKING:
    from coserve.cli.client import Client

HELP = """/adapter NAME   answer with this adapter from now on; without a name: list them
/base           answer with the base model
/system TEXT    what the model is told before all; without a text: nothing
/clear          forget the conversation
/help           this
/exit           leave (as Ctrl-D does)"""


@unfolded
def chat(
    server: ServerOptions,
    message: Annotated[
        str | None, typer.Argument(help="Ask this and leave; - reads all of stdin. Else: a conversation.")
    ] = None,
    model: ModelName = None,
    system: Annotated[str | None, typer.Option(help="What the model is told before all.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Longest answer.")] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed, the same answers.")] = None,
) -> None:
    """Talks with a model. Piped, every line of stdin is a turn, and answers alone are printed."""
    with server.connect() as client:
        client.wait_ready(tell_wait)
        options = given(temperature=temperature, max_tokens=max_tokens, seed=seed)
        conversation = Conversation(client, model or names_of(client)[0], options, system)
        if message is not None:
            _say(conversation, sys.stdin.read() if message == "-" else message)
        elif sys.stdin.isatty():
            _talk(conversation)
        else:
            # Output of commands goes to stderr, so that stdout holds answers and nothing else.
            turn = Turn(conversation, lambda text: print(text, file=sys.stderr))
            for line in sys.stdin:
                if not turn.take(line.strip()):
                    break


def names_of(client: "Client") -> list[str]:
    """The base model's name and the adapters'. Raises ServerError if the server refuses to tell."""
    return [str(model["id"]) for model in client.get("/v1/models")["data"]]


@dataclass
class Conversation:
    """Messages of a conversation so far (`said`), and the model that answers."""

    client: "Client"
    model: str
    options: dict[str, Any] = field(default_factory=dict)
    system: str | None = None
    said: list[dict[str, str]] = field(default_factory=list)

    def ask(self, text: str) -> Iterator[str]:
        """Sends a message and yields the answer piece by piece. Received pieces are added to `said`, also if
        the caller stops the iteration."""
        self.said.append({"role": "user", "content": text})
        answer: list[str] = []
        try:
            for piece in self._pieces():
                answer.append(piece)
                yield piece
        finally:
            if answer:
                self.said.append({"role": "assistant", "content": "".join(answer)})
            else:
                self.said.pop()  # a question that got nothing is asked again, not twice

    def _pieces(self) -> Iterator[str]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        body = {"model": self.model, "messages": [*system, *self.said], "stream": True, **self.options}
        for event in self.client.events("/v1/chat/completions", body):
            for choice in event.get("choices", []):
                if piece := choice.get("delta", {}).get("content"):
                    yield str(piece)


class Turn:
    """Handles the user's lines: messages and commands. `tell` prints the output of commands."""

    def __init__(self, conversation: Conversation, tell: Callable[[str], object]) -> None:
        self._conversation, self._tell = conversation, tell

    def take(self, line: str) -> bool:
        """Handles one line; returns False where the conversation is to end."""
        if not line:
            return True
        if not line.startswith("/"):
            _say(self._conversation, line)
            return True
        command, _, rest = line.partition(" ")
        return self._command(command, rest.strip())

    def _command(self, command: str, rest: str) -> bool:
        conversation = self._conversation
        match command:
            case "/adapter" | "/model" if rest:
                self._switch(rest)
            case "/adapter" | "/model":
                for name in names_of(conversation.client):
                    self._tell(f"{'*' if name == conversation.model else ' '} {name}")
            case "/base":
                self._switch(names_of(conversation.client)[0])
            case "/system":
                conversation.system = rest or None
            case "/clear":
                conversation.said.clear()
            case "/help":
                self._tell(HELP)
            case "/exit" | "/quit":
                return False
            case _:
                raise ConfigError(f"there is no command {command}: /help lists them")
        return True

    def _switch(self, name: str) -> None:
        from coserve.cli.client import in_path

        self._conversation.client.get(f"/v1/models/{in_path(name)}")  # checkpoints too, which are not listed
        self._conversation.model = name
        self._tell(f"now with {name}")


def _say(conversation: Conversation, text: str) -> None:
    for piece in conversation.ask(text):
        print(piece, end="", flush=True)
    print()


def _talk(conversation: Conversation) -> None:
    """Chats at a terminal. Ctrl-C stops the answer under way; at the prompt it ends the conversation."""
    from contextlib import suppress

    from rich.console import Console
    from rich.text import Text

    with suppress(ImportError):
        import readline  # noqa: F401  (arrow keys and history in `input`)
    console = Console(highlight=False)
    turn = Turn(conversation, lambda text: console.print(Text(text, "dim")))
    console.print(Text(f"{conversation.model} on {conversation.client.url}; /help lists commands", "dim"))
    while True:
        try:
            line = input(f"{conversation.model}> ").strip()
        except (EOFError, KeyboardInterrupt):
            console.print()
            return
        try:
            if not turn.take(line):
                return
        except KeyboardInterrupt:
            console.print(Text(" (stopped)", "dim"))
        except CoserveError as error:
            console.print(Text(str(error), "red"))
