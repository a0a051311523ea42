"""Regular expressions that take a backtracking matcher hours, wherever an adapter or a job may have one."""

import faulthandler
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from coserve.adapters.files import read_outline
from coserve.adapters.merge import WholeModel
from coserve.adapters.methods.lora import LoRA, LoRAConfig
from coserve.adapters.settings import settings_of
from coserve.errors import CoserveError
from models import edit_config, tiny, with_lora

FRAME = WholeModel(tiny("llama"))
FIELDS = ("target_modules", "exclude_modules", "layers_pattern", "rank_pattern", "alpha_pattern")
MOST = 10.0  # seconds of processor time for one of them; they are refused after two
TRIED = int(os.environ.get("COSERVE_ATTACK_PATTERNS", "60"))


@pytest.fixture(autouse=True)
def _ends_what_hangs() -> Iterator[None]:
    """A matcher that holds the interpreter can be ended by nothing else."""
    faulthandler.dump_traceback_later(600, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


def catastrophic(draws: random.Random) -> str:
    """Nested repeats, choices that overlap, and long counted repeats, before something that never comes."""
    kind = draws.randrange(5)
    if kind == 0:
        inner = draws.choice(["a", ".", "[a-z_]", r"\w", "(a|.)", "(.|_|[a-z])", ".*", r"\w*\.?"])
        for _ in range(draws.randint(2, 6)):
            inner = f"({inner}){draws.choice(['+', '*', '{1,30}', '{2,}', '+?', '*?'])}"
        return f"{inner}{draws.choice(['!', '$!', '(?=!)', chr(92) + '1!'])}"
    if kind == 1:
        choices = "|".join(
            draws.choice([".*", ".+", r"\w+", "[a-z.]+"]) + draws.choice("aelmo._") for _ in range(60)
        )
        return f"({choices})*!"
    if kind == 2:
        count = draws.choice([20, 300, 1000, 100_000])
        return f"({draws.choice(['.?', 'a?', '[a-z.]?'])}){{{count}}}{draws.choice(['.', 'a'])}{{{count}}}"
    if kind == 3:
        return f"((.{{0,{draws.choice([30, 1000])}}}){{0,{draws.choice([30, 1000])}}}x?){{0,100}}!"
    return (
        draws.choice([".*" * 3000, "(" * 3000 + "." + ")*" * 3000, ".*[aeo]" * 1000, r"(.*\w)+" * 400]) + "!"
    )


def in_time(work: Callable[[], object]) -> bool:
    """Tells whether `work` is accepted; it has to end soon, and to let other threads run meanwhile."""
    beats, ended = [time.monotonic()], threading.Event()

    def beat() -> None:
        while not ended.wait(0.01):
            beats.append(time.monotonic())

    heart = threading.Thread(target=beat)
    heart.start()
    begun = time.thread_time()
    try:
        work()
        taken = True
    except CoserveError as error:
        assert len(str(error)) < 1000
        taken = False
    spent = time.thread_time() - begun
    ended.set()
    heart.join()
    assert spent < MOST
    assert len(beats) > spent / 2, f"nothing else ran for most of {spent:.1f} s"
    return taken


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapter")
    with_lora(tiny("llama"), seed=0, r=4, target_modules=["q_proj"]).save_pretrained(str(folder))
    return folder


def test_an_imported_adapter_ends_in_time(adapter: Path) -> None:
    draws = random.Random(0)
    for number in range(TRIED):
        field = FIELDS[number % len(FIELDS)]
        pattern = catastrophic(draws)
        value = {pattern: 4, f"{pattern}?": 4} if field.endswith("_pattern") and field[0] in "ra" else pattern
        original = (adapter / "adapter_config.json").read_text()
        edit_config(adapter, **{field: value})
        try:
            in_time(lambda: read_outline(adapter, "mine", FRAME, torch.float32))
        finally:
            (adapter / "adapter_config.json").write_text(original)
    assert in_time(lambda: read_outline(adapter, "mine", FRAME, torch.float32)), "as it was before"


def test_a_jobs_settings_end_in_time() -> None:
    draws, method = random.Random(1), LoRA()
    for number in range(TRIED):
        field = ("rank_pattern", "alpha_pattern")[number % 2]
        patterns = {catastrophic(draws): 2 for _ in range(draws.choice([1, 1, 20]))}

        def begin(fields: dict[str, object]) -> None:
            (config,) = settings_of(fields)
            assert isinstance(config, LoRAConfig)
            with torch.device("meta"):
                method.fresh(config, FRAME, torch.Generator("cpu"))

        in_time(lambda fields={"r": 2, field: patterns}: begin(fields))
