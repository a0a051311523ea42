"""Every command and snippet of the README and of docs runs as it is written, but for those in a table."""

import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest

from documented import PYTHON, ROOT, SERVICE, SHELL, SHOWN, Block, Desk, blocks, blocks_of

SERVE: Final = ".venv/bin/coserve serve"  # the README's first, whose server all snippets with a client ask
# Commands that do not run here, by page or folder, and beginning, with the reason.
NOT_RUN: Final = {
    ("README.md", "make demo"): "makes a virtual environment, from a network",
    ("README.md", "make test"): "runs this test",
    ("README.md", ".venv/bin/coserve serve Qwen/"): "needs a network",
    ("CONTRIBUTING.md", "make "): "an environment, or what runs this test",
    ("docs/results/", ".venv/bin/coserve demo"): "minutes; tests/unit/demo runs it with less",
    ("docs/results/", "coserve demo"): "minutes; tests/unit/demo runs it with less",
    ("docs/results/", ".venv/bin/coserve bench"): "minutes each; tests/unit/benchmarks runs parts of each",
    ("docs/results/", "coserve bench"): "minutes each; tests/unit/benchmarks runs parts of each",
    ("docs/results/", "python -m coserve_benchmarks.demo_page"): "writes a page of docs",
    ("docs/results/", "coserve plan gpt2"): "needs a network",
    ("docs/results/", "pytest "): "tests, some of hours",
    ("docs/results/", "COSERVE_"): "tests, some of hours",
    ("docs/results/", "make clients"): "minutes, and the package index",
    ("docs/results/", "CONFORMANCE_WRITE"): "minutes, and the package index",
    ("docs/from-peft.md", "coserve adapters import"): "needs a network",
    (
        "docs/gpu.md",
        "make gpu",
    ): "needs a GPU, or minutes; tests/unit/benchmarks/test_bench_gpu.py runs parts",
    ("docs/gpu.md", "pip download"): "needs a network",
    ("docs/operating.md", "docker "): "needs a daemon, and a network",
    ("docs/operating.md", "certbot "): "needs a certificate authority, and a name in the DNS",
    ("docs/monitoring.md", "pip install"): "needs a network",
    ("docs/cluster.md", "coserve "): "two machines with Ray; tests/scenario/test_ray.py has one",
    ("docs/page.md", "make "): "minutes, and Chromium",
    ("docs/replicas.md", "pip install"): "needs a network",
    (
        "docs/replicas.md",
        "coserve serve --state /var/lib/coserve --database",
    ): "needs PostgreSQL: make postgres",
    ("docs/replicas.md", "coserve keys create"): "needs PostgreSQL: make postgres",
    ("docs/replicas.md", "coserve serve MODEL --state /var/lib/coserve --artifacts s3:"): "needs a bucket",
    ("docs/anthropic.md", "pip install"): "needs a network",
    ("docs/tinker.md", "pip install"): "needs a network",
    ("docs/tiny.md", "python -m coserve_benchmarks.tiny.build"): "hours of training",
    ("docs/tiny.md", "python -m coserve_benchmarks.tiny.evaluate"): "minutes, and writes a page of docs",
    ("docs/tiny.md", "python -m coserve_benchmarks.tiny.curve"): "draws what the training has written",
}
# Blocks that take more than a few seconds: engines that start, or plans of whole models.
SLOW: Final = {
    "README-4", "first-adapter-4", "from-peft-1", "from-peft-2", "from-unsloth-1", "from-vllm-1", "gguf-1",
    "memory-1", "monitoring-1", "monitoring-3", "monitoring-4", "monitoring-5", "monitoring-6",
    "monitoring-7", "operating-4", "pipeline-parallel-1", "pipeline-parallel-2",
    "policies-1", "policies-2", "privacy-1", "replicas-2", "simulate-1", "simulate-2", "simulate-3",
    "split-1", "split-2", "split-3", "split-4", "split-5", "split-6", "split-7", "split-8", "split-9",
    "tensor-parallel-1", "tensor-parallel-2", "tools-1", "training-2", "two-machines-1", "two-machines-2",
    "two-machines-3", "zoo-1", "zoo-2", "zoo-3",
}  # fmt: skip
# Blocks that another test runs as they are written.
ELSEWHERE: Final = dict.fromkeys(
    ("operating-7", "operating-8", "operating-9"), "tests/newcomers/test_operator.py"
)
CHECKED: Final = ("ini", "nginx")  # tags of files, which tests below look at
COMMAND: Final = re.compile(  # a line of a shell, which belongs into a block that runs
    r"^(\$ |sudo )?(\w+=\S+ )*(coserve|pip|python3?|make|curl|docker|podman|kubectl|export|git|apt-get) ",
    re.MULTILINE,
)
CLIENT: Final = re.compile(  # what asks a server
    r"coserve (finetune|chat|jobs|import|adapters import) (?!.*--base)|127\.0\.0\.1:8000|"
    r"\.venv/bin/coserve serve$",
    re.MULTILINE,
)
# Commands before a block: executors that it calls, which its page has started before, or models in a zoo.
EXECUTOR: Final = "coserve executor path/to/model --listen"
OWN: Final = f"COSERVE_EXECUTOR_KEY= {EXECUTOR} unix:/run/base.sock"  # which needs no key
BEFORE: Final = {
    "monitoring-3": (
        "export KEY=$(coserve keys create alice --state /var/lib/coserve)",
        "export URL=$COSERVE_URL",
        "coserve serve --state /var/lib/coserve",
    ),
    "monitoring-4": ("coserve keys create alice --state /var/lib/coserve",),
    "monitoring-5": ("mkdir -p /etc/coserve",),
    "monitoring-6": ("coserve serve",),
    "operating-4": ("coserve keys create alice",),
    "privacy-1": (
        f"{OWN} --dtype float32",
        f"{EXECUTOR} tcp:one.example:9000 --dtype float32",
        f"COSERVE_EXECUTOR_KEY=other {EXECUTOR} tcp:two.example:9000 --dtype float32",
    ),
    "split-2": (OWN,),
    "split-3": (f"{EXECUTOR} tcp:10.0.0.5:7000", OWN),
    "split-4": (OWN,),
    "split-6": tuple(f"{EXECUTOR} tcp:10.0.0.{4 + n}:7000 --shard {n}/2 --dtype float32" for n in (1, 2)),
    "split-9": (f"{EXECUTOR} tls:0.0.0.0:7000 --tls-cert cert.pem --tls-key key.pem --dtype float32",),
    "two-machines-4": (f"{EXECUTOR} tcp:10.0.0.5:7000",),
    "zoo-3": (
        "coserve zoo add coserve-tiny",
        "coserve zoo add ./my-full-fine-tune --parent coserve-tiny --name mine",
    ),
}


