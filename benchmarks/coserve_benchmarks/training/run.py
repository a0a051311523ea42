"""`coserve bench training`: the whole table."""

import contextlib
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Any, Final

from coserve import tiny
from coserve.adapters.methods.lora import LoRAConfig
from coserve.config import EngineConfig
from coserve.engine.engine import Engine
from coserve.train.config import TrainingConfig
from coserve.workload.requests import fixed_prompts
from coserve_benchmarks.folder import save_shape
from coserve_benchmarks.groups import begin, run_groups
from coserve_benchmarks.ours import Bench, make_engine
from coserve_benchmarks.results import Bar
from coserve_benchmarks.served import Served
from coserve_benchmarks.timing import alternate, speedup
from coserve_benchmarks.training import compatibility, tinker_steps
from coserve_benchmarks.training.parity import PLAIN, difference
from coserve_benchmarks.training.preferred import Preferred
from coserve_benchmarks.training.rollouts import Reward, Rollouts, Sizes

GROUPS: Final = ("methods", "losses", "overhead", "rl", "curves")
BARS: Final[dict[str, Bar | None]] = {
    "tinker.methods_share": Bar(0.95),
    "tinker.step_overhead": Bar(1.15, at_most=True),
    "losses.difference": Bar(1e-5, at_most=True),
    "rl.vs_turns": Bar(0.95, at_most=True),
    "rl.curve": None,
}
_DRAWS: Final = 20  # of each loss
_FULL, _QUICK = Sizes(8, 4, 64), Sizes(2, 2, 8)
_PROMPT: Final = 64  # tokens of a prompt
_WORDS: Final = ("Once upon a time", "The old man", "In the morning", "Nobody knew")
_LEARNING: Final = Sizes(len(_WORDS), 8, 16)
_RATE: Final = 4e-3


def run_training(
    shape: str = "255m",
    quick: bool = False,
    only: Collection[str] | None = None,
    json_path: str | Path | None = None,
) -> dict[str, Any]:
    """Measures the rows of some groups (all, by default) and returns what `--json` writes. Raises ConfigError
    for an unknown shape or group, ServerError where a server does not do what it should."""
    groups = GROUPS if only is None else tuple(only)
    bench = begin(shape, quick, groups, GROUPS, json_path, BARS)
    rows = _TrainingRows(bench, quick)
    run_groups(bench, groups, {group: getattr(rows, group) for group in GROUPS})
    return bench.results.as_dict()


