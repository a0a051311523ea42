"""`coserve bench zoo` makes its applications and counts their bytes; provisions answer every request."""

import json
from collections import Counter
from pathlib import Path

import pytest

from coserve.errors import ConfigError
from coserve.zoo.adding import add
from coserve.zoo.alternatives import Ladder
from coserve.zoo.equivalence import evaluate
from coserve.zoo.ladders import make_ladder
from coserve.zoo.store import Zoo
from coserve.zoo.text import TEXT
from coserve.zoo.views import serve_from
from coserve_benchmarks.zoo.adaptive import AdaptiveEngine
from coserve_benchmarks.zoo.provision import Asked, InTurns, Swapped, Together, make_load, replay
from coserve_benchmarks.zoo.run import BARS, run_zoo
from coserve_benchmarks.zoo.serving import RunningEngine
from zoo_made import make_fine_tune, make_lora, make_model


@pytest.mark.slow
def test_the_table_is_filled(tmp_path: Path) -> None:
    pictures = [tmp_path / f"{name}.svg" for name in ("chains", "depths", "loads")]
    results = run_zoo(True, None, tmp_path / "zoo.json", *pictures)
    written = json.loads((tmp_path / "zoo.json").read_text())["storage.exact"]
    assert written == pytest.approx(results["storage.exact"], rel=1e-3)  # it has four digits
    assert set(results["bars"]) == set(BARS) <= set(results)
    assert 0.0 < results["storage.with_alternatives"] <= results["storage.exact"] < 1.0
    assert "20 applications" in results["notes"]["storage.exact"]
    assert "full-6" in (tmp_path / "chains.svg").read_text()
    expected = {"stitch.128-256.seconds", "surrogate.L3-5.speedup", "depths.own.accuracy"}
    expected |= {"stitch.128-256.behind-2.served", "stitch.256-128.behind-4.served", "large.turns.p95"}
    assert expected | {"surrogate.L3-5.served.half", "speculation.L3.right"} <= set(results["figures"])
    assert 0.0 < results["speculation.right"] <= 1.0
    assert "switching every 2 layers" in (tmp_path / "depths.svg").read_text()
    assert 0.0 <= results["figures"]["adaptive.1.5.adapted"]["value"] <= 1.0
    assert "answers adapted" in (tmp_path / "loads.svg").read_text()


def test_an_unknown_group_is_refused() -> None:
    with pytest.raises(ConfigError, match="no group"):
        run_zoo(True, ["other"])


def test_popularity_is_uneven_and_the_load_is_what_was_asked_for() -> None:
    names = [f"app-{number}" for number in range(12)]
    load = make_load(names, 50.0, 20.0, 90, 3)
    assert len(load) == pytest.approx(1000, abs=12) and load == make_load(names, 50.0, 20.0, 90, 3)
    counts = Counter(asked.application for asked in load)
    assert len(counts) == 12 and max(counts.values()) > 3 * min(counts.values())
    assert [asked.at for asked in load] == sorted(asked.at for asked in load)


def test_every_provision_answers_every_request(tmp_path: Path) -> None:
    base = make_model(tmp_path / "base")
    lora = make_lora(tmp_path / "lora", base)
    other = make_fine_tune(tmp_path / "other", base, {"layers.1": 0.5})
    prompts = [tuple(range(5, 25 + number)) for number in range(6)]
    load = [Asked(0.001 * n, ("one", "two", "three")[n % 3], prompt) for n, prompt in enumerate(prompts)]
    adapters = {"one": lora, "two": lora, "three": lora}
    for provision in (Together, InTurns):
        engine = RunningEngine(base, adapters)
        assert engine.nbytes > engine.base_nbytes
        shared = provision(dict.fromkeys(adapters, engine))
        outcome = replay(shared, load)
        assert outcome.rate > 0 and outcome.p95 > 0 and not shared.has_work
    models = {"one": (base, {"one": lora}), "two": (base, {}), "three": (other, {})}
    swapped = Swapped(lambda name: RunningEngine(*models[name]), 2)
    assert replay(swapped, load).p95 > 0
    assert swapped.loads >= 3, "three models take turns in two places"


def test_with_little_room_some_answers_are_adapted(tmp_path: Path) -> None:
    base = make_model(tmp_path / "base")
    zoo, names = Zoo.create(tmp_path / "zoo"), ("one", "two")
    add(zoo, base, "base")
    for seed, name in enumerate(names):
        add(zoo, make_fine_tune(tmp_path / name, base, {"layers": 0.01}, seed), name, "base")
        evaluate(zoo, "base", name, TEXT[:400])
        make_ladder(zoo, name, TEXT[:400], most=2, window=32)
    served = serve_from(zoo)
    chains = {name: [f"{name}~2", None] for name in names}
    room = int(1.1 * max(ladder.nbytes for ladder in ladders_of(zoo)))
    load = [Asked(0.0, names[n % 2], tuple(range(5, 15 + n)), 4) for n in range(6)]
    shares = []
    for own in ({}, chains):
        engine = AdaptiveEngine(served, names, room, own)
        assert replay(Together(dict.fromkeys(names, engine)), load).rate > 0
        assert set(engine.answered) == set(load) and all(
            len(one.tokens) == 4 for one in engine.answered.values()
        )
        shares.append(sum(one.chain > 0 for one in engine.answered.values()))
    assert shares[0] == 0 < shares[1] < len(load)


def ladders_of(zoo: Zoo) -> list[Ladder]:
    return [one.made for one in zoo.alternatives.all().values() if isinstance(one.made, Ladder)]
