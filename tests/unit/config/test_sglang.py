"""SGLang's names: one table for the command line and for keyword arguments; what llmd lacks is refused, never ignored."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from llmd.config import ServerArgs
from llmd.config.fields import FIELDS
from llmd.config.keys import digest_of, read_admin_key, read_keys
from llmd.config.sglang import ALWAYS_ON, BY_NAME, CONFIG, KEYS, TABLE, complaint, known, load_kwargs
from llmd.config.sglang_names import UNSUPPORTED
from llmd.config.values import value_of
from llmd.errors import ConfigError, UsageError
from llmd.launch_server import main, read

#: What a script written for SGLang may give: flag, value, key, and what that key then is.
EXAMPLES = [
    ("model-path", "/m/x.gguf", "model.path", "/m/x.gguf"),
    ("tokenizer-path", "/t/tokenizer.json", "model.tokenizer_path", "/t/tokenizer.json"),
    ("served-model-name", "mine", "model.served_name", "mine"),
    ("revision", "main", "model.revision", "main"),
    ("chat-template", "/t/chat.jinja", "model.chat_template", "/t/chat.jinja"),
    ("dtype", "half", "model.dtype", "float16"),
    ("dtype", "float", "model.dtype", "float32"),
    ("dtype", "bfloat16", "model.dtype", "bfloat16"),
    ("kv-cache-dtype", "bf16", "model.kv_cache_dtype", "bfloat16"),
    ("quantization", "int8", "model.quantization", "int8"),
    ("context-length", 512, "model.context_length", 512),
    ("device", "cpu", "model.device", "cpu"),
    ("host", "::1", "http.host", "::1"),
    ("port", 30000, "http.port", 30000),
    ("tokenizer-worker-num", 2, "http.workers", 2),
    ("tp-size", 2, "parallel.tp", 2),
    ("tp", 2, "parallel.tp", 2),
    ("tensor-parallel-size", 2, "parallel.tp", 2),
    ("pp-size", 2, "parallel.pp", 2),
    ("dp-size", 2, "parallel.dp", 2),
    ("dp", 2, "parallel.dp", 2),
    ("ep-size", 2, "parallel.ep", 2),
    ("nnodes", 2, "parallel.nnodes", 2),
    ("node-rank", 1, "parallel.node_rank", 1),
    ("dist-init-addr", "host:5000", "parallel.dist_init_addr", "host:5000"),
    ("mem-fraction-static", 0.85, "memory.mem_fraction_static", 0.85),
    ("max-running-requests", 7, "memory.max_running_requests", 7),
    ("max-total-tokens", 4096, "memory.max_total_tokens", 4096),
    ("page-size", 32, "memory.page_size", 32),
    ("schedule-policy", "lpm", "scheduler.policy", "lpm"),
    ("chunked-prefill-size", 256, "scheduler.chunked_prefill_size", 256),
    ("radix-eviction-policy", "lfu", "scheduler.eviction", "lfu"),
    ("max-queued-requests", 9, "scheduler.max_queued_requests", 9),
    ("random-seed", 42, "scheduler.random_seed", 42),
    ("watchdog-timeout", 300, "supervision.hang_timeout", 300.0),
    ("max-loras-per-batch", 3, "lora.max_adapters", 3),
    ("max-lora-rank", 16, "lora.max_rank", 16),
    ("log-level", "warning", "observability.log_level", "warning"),
    ("otlp-traces-endpoint", "http://x:4317", "observability.tracing.otlp_endpoint", "http://x:4317"),
]
SWITCHES = [
    ("disable-radix-cache", "scheduler.radix_cache", False),
    ("disable-overlap-schedule", "scheduler.overlap", False),
    ("enable-dp-attention", "parallel.dp_attention", True),
    ("use-ray", "parallel.backend", "ray"),
]


@pytest.mark.parametrize(("flag", "value", "key", "expected"), EXAMPLES)
def test_a_flag_and_a_keyword_set_the_same_key(flag: str, value: object, key: str, expected: object) -> None:
    for argv in ([f"--{flag}", str(value)], [f"--{flag}={value}"]):
        loaded, _ = read(argv)
        assert value_of(loaded.args, key) == expected
        assert loaded.origins[key] == f"flag --{flag}"
    assert value_of(ServerArgs.from_kwargs(**{flag.replace("-", "_"): value}), key) == expected


@pytest.mark.parametrize(("flag", "key", "expected"), SWITCHES)
def test_a_switch_and_its_keyword_set_the_same_key(flag: str, key: str, expected: object) -> None:
    assert value_of(read([f"--{flag}"])[0].args, key) == expected
    name = flag.replace("-", "_")
    assert value_of(ServerArgs.from_kwargs(**{name: True}), key) == expected
    assert value_of(ServerArgs.from_kwargs(**{name: False}), key) == FIELDS[key].default
    with pytest.raises(UsageError, match="expected True or False"):
        ServerArgs.from_kwargs(**{name: "yes"})


def test_every_entry_of_the_table_is_tried_here_and_names_a_key() -> None:
    tried = {flag for flag, *_ in EXAMPLES} | {flag for flag, *_ in SWITCHES}
    for flag in TABLE:
        assert flag.key in FIELDS
        assert tried & set(flag.names), f"no example for {flag.names}"


def test_the_manual_has_every_name() -> None:
    manual = (Path(__file__).parents[3] / "docs" / "python-api.md").read_text()
    for name in [*BY_NAME, *ALWAYS_ON, *KEYS, CONFIG]:
        assert f"`--{name}`" in manual


def test_the_lists_do_not_overlap() -> None:
    groups = [set(BY_NAME), set(ALWAYS_ON), set(KEYS), {CONFIG}, set(UNSUPPORTED)]
    assert sum(map(len, groups)) == len(set.union(*groups))
    assert len(UNSUPPORTED) > 500


@pytest.mark.parametrize("name", ["speculative-algorithm", "enable-lora", "trust-remote-code", "attention-backend", "disaggregation-mode", "cuda-graph-max-bs"])
def test_a_flag_that_llmd_lacks_is_refused_and_said_to_be(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert not known(name)
    for argv in ([f"--{name}"], [f"--{name}", "value"], [f"--{name}=value", "--port", "0"]):
        assert main(argv) == 2
        assert f"--{name}: not supported" in capsys.readouterr().err
    with pytest.raises(UsageError, match=f"{name.replace('-', '_')}: not supported"):
        ServerArgs.from_kwargs(**{name.replace("-", "_"): 1})


def test_unknown_flags_are_all_named_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--modl-path", "x", "--zzz", "--context-lenght=5"]) == 2
    error = capsys.readouterr().err
    for line in (
        "--modl-path: unknown flag: did you mean --model-path?",
        "--zzz: unknown flag\n",
        "--context-lenght: unknown flag: did you mean --context-length?",
    ):
        assert line in error
    assert main(["--model"]) == 2
    assert main(["x"]) == 2
    assert main(["--po", "1"]) == 2, "no abbreviations"


@pytest.mark.parametrize("name", KEYS)
def test_a_key_goes_into_a_private_file_as_a_digest(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    for args in (read([f"--{name}", "sk-hush"])[0].args, ServerArgs.from_kwargs(**{name.replace("-", "_"): "sk-hush"})):
        path = Path((args.http.api_keys_file if name == "api-key" else args.http.admin_key_file) or "")
        assert path.stat().st_mode & 0o777 == 0o600 and "sk-hush" not in path.read_text()
        digest = read_keys(str(path))[0].digest if name == "api-key" else read_admin_key(str(path))
        assert digest == digest_of("sk-hush")
    for wrong in ("", "two words", "k" * 1000):
        assert main([f"--{name}", wrong]) == 2
        error = capsys.readouterr().err
        assert f"--{name}: a key has" in error and (not wrong or wrong not in error)


def test_the_file_of_a_key_goes_with_the_process() -> None:
    code = "from llmd import ServerArgs; print(ServerArgs.from_kwargs(api_key='sk-hush').http.api_keys_file)"
    path = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
    assert path and not Path(path).exists()


@pytest.mark.parametrize("name", ALWAYS_ON)
def test_what_is_always_on_may_be_named_and_not_turned_off(name: str) -> None:
    assert read([f"--{name}"])[0].args == ServerArgs()
    with pytest.raises(UsageError, match="cannot be turned off"):
        ServerArgs.from_kwargs(**{name.replace("-", "_"): False})


def test_flags_go_over_environment_and_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "llmd.yaml"
    file.write_text("http: {port: 1, host: localhost}\nmemory: {page_size: 8}\n")
    monkeypatch.setenv("LLMD_HTTP__PORT", "2")
    monkeypatch.setenv("LLMD_HTTP__WORKERS", "3")
    loaded, failpoints = read(["--config", str(file), "--port", "4", "--set", "http.backlog=5", "--allow-failpoints"])
    http = loaded.args.http
    assert (http.port, http.workers, http.host, http.backlog, loaded.args.memory.page_size) == (4, 3, "localhost", 5, 8)
    assert failpoints
    args = load_kwargs({"config": file, "port": 4, "served_model_name": None}).args
    assert (args.http.port, args.http.workers, args.http.host) == (4, 3, "localhost")


def test_every_bad_value_is_named_by_its_flag() -> None:
    with pytest.raises(ConfigError) as caught:
        ServerArgs.from_kwargs(port="abc", tp_size=0, dtype="int3")
    assert [fault.partition(":")[0] for fault in caught.value.faults] == ["port", "tp_size", "dtype"]
    assert complaint("nothing-like-it") == "unknown flag"
    assert complaint("hots", dashes=True).endswith("did you mean --host?") and complaint("tp-siez").endswith("did you mean tp_size?")


def test_names_for_one_key_must_agree() -> None:
    with pytest.raises(UsageError, match=r"tp_size: contradicts tp, which sets parallel\.tp too"):
        ServerArgs.from_kwargs(tp=1, tp_size=2)
    assert ServerArgs.from_kwargs(tp=1, tp_size=1).parallel.tp == 1


def test_words_of_sglang_that_mean_something_else_here() -> None:
    assert ServerArgs.from_kwargs(served_model_name="null").model.served_name == "null"
    assert ServerArgs.from_kwargs(log_level="INFO").observability.log_level == "info"
    assert ServerArgs.from_kwargs(log_level="critical").observability.log_level == "error"
    assert ServerArgs.from_kwargs(chunked_prefill_size=-1).scheduler.chunked_prefill_size == 16777216


@pytest.mark.parametrize("argv", [["--set", "http"], ["--config", ""], ["--config", "a", "--config", "b"]])
def test_a_bad_command_line_is_the_callers_mistake(argv: list[str]) -> None:
    with pytest.raises(UsageError, match=r"--set: 'http' is no KEY=VALUE|--config: expected one file"):
        read(argv)


def test_an_open_address_is_told_how_it_is_meant() -> None:
    with pytest.raises(ConfigError) as caught:
        read(["--model-path", "/m", "--host", "0.0.0.0"], checked=True)
    assert caught.value.hint.startswith("--set http.allow_unauthenticated=true")
