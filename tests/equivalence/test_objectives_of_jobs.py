"""Jobs that learn from pairs and rewards: every step's loss and figures, and the weights at the end, as
plain float64 training with transformers and PEFT has them."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from adapters import lora_adapter
from coserve import Engine, EngineConfig, LoRAConfig, TrainingConfig
from coserve.adapters.adapter import AdapterVersion
from coserve.adapters.lowrank import LoRABypass
from coserve.adapters.methods.prompt_tuning import PromptTuningConfig
from coserve.core.plan import Updated
from coserve.errors import AdapterNotFound, ConfigError, DataError
from coserve.train import distilled
from coserve.train.example import Example, Prepared, epochs
from coserve.train.fresh import fresh_adapter
from coserve.train.grading.graders import PythonGrader
from coserve.train.job import PreparedJob
from coserve.train.labelled import TokenAnswer
from coserve.train.objectives import DPO, KTO, ORPO, Distillation, Reinforcement
from coserve.train.pairs import TokenPair
from coserve.train.preferences import PreferenceSteps
from coserve.train.prompts import TokenPrompt
from coserve.train.reinforced import AnswerGroup, ReinforcedSteps
from coserve.train.state import TrainingState
from models import Exact, lora_parameters, prompts, tiny, with_lora
from training_runs import keep_states

LORA = LoRAConfig(rank=4, alpha=6.0)  # as `with_lora` makes them
RATE = 0.2
HUGE = 1e14  # with it as epsilon, and without memory, AdamW subtracts rate / epsilon times the gradient
PLAIN = {
    "learning_rate": RATE * HUGE,
    "epsilon": HUGE,
    "betas": (0.0, 0.0),
    "schedule": "constant",
    "warmup_ratio": 0.0,
    "max_grad_norm": None,
}
CLOSE = {"rtol": 1e-8, "atol": 1e-10}


def make_pairs(count: int = 5, seed: int = 0) -> list[TokenPair]:
    draws = random.Random(f"pairs {seed}" if seed else "pairs")
    made = []
    for _ in range(count):
        (asked,) = prompts(draws, [draws.randint(2, 6)])
        answers = prompts(draws, [draws.randint(2, 9), draws.randint(2, 9)])
        made.append(TokenPair(*(answered(asked, answer) for answer in answers)))
    return made


@dataclass
class Labelled:
    """A prompt, one answer to it, and whether that is desirable."""

    prompt: Sequence[int]
    answer: Sequence[int]
    desirable: bool

    @property
    def made(self) -> TokenAnswer:
        return TokenAnswer(answered(self.prompt, self.answer), self.desirable)


def make_labelled(count: int = 5, seed: int = 0) -> list[Labelled]:
    draws = random.Random(f"labelled {seed}" if seed else "labelled")
    found = [prompts(draws, [draws.randint(2, 6), draws.randint(2, 9)]) for _ in range(count)]
    return [Labelled(*pair, desirable=number % 3 != 1) for number, pair in enumerate(found)]


def make_examples(count: int = 5) -> list[Example]:
    draws = random.Random("examples")
    sizes = [[draw, draws.randint(2, 9)] for draw in (draws.randint(2, 6) for _ in range(count))]
    return [answered(*prompts(draws, size)) for size in sizes]


def answered(asked: Sequence[int], answer: Sequence[int]) -> Example:
    tokens = (*asked, *answer)
    return Example(tokens, (*[-100] * (len(asked) - 1), *answer, -100))


def whole(example: Example) -> Example:
    """With labels on the prompt too."""
    return Example(example.tokens, (*example.tokens[1:], -100))


def engine_of() -> Engine:
    with Exact():  # as its rotary tables are made when it is loaded
        return Engine(tiny("llama", torch.float64), EngineConfig(calibrate=False, cache_tokens=256))


@dataclass
class Plain:
    """Plain descent through PEFT, from an adapter of coserve's."""

    start: AdapterVersion
    model: Any = field(init=False)

    def __post_init__(self) -> None:
        oracle = tiny("llama", torch.float64)
        oracle.set_attn_implementation("eager")
        self.model = with_lora(oracle, seed=1)
        found = self.start.parameters()
        for path, pair in lora_parameters(self.model).items():
            for parameter, letter in zip(pair, "AB", strict=True):
                parameter.data.copy_(found[f"{path}.lora_{letter}"])
                parameter.requires_grad_()

    def logprobs(self, example: Example) -> Tensor:
        """Of the labels, in order."""
        logits = (
            self.model(input_ids=torch.tensor([example.tokens]), use_cache=False).logits[0].log_softmax(-1)
        )
        rows = [row for row, label in enumerate(example.labels) if label >= 0]
        return logits[rows, [example.labels[row] for row in rows]]

    def descend(self, loss: Tensor) -> None:
        flat = [p for pair in lora_parameters(self.model).values() for p in pair]
        for parameter, gradient in zip(flat, torch.autograd.grad(loss, flat), strict=True):
            parameter.data -= RATE * gradient

    def assert_same(self, trained: AdapterVersion, **close: float) -> None:
        found = trained.parameters()
        for path, pair in lora_parameters(self.model).items():
            for parameter, letter in zip(pair, "AB", strict=True):
                ours = found[f"{path}.lora_{letter}"]
                torch.testing.assert_close(ours, parameter.detach(), **(close or CLOSE))


