"""Bodies made to take long: to decode, to validate, to tokenize, to render, to compile."""

import json
import random
from collections.abc import Callable
from typing import Any

CHAT, TEXT, JOB = "/v1/chat/completions", "/v1/completions", "/v1/fine_tuning/jobs"
EMBEDDINGS, BATCHES, TOKENIZE, DETOKENIZE = "/v1/embeddings", "/v1/batches", "/tokenize", "/detokenize"
GRADERS, EVALS = "/v1/fine_tuning/alpha/graders/run", "/v1/evals"
MESSAGES, COUNT_TOKENS = "/v1/messages", "/v1/messages/count_tokens"
MESSAGE_BATCHES = "/v1/messages/batches"
RESPONSES, CONVERSATIONS = "/v1/responses", "/v1/conversations"
Body = tuple[str, bytes]  # path, JSON


def hostile(draw: random.Random, nbytes: int) -> Body:
    """One body of at most about `nbytes`, of a random kind."""
    path, body = draw.choice(KINDS)(draw, nbytes)
    return path, body if isinstance(body, bytes) else json.dumps(body).encode()


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1, **fields}


def text(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": "x", "max_tokens": 1, **fields}


def _parts(draw: random.Random, nbytes: int) -> tuple[str, Any]:
    message = {"role": "user", "content": [{"type": "text", "text": ""}] * 256}
    return draw.choice([CHAT, MESSAGES]), chat(messages=[message] * (nbytes // 8_000))


def _messages(draw: random.Random, nbytes: int) -> tuple[str, Any]:
    count = draw.choice([2000, nbytes // 35])
    return draw.choice([CHAT, MESSAGES]), chat(messages=[{"role": "user", "content": "a b"}] * count)


def _long(draw: random.Random, nbytes: int) -> tuple[str, Any]:
    unit = draw.choice(["a", "ab ", '"', "\\", "{[", "\U0001f600", "\x00", " ", "<|im_start|>"])
    words = unit * (nbytes // len(json.dumps(unit)))
    said = chat(messages=[{"role": "user", "content": words}])
    counted = {"model": "tiny", "system": words, "messages": chat()["messages"]}
    return draw.choice([
        (TEXT, text(prompt=words)), (CHAT, said), (MESSAGES, said), (COUNT_TOKENS, counted),
    ])  # fmt: skip


def _prompts(draw: random.Random, nbytes: int) -> tuple[str, Any]:
    return TEXT, text(prompt=["word " * (nbytes // 640)] * 128)


def _ids(draw: random.Random, nbytes: int) -> tuple[str, Any]:
    ids = [draw.randrange(1000)] * (nbytes // 5)
    return TEXT, text(prompt=draw.choice([ids, [ids], [ids[: len(ids) // 128 or 1]] * 128]))


def _items(draw: random.Random, nbytes: int) -> tuple[str, Any]:
    item: dict[str, Any] = draw.choice([
        {"role": "user", "content": [{"type": "input_text", "text": ""}] * 256},
        {"role": "assistant", "content": "a b"},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}" * 50},
        {"type": "function_call_output", "call_id": "1", "output": "x"},
        {"type": "reasoning", "summary": [], "encrypted_content": "YWFh" * 50},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "a"}] * 200},
        {"type": "item_reference", "id": "msg_0"},
        {"type": "web_search_call", "action": {"a": [0] * 50}},
        {"type": "compaction", "encrypted_content": "é"},
    ])  # fmt: skip
    items = [item] * draw.choice([20, 2000, nbytes // len(json.dumps(item))])
    if draw.random() < 0.2:
        return CONVERSATIONS, {"items": items}
    more = draw.choice([{}, {"truncation": "auto"}, {"instructions": "x" * (nbytes // 4)}, {"store": False}])
    return RESPONSES, {"model": "tiny", "input": items, "max_output_tokens": 1, **more}


def _unknown(draw: random.Random, nbytes: int) -> tuple[str, Any]:
    path, start = draw.choice([
        (CHAT, chat()), (TEXT, text()), (MESSAGES, chat()), (JOB, {"model": "tiny", "training_file": "f"}),
    ])  # fmt: skip
    unit = draw.choice([b"{}", b'""', b"0", b"[]", b"1e9", b'{"a":0}', b"null"])
    many = b",".join([unit] * (nbytes // (len(unit) + 1)))
    return path, json.dumps(start).encode()[:-1] + b',"metadata":[' + many + b"]}"


def _keys(draw: random.Random, nbytes: int) -> tuple[str, Any]:
    path, name = draw.choice([
        (CHAT, "logit_bias"), (CHAT, "metadata"), (CHAT, "prediction"), (CHAT, "response_format"),
        (RESPONSES, "metadata"), (RESPONSES, "tools"), (RESPONSES, "text"), (RESPONSES, "input"),
        (MESSAGES, "metadata"), (MESSAGES, "tools"), (MESSAGES, "thinking"), (MESSAGES, "cache_control"),
    ])  # fmt: skip
    named = {f"{i}": draw.choice([0, "x", None]) for i in range(nbytes // 12)}
    return path, chat(**{name: named})


def _nested(draw: random.Random, nbytes: int) -> tuple[str, Any]:
    one, other = draw.choice([(b"[", b"]"), (b'{"a":', b"}")])
    depth = draw.choice([900, nbytes // (len(one) + 1)])
    path, name = draw.choice(
        [(CHAT, b"prediction"), (MESSAGES, b"tools"), (RESPONSES, b"tools"), (RESPONSES, b"input")]
    )
    start = json.dumps(chat()).encode()[:-1] + b',"' + name + b'":'
    return path, start + one * depth + b"0" + other * depth + b"}"


def _schema(draw: random.Random, nbytes: int) -> tuple[str, Any]:
    names = [f"p{i:x}" for i in range(draw.choice([2000, nbytes // 20]))]
    schema: dict[str, Any] = draw.choice([
        {"enum": names},
        {"type": "object", "properties": {name: {"type": "string"} for name in names}},
        {"anyOf": [{"const": name} for name in names]},
        {"allOf": [{"pattern": f"{name}*"} for name in names]},
    ])  # fmt: skip
    asked = {"name": "x", "schema": schema}
    return CHAT, chat(response_format={"type": "json_schema", "json_schema": asked})


def grader(draw: random.Random, length: int) -> dict[str, Any]:
    """A grader of about `length` bytes that takes long, or is none."""
    text = draw.choice(["a", "{{item.x}}", "{{sample.output_json.x}}", "{{" + " " * 90, "((((", "é"])
    words = text * (length // len(text.encode()) + 1)
    asks = {
        "model": draw.choice(["tiny", "x" * 9_000]),
        "input": [{"role": "user", "content": words[:9_000]}],
    }
    flat: dict[str, Any] = draw.choice([
        {"type": "string_check", "operation": "eq", "input": words, "reference": words},
        {"type": "text_similarity", "evaluation_metric": "fuzzy_match", "input": words, "reference": text},
        {"type": "text_similarity", "evaluation_metric": "cosine", "input": words, "reference": "{{item.x}}"},
        {"type": "regex", "pattern": words},
        {"type": "json_schema", "schema": {"enum": [words] * 50}},
        {"type": "score_model", "range": draw.choice([[0, 1], [1e9, -1], [0, 1e-300], "x"]), **asks},
        {"type": "label_model", "labels": [words[:99]] * draw.choice([1, 65]), "passing_labels": [], **asks},
        {"type": "python", "source": words},
        {"type": "http", "url": "http://127.0.0.1/"},
    ])  # fmt: skip
    formula = draw.choice(["a", "-" * 990 + "a", "a" + "**a" * 300, "9" * 990, "a()" * 300, "a.__class__"])
    multi = {"type": "multi", "graders": {"a": flat}, "calculate_output": formula}
    return draw.choice([flat, multi, {**multi, "graders": {f"a{n}": flat for n in range(40)}}])


def _graders(draw: random.Random, nbytes: int) -> tuple[str, Any]:
    asked = grader(draw, draw.choice([100, 9_000, 60_000]))
    sample = draw.choice(["[" * 500_000, '{"x": 1}', "a" * 900_000, "\U0001f600" * 60_000])
    item = draw.choice([{"x": "{{item.x}}" * 5_000}, {"x": [[[[]]]]}, {f"{n}": n for n in range(50_000)}])
    return GRADERS, {"grader": asked, "model_sample": sample[: nbytes // 3], "item": item}


def _evals(draw: random.Random, nbytes: int) -> tuple[str, Any]:
    criteria = [grader(draw, 3_000) for _ in range(draw.choice([1, 16, 200]))]
    schema = draw.choice(
        [{}, {"pattern": "(a*)*b"}, {"enum": [*range(9_000)]}, {"$ref": "#"}, {"allOf": [{}] * 999}]
    )
    return EVALS, {
        "data_source_config": {"type": "custom", "item_schema": schema},
        "testing_criteria": criteria,
    }


def _cut(draw: random.Random, nbytes: int) -> tuple[str, Any]:
    path, body = hostile(draw, nbytes)
    return path, body[: draw.randrange(len(body))]


def _inputs(draw: random.Random, nbytes: int) -> tuple[str, Any]:
    """Texts, tokens and chats for routes that make neither answers nor streams of them."""
    word, ids = draw.choice(["word ", "a", "\U0001f600"]), [draw.randrange(1000)] * (nbytes // 5)
    words, few = word * (nbytes // len(json.dumps(word))), word * (nbytes // 2048 // 8)
    return draw.choice([
        (EMBEDDINGS, {"model": "tiny", "input": words}),
        (EMBEDDINGS, {"model": "tiny", "input": [few] * 2048}),
        (EMBEDDINGS, {"model": "tiny", "input": draw.choice([ids, [[i] for i in ids[:3000]], [[]] * 2048])}),
        (TOKENIZE, {"prompt": words}),
        (TOKENIZE, {"messages": [{"role": "user", "content": few}] * 2000}),
        (DETOKENIZE, {"tokens": ids}),
    ])  # fmt: skip


def _forms(draw: random.Random, nbytes: int) -> tuple[str, Any]:
    """Forms of answers that take long to compile, or are none."""
    deep, wide = draw.choice([100, 20_000]), [f"p{i:x}" for i in range(draw.choice([1024, nbytes // 20]))]
    form = draw.choice([
        {"regex": "(" * deep + "a" + ")*" * deep}, {"regex": "(a|aa)*" * deep}, {"regex": "a{1,9999}" * 40},
        {"choice": wide}, {"json": "[" * deep}, {"json": {"enum": wide}},
        {"grammar": "root ::= " + "(" * deep},
        {"grammar": "".join(f"r{i} ::= r{i + 1} | r{i}\n" for i in range(min(deep, 4000)))},
        {"grammar": "start: " + " | ".join(f'"{name}"' for name in wide)},
    ])  # fmt: skip
    name = next(iter(form))
    fields = draw.choice([{"structured_outputs": form}, {f"guided_{name}": form[name]}])
    return draw.choice([(CHAT, chat(**fields)), (TEXT, text(**fields))])


def _batch(draw: random.Random, nbytes: int) -> tuple[str, Any]:
    name = draw.choice(["a", "../", "\x00", "file-"]) * (nbytes // 8)
    ids = draw.choice([[name], ["part_" + "a" * 24] * (nbytes // 40)])
    request = {"custom_id": "a", "params": chat()}
    many = [{**request, "custom_id": f"{number}"} for number in range(nbytes // 120)]
    return draw.choice([
        (MESSAGE_BATCHES, {"requests": many}),
        (MESSAGE_BATCHES, {"requests": [{**request, "params": {f"{n}": n for n in range(nbytes // 12)}}]}),
        (BATCHES, {"input_file_id": name, "endpoint": TEXT, "completion_window": "24h"}),
        (BATCHES, {"input_file_id": "file-x", "endpoint": name, "completion_window": name}),
        ("/v1/uploads", {"filename": name, "purpose": "batch", "bytes": 10**15, "mime_type": name}),
        ("/v1/uploads/upload_x/complete", {"part_ids": ids, "md5": name}),
    ])  # fmt: skip


def _beside(draw: random.Random, nbytes: int) -> tuple[str, Any]:
    """For routes beside those that answer: of things that are not there, and of jobs."""
    _, asked = _items(draw, nbytes)
    names, many = ["x" * draw.choice([1, 900])] * (nbytes // 900), {f"{n}": "x" for n in range(nbytes // 12)}
    entries = [{"item": {"x": "a"}, "sample": {"output_text": "b" * 90}}] * draw.choice([1000, nbytes // 150])
    source = {"type": "jsonl", "source": {"type": "file_content", "content": entries}}
    graded = {"type": "reinforcement", "reinforcement": {"grader": grader(draw, nbytes // 2_500)}}
    return draw.choice([
        (f"{RESPONSES}/compact", asked), (f"{RESPONSES}/input_tokens", asked),
        (f"{CONVERSATIONS}/conv_x/items", asked), (f"{CONVERSATIONS}/conv_x", {"metadata": many}),
        (f"{CHAT}/chatcmpl-x", {"metadata": many}),
        (f"{EVALS}/eval_x/runs", {"data_source": source}), (f"{EVALS}/eval_x", {"metadata": many}),
        ("/v1/fine_tuning/checkpoints/ft:x/permissions", {"project_ids": names}),
        (JOB, {"model": "tiny", "training_file": "file-x", "method": graded}),
        (JOB, {"model": "tiny", "training_file": "file-x", "integrations": [many] * 3, "metadata": many}),
        ("/v1/fine_tuning/validate", {"model": "tiny", "training_file": "file-x", "method": graded}),
    ])  # fmt: skip


KINDS: list[Callable[[random.Random, int], tuple[str, Any]]] = [
    _parts, _messages, _items, _long, _prompts, _ids, _unknown, _keys, _nested, _schema, _cut, _inputs,
    _forms, _batch, _graders, _evals, _beside,
]  # fmt: skip
