"""The blocks of code in the README and the pages of docs, and a folder in which they run as they are written.

Commands run in a shell, one after the other, in real processes; a server goes on until its block ends. What a
block names is there: files, models, adapters, and in Python the names that it does not make itself. Ports and
hosts are replaced by free ones of this machine.
"""

import ast
import builtins
import json
import os
import random
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import platformdirs

from certificates import Authority
from coserve import tiny
from coserve.tiny import newtasks
from forking import forked
from waiting import wait_until
from whole_server import PATIENCE, RUN

ROOT: Final = Path(__file__).parents[1]
PAGES: Final = (
    *(ROOT / "README.md", ROOT / "CONTRIBUTING.md"),
    *sorted(set((ROOT / "docs").rglob("*.md")) - {ROOT / "docs" / "LOG.md"}),
)
SHELL, PYTHON, SHOWN = ("", "sh"), "python", "text"  # tags of blocks; what is shown is nothing to run
ASSIGNED: Final = re.compile(r"(export )?\w+=(\$\(.*\)|\S*)")
SERVICE: Final = re.compile(r"\bcoserve (serve|executor) (?!.*--show-config)|\bcoserve serve$")
LONGEST: Final = 900.0  # seconds of one command, on a busy machine
READY: Final = re.compile(r"ready in |executor of ")
HOSTS: Final = {
    "10.0.0.5": "127.0.0.5", "10.0.0.6": "127.0.0.6", "10.0.0.7": "127.0.0.1", "one.example": "127.0.0.2",
    "two.example": "127.0.0.3", "base.example": "127.0.0.1", "0.0.0.0": "127.0.0.1",
}  # fmt: skip
PORTS: Final = ("8000", "8001", "7000", "9000")
SMALL: Final = {
    "COSERVE_ENGINE_CALIBRATE": "false", "COSERVE_ENGINE_CACHE_TOKENS": "4096", "COSERVE_STANDBY": "false",
    "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error",
}  # fmt: skip


@dataclass(frozen=True)
class Block:
    """A fenced block: its page, its number on it from 1, its tag, its text."""

    page: str
    number: int
    tag: str
    text: str

    @property
    def name(self) -> str:
        place = Path(self.page)
        inside = (
            "results-" if place.parent.name == "results" else ""
        )  # where pages of docs have the same names
        return f"{inside}{place.stem}-{self.number}"

    def commands(self) -> list[str]:
        """Lines of a shell, joined where they go on, without comments and optional parts in brackets."""
        joined = self.text.replace("\\\n", " ")
        lines = (re.sub(r"\s+#.*|^#.*|\[--[^]]*\]", "", line).strip() for line in joined.splitlines())
        return [re.sub(r"\s+", " ", line) for line in lines if line]


FENCE: Final = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# Code that a page of the site would show and `FENCE` does not find: fences in lists, in quotes, with other
# marks or with words behind their tag; text that is indented by four; and HTML.
HIDDEN: Final = re.compile(
    r"^[ \t>*+\d.)-]*(```|~~~).*|<pre\b.*|"
    r"^(?<=\n\n)( {4}|\t)[ \t]*(?![ \t]|[*+-] |\d+[.)] |!\[).*",
    re.MULTILINE,
)


def blocks_of(page: str, text: str) -> list[Block]:
    """The blocks of a page. Raises ValueError where it has code that is in none."""
    found = [Block(page, number, *parts) for number, parts in enumerate(FENCE.findall(text), 1)]
    hidden = HIDDEN.search(FENCE.sub("", text))
    # A block that does not end takes the beginning of the next.
    told = hidden[0] if hidden else next((one.text for one in found if "```" in one.text), None)
    if told is not None:
        raise ValueError(f"{page} has code that no test finds: {told.strip()!r}")
    return found


@cache
def blocks() -> tuple[Block, ...]:
    return tuple(one for page in PAGES for one in blocks_of(str(page.relative_to(ROOT)), page.read_text()))


def _chats(file: Path) -> None:
    examples = newtasks.examples("pirate", "train", 12)
    file.write_text("".join(json.dumps({"messages": one.messages}) + "\n" for one in examples))


def _records(*records: Mapping[str, Any]) -> Callable[[Path], None]:
    return lambda file: _write(file, "".join(json.dumps(record) + "\n" for record in records))


def _write(file: Path, text: str) -> None:
    file.write_text(text)


def _model(folder: Path) -> None:
    shutil.copytree(tiny.path(), folder)


