"""Calls every public method of the `tinker` client at a server, and tells which of them work.

`METHODS` has a call for each, which checks what it returns; a method of the client that is not there makes
`check` fail, so that a newer client shows what it can do more. A call of an async method runs in an event
loop of its own.
"""

import asyncio
import inspect
import json
import urllib.request
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import tinker
from tinker import types
from tinker.lib.public_interfaces.rest_client import RestClient

CLIENTS: Final = (tinker.ServiceClient, tinker.TrainingClient, tinker.SamplingClient, RestClient)
_ADAM: Final = types.AdamParams(learning_rate=1e-3)
_FEW: Final = types.SamplingParams(max_tokens=3, temperature=0.0)
_TOKENS: Final = [5, 6, 7, 8, 9]
_PROMPT: Final = types.ModelInput.from_ints(_TOKENS)
_DATUM: Final = types.Datum(
    model_input=types.ModelInput.from_ints(_TOKENS[:-1]),
    loss_fn_inputs={"target_tokens": _TOKENS[1:], "weights": [1.0] * (len(_TOKENS) - 1)},
)


@dataclass(frozen=True)
class MethodResult:
    """One method of a client: whether its call did what it should, else what it said."""

    client: str
    method: str
    works: bool
    note: str = ""


@dataclass
class Surroundings:
    """Clients of one server, and what earlier calls have made there."""

    url: str
    key: str
    base: str
    service: tinker.ServiceClient
    rest: RestClient
    run: tinker.TrainingClient
    sampler: tinker.SamplingClient
    state: str  # path of a saved state
    weights: str  # path of saved sampler weights
    saved: int = field(default=0)

    @classmethod
    def make(cls, service: tinker.ServiceClient, url: str, key: str, base: str) -> "Surroundings":
        """Clients of the server at `url`, whose base has this name."""
        run = service.create_lora_training_client(base_model=base, rank=4, seed=0).result()
        state, weights = (
            run.save_state("start").result().path,
            run.save_weights_for_sampler("start").result().path,
        )
        sampler = service.create_sampling_client(base_model=base).result()
        return cls(
            url, key, base, service, RestClient(base_url=url, api_key=key), run, sampler, state, weights
        )

    def name(self) -> str:
        """A name that no saved weights have yet."""
        self.saved += 1
        return f"saved-{self.saved}"

    def fresh(self, external: bool = False) -> str:
        """The path of weights that were just saved."""
        save = self.run.save_weights_external if external else self.run.save_weights_for_sampler
        path: str = save(self.name()).result().path
        return path

    @property
    def session(self) -> str:
        return str(self.run.model_id).partition(":")[0]


Call = Callable[[Surroundings], Any]


@dataclass(frozen=True)
class Unsupported:
    """A call that fails with these words, and why it does."""

    call: Call
    says: str
    why: str


def done(made: Any) -> Any:
    """The result of a future or a coroutine, and of one that that gives; anything else as it is."""
    while True:
        if inspect.iscoroutine(made):
            made = asyncio.run(made)
        elif hasattr(made, "result") and callable(made.result):
            made = made.result()
        else:
            return made


def _holds(condition: object) -> None:
    if not condition:
        raise AssertionError("the call did not return what it should")


def _passed(made: Any) -> None:
    out = done(made)
    _holds(len(out.loss_fn_outputs) == 1 and out.loss_fn_outputs[0]["logprobs"].shape == [len(_TOKENS) - 1])


def _sampled(made: Any) -> None:
    _holds([len(one.tokens) for one in done(made).sequences] == [3])


def _scored(made: Any) -> None:
    scores = done(made)
    _holds(len(scores) == len(_TOKENS) and scores[0] is None and all(one < 0 for one in scores[1:]))


def _samples(made: Any) -> None:
    _sampled(done(made).sample(_PROMPT, 1, _FEW))


def _trains(made: Any) -> None:
    _passed(done(made).forward_backward([_DATUM], "cross_entropy"))


