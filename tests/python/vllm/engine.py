"""vLLM's engine in a process of its own: what it finds, as JSON, in the line that begins with `RECORD`.

``python -m tests.python.vllm.engine FOLDER '{"prompts": [[1, 2]], "tokens": 64, "options": {}}'``

What is asked for: `prompts`, lists of token ids; `tokens` to generate; `options` of `vllm.LLM`; `alone`: one prompt at
a time rather than all at once; `logprobs`: also those of the tokens; `aborted`: how many more requests are aborted
while the prompts run; `adapter`: a folder of LoRA, with which the prompts are asked.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any, Final

import torch

RECORD: Final = "record: "
DEVICE: Final = "cuda" if torch.cuda.is_available() else "cpu"
"""Where the engine runs, and tests of it."""
OPTIONS: Final = {
    "max_model_len": 256, "max_num_seqs": 8, "enforce_eager": True, "skip_tokenizer_init": True,
}  # fmt: skip
OPTIONS_OF_DEVICE: Final[dict[str, dict[str, Any]]] = {
    "cpu": {"dtype": "float32"},
    # Several engines at once find room on one GPU; attention in Triton takes heads of any size.
    "cuda": {
        "dtype": "float16", "gpu_memory_utilization": 0.05, "kv_cache_memory_bytes": 2**28,
        "attention_backend": "TRITON_ATTN",
    },
}  # fmt: skip
ENVIRONMENT: Final = {
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_ENGINE_READY_TIMEOUT_S": "1200",
    "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}  # fmt: skip
"""So that the engine starts without the network, on a small machine, and answers in the order of its steps."""


def generate(folder: str, asked: dict[str, Any]) -> dict[str, Any]:
    """The `tokens` of each prompt, their `logprobs` if asked for, and how many tokens of it were `cached`."""
    from vllm import LLM, SamplingParams

    llm = LLM(folder, **{**OPTIONS, **OPTIONS_OF_DEVICE[DEVICE], **asked.get("options", {})})
    prompts = [{"prompt_token_ids": ids} for ids in asked["prompts"]]
    params = SamplingParams(
        temperature=0, max_tokens=asked["tokens"], ignore_eos=True, detokenize=False,
        logprobs=0 if asked.get("logprobs") else None,
    )  # fmt: skip
    _abort(llm.llm_engine, prompts, params, asked.get("aborted", 0))
    batches = [[prompt] for prompt in prompts] if asked.get("alone") else [prompts]
    adapter = _adapter(asked.get("adapter"))
    done = [output for batch in batches for output in llm.generate(batch, params, use_tqdm=False, lora_request=adapter)]
    return {
        "tokens": [list(output.outputs[0].token_ids) for output in done],
        "logprobs": [
            [next(iter(chosen.values())).logprob for chosen in output.outputs[0].logprobs or ()] for output in done
        ],
        "cached": [output.num_cached_tokens or 0 for output in done],
    }


def _adapter(folder: str | None) -> Any:
    from vllm.lora.request import LoRARequest

    return None if folder is None else LoRARequest("adapter", 1, folder)


def _abort(engine: Any, prompts: list[Any], params: Any, count: int) -> None:
    """Has the engine begin requests, and abort each of them after some of its tokens."""
    for number in range(count):
        name = f"aborted-{number}"
        engine.add_request(name, prompts[number % len(prompts)], params)
        for _ in range(1 + number):
            engine.step()
        engine.abort_request([name])
    while engine.has_unfinished_requests():
        engine.step()


if __name__ == "__main__":
    for variable, value in ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    _, place, request = sys.argv
    found = generate(place, json.loads(request))
    print(f"\n{RECORD}{json.dumps(found)}", flush=True)