def excuse(page: str, command: str) -> tuple[str, str] | None:
    """The entry of a command that is not run."""
    return next((key for key in NOT_RUN if page.startswith(key[0]) and command.startswith(key[1])), None)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Desk]:
    """A desk with the server that the README starts first."""
    desk = Desk(tmp_path_factory.mktemp("server"))
    try:
        said = desk.run(SERVE)
        assert "coserve-tiny on http://127.0.0.1:" in said
        yield desk
        desk.end()
    finally:
        desk.kill()


@pytest.fixture
def desk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Desk]:
    """A desk of its own, on whose port the server is unless the block starts services itself."""
    block: Block = request.getfixturevalue("block")
    asks = block.tag == PYTHON and ("client" in block.text or "tinker" in block.text)
    served = [one for one in block.commands() if one != SERVE and SERVICE.search(one)]
    asks |= block.tag in SHELL and not served and CLIENT.search(block.text) is not None
    ports = request.getfixturevalue("server").ports if asks and block.name not in BEFORE else None
    made = Desk(tmp_path, ports, COSERVE_EXECUTOR_KEY="secret")
    try:
        yield made
        made.end()
    finally:
        made.kill()


@pytest.mark.parametrize(
    "block",
    [
        pytest.param(one, id=one.name, marks=pytest.mark.slow if one.name in SLOW else [])
        for one in blocks()
        if one.tag in (*SHELL, PYTHON) and one.name not in ELSEWHERE
    ],
)
def test_it_runs_as_it_is_written(block: Block, desk: Desk) -> None:
    before = BEFORE.get(block.name, ())
    asked = [one for one in block.commands() if one != SERVE and excuse(block.page, one) is None]
    desk.lay_out("\n".join([*before, *asked] if block.tag in SHELL else [*before, block.text]))
    said = [desk.run(command) for command in before]
    if block.tag in SHELL:
        for command in asked:
            desk.run(command)
        return
    for earlier in blocks():
        if earlier.page == block.page and earlier.number < block.number and earlier.tag in SHELL:
            for command in earlier.commands():
                if command.startswith("export "):
                    desk.run(command)
    for pin in re.findall(r"certificate (\w+)", " ".join(said)):
        desk.names["3f9a..."] = pin
        desk.environment["SSL_CERT_FILE"] = str(desk.folder / "ca.pem")
    for text in alternatives(block):
        desk.python(replace(block, text=text))