def _squared(data: Any, logprobs: Any) -> tuple[Any, dict[str, float]]:
    loss = sum((one**2).sum() for one in logprobs)
    return loss, {"squared:sum": float(loss)}


def _custom(logprobs: Any, weights: Any) -> tuple[Any, dict[str, Any]]:
    loss = -(logprobs * weights).sum()
    return loss, {"custom/likelihood:sum": loss}


def _handle(at: Surroundings) -> None:
    handle = done(at.service.create_custom_loss(_custom, input_ranks={"logprobs": 1, "weights": 1}))
    _passed(at.run.forward_backward_custom([_DATUM], handle))


def _close(at: Surroundings) -> None:
    other = tinker.ServiceClient(base_url=at.url, api_key=at.key)
    run = done(other.create_lora_training_client(base_model=at.base, rank=4))
    done(other.close("success"))
    _holds(run.model_id.partition(":")[0] in done(at.rest.list_sessions()).sessions)


def _deleted(at: Surroundings, delete: Callable[[str], Any]) -> None:
    path = at.fresh()
    done(delete(path))
    _holds(path not in [one.tinker_path for one in done(at.rest.list_user_checkpoints()).checkpoints])


def _delete(at: Surroundings, method: Callable[[str, str], Any]) -> None:
    _deleted(at, lambda path: method(at.run.model_id, path.partition(at.run.model_id + "/")[2]))


def _checkpoint(at: Surroundings, path: str) -> types.Checkpoint:
    found = [one for one in done(at.rest.list_user_checkpoints()).checkpoints if one.tinker_path == path]
    _holds(len(found) == 1)
    return found[0]


def _published(at: Surroundings, made: Callable[[str], Any], public: bool) -> None:
    path = at.fresh()
    if not public:
        done(at.rest.publish_checkpoint_from_tinker_path(path))
    done(made(path))
    _holds(_checkpoint(at, path).public is public)


def _expires(at: Surroundings, made: Callable[[str, int], Any]) -> None:
    path = at.fresh()
    done(made(path, 7200))
    _holds(_checkpoint(at, path).expires_at is not None)


def _copied(at: Surroundings, made: Any) -> None:
    path = done(made)
    _holds(path != at.weights and _checkpoint(at, path).checkpoint_type == "sampler")
    _samples(at.service.create_sampling_client(model_path=path))


def _downloads(at: Surroundings, made: Callable[[str], Any]) -> None:
    urls = done(made(at.fresh(external=True))).urls
    with urllib.request.urlopen(urls["adapter_config.json"]) as answer:
        _holds(json.load(answer)["r"] == 4)
    _holds("adapter_model.safetensors" in urls)


def _copied_by_service(at: Surroundings) -> None:
    with tinker.ServiceClient(base_url=at.url, api_key=at.key, project_id="project") as service:
        _copied(at, service.copy_weights(at.weights))


def _resumes(made: Any) -> None:
    run = done(made)
    _holds(run.get_info().lora_rank == 4)
    _trains(run)
    done(run.optim_step(_ADAM))


def _usage(made: Callable[[datetime, datetime], Any]) -> None:
    hour = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    _holds(done(made(hour - timedelta(hours=2), hour)).data == [])


def _shares(at: Surroundings, made: Any) -> None:
    found = done(made)
    _holds([one.training_run_id for one in found.training_runs].count(at.run.model_id) == 1)


def _has_tokenizer(client: Any) -> None:
    tokenizer = client.get_tokenizer()
    _holds(tokenizer.encode("Once upon a time"))


def _finds(at: Surroundings) -> None:
    request = types.SessionSearchRequest(session_id=at.session)
    _holds([one.session_id for one in done(at.rest.search_sessions(request)).sessions] == [at.session])


def _assigned(at: Surroundings, made: Any) -> None:
    done(made)
    request = types.SessionSearchRequest(project_ids=["project"])
    _holds(at.session in [one.session_id for one in done(at.rest.search_sessions(request)).sessions])


