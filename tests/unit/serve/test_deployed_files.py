"""Files for other programs: the dashboard's metrics exist in a scrape, and the unit is the documented one."""

import json
import re
from pathlib import Path

from prometheus_client.metrics import MetricWrapperBase

from coserve.metrics import Metrics

DOCS = Path(__file__).parents[3] / "docs"
_OF_SCRAPES = {"job", "instance", "le"}  # labels that Prometheus adds, and that of buckets


def metrics() -> dict[str, set[str]]:
    """The names of all samples of a scrape, with their labels."""
    found: dict[str, set[str]] = {}
    for metric in Metrics().registry._collector_to_names:
        assert isinstance(metric, MetricWrapperBase)
        suffixes = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}
        for suffix in suffixes.get(metric._type, ("",)):
            labels = {f"exported_{name}" if name == "job" else name for name in metric._labelnames}
            found[metric._name + suffix] = labels
    return found


def test_every_metric_and_label_of_the_dashboard_is_in_a_scrape() -> None:
    dashboard, known = json.loads((DOCS / "deploy/grafana.json").read_text()), metrics()
    scraped = Metrics().render().decode()
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    assert len(panels) > 12 and len({panel["id"] for panel in dashboard["panels"]}) == len(
        dashboard["panels"]
    )
    queries = [(target["expr"], target["legendFormat"]) for panel in panels for target in panel["targets"]]
    queries += [
        (one["query"]["query"], "") for one in dashboard["templating"]["list"] if one["type"] == "query"
    ]
    for query, legend in queries:
        names = re.findall(r"coserve_\w+", query)
        assert names and query.count("(") == query.count(")"), query
        labels = set().union(_OF_SCRAPES, *(known.get(name, set()) for name in names))
        for name in names:
            assert name in known, f"{name} is in no scrape"
            assert re.sub(r"_(total|bucket|sum|count)$", "", name) in scraped
        used = re.findall(r"by \(([^)]*)\)", query) + re.findall(r"\{\{(\w+)\}\}", legend)
        used += re.findall(r'(\w+)=~?"', query)
        assert {one.strip() for part in used for one in part.split(",")} <= labels, query


def test_the_unit_is_the_page_s() -> None:
    """The block of the page is what `tests/scenario/test_documented.py` gives to systemd."""
    unit = (DOCS / "deploy/coserve.service").read_text()
    assert f"```ini\n{unit}```" in (DOCS / "operating.md").read_text()
