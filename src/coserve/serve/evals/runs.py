"""Runs of evals: one of each tenant at a time, beside everything else that the server does.

A run is rows: what it is over, and an outcome for each item, written as soon as it is known. So a run goes on
where it was when the server starts again, and an item that was under way is graded anew.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence, Set
from contextlib import asynccontextmanager
from dataclasses import dataclass
from time import time
from typing import Any, Final

from coserve.core.contained import contained
from coserve.core.request import SamplingParams
from coserve.errors import CoserveError, DataError, EngineLost, LeaseLost, StateError
from coserve.serve.answering.chat import Chat
from coserve.serve.answering.cost import RequestSize
from coserve.serve.answering.structure import Structure
from coserve.serve.errors import ApiError
from coserve.serve.evals.entries import Entry, read_entries
from coserve.serve.evals.grade import ChatAnswer, ask, grade, grader_of
from coserve.serve.schema.common import MOST_TOKEN_ID
from coserve.serve.state import State
from coserve.serve.store.ids import new_id
from coserve.serve.store.leases import LeaseKey
from coserve.serve.store.records import EvalItemRecord, EvalRecord, EvalRunRecord, Tenant
from coserve.serve.tasks import beside, cancel
from coserve.train.grading.asking import message_template, text_of_content
from coserve.train.grading.graders import Grader

log = logging.getLogger(__name__)
_AT_ONCE: Final = 4  # items of a run
_AGAIN: Final = 1.0  # seconds until what failed for a while is tried again
_TIER: Final = "flex"
_TOKENS: Final = 256  # of an answer, unless the run says otherwise
_SURE: Final = ("string_check", "regex", "json_schema", "label_model")  # whose scores are 0 or 1


@dataclass(frozen=True, slots=True)
class EvalCriterion:
    """A grader of an eval, under the name of its results, and the score from which it passes."""

    name: str
    kind: str
    grader: Grader
    threshold: float


async def criteria_of(
    state: State, tenant: Tenant, settings: Sequence[Mapping[str, Any]]
) -> list[EvalCriterion]:
    """The graders of an eval. Raises ApiError 400, naming the place of one that cannot be used."""
    found = list[EvalCriterion]()
    for number, one in enumerate(settings):
        given, param = dict(one), f"testing_criteria.{number}"
        threshold = given.pop("pass_threshold", None)
        if threshold is None:
            threshold = 1.0 if given.get("type") in _SURE else 0.5
        if isinstance(threshold, bool) or not isinstance(threshold, int | float):
            message = f"Invalid value for '{param}.pass_threshold': expected a number."
            raise ApiError(400, message, param=f"{param}.pass_threshold", code="invalid_value")
        grader = await grader_of(state, tenant, given, param)
        kind = str(given["type"])
        name = str(given.get("name") or kind)
        if name in {each.name for each in found}:
            name = f"{name}-{number}"
        found.append(EvalCriterion(name, kind, grader, float(threshold)))
    return found


@asynccontextmanager
async def running_evals(state: State) -> AsyncIterator[None]:
    """Context in which runs that are not over go on."""
    async with beside(_run_all(state), "evals"):
        yield


async def _run_all(state: State) -> None:
    running = dict[str, asyncio.Task[None]]()

    runs = dict[str, str]()  # by tenant
    leases = state.store.leases

    def ended(tenant: str) -> None:
        running.pop(tenant, None)
        state.evals_changed.set()

    async def follow_others(lost: Set[LeaseKey]) -> None:
        for tenant, task in running.items():
            if ("eval", runs[tenant]) in lost:
                task.cancel()
        await leases.release_but("eval", [runs[tenant] for tenant in running])
        state.evals_changed.set()  # others' runs may have been left

    leases.on_renewed.append(follow_others)

    try:
        while True:
            state.evals_changed.clear()
            try:
                waiting = await state.store.evals.next_runs()
            except StateError:
                await asyncio.sleep(_AGAIN)
                state.evals_changed.set()
                waiting = ()
            for run in waiting:
                if run.tenant not in running and await _claimed(state, run):
                    runs[run.tenant] = run.id
                    task = running[run.tenant] = asyncio.create_task(_finish(state, run))
                    task.add_done_callback(lambda _, tenant=run.tenant: ended(tenant))  # type: ignore[misc]
            await state.evals_changed.wait()
    finally:
        leases.on_renewed.remove(follow_others)
        await cancel(*running.values())


async def _claimed(state: State, run: EvalRunRecord) -> bool:
    try:
        return await state.store.leases.claim("eval", run.id)
    except StateError:  # the next turn tries again
        return False


async def _finish(state: State, run: EvalRunRecord) -> None:
    """Runs a run to its end, however often the engine or the disk is lost meanwhile."""
    error: dict[str, Any] | None = None
    while True:
        try:
            await _go_on(state, run)
            break
        except LeaseLost as lost:
            log.warning("%s", lost)
            return
        except (EngineLost, StateError):
            await asyncio.sleep(_AGAIN)
        except ApiError as refused:
            error = {"code": refused.code or "invalid_request", "message": refused.message}
            break
        except CoserveError as refused:
            error = {"code": "invalid_request", "message": str(refused)}
            break
        except Exception as bug:
            error = {"code": "server_error", "message": str(contained(bug, f"the run {run.id}"))}
            break
    while True:
        try:
            if await state.store.evals.advance(run.id, "failed" if error else "completed", error):
                state.alert(f"eval.run.{'failed' if error else 'succeeded'}", id=run.id)
            return
        except LeaseLost as lost:
            log.warning("%s", lost)
            return
        except StateError:
            await asyncio.sleep(_AGAIN)


async def _go_on(state: State, run: EvalRunRecord) -> None:
    """Grades the items of a run that have no outcome yet. Raises CoserveError or ApiError where the run
    cannot go on."""
    tenant = await state.store.tenants.get(run.tenant)
    parent = await state.store.evals.get(EvalRecord, run.tenant, run.eval)
    if tenant is None or parent is None:
        return
    await state.store.evals.advance(run.id, "in_progress")
    entries = await _entries(state, tenant, run)
    criteria = await criteria_of(state, tenant, parent.criteria)
    if run.model is not None:
        await state.catalog.find(tenant, run.model)
    done = await state.store.evals.places(run.id)
    left = iter([(place, entry) for place, entry in enumerate(entries) if place not in done])
    workers = [asyncio.create_task(_work(state, tenant, run, criteria, left)) for _ in range(_AT_ONCE)]
    try:
        await asyncio.gather(*workers)
    finally:
        await cancel(*workers)


async def _entries(state: State, tenant: Tenant, run: EvalRunRecord) -> Sequence[Entry]:
    """The data of a run. Raises ApiError 404 for a file that is gone, and DataError."""
    source = run.source["source"]
    if source["type"] == "file_content":
        content: list[Entry] = source["content"]
        return content
    file = await state.store.files.get(tenant.id, source["id"])
    if file is None:
        raise ApiError(404, f"No such File object: {source['id']}", code="file_not_found")
    try:
        return await state.data.run(tenant.id, read_entries, await state.store.bring_file(file))
    except OSError as error:
        raise ApiError(404, f"The file {source['id']} was deleted", code="file_not_found") from error


async def _work(
    state: State,
    tenant: Tenant,
    run: EvalRunRecord,
    criteria: Sequence[EvalCriterion],
    left: Iterator[tuple[int, Entry]],
) -> None:
    """Takes one item after the other, until none is left or the run has ended."""
    for place, entry in left:
        while True:
            try:
                row, usage = await _outcome(state, tenant, run, criteria, place, entry)
                break
            except ApiError as error:
                if error.status not in (429, 503):
                    raise
                await asyncio.sleep(_AGAIN)
        if not await state.store.evals.add_item(row, usage):
            current = await state.store.evals.get(EvalRunRecord, tenant.id, run.id)
            if current is None or current.status != "in_progress":
                return


async def _outcome(
    state: State,
    tenant: Tenant,
    run: EvalRunRecord,
    criteria: Sequence[EvalCriterion],
    place: int,
    entry: Entry,
) -> tuple[EvalItemRecord, Mapping[str, tuple[int, int]]]:
    """The outcome of an item, and the tokens that models have read and written for it."""
    item, usage = entry["item"], Counter[tuple[str, int]]()
    results, sample, status = list[dict[str, Any]](), dict[str, Any](), "pass"

    def count(said: ChatAnswer) -> None:
        usage[said.model, 0] += said.read
        usage[said.model, 1] += said.written

    try:
        if run.model is None:
            text = str((entry.get("sample") or {}).get("output_text") or "")
            sample = {"output": [{"role": "assistant", "content": text}]}
        else:
            said, sample = await _sampled(state, tenant, run, item)
            text = said.text
            count(said)
        for one in criteria:
            found = await grade(state, tenant, one.grader, text, item, _TIER)
            for reply in found.replies:
                count(reply)
            passed = found.reward >= one.threshold
            results.append({
                "name": one.name, "type": one.kind, "score": found.reward, "passed": passed,
                "sample": {"sub_rewards": dict(found.parts)} if found.parts else None,
            })  # fmt: skip
            status = status if passed else "fail"
    except (EngineLost, StateError):
        raise
    except (ApiError, CoserveError) as error:
        if isinstance(error, ApiError) and error.status in (429, 503):
            raise
        told = error.message if isinstance(error, ApiError) else str(error)
        sample["error"] = {"code": getattr(error, "code", None) or "invalid_request", "message": told}
        status = "error"
    now, name = int(time()), new_id("outputitem")
    row = EvalItemRecord(name, tenant.id, run.id, place, now, status, dict(item), results, sample)
    models = {model for model, _ in usage}
    return row, {model: (usage[model, 0], usage[model, 1]) for model in models}


async def _sampled(
    state: State, tenant: Tenant, run: EvalRunRecord, item: Mapping[str, Any]
) -> tuple[ChatAnswer, dict[str, Any]]:
    """The answer of the run's model to an item, and the sample that is shown of it."""
    assert run.model is not None, "a run with a model"
    turns = await state.graders.run(tenant.id, _turns, run.source["input_messages"], item)
    given = run.source.get("sampling_params") or {}
    values = {name: value for name, value in given.items() if value is not None}
    most = values.get("max_completion_tokens", _TOKENS)
    temperature, top_p = float(values.get("temperature", 1.0)), float(values.get("top_p", 1.0))
    sampling = SamplingParams(MOST_TOKEN_ID, temperature=temperature, top_p=top_p, seed=values.get("seed", 0))
    schema, wanted = None, values.get("response_format") or {"type": "text"}
    if wanted["type"] != "text":
        schema = wanted.get("json_schema", {}).get("schema") or {"type": "object"}
    chat = Chat(turns, structure=Structure.of_schema(schema))
    said = await ask(state, tenant, run.model, chat, sampling, RequestSize(max_tokens=most), _TIER)
    return said, {
        "input": turns,
        "output": [{"role": "assistant", "content": said.text}],
        "finish_reason": said.finish,
        "model": said.model,
        "temperature": temperature,
        "top_p": top_p,
        "seed": sampling.seed,
        "max_completion_tokens": most,
        "usage": {
            "prompt_tokens": said.read,
            "completion_tokens": said.written,
            "total_tokens": said.read + said.written,
            "cached_tokens": 0,
        },
    }


def _turns(messages: Mapping[str, Any], item: Mapping[str, Any]) -> list[dict[str, str]]:
    """The chat for an item. Raises DataError where it has none, and ConfigError for a bad template."""
    if messages["type"] == "template":
        pairs = [message_template(one, "input_messages") for one in messages["template"]]
        return [{"role": role, "content": template.render("", item)} for role, template in pairs]
    value: Any = {"item": item}
    for name in messages["item_reference"].split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        raise DataError(f"the item has no messages at {messages['item_reference']}")
    turns = []
    for one in value:
        if not isinstance(one, Mapping) or not isinstance(one.get("role"), str):
            raise DataError(f"the item's messages at {messages['item_reference']} need a role and a content")
        content = text_of_content(one.get("content"), messages["item_reference"])
        turns.append({"role": one["role"], "content": content})
    return turns