def _capable(at: Surroundings, made: Any) -> None:
    _holds(at.base in [one.model_name for one in done(made).supported_models])


def _listed(at: Surroundings, made: Any) -> None:
    _holds({at.state, at.weights} <= {one.tinker_path for one in done(made).checkpoints})


def _run_of(at: Surroundings, made: Any) -> None:
    found = done(made)
    _holds(found.training_run_id == at.run.model_id and found.lora_rank == 4)


def _from_handle(at: Surroundings) -> None:
    handle = at.sampler.get_sampler_handle()
    sampler = tinker.SamplingClient.from_sampler_handle(handle, api_key=at.key)
    try:
        _sampled(sampler.sample(_PROMPT, 1, _FEW))
    finally:  # it sends signs of life of the session that it shares, as long as it is there
        done(sampler.holder.run_coroutine_threadsafe(sampler.holder.aclose()))


_TRACES: Final = "no timelines of sessions are recorded"
_AUDIT: Final = "no audit log is kept"
_IDENTITY: Final = "the client asks for a JWT's claims, and this server's keys are no JWTs"

SERVICE: Final[Mapping[str, Call | Unsupported]] = {
    "close": _close,
    "copy_weights": _copied_by_service,
    "create_custom_loss": _handle,
    "create_lora_training_client": lambda at: _trains(
        at.service.create_lora_training_client(base_model=at.base, rank=4)
    ),
    "create_lora_training_client_async": lambda at: _trains(
        at.service.create_lora_training_client_async(base_model=at.base, rank=4)
    ),
    "create_rest_client": lambda at: _capable(at, at.service.create_rest_client().get_server_capabilities()),
    "create_sampling_client": lambda at: _samples(at.service.create_sampling_client(model_path=at.weights)),
    "create_sampling_client_async": lambda at: _samples(
        at.service.create_sampling_client_async(base_model=at.base)
    ),
    "create_training_client_from_state": lambda at: _resumes(
        at.service.create_training_client_from_state(at.state)
    ),
    "create_training_client_from_state_async": lambda at: _resumes(
        at.service.create_training_client_from_state_async(at.state)
    ),
    "create_training_client_from_state_with_optimizer": lambda at: _resumes(
        at.service.create_training_client_from_state_with_optimizer(at.state)
    ),
    "create_training_client_from_state_with_optimizer_async": lambda at: _resumes(
        at.service.create_training_client_from_state_with_optimizer_async(at.state)
    ),
    "get_console_url": lambda at: _holds(at.session in at.service.get_console_url()),
    "get_server_capabilities": lambda at: _capable(at, at.service.get_server_capabilities()),
    "get_server_capabilities_async": lambda at: _capable(at, at.service.get_server_capabilities_async()),
    "get_telemetry": lambda at: at.service.get_telemetry(),
}