def preference_steps(
    plain: Plain, pairs: Sequence[TokenPair], config: TrainingConfig, objective: DPO | ORPO
) -> list[dict[str, float]]:
    """Loss and figures of each step."""
    with torch.no_grad():
        reference = [[plain.logprobs(e).sum() for e in (p.chosen, p.rejected)] for p in pairs]
    told = []
    for indices in epochs(len(pairs), config.batch_size, config.epochs, config.seed):
        losses, rewards, likely = [], [], list[Tensor]()
        for i in indices:
            own = [plain.logprobs(example) for example in (pairs[i].chosen, pairs[i].rejected)]
            if isinstance(objective, DPO):
                won, lost = (o.sum() - r for o, r in zip(own, reference[i], strict=True))
                losses.append(-F.logsigmoid(objective.beta * (won - lost)))
            else:
                won, lost = (o.mean() for o in own)
                odds = [p - torch.log1p(-p.exp()) for p in (won, lost)]
                losses.append(-objective.beta * F.logsigmoid(odds[0] - odds[1]))
                on_all = objective.nll_on == "all"
                likely.append(plain.logprobs(whole(pairs[i].chosen)) if on_all else won[None])
            rewards.append([objective.beta * float(won), objective.beta * float(lost)])
        loss = torch.stack(losses).mean() - (torch.cat(likely).mean() if likely else 0.0)
        plain.descend(loss)
        chosen, rejected = torch.tensor(rewards, dtype=torch.float64).T
        told.append(
            {
                "loss": float(loss.detach()),
                "rewards/chosen": float(chosen.mean()),
                "rewards/rejected": float(rejected.mean()),
                "rewards/accuracies": float((chosen > rejected).double().mean()),
                "rewards/margins": float((chosen - rejected).mean()),
            }
        )
    return told


def kto_steps(
    plain: Plain, data: Sequence[Labelled], config: TrainingConfig, objective: KTO
) -> list[dict[str, float]]:
    """Loss and figures of each step, by TRL's definition: the divergence is that of each prompt with the
    answer before it in the data."""
    own = [answered(one.prompt, one.answer) for one in data]
    longest = max(map(len, own))
    mixed = []
    for one, before in zip(data, [data[-1], *data], strict=False):
        room = longest - len(one.prompt)  # longer pairs are cut to the longest of the data's own
        mixed.append(answered(one.prompt, before.answer[:room]))
    told, beta = [], objective.beta
    with torch.no_grad():
        reference = [
            [plain.logprobs(example).sum() for example in pair] for pair in zip(own, mixed, strict=True)
        ]
    for indices in epochs(len(data), config.batch_size, config.epochs, config.seed):
        with torch.no_grad():
            apart = [plain.logprobs(mixed[i]).sum() - reference[i][1] for i in indices]
        kl = max(float(torch.stack(apart).mean()), 0.0)
        losses, rewards = [], {True: list[float](), False: list[float]()}
        for i in indices:
            gain = plain.logprobs(own[i]).sum() - reference[i][0]
            rewards[data[i].desirable].append(beta * float(gain))
            if data[i].desirable:
                losses.append(objective.desirable_weight * (1 - torch.sigmoid(beta * (gain - kl))))
            else:
                losses.append(objective.undesirable_weight * (1 - torch.sigmoid(beta * (kl - gain))))
        loss = torch.stack(losses).mean()
        plain.descend(loss)
        figures = {"loss": float(loss.detach()), "kl": kl}
        for name, of_kind in (("chosen", rewards[True]), ("rejected", rewards[False])):
            if of_kind:
                figures[f"rewards/{name}"] = sum(of_kind) / len(of_kind)
        if rewards[True] and rewards[False]:
            figures["rewards/margins"] = figures["rewards/chosen"] - figures["rewards/rejected"]
        told.append(figures)
    return told


