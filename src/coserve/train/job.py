"""A job, or a training session, with everything read that it trains from."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from coserve.adapters.activation import invocation_of, last_invocation, listed_tokens
from coserve.adapters.adapter import AdapterVersion
from coserve.adapters.paging.stored import StoredVersion
from coserve.errors import ConfigError, DataError
from coserve.model.base import Base
from coserve.train.checkpoint import Checkpoint
from coserve.train.config import TrainingConfig
from coserve.train.example import Example, Prepared
from coserve.train.needs import JobNeeds, Steps, job_needs
from coserve.train.objectives import SUPERVISED, Distillation, Objective, Reinforcement
from coserve.train.state import TrainingState


@dataclass(frozen=True, slots=True)
class PreparedJob:
    """A fine-tuning job with its data read, or a training session, which has no data: they come pass by pass.

    `methods` are the settings of its adapter's methods. `first` is the version that training begins with; of
    one that `is_fresh` it is the shapes alone. `resume` is the state to resume from. `reference` is the
    adapter that an objective compares with, or that teaches; None is the base alone.

    A server's job may have `validation` data, scored once under the adapter `validation_reference` where the
    objective has a reference (None is the base), and the `checkpoint` on disk that it resumes from.
    """

    job: str
    adapter: str
    data: Prepared
    methods: tuple[object, ...]
    config: TrainingConfig
    first: AdapterVersion
    is_fresh: bool = False
    resume: TrainingState | None = None
    objective: Objective = SUPERVISED
    reference: AdapterVersion | None = None
    validation: Prepared | None = None
    validation_reference: StoredVersion | None = None
    checkpoint: Checkpoint | None = None

    @property
    def units(self) -> int:
        """Number of examples, pairs or prompts."""
        return len(self.data.examples) // self.objective.group

    @property
    def lengths(self) -> list[int]:
        """Rows of each unit, or of each answer to one."""
        group, rows = self.objective.group, [len(example) for example in self.data.examples]
        sampled = answer_tokens(self.objective)
        return [sum(rows[i : i + group]) + sampled for i in range(0, len(rows), group)]

    @property
    def reserved(self) -> int:
        """See `reserved_positions`."""
        return reserved_positions(self.first, self.reference, self.objective)

    def needs(self, base: Base, steps: Steps, lengths: Sequence[int] | None = None) -> JobNeeds:
        """Bytes of the job on an engine with the limits `steps`; of a session with micro-batches of at most
        `config.rows` rows. `lengths` stand in for those of its units."""
        config, first = self.config, self.first
        if not self.data.examples:
            full = max(config.rows - first.virtual.prompt_count, 1)
            config = replace(config, batch_size=steps.in_flight)
            return job_needs(base, first, [full] * steps.in_flight, config, steps, accumulates=True)
        answers = self.objective.group_size if isinstance(self.objective, Reinforcement) else 1
        units = self.lengths if lengths is None else lengths
        config = replace(config, batch_size=config.batch_size * answers)
        rows = [length for length in units for _ in range(answers)]  # each answer is an example of its own
        return job_needs(base, first, rows, config, steps, reference=self.reference)

    def check_objective(self, vocabulary: int) -> None:
        """Raises ConfigError where a setting of the objective is invalid for a model of `vocabulary`
        tokens."""
        if isinstance(self.objective, Distillation) and self.objective.top_k > vocabulary:
            raise ConfigError(
                f"distillation.top_k is {self.objective.top_k}, and the model has {vocabulary} tokens"
            )


def check_invoked(examples: Sequence[Example], group: int, *adapters: AdapterVersion | None) -> None:
    """Raises DataError for an example, in groups of so many, on none of whose rows one of the adapters acts,
    as it has not the tokens from which on it does."""
    for adapter in adapters:
        invocation = () if adapter is None else invocation_of(adapter)
        for index, example in enumerate(examples if invocation else ()):
            if last_invocation(example.tokens, invocation) is None:
                raise DataError(
                    f"example {index // group + 1} has none of the tokens from which on the adapter acts "
                    f"({listed_tokens(invocation)}): put them where the answer begins, or leave it out"
                )


def answer_tokens(objective: Objective) -> int:
    """Most tokens of an answer that is sampled for training; 0 for objectives without such answers."""
    return objective.max_tokens if isinstance(objective, Reinforcement) else 0


def reserved_positions(first: AdapterVersion, reference: AdapterVersion | None, objective: Objective) -> int:
    """Positions of the model that examples leave to virtual tokens, those of the adapter in training or of
    what it is compared with, and to answers."""
    beside = 0 if reference is None else reference.virtual.count
    return max(first.virtual.count + answer_tokens(objective), beside)