TRAINING: Final[Mapping[str, Call | Unsupported]] = {
    "create_sampling_client": lambda at: _samples(at.run.create_sampling_client(at.weights)),
    "create_sampling_client_async": lambda at: _samples(at.run.create_sampling_client_async(at.weights)),
    "forward": lambda at: _passed(at.run.forward([_DATUM], "cross_entropy")),
    "forward_async": lambda at: _passed(at.run.forward_async([_DATUM], "cross_entropy")),
    "forward_backward": lambda at: _passed(at.run.forward_backward([_DATUM], "cross_entropy")),
    "forward_backward_async": lambda at: _passed(at.run.forward_backward_async([_DATUM], "cross_entropy")),
    "forward_backward_custom": lambda at: _passed(at.run.forward_backward_custom([_DATUM], _squared)),
    "forward_backward_custom_async": lambda at: _passed(
        at.run.forward_backward_custom_async([_DATUM], _squared)
    ),
    "get_console_url": lambda at: _holds(at.run.model_id in at.run.get_console_url()),
    "get_info": lambda at: _holds(at.run.get_info().lora_rank == 4),
    "get_info_async": lambda at: _holds(done(at.run.get_info_async()).lora_rank == 4),
    "get_telemetry": lambda at: at.run.get_telemetry(),
    "get_tokenizer": lambda at: _has_tokenizer(at.run),
    "load_state": lambda at: _holds(done(at.run.load_state(at.state)).path == at.state),
    "load_state_async": lambda at: _holds(done(at.run.load_state_async(at.state)).path == at.state),
    "load_state_with_optimizer": lambda at: _holds(
        done(at.run.load_state_with_optimizer(at.state)).path == at.state
    ),
    "load_state_with_optimizer_async": lambda at: _holds(
        done(at.run.load_state_with_optimizer_async(at.state)).path == at.state
    ),
    "optim_step": lambda at: _stepped(at, lambda: at.run.optim_step(_ADAM)),
    "optim_step_async": lambda at: _stepped(at, lambda: at.run.optim_step_async(_ADAM)),
    "save_state": lambda at: _checkpoint(at, done(at.run.save_state(at.name())).path),
    "save_state_async": lambda at: _checkpoint(at, done(at.run.save_state_async(at.name())).path),
    "save_weights_and_get_sampling_client": lambda at: _samples(
        at.run.save_weights_and_get_sampling_client()
    ),
    "save_weights_and_get_sampling_client_async": lambda at: _samples(
        at.run.save_weights_and_get_sampling_client_async()
    ),
    "save_weights_external": lambda at: _checkpoint(at, done(at.run.save_weights_external(at.name())).path),
    "save_weights_external_async": lambda at: _checkpoint(
        at, done(at.run.save_weights_external_async(at.name())).path
    ),
    "save_weights_for_sampler": lambda at: _checkpoint(at, at.fresh()),
    "save_weights_for_sampler_async": lambda at: _checkpoint(
        at, done(at.run.save_weights_for_sampler_async(at.name())).path
    ),
}

SAMPLING: Final[Mapping[str, Call | Unsupported]] = {
    "compute_logprobs": lambda at: _scored(at.sampler.compute_logprobs(_PROMPT)),
    "compute_logprobs_async": lambda at: _scored(at.sampler.compute_logprobs_async(_PROMPT)),
    "create": lambda at: _samples(tinker.SamplingClient.create(at.service.holder, base_model=at.base)),
    "from_sampler_handle": _from_handle,
    "get_base_model": lambda at: _holds(at.sampler.get_base_model() == at.base),
    "get_base_model_async": lambda at: _holds(done(at.sampler.get_base_model_async()) == at.base),
    "get_sampler_handle": lambda at: _holds(at.sampler.get_sampler_handle()),
    "get_telemetry": lambda at: at.sampler.get_telemetry(),
    "get_tokenizer": lambda at: _has_tokenizer(at.sampler),
    "on_queue_state_change": lambda at: at.sampler.on_queue_state_change(tinker_queue_state(), None),
    "sample": lambda at: _sampled(at.sampler.sample(_PROMPT, 1, _FEW)),
    "sample_async": lambda at: _sampled(at.sampler.sample_async(_PROMPT, 1, _FEW)),
}

