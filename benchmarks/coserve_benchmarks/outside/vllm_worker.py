"""vLLM on a load, `python -m coserve_benchmarks.outside.vllm_worker`: needs vLLM for a CPU, no coserve."""

import os
import time
from typing import Any

from coserve_benchmarks.outside.worker import Answers, Load, serve


class VLLM:
    """vLLM's engine in this process. A step has `batch_tokens` tokens at most; `eager` compiles nothing."""

    def __init__(self, load: Load, batch_tokens: int, eager: bool, intel: bool, threads: int) -> None:
        assert os.environ["OMP_NUM_THREADS"] == str(threads), "vLLM takes OpenMP's number"
        assert intel == ("libiomp" in os.environ.get("LD_PRELOAD", "")), (
            "a library is loaded before all others"
        )
        os.environ |= {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        from vllm import LLM  # reads the environment

        self._load, self._number = load, 0
        self._engine: Any = LLM(
            model=load.folder,
            skip_tokenizer_init=True,
            dtype="bfloat16",
            enable_prefix_caching=False,  # rounds repeat their prompts
            max_model_len=len(load.prompts[0]) + load.answer,
            max_num_seqs=len(load.prompts),
            max_num_batched_tokens=batch_tokens,
            enforce_eager=eager,
            max_logprobs=-1,
            seed=0,
        ).llm_engine

    def answer(self) -> Answers:
        started = between = time.perf_counter()
        waiting = {
            self._add(prompt, self._load.answer): order for order, prompt in enumerate(self._load.prompts)
        }
        tokens: list[list[int]] = [[] for _ in self._load.prompts]
        while self._engine.has_unfinished_requests():
            had_first = all(tokens)
            for output in self._engine.step():
                tokens[waiting[output.request_id]] = list(output.outputs[0].token_ids)
            if not had_first:
                between = time.perf_counter()
        return Answers(between - started, time.perf_counter() - between, tokens)

    def logprobs(self) -> list[list[float]]:
        waiting = [self._add(prompt, 1, -1) for prompt in self._load.prompts]
        found: dict[str, Any] = {}
        while self._engine.has_unfinished_requests():
            found |= {output.request_id: output.outputs[0].logprobs[0] for output in self._engine.step()}
        return [[found[name][token].logprob for token in sorted(found[name])] for name in waiting]

    def _add(self, prompt: Any, answer: int, logprobs: int | None = None) -> str:
        from vllm import SamplingParams

        self._number += 1
        sampling = SamplingParams(
            temperature=0.0, max_tokens=answer, ignore_eos=True, detokenize=False, logprobs=logprobs
        )
        self._engine.add_request(str(self._number), {"prompt_token_ids": list(prompt)}, sampling)
        return str(self._number)


if __name__ == "__main__":
    serve(VLLM)