class _TrainingRows:
    """Rows of the table, a method for each group."""

    def __init__(self, bench: Bench, is_quick: bool) -> None:
        self._bench, self._results, self._is_quick = bench, bench.results, is_quick

    def methods(self) -> None:
        """The share of the client's public methods that work, each called at a server with the embedded
        model. The client finds a tokenizer by its base's name: a folder in the present one."""
        with tempfile.TemporaryDirectory(prefix="coserve-tinker-") as folder:
            model = Path(folder, "tiny")
            model.symlink_to(tiny.path())
            settings: dict[str, Any] = {
                "engine_cache_tokens": 4096,
                "engine_dtype": "float32",
                "engine_calibrate": False,
                "name": model.name,
            }
            with Served(model, Path(folder), standby=False, **settings) as served, contextlib.chdir(folder):
                found = compatibility.check(served.url, tinker_steps.KEY, served.name)
        for client in compatibility.METHODS:
            own = [one for one in found if one.client == client]
            works = sum(one.works for one in own)
            self._results.figure(f"tinker.methods[{client}]", works, f"of {len(own)} methods")
        lacking = [one for one in found if not one.works]
        note = "; ".join(f"{one.client}.{one.method}: {one.note}" for one in lacking)
        self._results.row("tinker.methods_share", compatibility.share(found), note=note)

    def losses(self) -> None:
        """The greatest difference of each loss and its gradient, in float32, from a plain computation in
        float64."""
        greatest = 0.0
        for name in PLAIN:
            drawn = [difference(name, seed) for seed in range(_DRAWS)]
            value, gradient = max(one.value for one in drawn), max(one.gradient for one in drawn)
            self._results.figure(f"losses.{name}", value, "relative difference of the loss")
            self._results.figure(
                f"losses.{name}.gradient", gradient, "of the gradient, to its greatest entry"
            )
            greatest = max(greatest, value, gradient)
        self._results.row("losses.difference", greatest, note=f"over {_DRAWS} batches of each loss")

    def overhead(self) -> None:
        """See `tinker_steps`."""
        with tempfile.TemporaryDirectory(prefix="coserve-bench-") as folder:
            model = save_shape(self._bench.shape, Path(folder))
            with Served(model, Path(folder), **tinker_steps.SERVER) as served:
                tinker_steps.measure(self._bench, served)

    def rl(self) -> None:
        """Seconds of a GRPO step whose training and next sampling are in the same steps, over those of one
        that samples and then trains; each policy has an engine of its own, of which one is idle."""
        bench, results = self._bench, self._results
        sizes = _QUICK if self._is_quick else _FULL
        prompts = fixed_prompts(sizes.prompts, _PROMPT, bench.shape.vocabulary, bench.settings.seed)
        policies = [_policy(make_engine(bench), prompts, sizes, bench.shape.vocabulary) for _ in range(2)]
        contestants = {"turns": policies[0].in_turns, "together": policies[1].together}
        times = alternate(contestants, bench.settings.train_rounds, bench.machine.threads)
        for name, taken in times.items():
            results.figure(f"rl.{name}", taken.median, "s a step", (taken.low, taken.high))
        ratio = speedup(times["turns"], times["together"])
        count = sizes.prompts * sizes.group
        note = (
            f"{count} answers of {sizes.answer} tokens to {sizes.prompts} prompts of {_PROMPT}, rank 8 on "
            "all linears; sampling has the bounds of `flex`"
        )
        results.ratio("rl.vs_turns", ratio, note)

    def curves(self) -> None:
        """The embedded model learns words that begin with s, in turns and together, from as many samples: the
        reward of the last quarter of the steps, together over in turns. And by DPO, from pairs of samples."""
        steps, last = (8, 2) if self._is_quick else (40, 10)
        reached = {}
        for name in ("turns", "together"):
            policy = _learner(self._bench.settings.seed)
            step = policy.in_turns if name == "turns" else policy.together
            for _ in range(steps):
                step()
            self._results.series(f"rl.reward.{name}", policy.rewards)
            reached[name] = sum(policy.rewards[-last:]) / last
            self._results.figure(f"rl.reward_{name}", reached[name], f"mean reward of the last {last} steps")
            first = policy.rewards[0]
            self._results.figure(f"rl.reward_{name}_first", first, "mean reward of the first step")
        note = f"{steps} steps on {_LEARNING.prompts * _LEARNING.group} answers each"
        self._results.row("rl.curve", reached["together"] / max(reached["turns"], 1e-9), note=note)
        self._dpo_curve()

    def _dpo_curve(self) -> None:
        """The same task from pairs of sampled answers."""
        engine, prompts, reward = _learning_engine()
        rounds, epochs, batch = (1, 1, 2) if self._is_quick else (16, 4, 8)
        preferred = Preferred(engine, prompts, reward, _LEARNING.answer, rounds)
        self._results.figure("dpo.pairs", len(preferred.pairs), "of the best and the worst of 8 answers")
        self._results.figure("dpo.reward_first", preferred.mean_reward(None), "mean reward of the base")
        history = preferred.train("preferred", epochs, batch)
        self._results.series("dpo.loss", [one.loss for one in history])
        for name in ("margins", "accuracies"):
            found = [one.metrics[f"rewards/{name}"] for one in history]
            self._results.series(f"dpo.{name}", found)
            self._results.figure(f"dpo.{name}", found[-1], f"rewards/{name} of step {len(found)}")
        self._results.figure("dpo.reward", preferred.mean_reward("preferred"), "mean reward after DPO")


def _policy(engine: Engine, prompts: Any, sizes: Sizes, vocabulary: int) -> Rollouts:
    """A policy of random words, rewarded for tokens in the lower half of the vocabulary."""
    session = engine.open_training("policy", LoRAConfig(rank=8), TrainingConfig())
    reward = lambda tokens: sum(token < vocabulary // 2 for token in tokens) / len(tokens)  # noqa: E731
    return Rollouts(engine, session, prompts, reward, sizes, 1e-4)


def _learner(seed: int) -> Rollouts:
    engine, prompts, reward = _learning_engine()
    session = engine.open_training("policy", LoRAConfig(rank=16), TrainingConfig(seed=seed))
    return Rollouts(engine, session, prompts, reward, _LEARNING, _RATE, ends=True)


def _learning_engine() -> tuple[Engine, list[tuple[int, ...]], Reward]:
    """The embedded model, prompts, and a reward: the share of an answer's words that begin with s."""
    engine = Engine(tiny.path(), EngineConfig(cache_tokens=4096, dtype="float32", calibrate=False))
    text = engine.text
    assert text is not None, "the embedded model has a tokenizer"

    def reward(tokens: Any) -> float:
        words = text.decode(list(tokens)).lower().split()
        return sum(word.startswith("s") for word in words) / max(len(words), 1)

    return engine, [tuple(text.encode(words)) for words in _WORDS], reward
