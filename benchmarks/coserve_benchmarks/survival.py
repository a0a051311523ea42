"""Rows `kill.*`: what streams and jobs see of processes that are killed under them."""

import random
import tempfile
from pathlib import Path

from coserve_benchmarks.folder import training_file
from coserve_benchmarks.kills import Kills, Outcome, Work
from coserve_benchmarks.ours import CACHE_TOKENS, Bench
from coserve_benchmarks.served import Served, Victim

_VICTIMS = (Victim.ENGINE, Victim.API, Victim.ENGINE, Victim.EVERYTHING)  # over and over
_CHECKPOINTS = 4  # optimizer steps between two


def run(bench: Bench, model: Path) -> None:
    """An uninterrupted run in the deterministic mode, then the same with a kill in each."""
    settings = bench.settings
    batch = settings.server_batch
    examples = training_file(bench.shape, settings.kill_steps * batch, settings.kill_length, settings.seed)
    work = Work(
        streams=settings.kill_streams,
        prompt=settings.kill_prompt,
        answer=settings.kill_answer,
        vocabulary=bench.shape.vocabulary,
        data=examples,
        batch=batch,
    )
    draw = random.Random(settings.seed)
    outcomes = []
    with (
        tempfile.TemporaryDirectory(dir=model.parent) as folder,
        Served(
            model,
            Path(folder),
            engine_cache_tokens=CACHE_TOKENS,
            engine_prefix_sharing=False,
            engine_deterministic=True,
            checkpoint_steps=_CHECKPOINTS,
        ) as served,
    ):
        kills = Kills(served, work)
        try:
            kills.peace()
            for number in range(settings.kills):
                served.wait_standby()
                outcomes.append(kills.strike(_VICTIMS[number % len(_VICTIMS)], draw))
            lost = kills.lost_in_all()
        finally:
            kills.close()
        tell(bench, outcomes, lost, kills.longest_calm_gap)


def tell(bench: Bench, outcomes: list[Outcome], lost_at_the_end: list[str], calm_gap: float) -> None:
    """Rows and figures of all outcomes."""
    results = bench.results
    lost = {thing for outcome in outcomes for thing in outcome.lost} | set(lost_at_the_end)
    wrong = [thing for outcome in outcomes for thing in outcome.wrong]
    for number, thing in enumerate([*sorted(lost), *wrong], 1):
        results.note(f"kill.fault_{number}", thing)
    acknowledged = sum(outcome.acknowledged for outcome in outcomes)
    count = ", ".join(f"{sum(o.victim is victim for o in outcomes)} of {victim}" for victim in Victim)
    note = f"of {acknowledged} that were acknowledged; {len(outcomes)} kills: {count}"
    results.row("kill.lost_acknowledged", len(lost), note=note)

    engine = [outcome for outcome in outcomes if outcome.victim is Victim.ENGINE]
    live = sum(outcome.live for outcome in engine)
    went_on = sum(min(outcome.continued, outcome.same) for outcome in engine)
    note = (
        f"{went_on} of {live} streams that were live when the engine died went on over their connection with "
        "the tokens of an uninterrupted run, by position (deterministic mode)"
    )
    results.row("kill.streams_continued", went_on / live, note=note)
    gaps = [outcome.longest_gap for outcome in engine]
    note = f"of streams whose engine died; without a kill it is {calm_gap:.2f} s"
    results.row("kill.longest_gap_s", max(gaps), (min(gaps), max(gaps)), note)

    others = [outcome for outcome in outcomes if outcome.victim is not Victim.ENGINE]
    asked = sum(outcome.streams for outcome in others)
    if asked:
        same = sum(outcome.same for outcome in others)
        results.figure("kill.streams_asked_again", same / asked, "with the same tokens, by position")
    trained = [outcome.training for outcome in outcomes]
    results.figure("kill.jobs_resumed", sum(trained), "jobs, that were training at a kill")
    results.figure("kill.jobs_wrong", len(wrong), "differences in steps, losses or weights")
    for victim in Victim:
        ready = [outcome.ready_after for outcome in outcomes if outcome.victim is victim]
        if ready:
            spread = (min(ready), max(ready))
            results.figure(f"kill.ready_after ({victim})", sum(ready) / len(ready), "seconds", spread)