REST: Final[Mapping[str, Call | Unsupported]] = {
    "assign_session_project": lambda at: _assigned(at, at.rest.assign_session_project(at.session, "project")),
    "assign_session_project_async": lambda at: _assigned(
        at, at.rest.assign_session_project_async(at.session, "project")
    ),
    "copy_weights": lambda at: _copied(at, at.rest.copy_weights(at.weights, "project")),
    "copy_weights_async": lambda at: _copied(at, at.rest.copy_weights_async(at.weights, "project")),
    "delete_checkpoint": lambda at: _delete(at, at.rest.delete_checkpoint),
    "delete_checkpoint_async": lambda at: _delete(at, at.rest.delete_checkpoint_async),
    "delete_checkpoint_from_tinker_path": lambda at: _deleted(at, at.rest.delete_checkpoint_from_tinker_path),
    "delete_checkpoint_from_tinker_path_async": lambda at: _deleted(
        at, at.rest.delete_checkpoint_from_tinker_path_async
    ),
    "export_session_trace": Unsupported(
        lambda at: done(at.rest.export_session_trace(at.session)), "404", _TRACES
    ),
    "export_session_trace_async": Unsupported(
        lambda at: done(at.rest.export_session_trace_async(at.session)), "404", _TRACES
    ),
    "get_audit_log": Unsupported(lambda at: done(at.rest.get_audit_log()), "404", _AUDIT),
    "get_audit_log_async": Unsupported(lambda at: done(at.rest.get_audit_log_async()), "404", _AUDIT),
    "get_billing_usage": lambda at: _usage(at.rest.get_billing_usage),
    "get_billing_usage_async": lambda at: _usage(at.rest.get_billing_usage_async),
    "get_current_checkpoint_storage_usage": lambda at: _holds(
        done(at.rest.get_current_checkpoint_storage_usage()).data[0].size_bytes > 0
    ),
    "get_current_checkpoint_storage_usage_async": lambda at: _holds(
        done(at.rest.get_current_checkpoint_storage_usage_async()).data[0].size_bytes > 0
    ),
    "get_external_weights_urls": lambda at: _downloads(at, at.rest.get_external_weights_urls),
    "get_external_weights_urls_async": lambda at: _downloads(at, at.rest.get_external_weights_urls_async),
    "get_sampler": lambda at: _holds(
        done(at.rest.get_sampler(f"{at.session}:sample:0")).base_model == at.base
    ),
    "get_sampler_async": lambda at: _holds(
        done(at.rest.get_sampler_async(f"{at.session}:sample:0")).base_model == at.base
    ),
    "get_server_capabilities": lambda at: _capable(at, at.rest.get_server_capabilities()),
    "get_session": lambda at: _holds(
        at.run.model_id in done(at.rest.get_session(at.session)).training_run_ids
    ),
    "get_session_async": lambda at: _holds(
        at.run.model_id in done(at.rest.get_session_async(at.session)).training_run_ids
    ),
    "get_telemetry": lambda at: at.rest.get_telemetry(),
    "get_training_run": lambda at: _run_of(at, at.rest.get_training_run(at.run.model_id)),
    "get_training_run_async": lambda at: _run_of(at, at.rest.get_training_run_async(at.run.model_id)),
    "get_training_run_by_tinker_path": lambda at: _run_of(
        at, at.rest.get_training_run_by_tinker_path(at.state)
    ),
    "get_training_run_by_tinker_path_async": lambda at: _run_of(
        at, at.rest.get_training_run_by_tinker_path_async(at.state)
    ),
    "get_weights_info_by_tinker_path": lambda at: _holds(
        done(at.rest.get_weights_info_by_tinker_path(at.state)).lora_rank == 4
    ),
    "list_checkpoints": lambda at: _listed(at, at.rest.list_checkpoints(at.run.model_id)),
    "list_checkpoints_async": lambda at: _listed(at, at.rest.list_checkpoints_async(at.run.model_id)),
    "list_sessions": lambda at: _holds(at.session in done(at.rest.list_sessions()).sessions),
    "list_sessions_async": lambda at: _holds(at.session in done(at.rest.list_sessions_async()).sessions),
    "list_training_runs": lambda at: _shares(at, at.rest.list_training_runs()),
    "list_training_runs_async": lambda at: _shares(at, at.rest.list_training_runs_async()),
    "list_user_checkpoints": lambda at: _listed(at, at.rest.list_user_checkpoints()),
    "list_user_checkpoints_async": lambda at: _listed(at, at.rest.list_user_checkpoints_async()),
    "publish_checkpoint_from_tinker_path": lambda at: _published(
        at, at.rest.publish_checkpoint_from_tinker_path, True
    ),
    "publish_checkpoint_from_tinker_path_async": lambda at: _published(
        at, at.rest.publish_checkpoint_from_tinker_path_async, True
    ),
    "search_sessions": _finds,
    "set_checkpoint_ttl_from_tinker_path": lambda at: _expires(
        at, at.rest.set_checkpoint_ttl_from_tinker_path
    ),
    "set_checkpoint_ttl_from_tinker_path_async": lambda at: _expires(
        at, at.rest.set_checkpoint_ttl_from_tinker_path_async
    ),
    "unpublish_checkpoint_from_tinker_path": lambda at: _published(
        at, at.rest.unpublish_checkpoint_from_tinker_path, False
    ),
    "unpublish_checkpoint_from_tinker_path_async": lambda at: _published(
        at, at.rest.unpublish_checkpoint_from_tinker_path_async, False
    ),
    "whoami": Unsupported(lambda at: done(at.rest.whoami()), "JWT", _IDENTITY),
}