def told_by(history: Sequence[Updated]) -> list[dict[str, float]]:
    return [{"loss": updated.loss, **updated.metrics} for updated in history]


def assert_close(found: Sequence[dict[str, float]], wanted: Sequence[dict[str, float]]) -> None:
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        if (
            abs(other.get("rewards/margins", 1.0)) < 1e-12
        ):  # all pairs are alike: rounding decides who is ahead
            one = {**one, "rewards/accuracies": other["rewards/accuracies"]}
        assert one == pytest.approx(other, rel=1e-8, abs=1e-10)


def started(engine: Engine) -> AdapterVersion:
    """An adapter that changes the model already."""
    adapted = with_lora(tiny("llama", torch.float64), seed=2)
    bypasses = {
        path: LoRABypass(a.detach().clone(), b.detach().clone(), LORA.at([path]).scale(path, LORA.rank))
        for path, (a, b) in lora_parameters(adapted).items()
    }
    return lora_adapter("given", 0, LORA, bypasses)


def fresh(engine: Engine) -> AdapterVersion:
    return fresh_adapter(engine.base, "mine", LORA, 3)


@pytest.mark.sample(2)
@pytest.mark.parametrize("objective", [DPO(0.7), ORPO(0.6), ORPO(0.6, "answer")], ids=str)
@pytest.mark.parametrize("start", [started, fresh])
def test_a_job_on_pairs_is_plain_training(
    objective: DPO | ORPO, start: Callable[[Engine], AdapterVersion]
) -> None:
    """Six steps in two epochs, in micro-batches of few rows; the reference is the adapter that the job starts
    from, or the base."""
    engine, pairs = engine_of(), make_pairs()
    config = TrainingConfig(batch_size=2, epochs=2, seed=3, rows=40, **PLAIN)
    given = start(engine)
    with Exact():
        plain = Plain(given)
        wanted = preference_steps(plain, pairs, config, objective)
        continued = given if start is started else None
        job = engine.finetune(pairs, "mine", LORA, config, continued, objective=objective).result()
    assert len(job.history) == 6
    assert_close(told_by(job.history), wanted)
    plain.assert_same(engine.adapters.weights("mine"))
    assert wanted[0]["rewards/margins"] != wanted[-1]["rewards/margins"]


@pytest.mark.parametrize("start", [started, fresh])
def test_a_job_on_labelled_answers_is_plain_training(start: Callable[[Engine], AdapterVersion]) -> None:
    """Nine steps in three epochs; the divergence is above zero in some of them, and below in others."""
    engine, data = engine_of(), make_labelled()
    objective = KTO(0.7, desirable_weight=1.5, undesirable_weight=0.8)
    config = TrainingConfig(batch_size=2, epochs=3, seed=3, rows=24, **PLAIN)
    given = start(engine)
    with Exact():
        plain = Plain(given)
        wanted = kto_steps(plain, data, config, objective)
        continued = given if start is started else None
        answers = [one.made for one in data]
        job = engine.finetune(answers, "mine", LORA, config, continued, objective=objective).result()
    assert len(job.history) == 9
    assert any(one["kl"] > 1e-3 for one in wanted) and any(one["kl"] == 0.0 for one in wanted)
    assert_close(told_by(job.history), wanted)
    plain.assert_same(engine.adapters.weights("mine"))


def test_the_reference_of_a_fresh_prompt_is_the_base_without_it() -> None:
    engine, pairs, model = engine_of(), make_pairs(2), tiny("llama", torch.float64)
    with Exact(), torch.no_grad():
        job = engine.finetune(pairs, "mine", PromptTuningConfig(tokens=3), objective="dpo")
        steps = job.work
        assert isinstance(steps, PreferenceSteps)
        while not steps._reference:
            engine.step()
        for number, example in enumerate(e for pair in pairs for e in (pair.chosen, pair.rejected)):
            logits = (
                model(input_ids=torch.tensor([example.tokens]), use_cache=False).logits[0].log_softmax(-1)
            )
            wanted = [float(logits[row, t]) if t >= 0 else 0.0 for row, t in enumerate(example.labels)]
            assert list(steps._reference[number]) == pytest.approx(wanted, abs=1e-10)
    assert job.result().history[0].metrics["rewards/margins"] != 0.0


