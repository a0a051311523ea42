"""FlexLLM's setting (arXiv 2402.18789, section 8.1) on its class of hardware: how much fine-tuning is kept.

There: OPT-13B, LLaMA-30B and LLaMA-2-70B on 4, 8 and 16 A100 of 40 GB, prompts of 256 tokens and answers of
64, bounds of 50, 80 and 110 ms a token, fine-tuning on sequences of 1,024 tokens with LoRA of rank 8 on the
MLP. Against it resource isolation (some devices serve, the others train), temporal and spatial sharing (8.3).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from coserve.core.request import SLO
from coserve.simulate.loads import SimulatedLoad, TrainingLoad
from coserve.simulate.outcome import RunFigures, figures_of
from coserve.simulate.runs import FleetSettings, Simulator
from coserve.workload.shapes import shape_named

HARDWARE: Final = "a100-40"
POLICIES: Final = ("hybrid", "adaptive", "temporal:8,grain=batch", "spatial")
ISOLATED: Final = "isolation"
COSERVED: Final = ("hybrid", "adaptive")
RATES: Final = (2.5, 5.0, 10.0)  # requests a second; the last is their "very high" rate (8.3)
HEAVY: Final = RATES[-1]
FULL: Final = 0.95  # of the requests a second that all devices answer within the bound: beyond their loads
PROMISED: Final = 0.99  # of the requests, within their bounds
THEIRS: Final = 0.80  # of the peak is kept at heavy load (abstract and 8.1)
_RANK: Final = 8
_NOBODY: Final = 1e-9  # requests a second: a single one comes
_PATIENT: Final = 10.0  # seconds to the first token: theirs is not bounded, and no line may grow without end


@dataclass(frozen=True, slots=True)
class Setting:
    """A model of theirs, its devices, and its bound between tokens, seconds.

    An engine has `degree` devices: a node of four, as there, or eight where a job does not fit beside the
    weights; there such models are pipelines of nodes. Isolation divides the devices into engines of `apart`.
    """

    name: str
    shape: str
    devices: int
    degree: int
    apart: int
    bound: float

    @property
    def engines(self) -> int:
        """Engines on all devices."""
        return self.devices // self.degree


SETTINGS: Final = (
    Setting("OPT-13B", "13b", 4, 4, 2, 0.050),
    Setting("LLaMA-30B", "30b", 8, 4, 4, 0.080),
    Setting("LLaMA-2-70B", "70b-32k", 16, 8, 8, 0.110),
)


@dataclass(frozen=True, slots=True)
class KeptShare:
    """A policy at one rate: the share of the peak that it trains, and the share of requests within bounds."""

    policy: str
    rate: float
    kept: float
    within: float
    note: str = ""


class FlexLLM:
    """Runs one setting. `seconds` are those of each run, `say` is told what is being run."""

    def __init__(
        self,
        setting: Setting,
        seconds: float,
        seed: int = 0,
        say: Callable[[str], object] = lambda text: None,
    ) -> None:
        self.setting, self._seed, self._say = setting, seed, say
        self._fleet = FleetSettings(
            shape_named(setting.shape), HARDWARE, "hybrid", setting.engines, setting.degree, rank=_RANK
        )
        slo = SLO(first_token=_PATIENT, between_tokens=setting.bound)
        self._load = SimulatedLoad(seconds, 1.0, slo=slo)
        self._training = TrainingLoad(1, 1, 1024)

    def run(self, rates: Sequence[float] = RATES, policies: Sequence[str] = POLICIES) -> dict[str, Any]:
        """All policies at all rates, and at `FULL` of the capacity; with the peak (tokens a second) and the
        capacity (requests a second)."""
        peak, capacity = self.peak(), self.capacity()
        kept = [one for rate in (*rates, FULL * capacity) for one in self.at(rate, peak, policies)]
        return {
            "model": self.setting.name,
            "devices": self.setting.devices,
            "degree": self.setting.degree,
            "bound": self.setting.bound,
            "peak": peak,
            "capacity": capacity,
            "kept": [asdict(one) for one in kept],
        }

    def peak(self) -> float:
        """Fine-tuning tokens a second of all engines without requests, under the better policy."""
        return self._peak(self.setting.engines, self.setting.degree)

    def _peak(self, engines: int, degree: int) -> float:
        return max(self._run(policy, _NOBODY, engines, degree, True).training for policy in COSERVED)

    def capacity(self) -> float:
        """Requests a second that all engines answer within the bounds, without training; to a twentieth."""
        low, high = 0.0, 1.0
        engines, degree = self.setting.engines, self.setting.degree
        while self._holds(high, engines, degree):
            low, high = high, 2 * high
        while high - low > high / 20:
            middle = (low + high) / 2
            low, high = (middle, high) if self._holds(middle, engines, degree) else (low, middle)
        return low

    def at(self, rate: float, peak: float, policies: Sequence[str] = POLICIES) -> Iterator[KeptShare]:
        """All policies at one rate, and isolation: as few engines as hold the bounds serve, others train."""
        for policy in policies:
            found = self._run(policy, rate, self.setting.engines, self.setting.degree, True)
            yield KeptShare(policy, rate, found.training / peak, found.within)
        apart = self.setting.apart
        engines = self.setting.devices // apart
        serving = next((n for n in range(1, engines) if self._holds(rate, n, apart)), engines)
        training = self._peak(engines - serving, apart) if serving < engines else 0.0
        within = self._run("hybrid", rate, serving, apart, False).within
        note = f"{serving} of {engines} engines serve"
        yield KeptShare(ISOLATED, rate, training / peak, within, note)

    def _holds(self, rate: float, engines: int, degree: int) -> bool:
        found = self._run("hybrid", rate, engines, degree, False)
        return found.within >= PROMISED

    def _run(self, policy: str, rate: float, engines: int, degree: int, trains: bool) -> RunFigures:
        self._say(f"{self.setting.name}: {policy}, {rate:.3g} requests/s on {engines} engines of {degree}")
        load = replace(self._load, rate=rate, training=self._training if trains else TrainingLoad())
        fleet = replace(self._fleet, policy=policy, engines=engines, degree=degree)
        return figures_of(Simulator(fleet, load).run(self._seed))
