"""Files of `deploy/` against the code: each flag, path, port and metric that they name is there."""

import asyncio
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from typer.testing import CliRunner

from coserve.cli.app import app
from coserve.serve.main import CHECKPOINT_SECONDS
from coserve.serve.routes import health
from coserve.serve.settings import ServerSettings
from serving import world

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"
SERVER = {"model": "m", "state": Path("/state")}
METRIC = re.compile(r"\b(?:vllm:|coserve_)\w+")


def documents(name: str) -> list[Any]:
    return list(yaml.safe_load_all((DEPLOY / name).read_text()))


def of_kind(name: str, kind: str) -> Any:
    (found,) = (one for one in documents(name) if one["kind"] == kind)
    return found


def values(arguments: list[str]) -> dict[str, str]:
    """Flags of a command line, which `coserve serve` takes, with their values."""
    told = CliRunner().invoke(app, ["serve", "--show-config", *arguments])
    assert told.exit_code == 0, told.output
    found, rest = dict[str, str](), list(arguments)
    while rest:
        name, is_joined, value = rest.pop(0).partition("=")
        if not is_joined and rest and not rest[0].startswith("--"):
            value = rest.pop(0)
        found[name] = value
    return found


@pytest.fixture(scope="module")
def metrics(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Names of all samples of a server, as Prometheus scrapes them."""

    async def scrape() -> str:
        async with world(tmp_path_factory.mktemp("scraped"), {}, {}) as it:
            return (await it.http.get("/metrics")).text

    names = set()
    for name, kind in re.findall(r"^# TYPE (\S+) (\w+)$", asyncio.run(scrape()), re.MULTILINE):
        names |= {f"{name}{end}" for end in ("_bucket", "_sum", "_count") if kind == "histogram"} | {name}
    return names


def paths() -> set[str]:
    return {route.path for route in health.router.routes}  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def pod() -> Any:
    return of_kind("kubernetes/server.yaml", "StatefulSet")["spec"]["template"]["spec"]


def test_compose_starts_a_server_whose_flags_are_there() -> None:
    (compose,) = documents("compose.yaml")
    server = compose["services"]["server"]
    given = values(server["command"][1:])
    database = urlsplit(given["--database"])
    owner = compose["services"][database.hostname]["environment"]
    assert (database.username, database.path) == (owner["POSTGRES_USER"], f"/{owner['POSTGRES_DB']}")
    assert server["environment"]["PGPASSWORD"] == owner["POSTGRES_PASSWORD"] and database.password is None
    said = (DEPLOY / "compose.yaml").read_text()
    assert f"keys create monitoring --database {given['--database']}\n" in said, (
        "where the server looks for keys"
    )
    assert f"--owner coserve --mode 700 {given['--artifacts']}" in (DEPLOY / "Containerfile").read_text()
    assert server["ports"] == [f"{given['--port']}:{given['--port']}"]
    drain = float(given["--drain-seconds"])
    assert int(server["stop_grace_period"].removesuffix("s")) > drain + CHECKPOINT_SECONDS
    assert "/health/ready" in paths() and "/health/ready" in server["healthcheck"]["test"][-1]
    mounted = {volume.split(":")[1] for volume in server["volumes"]}
    assert {"/state", given["--artifacts"]} <= mounted
    for service in compose["services"].values():
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            if source.startswith("."):
                assert (DEPLOY / source).exists(), volume
            elif source[0] not in "$/":
                assert source in compose["volumes"]
        assert set(service.get("depends_on", ())) <= compose["services"].keys()
        assert set(service.get("secrets", ())) <= compose["secrets"].keys()


def test_prometheus_finds_the_servers() -> None:
    (config,) = documents("prometheus.yml")
    (job,) = config["scrape_configs"]
    (compose,) = documents("compose.yaml")
    assert job["metrics_path"] in paths()
    (found,) = job["dns_sd_configs"]
    given = values(compose["services"]["server"]["command"][1:])
    assert found["names"] == ["server"] and str(found["port"]) == given["--port"]
    secret = job["authorization"]["credentials_file"].rpartition("/")[2]
    assert secret in compose["services"]["prometheus"]["secrets"]


def expressions() -> Iterator[str]:
    (trigger,) = of_kind("kubernetes/autoscaling.yaml", "ScaledObject")["spec"]["triggers"]
    yield trigger["metadata"]["query"]


def test_each_metric_that_is_drawn_or_scaled_on_is_there(metrics: set[str]) -> None:
    named = {name for each in expressions() for name in METRIC.findall(each)}
    assert len(named) >= 2 and named <= metrics, sorted(named - metrics)


def test_pods_are_probed_and_drained(pod: Any) -> None:
    (server,) = pod["containers"]
    model, *arguments = server["args"]
    given = values(arguments)
    (port,) = server["ports"]
    assert str(port["containerPort"]) == given["--port"] and not model.startswith("-")
    for probe, path in (
        ("startupProbe", "/health/ready"),
        ("livenessProbe", "/health"),
        ("readinessProbe", "/health/ready"),
    ):
        assert server[probe]["httpGet"] == {"path": path, "port": port["name"]} and path in paths()
    pause = int(server["lifecycle"]["preStop"]["exec"]["command"][1])
    drain = float(given["--drain-seconds"])
    assert pod["terminationGracePeriodSeconds"] > pause + drain + CHECKPOINT_SECONDS
    fields = {"artifacts": given["--artifacts"], "max_artifact_bytes": int(given["--max-artifact-bytes"])}
    assert ServerSettings(**SERVER, **fields).artifacts.startswith("s3://")
    secrets = re.findall(r"secretRef: .*# (.*)", (DEPLOY / "kubernetes" / "server.yaml").read_text())
    named = set(re.findall(r"\b(?:COSERVE|PG|AWS)_?[A-Z_]+", " ".join(secrets)))
    assert {"COSERVE_DATABASE", "PGPASSWORD", "AWS_ACCESS_KEY_ID"} <= named
    assert "database" in ServerSettings.__dataclass_fields__
    claims = of_kind("kubernetes/server.yaml", "StatefulSet")["spec"]["volumeClaimTemplates"]
    known = {one["metadata"]["name"] for one in claims} | {one["name"] for one in pod["volumes"]}
    assert {mount["name"] for mount in server["volumeMounts"]} == known


def test_services_and_scaling_name_the_pods() -> None:
    workload = of_kind("kubernetes/server.yaml", "StatefulSet")
    labels = workload["spec"]["template"]["metadata"]["labels"]
    assert workload["spec"]["selector"]["matchLabels"] == labels
    services = [one for one in documents("kubernetes/server.yaml") if one["kind"] == "Service"]
    assert workload["spec"]["serviceName"] in {one["metadata"]["name"] for one in services}
    assert all(one["spec"]["selector"] == labels for one in services)
    target = of_kind("kubernetes/autoscaling.yaml", "ScaledObject")["spec"]["scaleTargetRef"]
    assert (target["kind"], target["name"]) == (workload["kind"], workload["metadata"]["name"])


def test_the_container_file_copies_what_is_there_and_pins_what_make_pins() -> None:
    text = (DEPLOY / "Containerfile").read_text()
    makefile = (ROOT / "Makefile").read_text()
    assert f"TORCH := torch=={re.search(r'ARG TORCH=(.*)', text)[1]}" in makefile  # type: ignore[index]
    for line in re.findall(r"^COPY (?!--from)(.*)$", text, re.MULTILINE):
        assert all((ROOT / name).exists() for name in line.split()[:-1]), line
    stages = re.findall(r"^FROM (\S+) AS (\w+)$", text, re.MULTILINE)
    named = {name for _, name in stages}
    (compose,) = documents("compose.yaml")
    assert {"cpu", "cuda", compose["services"]["server"]["build"]["target"]} <= named
    entry = json.loads(re.search(r"^ENTRYPOINT (.*)$", text, re.MULTILINE)[1])  # type: ignore[index]
    assert entry[:2] == ["coserve", "serve"]
    assert values(entry[2:]) == {"--state": re.search(r"^VOLUME (.*)$", text, re.MULTILINE)[1]}  # type: ignore[index]


@pytest.mark.skipif(shutil.which("docker-compose") is None, reason="docker-compose is not installed")
def test_docker_compose_takes_the_file(tmp_path: Path) -> None:
    told = subprocess.run(
        ["docker-compose", "--file", str(DEPLOY / "compose.yaml"), "config", "--quiet"],
        env={
            "PATH": "/usr/bin:/bin",
            "HOME": str(tmp_path),
            "COSERVE_MODEL": "m",
            "COSERVE_DATABASE_PASSWORD": "p",
        },
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert told.returncode == 0, told.stderr