@pytest.mark.parametrize("objective", [DPO(0.7), ORPO(0.6), KTO(0.7)], ids=lambda one: one.name)
def test_a_resumed_job_on_pairs_is_the_uninterrupted_one(objective: DPO | ORPO | KTO) -> None:
    engine, states = engine_of(), list[TrainingState]()
    pairs: Any = make_pairs()
    if isinstance(objective, KTO):
        pairs = [one.made for one in make_labelled()]
    config = TrainingConfig(batch_size=2, epochs=2, learning_rate=1e-2, seed=3, rows=40)
    given = started(engine)
    with Exact():
        keeping = keep_states(states)
        whole = engine.finetune(
            pairs, "mine", LORA, config, given, objective=objective, keeping=keeping
        ).result()
        assert [state.loss for state in states] == [updated.loss for updated in whole.history]
        for state in (states[0], states[3]):
            rest = engine.finetune(
                pairs, "again", LORA, config, given, resume=state, objective=objective
            ).result()
            assert_close(told_by(rest.history), told_by(whole.history[state.step :]))
            ours, theirs = (engine.adapters.weights(name).parameters() for name in ("again", "mine"))
            for name, tensor in ours.items():
                torch.testing.assert_close(tensor, theirs[name], rtol=1e-9, atol=1e-12)


def distilled_steps(
    plain: Plain,
    teacher: Callable[[Sequence[int]], Tensor],
    examples: Sequence[Example],
    config: TrainingConfig,
    objective: Distillation,
) -> list[dict[str, float]]:
    """Loss and figures of each step; `teacher` gives the logits of all rows of a sequence."""
    told, heat = [], objective.temperature
    for indices in epochs(len(examples), config.batch_size, config.epochs, config.seed):
        total, mass, count, hits = torch.zeros((), dtype=torch.float64), 0.0, 0, 0
        for i in indices:
            rows = [row for row, label in enumerate(examples[i].labels) if label >= 0]
            with torch.no_grad():
                taught = teacher(examples[i].tokens)[rows]
            own = plain.model(input_ids=torch.tensor([examples[i].tokens]), use_cache=False).logits[0][rows]
            labels = torch.tensor(examples[i].labels)[rows]
            hits += int((own.argmax(-1) == labels).sum())
            for theirs, ours in zip(taught, own, strict=True):
                likely = theirs.argsort(descending=True)[: objective.top_k]
                wanted, found = (theirs[likely] / heat).softmax(0), (ours / heat).softmax(0)[likely]
                total = total + heat**2 * (wanted * (wanted / found).log()).sum()
                mass, count = mass + float(theirs.softmax(0)[likely].sum()), count + 1
        loss = total / count
        plain.descend(loss)
        accuracy = hits / count
        told.append(
            {
                "loss": float(loss.detach()),
                "teacher/top_k_mass": mass / count,
                "mean_token_accuracy": accuracy,
            }
        )
    return told


@pytest.mark.parametrize("start", [started, fresh])
@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_a_distilled_adapter_is_plain_training(
    start: Callable[[Engine], AdapterVersion], temperature: float
) -> None:
    """From a teacher of another method, whose virtual tokens the student has not, and from the base."""
    engine, examples = engine_of(), make_examples()
    config = TrainingConfig(batch_size=2, epochs=2, seed=3, rows=24, **PLAIN)
    given = start(engine)
    engine.adapters.add(fresh_adapter(engine.base, "teacher", PromptTuningConfig(tokens=3), 5))
    name = "teacher" if start is fresh else None
    objective = Distillation(name, top_k=6, temperature=temperature)
    rows = engine.adapters.weights("teacher").virtual.rows().detach() if name else None
    model = tiny("llama", torch.float64)

    def teacher(tokens: Sequence[int]) -> Tensor:
        embedded = model.get_input_embeddings()(torch.tensor([tokens]))
        if rows is None:
            return model(inputs_embeds=embedded, use_cache=False).logits[0]
        both = torch.cat([rows[None], embedded], 1)
        return model(inputs_embeds=both, use_cache=False).logits[0, len(rows) :]

    with Exact():
        plain = Plain(given)
        wanted = distilled_steps(plain, teacher, examples, config, objective)
        continued = given if start is started else None
        job = engine.finetune(examples, "mine", LORA, config, continued, objective=objective).result()
    assert len(job.history) == 6 and wanted[-1]["loss"] != wanted[0]["loss"]
    assert_close(told_by(job.history), wanted)
    plain.assert_same(engine.adapters.weights("mine"))


