"""`/v1/fine_tuning/alpha/graders`: graders tried on an answer."""

from collections import Counter
from typing import Any

from fastapi import APIRouter, Request, Response

from coserve.errors import ConfigError, CoserveError, DataError, EngineLost, JobError, StateError
from coserve.serve.errors import ApiError, error_responses
from coserve.serve.evals.grade import Grade, grade, grader_of
from coserve.serve.http.auth import Caller
from coserve.serve.http.json_bodies import JsonRoute
from coserve.serve.http.json_replies import json_reply
from coserve.serve.http.streams import ClientGone, unless_gone
from coserve.serve.schema.graders import GraderRun, GraderRunResult, GraderValidation
from coserve.serve.state import Shared
from coserve.train.grading.asking import models_asked

router = APIRouter(route_class=JsonRoute, prefix="/v1/fine_tuning/alpha/graders", tags=["Fine-tuning"])
_ERRORS = (
    "formula_parse_error",
    "sample_parse_error",
    "truncated_observation_error",
    "unresponsive_reward_error",
    "invalid_variable_error",
    "other_error",
    "python_grader_server_error",
    "python_grader_runtime_error",
    "model_grader_server_error",
    "model_grader_refusal_error",
    "model_grader_parse_error",
)
_GONE = 499  # the status that proxies log for a client that left; it is never read


@router.post(
    "/run", response_model=GraderRunResult, responses=error_responses(404), summary="Grade an answer"
)
async def run_grader(body: GraderRun, request: Request, caller: Caller, state: Shared) -> Response:
    """Grades one answer. Models that the grader asks answer as they do other requests of the caller's.

    Where there is no reward it is 0, and `metadata.errors` tells why."""
    grader = await grader_of(state, caller, body.grader, "grader")
    for name in sorted(models_asked(grader)):
        await state.catalog.find(caller, name)
    found, errors = Grade(0.0, {}, (), 0.0), dict[str, Any]()
    try:
        work = grade(state, caller, grader, body.model_sample, body.item)
        found = await unless_gone(request.receive, work)
    except ClientGone:
        return Response(status_code=_GONE)
    except (EngineLost, StateError):
        raise  # the request may be sent again
    except DataError as error:
        errors = {"invalid_variable_error": True, "invalid_variable_error_details": str(error)}
    except (JobError, ConfigError) as error:
        kind = "model_grader_parse_error" if "model's reply" in str(error) else "other_error"
        errors = {kind: True, f"{kind}_details": str(error)}
    except (ApiError, CoserveError) as error:
        told = error.message if isinstance(error, ApiError) else str(error)
        errors = {"model_grader_server_error": True, "model_grader_server_error_details": told}
    return await json_reply(state.bodies, caller.id, _shown(body.grader, found, errors))


@router.post(
    "/validate", response_model=GraderValidation, responses=error_responses(404), summary="Check a grader"
)
async def validate_grader(body: GraderValidation, caller: Caller, state: Shared) -> Response:
    """Returns the grader where it can be used."""
    for name in sorted(models_asked(await grader_of(state, caller, body.grader, "grader"))):
        await state.catalog.find(caller, name)
    return await json_reply(state.bodies, caller.id, body)


def _shown(settings: dict[str, Any], found: Grade, errors: dict[str, Any]) -> dict[str, Any]:
    usage = Counter[str]()
    for reply in found.replies:
        usage[reply.model] += reply.read + reply.written
    name, kind = str(settings.get("name") or ""), str(settings["type"])
    return {
        "reward": found.reward,
        "sub_rewards": found.parts,
        "model_grader_token_usage_per_model": dict(usage),
        "metadata": {
            "name": name,
            "type": kind,
            "errors": {**dict.fromkeys(_ERRORS, False), **errors},
            "execution_time": found.seconds,
            "scores": found.parts or {name: found.reward},
            "token_usage": sum(usage.values()) if found.replies else None,
            "sampled_model_name": found.replies[0].model if found.replies else None,
        },
    }
