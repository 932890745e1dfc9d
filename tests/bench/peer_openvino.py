"""What OpenVINO GenAI does with the same GGUF and the same prompts, in its own process and virtual environment; JSON lines on stdout.

`python peer_openvino.py MODEL.gguf '[["short", 4, [seed, …]], …]' PAUSE [f32|bf16]`, with openvino-genai installed and `admin` on PYTHONPATH. In-process, no
HTTP and no client beside it: a favour to the peer. What it computes in is its own choice (bf16 on a CPU with AMX) unless it is told.
"""

from __future__ import annotations

import json
import sys
import time

import openvino_genai as genai

from llmctl.load import WORKS, Work, prompts


def pipeline(path: str, precision: str | None) -> genai.ContinuousBatchingPipeline:
    """Continuous batching as its makers recommend it on a CPU: prefix cache, chunked prefill, 4 GB of KV."""
    config = genai.SchedulerConfig()
    config.cache_size, config.max_num_batched_tokens, config.max_num_seqs = 4, 512, 64
    config.enable_prefix_caching = config.dynamic_split_fuse = True
    return genai.ContinuousBatchingPipeline(path, config, "CPU", {"INFERENCE_PRECISION_HINT": precision} if precision else {})


def seconds(pipe: genai.ContinuousBatchingPipeline, work: Work, texts: list[str]) -> float:
    """How long all of `texts`, submitted at once, take."""
    config = genai.GenerationConfig()
    config.max_new_tokens, config.ignore_eos, config.do_sample, config.apply_chat_template = work.output_len, True, False, False
    began = time.perf_counter()
    pipe.generate(texts, [config] * len(texts))
    return time.perf_counter() - began


def main(path: str, plan: list[tuple[str, int, list[int]]], pause: float, precision: str | None = None) -> None:
    """`pause`: seconds without work before each point."""
    pipe = pipeline(path, precision)
    seconds(pipe, Work(20, 8), prompts(Work(20, 8), 2, 0))
    for name, streams, seeds in plan:
        work = WORKS[name]
        time.sleep(pause)
        took = [seconds(pipe, work, prompts(work, streams, seed)) for seed in seeds]
        print(json.dumps({"work": name, "streams": streams, "seconds": took}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]), float(sys.argv[3]), *sys.argv[4:])