def test_a_resumed_distillation_is_the_uninterrupted_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the teacher's predictions are not kept from one step to the next."""
    engine, examples, states = engine_of(), make_examples(), list[TrainingState]()
    config = TrainingConfig(batch_size=2, epochs=2, learning_rate=1e-2, seed=3, rows=40)
    engine.adapters.add(replace(started(engine), name="teacher"))
    objective = Distillation("teacher", top_k=4)
    with Exact():
        keeping = keep_states(states)
        whole = engine.finetune(examples, "mine", LORA, config, objective=objective, keeping=keeping).result()
        monkeypatch.setattr(distilled, "_MOST_KEPT", 0)
        for state in (states[0], states[3]):
            rest = engine.finetune(
                examples, "again", LORA, config, resume=state, objective=objective
            ).result()
            assert_close(told_by(rest.history), told_by(whole.history[state.step :]))
            ours, theirs = (engine.adapters.weights(name).parameters() for name in ("again", "mine"))
            for name, tensor in ours.items():
                torch.testing.assert_close(tensor, theirs[name], rtol=1e-9, atol=1e-12)
    assert whole.history[-1].loss < whole.history[0].loss


def test_who_cannot_teach() -> None:
    engine, examples = engine_of(), make_examples(2)
    with pytest.raises(AdapterNotFound, match="nobody"):
        engine.finetune(examples, "mine", objective=Distillation("nobody"))
    first, aim = AdapterVersion("mine", 0, ()), Distillation(top_k=64)
    prepared = PreparedJob("j", "mine", Prepared(()), (), TrainingConfig(), first, objective=aim)
    with pytest.raises(ConfigError, match="top_k is 64, and the model has 32 tokens"):
        prepared.check_objective(32)
    long = PromptTuningConfig(tokens=engine.base.max_positions - 4)
    engine.adapters.add(fresh_adapter(engine.base, "long", long, 5))
    with pytest.raises(DataError, match="positions"):
        engine.finetune(examples, "mine", objective=Distillation("long", top_k=4))


@pytest.mark.parametrize("clip", [None, 0.2])
def test_a_step_on_rewards_is_plain_policy_gradient(
    clip: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens of groups whose answers have equal rewards count among those that the loss is divided by."""
    engine, seen = engine_of(), list[list[AnswerGroup]]()
    offer = ReinforcedSteps.offer

    def watched(self: ReinforcedSteps, groups: Sequence[AnswerGroup]) -> None:
        seen.append([*groups])
        offer(self, groups)

    monkeypatch.setattr(ReinforcedSteps, "offer", watched)
    rewards = random.Random(5)
    grader = PythonGrader(lambda answer, item: rewards.choice([0.0, 0.3, 1.0]))
    asked = [TokenPrompt(tuple(tokens), {}) for tokens in prompts(random.Random(1), [3, 5, 4])]
    config = TrainingConfig(batch_size=2, epochs=2, seed=3, rows=40, **PLAIN)
    given = started(engine)
    objective = Reinforcement(grader, group_size=3, max_tokens=6, clip=clip)
    with Exact():
        plain = Plain(given)
        job = engine.finetune(asked, "mine", LORA, config, given, objective=objective).result()
        assert len(job.history) == len(seen) == 4
        for groups, updated in zip(seen, job.history, strict=True):
            total, count = torch.zeros((), dtype=torch.float64), 0
            for group in groups:
                scores = torch.tensor(group.rewards, dtype=torch.float64)
                for answer, reward in zip(group.answers, scores, strict=True):
                    advantage = (reward - scores.mean()) / (scores.std() + 1e-4)
                    own = plain.logprobs(answered(group.prompt, answer.tokens))
                    ratio = (own - torch.tensor(answer.logprobs, dtype=torch.float64)).exp()
                    gain = ratio * advantage
                    if clip is not None:
                        gain = torch.minimum(gain, ratio.clamp(1 - clip, 1 + clip) * advantage)
                    total, count = total - gain.sum(), count + len(answer.tokens)
            loss = total / count
            assert updated.loss == pytest.approx(float(loss.detach()), rel=1e-6, abs=1e-8)
            plain.descend(loss)
    plain.assert_same(engine.adapters.weights("mine"))
