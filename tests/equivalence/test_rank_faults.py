"""Faults that other servers have had with adapters over ranks: what one rank answers, two do."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch

from coserve import Engine, EngineConfig, SamplingParams
from coserve.engine.completion import Completion
from coserve.executors.remote import RemoteExecutor
from forked_executors import fork_executors
from models import save, tiny, with_lora

pytestmark = pytest.mark.local
SAMPLING = SamplingParams(max_tokens=5, ignore_eos=True, logprobs=1, prompt_logprobs=1)
UP = "model.layers.1.mlp.up_proj"
RANKS = {"rank 1": 1, "rank 3": 3, "rank 8": 8}
Answers = Mapping[str, Completion]


def make_adapters(folder: Path) -> dict[str, Path]:
    """Of several ranks, one without effect, and one beside a single linear."""
    made = {name: with_lora(tiny("llama"), seed, r=rank) for seed, (name, rank) in enumerate(RANKS.items())}
    made["no effect"] = empty = with_lora(tiny("llama"), 9)
    with torch.no_grad():
        for path, parameter in empty.named_parameters():
            if "lora_B" in path:
                parameter.zero_()
    made["one linear"] = with_lora(tiny("llama"), 8, target_modules=[UP])
    for name, adapted in made.items():
        adapted.save_pretrained(str(folder / name))
    return {name: folder / name for name in made}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Answers]]:
    """The answers of one rank and of two: of all adapters and of the base, whose rows share steps."""
    folder = tmp_path_factory.mktemp("ranks")
    model, adapters = save(tiny("llama"), folder / "model"), make_adapters(folder)
    found: list[Answers] = []
    with pytest.MonkeyPatch.context() as patch:
        fork_executors(patch)
        for ranks in (1, 2):
            engine = Engine(model, EngineConfig(calibrate=False, cache_tokens=512, tensor_parallel=ranks))
            for name, path in adapters.items():
                engine.adapters.load(name, path)
            asked = {
                name: engine.generate([5, 9, 2, 7], name or None, SAMPLING)
                for name in ("", *adapters, "rank 1")
            }
            engine.run()
            found.append(asked)
            if isinstance(engine.executor, RemoteExecutor):
                engine.executor.close()
    yield found


def same(answers: list[Answers], *names: str) -> None:
    one, two = answers
    for name in names:
        assert one[name].tokens == two[name].tokens, name
        numbers = (
            [x.chosen for x in (*own[name].prompt_logprobs, *own[name].logprobs)] for own in (one, two)
        )
        assert next(numbers) == pytest.approx(next(numbers), rel=0, abs=1e-5), name
    assert len({one[name].logprobs[0].chosen for name in names}) == len(names), "each has an effect"


def test_adapters_of_several_ranks_in_one_step_and_below_the_largest(answers: list[Answers]) -> None:
    """Others padded A and B to the largest rank, and found the zeros between the ranks' parts."""
    same(answers, *RANKS)


def test_an_adapter_without_effect_is_the_base(answers: list[Answers]) -> None:
    for own in answers:
        assert own["no effect"].tokens == own[""].tokens
        assert [x.chosen for x in own["no effect"].logprobs] == [x.chosen for x in own[""].logprobs]
    same(answers, "")


def test_linears_without_an_adapter_of_their_own_beside_others(answers: list[Answers]) -> None:
    same(answers, "one linear", "")
