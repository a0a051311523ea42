"""Asks llama.cpp for the likeliest next tokens behind prompts, by a GGUF file and an adapter beside it. It
runs in the clients' environment, without coserve. JSON goes in and out."""

import json
import sys
from typing import Any

import xllamacpp

given = json.load(sys.stdin)
params = xllamacpp.CommonParams()
params.model.path = given["model"]
params.n_ctx, params.n_parallel, params.warmup = 256, 1, False
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
params.verbosity, params.hostnames = -1, ["127.0.0.1"]
if given["lora"]:
    params.lora_adapters = [xllamacpp.CommonAdapterLoraInfo(given["lora"], 1.0)]
params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
server = xllamacpp.Server(params)


def likeliest(prompt: Any) -> list[tuple[int, float]]:
    """The likeliest next tokens with their log-probabilities."""
    # The token that is taken is an ASCII letter: of a part of a character no scores are told.
    asked = {"prompt": prompt, "n_predict": 1, "n_probs": given["most"], "logit_bias": {given["taken"]: 100}}
    (choice,) = server.handle_completions(asked)["choices"]
    (first,) = choice["logprobs"]["content"]
    assert first["id"] == int(given["taken"])
    return [(one["id"], one["logprob"]) for one in first["top_logprobs"]]


json.dump([likeliest(prompt) for prompt in given["prompts"]], sys.stdout)