def _adapter(folder: Path) -> None:
    """An adapter of PEFT's, on the embedded model as PEFT finds it."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny.path())
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    get_peft_model(model, lora).save_pretrained(folder)


def _zoo_model(seed: int, **changes: Any) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        from zoo_made import make_model

        make_model(folder, seed=seed, max_position_embeddings=512, **changes)

    return make


def _zoo_adapter(folder: Path) -> None:
    from zoo_made import make_lora

    make_lora(folder, folder.parent / "large")


def _fine_tune(folder: Path) -> None:
    from zoo_made import make_fine_tune

    make_fine_tune(folder, tiny.path(), {"layers.5": 0.01})


def _arrivals(file: Path) -> None:
    draws, now = random.Random(0), datetime(2026, 1, 1)
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    for _ in range(60):
        now += timedelta(seconds=draws.expovariate(5))
        lines.append(f"{now},{draws.randrange(50, 400)},{draws.randrange(20, 100)}")
    _write(file, "\n".join(lines) + "\n")


def _certificates(file: Path) -> None:
    authority = Authority(file.parent / "authority")
    signed = authority.sign("executor")
    for name, made in (
        ("cert.pem", signed.certificate),
        ("key.pem", signed.key),
        (file.name, signed.certificate),
    ):
        shutil.copy(made, file.parent / name)
    for name in ("ca.pem", "clients.pem"):
        shutil.copy(authority.certificate, file.parent / name)


FILES: Final[Mapping[str, Callable[[Path], None]]] = {
    **dict.fromkeys(("train.jsonl", "data.jsonl", "chats.jsonl"), _chats),
    "pairs.jsonl": _records(*({"prompt": f"{n}?", "chosen": "yes", "rejected": "no"} for n in range(4))),
    "answers.jsonl": _records(*({"prompt": f"{n}?", "completion": "yes", "label": n % 2 == 0}
                                for n in range(4))),
    "prompts.jsonl": _records(*({"messages": [{"role": "user", "content": f"{n}?"}], "reference": "yes"}
                                for n in range(2))),
    "grader.json": lambda file: _write(file, json.dumps({
        "type": "string_check", "name": "same", "operation": "eq", "input": "{{sample.output_text}}",
        "reference": "{{item.reference}}"})),
    "jobs.json": lambda file: _write(file, json.dumps({
        "object": "fine_tuning.job", "id": "ftjob-abc", "model": "gpt-4.1-mini",
        "training_file": "file-abc123",
        "method": {"type": "supervised", "supervised": {"hyperparameters": {"n_epochs": 1}}}})),
    "file-abc123.jsonl": _chats,
    "lines.jsonl": _records({"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {
        "model": "coserve-tiny", "max_tokens": 4, "messages": [{"role": "user", "content": "Hello!"}]}}),
    "questions.txt": lambda file: _write(file, "the cats sat on the mats, and ate. " * 80),
    "conversations.csv": _arrivals,
    "adapters/support": _adapter,
    "path/to/model": _model,
    "cert.pem": _certificates,
    "etc/coserve/fullchain.pem": _certificates,
    "./large": _zoo_model(3, hidden_size=96),
    "./small": _zoo_model(0),
    "./my-full-fine-tune": _fine_tune,
    "./my-lora --parent large": lambda place: _zoo_adapter(place.parent / "my-lora"),
    "./my-lora ": lambda place: _adapter(place.parent / "my-lora"),
}  # fmt: skip
_ENGINE: Final = (
    "from coserve import Engine, EngineConfig\nfrom coserve.tiny import path\n"
    "engine = Engine(path(), EngineConfig(calibrate=False, cache_tokens=2048))"
)
# What a block of Python uses and does not make, by its name or by page and name: lines of code before it.
NAMES: Final[Mapping[str, str]] = {
    "client": "import openai; client = openai.OpenAI(base_url='http://127.0.0.1:8000/v1', api_key='none')",
    "file": "file = client.files.create(file=open('pairs.jsonl' if 'dpo' in SOURCE else 'data.jsonl', 'rb'), "
            "purpose='fine-tune')",
    "engine": _ENGINE,
    "Engine": "from coserve import Engine",
    "EngineConfig": "from coserve import EngineConfig",
    "LoRAConfig": "from coserve import LoRAConfig",
    "data": "data = 'data.jsonl'",
    "pairs": "pairs = 'pairs.jsonl'",
    "docs/tools.md model": "model = 'coserve-tiny'",
    "messages": "messages = [{'role': 'user', 'content': 'What is the weather in Oslo?'}]",
    "docs/tinker.md data": "data = [types.Datum(model_input=types.ModelInput.from_ints([5, 6, 7]), "
                           "loss_fn_inputs={'target_tokens': [6, 7, 8], 'weights': [1.0, 1.0, 1.0]})]",
    "docs/tinker.md prompt": "prompt = types.ModelInput.from_ints([5, 6, 7])",
    "scheduler": f"{_ENGINE}\nengine.generate('hello')\nscheduler = engine.scheduler",
    "executor": "executor = engine.loop.executor",
    "now": "now = engine.clock()",
    "get_peft_model": "from peft import get_peft_model",
    "LoraConfig": "from peft import LoraConfig",
    "AutoModelForCausalLM": "from transformers import AutoModelForCausalLM",
    "model": "from transformers import AutoModelForCausalLM\n"
             "model = AutoModelForCausalLM.from_pretrained('path/to/model', dtype='float32')",
    "key": "key = 'secret'",
    "other_key": "other_key = 'other'",
    "attach": "from coserve.split.attach import attach",
}  # fmt: skip


def unmade(source: str) -> Iterator[str]:
    """Names that a block reads and does not make, in their order."""
    nodes = list(ast.walk(ast.parse(source)))
    made = {n.id for n in nodes if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)}
    made |= {n.name for n in nodes if isinstance(n, ast.ClassDef | ast.FunctionDef)} | set(dir(builtins))
    made |= {n.arg for n in nodes if isinstance(n, ast.arg)}
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            made |= {one.asname or one.name.partition(".")[0] for one in node.names}
    read = (n.id for n in nodes if isinstance(n, ast.Name) and n.id not in made)
    yield from dict.fromkeys(read)


class Desk:
    """A folder in which blocks run. `ports` has the ones that stand for those in the text."""

    def __init__(self, folder: Path, ports: Mapping[str, str] | None = None, **environment: str) -> None:
        self.folder = folder
        self.ports = dict(ports or {port: _free_port() for port in PORTS})
        self.names = {" MODEL ": " path/to/model ", "ft:coserve-tiny:local::1a2b3c4d": "coserve-tiny"}
        (folder / "var" / "lib").mkdir(parents=True)
        bin_ = folder / ".venv" / "bin"
        bin_.mkdir(parents=True)
        for name, code in (("coserve", f"import sys; sys.argv[0] = 'coserve'; {RUN}"), ("python", None)):
            told = f' -c "{code}"' if code else ""
            (bin_ / name).write_text(f'#!/bin/sh\nexec {sys.executable}{told} "$@"\n')
            (bin_ / name).chmod(0o755)
        places = {f"XDG_{kind}_HOME": str(folder / kind.lower()) for kind in ("DATA", "CONFIG", "CACHE")}
        # Compiled kernels are those of all tests: desks would compile them for seconds each.
        kernels = platformdirs.user_cache_path("coserve") / "kernels"
        kernels.mkdir(parents=True, exist_ok=True)
        (folder / "cache" / "coserve").mkdir(parents=True)
        (folder / "cache" / "coserve" / "kernels").symlink_to(kernels)
        path = os.pathsep.join([str(bin_), os.environ["PATH"]])
        asked = {"COSERVE_PORT": self.ports["8000"], "COSERVE_URL": self.url}
        self.environment = {**os.environ, **SMALL, **places, "PATH": path, **asked, **environment}
        self._services: dict[str, subprocess.Popen[bytes]] = {}  # by the addresses that they take
        self._started = 0

    @property
    def url(self) -> str:
        """The address of the server on the first port."""
        return f"http://127.0.0.1:{self.ports['8000']}"

    def local(self, text: str) -> str:
        """A text with addresses of this machine."""
        for host, here in HOSTS.items():
            text = text.replace(host, here)
        for name, here in self.names.items():
            text = text.replace(name, here)
        text = re.sub(r"(?<![\w.])/((var/lib|var/cache|etc|opt|mnt)/coserve)", rf"{self.folder}/\1", text)
        text = text.replace("/run/base.sock", str(self.folder / "base.sock"))
        return re.sub(rf"\b({'|'.join(PORTS)})\b", lambda found: self.ports[found[1]], text)

    def lay_out(self, text: str) -> None:
        """Makes the files that a text names."""
        text = f"{' '.join(self.local(text).split())} "
        for name, make in FILES.items():
            place = self.folder / name.split()[0]
            if name in text and not place.exists():
                place.parent.mkdir(parents=True, exist_ok=True)
                make(place)

    def run(self, command: str) -> str:
        """Runs one line in a shell, and returns what it prints. A server is left running. Fails where the
        command does."""
        command = self.local(command)
        if SERVICE.search(command):
            return self._serve(command)
        assigns = ASSIGNED.fullmatch(command) is not None
        words, environment = self._plain(f"set -a; {command}; env -0" if assigns else command)
        with forked():
            ran = subprocess.run(
                words, cwd=self.folder, env=environment, capture_output=True, text=True, timeout=LONGEST
            )
        assert ran.returncode == 0, f"$ {command}\n{ran.stdout[-2000:]}\n{ran.stderr[-2000:]}"
        if assigns:
            self.environment = dict(line.split("=", 1) for line in ran.stdout.rstrip("\0").split("\0"))
            return ""
        return ran.stdout

    def _serve(self, command: str) -> str:
        """Starts a server; where another one has its address, that ends first."""
        place = re.search(r"--(?:port|listen) (\S+)", command)
        address = self.ports["8000"] if place is None else place[1]
        if address in self._services:
            self._stop(self._services[address])
        self._started += 1
        said = self.folder / f"service-{self._started}"
        words, environment = self._plain(command)
        with said.open("wb") as console, forked():
            process = self._services[address] = subprocess.Popen(
                words, cwd=self.folder, env=environment, stdout=console, stderr=subprocess.STDOUT
            )
        wait_until(lambda: READY.search(said.read_text()) or process.poll() is not None, LONGEST)
        assert process.poll() is None, f"$ {command}\n{said.read_text()}"
        return said.read_text()

    def _plain(self, command: str) -> tuple[list[str], dict[str, str]]:
        """A command's words and environment: `coserve` without what only a shell does needs none, and can be
        forked."""
        found = re.fullmatch(r"((?:\w+=[^\s$`]* )*)(?:\.venv/bin/)?coserve ([^$*&|;<>()`~\\]*)", command)
        if found is None:
            return ["bash", "-o", "pipefail", "-ec", command], self.environment
        assigned = dict(word.split("=", 1) for word in shlex.split(found[1]))
        code = f"import sys; sys.argv[0] = 'coserve'; {RUN}"
        return [sys.executable, "-c", code, *shlex.split(found[2])], {**self.environment, **assigned}

    def python(self, block: Block) -> None:
        """Runs a block of Python, in a process that has imported the libraries already."""
        before: list[str] = []
        todo = list(unmade(block.text))
        while todo:
            name = todo.pop(0)
            code = NAMES.get(f"{block.page} {name}", NAMES.get(name))
            assert code is not None, f"{block.name} uses {name}, which nothing makes"
            before.insert(0, code)
            todo += [one for one in unmade(code) if one in NAMES and NAMES[one] not in before]
        imports = [line for line in block.text.splitlines() if re.match(r"(import|from) ", line)]
        code = self.local("\n".join([*imports, *before, block.text]))
        self.lay_out(code)
        said = self.folder / "said"
        run = "import sys; from documented import run_source; run_source(*sys.argv[1:])"
        with said.open("w") as file, forked():
            child = subprocess.run(
                [sys.executable, "-c", run, code, block.text], cwd=self.folder, env=self.environment,
                stdout=file, stderr=file, timeout=LONGEST,
            )  # fmt: skip
        assert child.returncode == 0, f"{code}\n{said.read_text()[-3000:]}"

    def end(self) -> None:
        """Stops the services, the last one first; each ends in order."""
        for process in reversed(self._services.values()):
            self._stop(process)

    def _stop(self, process: "subprocess.Popen[bytes]") -> None:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE) == 0, "a service that was told to stop failed"

    def kill(self) -> None:
        for process in self._services.values():
            if process.poll() is None:
                process.kill()
            process.wait()


def run_source(code: str, source: str) -> None:
    """Runs a program, in a process made for it."""
    try:
        module = sys.modules["block"] = ModuleType("block")
        vars(module)["SOURCE"] = source
        exec(compile(code, "<block>", "exec"), vars(module))
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    sys.stdout.flush()
    os._exit(0)  # clients' threads may go on


def _free_port() -> str:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return str(found.getsockname()[1])
