"""The steps of a prepared job, by its objective."""

from coserve.engine.finetuning import PreparedJob
from coserve.model.base import Base
from coserve.train.distilled import DistilledSteps
from coserve.train.objectives import KTO, Distillation, Reinforcement, Supervised
from coserve.train.packing import Packing
from coserve.train.preferences import LabelledSteps, PreferenceSteps
from coserve.train.reinforced import ReinforcedSteps
from coserve.train.steps import JobSteps
from coserve.train.supervised import SupervisedSteps


def make_steps(prepared: PreparedJob, adapter: str, base: Base) -> JobSteps:
    """Steps of a job that trains from the version `adapter`. Raises JobError where the job's saved state is
    of another job."""
    data, config, resume = prepared.data, prepared.config, prepared.resume
    packing, done = Packing.of(prepared.job, base, prepared.first(base).virtual), resume.step if resume else 0
    steps: JobSteps
    match prepared.objective:
        case Supervised():
            steps = SupervisedSteps(adapter, data.examples, config, packing, data.digest, done)
        case Reinforcement() as objective:
            steps = ReinforcedSteps(objective, adapter, data.examples, config, packing, data.digest, done)
        case Distillation() as objective:
            steps = DistilledSteps(
                objective, adapter, data.examples, config, packing, _of_reference(prepared, base),
                data.digest, done,
            )  # fmt: skip
        case KTO() as objective:
            steps = LabelledSteps(
                objective, adapter, data.examples, data.desirable, config, packing,
                _of_reference(prepared, base), data.digest, done,
            )  # fmt: skip
        case objective:
            steps = PreferenceSteps(
                objective, adapter, data.examples, config, packing, _of_reference(prepared, base),
                data.digest, done,
            )  # fmt: skip
    if resume is not None:
        steps.identity.expect(resume.identity)
    return steps


def _of_reference(prepared: PreparedJob, base: Base) -> Packing:
    """Packs the reference of a job's training: the base alone, or another adapter."""
    reference = prepared.reference
    return Packing.of(prepared.job, base, None if reference is None else reference.virtual)
