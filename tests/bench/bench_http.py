"""Output tokens a second over HTTP at 1, 4, 16 and 64 streams, the client on the same cores; with PEER=1 beside OpenVINO GenAI, as ratios.

`python -m tests.bench.bench_http [MODEL.gguf] [key=value ...]`: a GGUF (the embedded one by default) and settings of llmd. Works: *short* 128 tokens
in and 128 out, *shared* 1,024 shared and 32 in and 64 out, *long* 1,500 in and 16 out. Medians of three rounds, each with prompts of its own. Before
each point nothing is asked for during two seconds, which is when llmd takes memory ahead of its use; the peer has the same pauses. The peer runs in
`.venv-peer`, which is made when it is missing, on the same file and the same prompts, before llmd, never beside it. PEER=f32 and PEER=bf16 tell it what
to compute in; with PEER=1 it chooses.

At the end some of the 64-stream answers are asked for again, alone and with an empty prefix cache: their texts must be the same.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import yaml

from llmctl.load import WORKS, Result, Target, prompts, run
from tests.daemon import Daemon

ROOT = Path(__file__).parents[2]
PEER_VENV = ROOT / ".venv-peer"
PEER_PACKAGE = "openvino-genai==2026.4.*"
EMBEDDED = Path.home() / ".cache/llmd/models/smollm2-135m-instruct/SmolLM2-135M-Instruct.Q4_1.gguf"

#: (work, streams); the seeds of its rounds follow from its place.
POINTS = [("short", 1), ("short", 4), ("short", 16), ("short", 64), ("shared", 1), ("shared", 16), ("shared", 64), ("long", 1), ("long", 4)]
ROUNDS = 3
#: Seconds without a request before each point.
QUIET_S = 2.0
CHECKED = 4

Rates = dict[tuple[str, int], list[float]]


def plan() -> list[tuple[str, int, list[int]]]:
    return [(work, streams, [1000 * (place + 1) + n for n in range(ROUNDS)]) for place, (work, streams) in enumerate(POINTS)]


def tokens_of(work: str, streams: int) -> int:
    """The tokens that a point's rate is about: prompt tokens for long prompts, else output tokens."""
    return streams * (WORKS[work].input_len if work == "long" else WORKS[work].output_len)


def peer(model: Path, choice: str) -> Rates:
    """Rates of the peer; `choice` is what PEER says."""
    python = PEER_VENV / "bin/python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", PEER_VENV], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", PEER_PACKAGE], check=True)
    script = Path(__file__).with_name("peer_openvino.py")
    command = [python, script, model, json.dumps(plan()), str(QUIET_S), *([] if choice == "1" else [choice])]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, env=os.environ | {"PYTHONPATH": str(ROOT / "admin")})
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith(b"{")]
    return {(line["work"], line["streams"]): [tokens_of(line["work"], line["streams"]) / s for s in line["seconds"]] for line in lines}


def ours(daemon: Daemon) -> tuple[Rates, Result]:
    """Rates of llmd, and its last round of short prompts at the most streams."""
    target = Target(daemon.url, daemon.status()["model"])
    rates: Rates = {}
    widest: Result | None = None
    measure(target, "short", 2, 0)
    for work, streams, seeds in plan():
        time.sleep(QUIET_S)
        before, began = cpu_seconds(daemon), time.perf_counter()
        rounds = [measure(target, work, streams, seed) for seed in seeds]
        wall = (time.perf_counter() - began) * (os.cpu_count() or 1)
        used = {role: (after - before[role]) / wall for role, after in cpu_seconds(daemon).items()}
        rates[work, streams] = [tokens_of(work, streams) / result.seconds for result in rounds]
        if work == "short":
            widest = rounds[-1]
        print(f"  llmd {work:<7}{streams:3d} streams: {statistics.median(rates[work, streams]):7.1f} tokens/s; of all cores {shares(used)}", flush=True)
    assert widest is not None
    return rates, widest


def cpu_seconds(daemon: Daemon) -> dict[str, float]:
    """CPU seconds of each process so far, and of this one, which is the client."""
    times = {process["role"]: sum(psutil.Process(process["pid"]).cpu_times()[:2]) for process in daemon.status()["processes"]}
    return times | {"client": sum(psutil.Process().cpu_times()[:2])}


def shares(used: dict[str, float]) -> str:
    """What each process had of all cores, and what nobody had."""
    rest = max(0.0, 1 - sum(used.values()))
    return ", ".join(f"{role} {share:.0%}" for role, share in [*sorted(used.items(), key=lambda item: -item[1]), ("idle and others", rest)] if share >= 0.005)


def measure(target: Target, work: str, streams: int, seed: int) -> Result:
    result = asyncio.run(run(target, WORKS[work], prompts(WORKS[work], streams, seed), streams))
    if result.errors:
        raise SystemExit(f"{len(result.errors)} requests failed: {result.errors[0]}")
    return result


def same_alone(daemon: Daemon, widest: Result) -> int:
    """How many of the first answers of `widest` come out the same alone and without a cached prefix."""
    target = Target(daemon.url, daemon.status()["model"])
    seed = next(seeds[-1] for work, streams, seeds in plan() if (work, streams) == ("short", widest.streams))
    texts = {sample.text for sample in widest.samples}
    same = 0
    for prompt in prompts(WORKS["short"], widest.streams, seed)[:CHECKED]:
        daemon.admin("POST", "/v1/flush", {})
        same += asyncio.run(run(target, WORKS["short"], [prompt], 1)).samples[0].text in texts
    return same


def main(argv: list[str]) -> None:
    settings = dict(word.split("=", 1) for word in argv if "=" in word)
    model = Path(next((word for word in argv if "=" not in word), EMBEDDED)).resolve()
    config: dict[str, Any] = {"model": {"path": str(model)}}
    for key, value in settings.items():
        section, name = key.split(".", 1)
        config.setdefault(section, {})[name] = yaml.safe_load(value)
    print(model.name, settings or "")
    choice = os.environ.get("PEER")
    theirs = peer(model, choice) if choice else {}
    with tempfile.TemporaryDirectory() as directory, Daemon(Path(directory), config=config).start(timeout=600) as daemon:
        rates, widest = ours(daemon)
        same = same_alone(daemon, widest)
        daemon.stop()
    print(f"\n{'work':<8}{'streams':>8}{'llmd':>9}" + (f"{'peer':>9}{'ratio':>8}" if theirs else ""))
    for point, values in rates.items():
        mine = statistics.median(values)
        line = f"{point[0]:<8}{point[1]:>8}{mine:>9.1f}"
        if point in theirs:
            other = statistics.median(theirs[point])
            line += f"{other:>9.1f}{mine / other:>7.2f}x"
        print(line)
    print(f"{same} of {CHECKED} answers of the widest run are the same alone")


if __name__ == "__main__":
    main(sys.argv[1:])