def alternatives(block: Block) -> Iterator[str]:
    """The texts of a block that shows several ways to attach the same model: each has one of them."""
    lines = block.text.splitlines(keepends=True)
    ways = [line for line in lines if line.startswith("attach(")]
    for way in ways or [""]:
        yield "".join(line for line in lines if line not in ways or line == way)


def test_the_tables_name_what_is_there() -> None:
    """An entry that nothing matches is of a command that has gone; every block has a tag that is known."""
    found = blocks()
    commands = [(one.page, command) for one in found if one.tag in SHELL for command in one.commands()]
    assert {excuse(*command) for command in commands} - {None} == {*NOT_RUN}
    runnable = {one.name for one in found if one.tag in (*SHELL, PYTHON)}
    assert runnable >= SLOW | {*BEFORE, *ELSEWHERE}, SLOW | {*BEFORE, *ELSEWHERE} - runnable
    assert not SLOW & {*ELSEWHERE}
    assert {one.tag for one in found} <= {*SHELL, PYTHON, SHOWN, *CHECKED}
    assert len(found) > 30
    shown = [one.name for one in found if one.tag == SHOWN and COMMAND.search(one.text)]
    assert not shown, "commands that no test runs: ```sh, and a row of NOT_RUN where they cannot"
    for name, test in ELSEWHERE.items():
        assert name in (ROOT / test).read_text(), f"{test} does not run {name}"


@pytest.mark.parametrize(
    "hidden",
    (
        "~~~sh\ncoserve serve\n~~~", "- first\n\n  ```sh\n  coserve serve\n  ```",
        "```sh title=x\ncoserve serve\n```",
        "> ```sh\n> coserve serve\n> ```", "text\n\n    coserve serve\n", "- ```sh\n  coserve serve\n  ```",
        "<pre>coserve serve</pre>", "````sh\ncoserve serve\n````", "```sh\ncoserve serve\n",
        "```sh\ncoserve serve\n\n```sh\ncoserve jobs\n```",
    ),
)  # fmt: skip
def test_a_page_hides_no_code(hidden: str) -> None:
    """Neither behind a block that is found."""
    shown = "```sh\ncoserve jobs\n```\n"
    assert [one.text for one in blocks_of("p.md", f"# A page\n\n{shown}\n- a\n\n  b\n")] == ["coserve jobs\n"]
    with pytest.raises(ValueError, match="has code that no test finds"):
        blocks_of("p.md", f"# A page\n\n{shown}\n{hidden}\n")


def only(tag: str, page: str = "docs/operating.md") -> str:
    """The text of the one block of a page with a tag."""
    (found,) = (one.text for one in blocks() if (one.tag, one.page) == (tag, page))
    return found


def test_the_unit_is_one_for_systemd(tmp_path: Path) -> None:
    """Its command is one of ours, and so are its settings."""
    desk = Desk(tmp_path)
    text = only("ini")
    (command,) = re.findall(r"^ExecStart=\S+/\.venv/bin/(.*)$", text, re.MULTILINE)
    settings = tmp_path / "etc" / "coserve" / "coserve.toml"
    settings.parent.mkdir(parents=True)
    settings.write_text("[server]\nrequire_keys = true\n")
    assert '"require_keys": true' in desk.run(f"{command} --show-config")
    if shutil.which("systemd-analyze") is None:
        pytest.skip("there is no systemd-analyze")
    unit = tmp_path / "coserve.service"
    unit.write_text(text.replace("/opt/coserve", str(tmp_path)).replace("User=coserve\n", ""))
    ran = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0 and "coserve" not in ran.stderr, ran.stderr


def test_the_proxy_is_one_for_nginx(tmp_path: Path) -> None:
    text = only("nginx")
    assert text.count("{") == text.count("}") and "proxy_buffering off;" in text
    if shutil.which("nginx") is None:
        pytest.skip("there is no nginx")
    desk = Desk(tmp_path)
    desk.lay_out("cert.pem")
    file = tmp_path / "nginx.conf"
    inside = text.replace("/etc/coserve", str(tmp_path))
    file.write_text(f"pid {tmp_path}/pid;\nevents {{}}\nhttp {{\n{inside}}}\n")
    subprocess.run(["nginx", "-t", "-p", str(tmp_path), "-c", str(file)], check=True, capture_output=True)
