"""Rows `finetune.*`: tokens a second with the optimizer's step, and the bytes kept for the backward pass."""

from functools import partial

from coserve.core.plan import BasePlan
from coserve.core.sequence import Direction
from coserve.engine.engine import Engine
from coserve.train.save_policy import SavePolicy
from coserve_benchmarks.floors import train_flops
from coserve_benchmarks.ours import Bench, batch_tokens, make_engine, seconds_of_steps, start_training
from coserve_benchmarks.peers import PeftTraining
from coserve_benchmarks.plans import local_sessions, watch_plans
from coserve_benchmarks.timing import Timing, alternate, speedup


def run(bench: Bench) -> None:
    """Measures ours keeping products against PEFT without checkpointing, and ours keeping inputs against PEFT
    with it."""
    default = PeftTraining(bench.shape, batch_tokens(bench), bench.settings.rank, matched=False)
    matched = PeftTraining(bench.shape, batch_tokens(bench), bench.settings.rank, matched=True)

    engine = _training_engine(bench, SavePolicy.INPUTS)
    _bytes_row(bench, engine, matched)
    _speed_rows(bench, engine, "_checkpointing", default, matched)
    del engine
    _speed_rows(bench, _training_engine(bench, SavePolicy.EVERYTHING), "", default, matched)


def peak(bench: Bench) -> float:
    """Our tokens a second of the third row, measured now if that row has not been."""
    if "finetune.ours" not in bench.results.figures:
        engine = _training_engine(bench, SavePolicy.EVERYTHING)
        ours = partial(seconds_of_steps, engine)
        times = alternate({"ours": ours}, bench.settings.train_rounds, bench.machine.threads)
        _figure(bench, "finetune.ours", times["ours"], recompute=False)
    return bench.results.figures["finetune.ours"].value


def _speed_rows(
    bench: Bench, engine: Engine, suffix: str, default: PeftTraining, matched: PeftTraining
) -> None:
    recompute = bool(suffix)
    for name, peer in (("peft", default), ("peft_matched", matched)):
        tried = peer.tune(recompute, bench.machine.threads, bench.compiled)
        infix = name.removeprefix("peft")
        bench.results.peer(f"finetune.peft{suffix}{infix}", peer.settings(recompute).describe(), tried)
    contestants = {
        "ours": partial(seconds_of_steps, engine),
        "peft": partial(default.step, checkpointing=recompute),
        "peft_matched": partial(matched.step, checkpointing=recompute),
    }
    times = alternate(contestants, bench.settings.train_rounds, bench.machine.threads)
    for name, taken in times.items():
        infix = "_matched" if name == "peft_matched" else ""
        label = f"finetune.{name.removesuffix('_matched')}{suffix}{infix}"
        _figure(bench, label, taken, recompute)
    for peer, infix in ((default, ""), (matched, "_matched")):
        ratio = speedup(times["ours"], times[f"peft{infix}"])
        note = f"the peer runs with {peer.settings(recompute).describe()}, the best that it was tried with"
        bench.results.ratio(f"finetune.vs_peft{suffix}{infix}", ratio, note)


def _bytes_row(bench: Bench, engine: Engine, matched: PeftTraining) -> None:
    ours = _activation_bytes(engine)
    activations, logits = matched.saved_bytes()
    checkpoints, _ = matched.saved_bytes(checkpointing=True)
    results = bench.results
    settings, shape = bench.settings, bench.shape
    # Whoever recomputes layer by layer needs one bfloat16 input for each.
    floor = 2 * settings.batch * settings.length * shape.hidden * shape.layers
    results.figure("finetune.ours_bytes", ours, "bytes", floor=lambda: floor)
    results.figure("finetune.peft_matched_bytes", activations, "bytes")
    results.figure("finetune.peft_checkpointing_matched_bytes", checkpoints, "bytes")
    results.figure("finetune.peft_matched_logits", logits, "bytes")
    note = "held between forward and backward, logits left out of both; ours are made and spent in chunks"
    results.row("finetune.activation_bytes_vs_peft", ours / activations, note=f"{note}; PEFT keeps all")
    name = "finetune.activation_bytes_vs_peft_checkpointing"
    results.row(name, ours / checkpoints, note=f"{note}; both compute what is within a layer again")


def _activation_bytes(engine: Engine) -> int:
    """Bytes of a micro-batch's activations when its last row has come through the last layer."""
    found: list[int] = []

    def look(plan: BasePlan) -> None:
        for segment in plan.training:
            micro_batch = local_sessions(engine)[segment.job].micro_batches[segment.key]
            length = sum(micro_batch.start.lengths)
            is_last = segment.start + segment.length == length and segment.span.last == segment.layers
            if segment.direction is Direction.TRAIN_FORWARD and is_last:
                found.append(micro_batch.nbytes)

    with watch_plans(engine, look):
        while not found:
            engine.step()
    return found[0]


def _training_engine(bench: Bench, keep: SavePolicy) -> Engine:
    engine = make_engine(bench, cache_tokens=min(1024, bench.shape.positions))
    start_training(engine, bench, "bench", keep)
    return engine


def _figure(bench: Bench, name: str, times: Timing, recompute: bool) -> None:
    settings = bench.settings
    tokens = settings.batch * settings.length
    flops = train_flops(bench.shape, settings.batch, settings.length, settings.rank, recompute)
    spread = (tokens / times.high, tokens / times.low)
    bench.results.figure(
        name,
        tokens / times.median,
        "tokens/s",
        spread,
        lambda: tokens / bench.machine.floor_train_seconds(flops),
    )
