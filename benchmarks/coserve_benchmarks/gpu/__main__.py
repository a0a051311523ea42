"""`python -m coserve_benchmarks.gpu`: what `make gpu` runs. It needs torch and transformers, and none of the
server's packages."""

import argparse
import os
import subprocess
import sys
import time
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from coserve.core.compact import compact_json
from coserve.errors import CoserveError
from coserve_benchmarks.gpu.conductor import PARTS, Conductor, Outcome
from coserve_benchmarks.gpu.page import page_of
from coserve_benchmarks.gpu.sizes import sizes_of
from coserve_benchmarks.gpu.wheels import install_missing

_NEEDED: Final = (
    "torch", "transformers", "msgspec", "llguidance", "re2", "platformdirs", "scipy",
    "jinja2", "safetensors", "httpcore",
)  # fmt: skip
_SECONDS: Final = 525.0  # of all parts: with this process's own beginning and end, nine minutes


def main() -> int:
    """Runs all parts; 0 if all of them end well, 1 if one does not, 2 if nothing can run."""
    options = _options()
    started = time.monotonic()
    known = {part.name: part for part in PARTS}
    if unknown := [part for part in options.only if part not in known]:
        return _refused(f"there is no part {unknown[0]}; there are {', '.join(known)}")
    try:
        sizes_of(options.shape)
        added = _with_wheels(options)
        if missing := [name for name in _NEEDED if find_spec(name) is None]:
            return _refused(f"these packages are missing: {', '.join(missing)} (make gpu WHEELS=FOLDER)")
        name = _device_name(options.device)
    except CoserveError as error:
        return _refused(str(error))
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "gpu.log").unlink(missing_ok=True)
    parts = [known[part] for part in options.only] or list(PARTS)
    run: dict[str, Any] = {
        "device": options.device, "device_name": name, "shape": options.shape, "commit": _commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }  # fmt: skip

    def told(outcomes: list[Outcome]) -> None:
        run["seconds"] = time.monotonic() - started
        run["parts"] = [asdict(outcome) for outcome in outcomes]
        (options.out / "gpu.json").write_text(compact_json(run), encoding="utf-8")
        (options.out / "gpu.md").write_text(page_of(run))
        last = outcomes[-1]
        wrong = [f"wrong: {failure}" for failure in last.found.get("failures", ())]
        print(
            f"{last.part}: {last.status}, {last.seconds:.0f} s", *wrong, *last.tail, sep="\n    ", flush=True
        )

    conductor = Conductor(options.out, options.device, options.shape, added)
    outcomes = conductor.run(parts, options.seconds, told)
    print((options.out / "gpu.md").read_text())
    return 0 if all(outcome.is_well for outcome in outcomes) else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make gpu", description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shape", default="8b")
    parser.add_argument("--out", type=Path, default=Path("build/gpu"))
    parser.add_argument("--wheels", type=Path)
    parser.add_argument("--seconds", type=float, default=_SECONDS, help="of all parts together")
    parser.add_argument("--only", nargs="*", default=[], metavar="PART", help="these parts alone")
    return parser.parse_args()


def _with_wheels(options: argparse.Namespace) -> dict[str, str]:
    """Makes the packages of wheels importable here and, by the returned environment, in parts."""
    if options.wheels is None:
        return {}
    into = Path("build/wheels").absolute()
    install_missing(options.wheels, into)
    sys.path.append(str(into))
    known = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": os.pathsep.join([*([known] if known else []), str(into)])}


def _device_name(device: str) -> str:
    """The device's name. Raises ConfigError where it cannot be used."""
    from coserve.engine.remembered import device_name
    from coserve.model.load import usable_device

    return device_name(usable_device(device))


def _refused(reason: str) -> int:
    print(f"make gpu: {reason}", file=sys.stderr)
    return 2


def _commit() -> str:
    try:
        command = ["git", "rev-parse", "--short", "HEAD"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


if __name__ == "__main__":
    sys.exit(main())