METHODS: Final[Mapping[str, Mapping[str, Call | Unsupported]]] = {
    "ServiceClient": SERVICE,
    "TrainingClient": TRAINING,
    "SamplingClient": SAMPLING,
    "RestClient": REST,
}


def tinker_queue_state() -> Any:
    """The state of a queue as the client's observers are told it."""
    from tinker.lib.api_future_impl import QueueState

    return QueueState.ACTIVE


def _stepped(at: Surroundings, step: Callable[[], Any]) -> None:
    _trains(at.run)
    metrics = done(step()).metrics
    _holds(metrics is not None and metrics["grad_norm"] > 0)


def discovered() -> dict[str, list[str]]:
    """The public methods of the clients, as the installed version has them."""
    return {
        client.__name__: [
            name for name, value in inspect.getmembers(client) if callable(value) and not name.startswith("_")
        ]
        for client in CLIENTS
    }


def check(url: str, key: str, base: str) -> list[MethodResult]:
    """Calls every method at the server at `url`. Raises KeyError for one without a call in `METHODS`."""
    results = []
    with tinker.ServiceClient(base_url=url, api_key=key) as service, warnings.catch_warnings():
        at = Surroundings.make(service, url, key, base)
        warnings.simplefilter("ignore")  # of methods that the client wants to drop
        for client, names in discovered().items():
            for name in names:
                results.append(_result(at, client, name, METHODS[client][name]))
    return results


def _result(at: Surroundings, client: str, name: str, asked: Call | Unsupported) -> MethodResult:
    if isinstance(asked, Unsupported):
        try:
            asked.call(at)
        except Exception as error:
            if asked.says in str(error):
                return MethodResult(client, name, False, asked.why)
            return MethodResult(client, name, False, f"not as expected: {error}")
        return MethodResult(client, name, True)
    try:
        asked(at)
    except Exception as error:
        return MethodResult(client, name, False, f"{type(error).__name__}: {error}")
    return MethodResult(client, name, True)


def share(results: list[MethodResult]) -> float:
    """The share of methods that work."""
    return sum(result.works for result in results) / len(results)


def page(results: list[MethodResult]) -> str:
    """The results as `docs/results/tinker.md`."""
    works = sum(result.works for result in results)
    lines = [
        "# What of the `tinker` client works",
        "",
        f"Each public method of the client's version {tinker.__version__} was called at a server with the",
        "embedded model, and what it returned was checked",
        f"(`benchmarks/coserve_benchmarks/training/compatibility.py`): {works} of {len(results)} work,",
        f"{100 * share(results):.0f} %. [tinker.md](../tinker.md) tells how to use it. A test of these calls",
        "(`tests/api/test_tinker_training.py`) writes this page where `COSERVE_TINKER_PAGE` says.",
        "",
    ]
    for client in METHODS:
        own = [result for result in results if result.client == client]
        lines += [f"## `{client}`: {sum(one.works for one in own)} of {len(own)}", "", "| method | works |"]
        lines += ["|---|---|"]
        lines += [f"| `{one.method}` | {'yes' if one.works else 'no: ' + one.note} |" for one in own]
        lines += [""]
    return "\n".join(lines)
