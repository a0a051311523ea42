"""The paper's figures and tables that this hardware can show, as series: figures 10 to 12, 22, 23, table 2.

The paper's clients and executor are on GPUs; here all are processes on one CPU, so directions compare, sizes
do not.
"""

from statistics import mean, median

from coserve_benchmarks.split.orders import RoundReport, Work
from coserve_benchmarks.split.processes import Clients, PeakMemory
from coserve_benchmarks.split.testbed import LORAS, Testbed, rate_of


class Figures:
    """Measures series, each a list of medians over rounds."""

    def __init__(self, bed: Testbed) -> None:
        self._bed, self._results, self._sizes = bed, bed.results, bed.sizes

    def measure(self) -> None:
        """All of them."""
        self._by_clients()
        self._by_adapter()
        self._mixed()

    def _by_clients(self) -> None:
        """Figures 10 to 12: memory, seconds of a step and tokens a second, by the number of training
        clients, and of as many processes with PEFT."""
        bed, counts = self._bed, self._sizes.counts
        most = max(counts)
        found: dict[str, list[list[float]]] = {"split": [], "separate": []}
        with (
            bed.executor(bed.bench.machine.threads) as executor,
            Clients(bed.trainers(most, executor.address)) as split,
        ):
            for count in counts:
                with Clients(bed.peers(count)) as separate:
                    contestants = (("split", split, [executor.pid]), ("separate", separate, list[int]()))
                    for name, clients, beside in contestants:
                        with PeakMemory([*beside, *clients.pids[:count]]) as memory:
                            rounds = self._rounds(clients, count)
                        found[name].append(
                            [median(map(_step, rounds)), median(map(rate_of, rounds)), memory.nbytes]
                        )
        self._results.series("clients", counts)
        for name, rows in found.items():
            for kind, values in zip(("step", "rate", "memory"), zip(*rows, strict=True), strict=True):
                self._results.series(f"clients.{name}.{kind}", values)

    def _by_adapter(self) -> None:
        """Table 2: seconds of a training step of LoRA 1 to 4, of a client and of a process with PEFT."""
        bed = self._bed
        with bed.executor(bed.bench.machine.threads) as executor:
            orders = {
                "split": [bed.order(address=executor.address, **lora) for lora in LORAS],
                "separate": [order for lora in LORAS for order in bed.peers(1, **lora)],
            }
            for name, of_name in orders.items():
                steps = []
                for order in of_name:
                    with Clients([order]) as one:
                        steps.append(median(map(_step, self._rounds(one, 1))))
                self._results.series(f"adapters.{name}", steps)

    def _mixed(self) -> None:
        """Figures 22 and 23: tokens a second of eight decoding clients, and of six beside two that train."""
        bed, most = self._bed, self._sizes.mixed
        with bed.executor(bed.bench.machine.threads) as executor:
            decoding = [
                bed.order(act="decode", batch=2, seed=k, address=executor.address) for k in range(most)
            ]
            with Clients(decoding) as answers:
                alone = self._rounds(answers, most, "decode")
                with Clients(bed.trainers(2, executor.address)) as training:
                    beside = []
                    for _ in range(self._sizes.figure_rounds):
                        ended = answers.begin("decode", self._sizes.seconds, most - 2)
                        trained = training.run("train", self._sizes.seconds)
                        beside.append((ended(), trained))
        rates = [median(map(rate_of, alone))]
        self._results.series("mixed.decoding", [*rates, median(rate_of(one) for one, _ in beside)])
        self._results.series("mixed.training", [0.0, median(rate_of(other) for _, other in beside)])
        steps = [median(map(_step, alone)), median(_step(one) for one, _ in beside)]
        self._results.series("mixed.step", steps)

    def _rounds(self, clients: Clients, count: int, work: Work = "train") -> list[list[RoundReport]]:
        clients.run(work, 0.0, count)
        rounds = range(self._sizes.figure_rounds)
        return [clients.run(work, self._sizes.seconds, count) for _ in rounds]


def _step(reports: list[RoundReport]) -> float:
    """Mean seconds of a step."""
    return mean(mean(report.steps) for report in reports)
