"""Flag > environment > file > default; every fault at once, with its place and the nearest key."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from llmd.config.fields import FIELDS
from llmd.config.load import RESERVED, Loaded, load_config
from llmd.config.values import value_of
from llmd.errors import ConfigError
from llmd.plan import context
from tests.daemon import SLOW


def faults(tmp_path: Path, text: str | bytes, overrides: tuple[str, ...] = (), **environ: str) -> list[str]:
    """Faults of a configuration file with the directory taken off."""
    file = tmp_path / "llmd.yaml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError) as caught:
        load_config(str(file), list(overrides), environ)
    return [fault.replace(f"{tmp_path}/", "") for fault in caught.value.faults]


def load(tmp_path: Path, text: str, *overrides: str, **environ: str) -> Loaded:
    file = tmp_path / "llmd.yaml"
    file.write_text(text, encoding="utf-8")
    return load_config(str(file), list(overrides), environ)


def test_precedence_and_origin_of_each_layer(tmp_path: Path) -> None:
    text = "http:\n  port: 1\n  host: localhost\n  workers: 2\n"
    loaded = load(tmp_path, text, "http.port=3", LLMD_HTTP__PORT="2", LLMD_HTTP__HOST="127.0.0.2")
    http = loaded.args.http
    assert (http.port, http.host, http.workers, http.backlog) == (3, "127.0.0.2", 2, 2048)
    origins = [loaded.origins[f"http.{name}"] for name in ("port", "host", "workers", "backlog")]
    assert origins == ["flag --set", "environment LLMD_HTTP__HOST", f"file {tmp_path}/llmd.yaml:4", "default"]
    assert set(loaded.origins) == set(FIELDS)


def test_the_last_of_several_flags_wins() -> None:
    assert load_config(None, ["http.port=1", "http.port=2"], {}).args.http.port == 2


def test_the_file_can_come_from_the_environment(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("http: {port: 7}")
    (tmp_path / "b.yaml").write_text("http: {port: 8}")
    environ = {"LLMD_CONFIG": str(tmp_path / "a.yaml")}
    assert load_config(None, [], environ).args.http.port == 7
    assert load_config(str(tmp_path / "b.yaml"), [], environ).args.http.port == 8


@pytest.mark.parametrize("text", ["", "# nothing\n", "---\n", "http:\nsupervision:\n  restart:\n"])
def test_an_empty_file_or_section_is_all_defaults(tmp_path: Path, text: str) -> None:
    assert load(tmp_path, text).args == load_config(None, [], {}).args


def test_units_and_lists_from_every_layer(tmp_path: Path) -> None:
    loaded = load(
        tmp_path,
        "http: {keep_alive: 1min, max_body: 1MB, access_log_exclude: [/a, /b]}\nsupervision: {heartbeat: 250ms, restart: {backoff: [0, 2s, 1min]}}\n",
        "observability.metrics.compat=[sglang]",
        LLMD_SCHEDULER__QUEUE_TIMEOUT="1h",
    )
    args = loaded.args
    assert (args.http.keep_alive, args.http.max_body, args.http.access_log_exclude) == (60.0, 10**6, ("/a", "/b"))
    assert (args.supervision.heartbeat, args.supervision.restart.backoff) == (0.25, (0.0, 2.0, 60.0))
    assert (args.scheduler.queue_timeout, args.observability.metrics.compat) == (3600.0, ("sglang",))


def test_text_from_flags_and_environment_is_taken_as_it_is() -> None:
    args = load_config(None, ["model.served_name=7: x #y"], {"LLMD_HTTP__HOST": "::1"}).args
    assert (args.model.served_name, args.http.host) == ("7: x #y", "::1")
    assert load_config(None, ["admin.group=null"], {}).args.admin.group is None


def test_relative_paths_belong_to_where_they_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    text = "run_dir: r\nmodel: {path: m/x, chat_template: ../t.jinja}\nlora: {adapters: {a: b/c}}\nreload: {allowed_dirs: [d, /e]}\n"
    args = load(tmp_path, text, "state_dir=s").args
    assert (args.run_dir, args.state_dir) == (f"{tmp_path}/r", "/s")
    assert (args.model.path, args.model.chat_template) == (f"{tmp_path}/m/x", f"{tmp_path.parent}/t.jinja")
    assert (args.lora.adapters, args.reload.allowed_dirs) == ({"a": f"{tmp_path}/b/c"}, (f"{tmp_path}/d", "/e"))


@pytest.mark.parametrize(
    ("path", "is_name"), [("smollm2-135m-instruct", True), ("dummy", True), ("hf:a/b", True), ("x.gguf", False), ("a/b", False), ("./x", False)]
)
def test_a_model_is_a_name_or_a_path(tmp_path: Path, path: str, is_name: bool) -> None:
    read = load(tmp_path, f"model: {{path: '{path}'}}").args.model.path
    assert read == path if is_name else read == str(tmp_path / path)


def test_all_faults_at_once_each_with_its_place(tmp_path: Path) -> None:
    text = (
        "memory:\n  max_runing_requests: 4\n"
        "http:\n  drain-timeout: 5s\n  port: 1\n  port: 2\n  chunked_prefill_size: 3\n  backlog: 0\n  keep_alive: 60\n"
        "htpp: {workerz: 2}\nport: 4\nscheduler: 7\n"
    )
    found = faults(tmp_path, text, ("http.port=x",), LLMD_HTTP_PORT="1")
    assert found == [
        "llmd.yaml:2:3: unknown key 'max_runing_requests' in section 'memory': did you mean 'max_running_requests'?",
        "llmd.yaml:4:3: unknown key 'drain-timeout' in section 'http': write it 'drain_timeout'",
        "llmd.yaml:6:3: duplicate key 'http.port', first at line 5",
        "llmd.yaml:7:3: unknown key 'chunked_prefill_size' in section 'http': 'chunked_prefill_size' belongs under 'scheduler'",
        "llmd.yaml:8:12: http.backlog: expected a whole number >= 1 and <= 65535, got 0",
        "llmd.yaml:9:15: http.keep_alive: expected a duration like 30s, got 60 (a duration needs a unit: 60s, 60ms or 60min)",
        "llmd.yaml:10:1: unknown key or section 'htpp' at the top level: did you mean 'http'?",
        "llmd.yaml:10:8: unknown key 'workerz' in section 'http': did you mean 'workers'?",
        "llmd.yaml:11:1: unknown key or section 'port' at the top level: 'port' belongs under 'http'",
        "llmd.yaml:12:12: scheduler is a section, expected keys below it, got 7",
        "environment LLMD_HTTP_PORT: unknown variable: did you mean LLMD_HTTP__PORT?",
        "--set http.port: expected a whole number >= 0 and <= 65535, got 'x'",
    ]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("http: {port: '80'}", "llmd.yaml:1:14: http.port: expected a whole number >= 0 and <= 65535, got '80' (a number is written without quotes)"),
        ("http: {port: 010}", "llmd.yaml:1:14: http.port: expected a whole number >= 0 and <= 65535, got 010"),
        ("http: {port: }", "llmd.yaml:1:13: http.port: expected a whole number >= 0 and <= 65535, got nothing"),
        ("http: {port: 70000}", "llmd.yaml:1:14: http.port: expected a whole number >= 0 and <= 65535, got 70000"),
        ("http: {host: 5}", "llmd.yaml:1:14: http.host: expected text, got 5 (put it in quotes)"),
        ("http: {host: [a]}", "llmd.yaml:1:14: http.host: expected text, got a list"),
        ("http: {strict: yes}", "llmd.yaml:1:16: http.strict: expected true or false, got yes (write true or false)"),
        ("model: {dtype: fp16}", "llmd.yaml:1:16: model.dtype: expected one of auto, bfloat16, float16, float32, got 'fp16'"),
        ("model: {threads: 0}", "llmd.yaml:1:18: model.threads: expected a whole number >= 1 and <= 1024, or auto, got 0"),
        (
            "http: {max_body: 8M}",
            "llmd.yaml:1:18: http.max_body: expected a size like 8MiB, 1KiB to 1TiB, got '8M' (unknown unit 'M': use B, KiB, MiB, GiB, TiB, kB, MB, GB or TB)",
        ),
        ("supervision: {heartbeat: 0s}", "llmd.yaml:1:26: supervision.heartbeat: expected a duration like 30s, at least 10ms, got '0s'"),
        ("supervision: {restart: {backoff: [0s]}}", "llmd.yaml:1:34: supervision.restart.backoff: expected a list of 3, each a duration like 30s, got a list"),
        ("lora: {adapters: {a: 1}}", "llmd.yaml:1:18: lora.adapters: expected a mapping of names, each to a path, got a mapping (put it in quotes)"),
        (
            "run_dir: !!python/object:os.system x",
            "llmd.yaml:1:10: run_dir: expected a path, or null, got x (the tag tag:yaml.org,2002:python/object:os.system is not allowed)",
        ),
        ("memory: {mem_fraction_static: .nan}", "llmd.yaml:1:31: memory.mem_fraction_static: expected a number > 0 and < 1, or auto, got .nan"),
        ("run_dir: &x /a", "llmd.yaml:1:10: anchors and aliases are not supported, write the value out"),
        ("run_dir: *x", "llmd.yaml:1:10: anchors and aliases are not supported, write the value out"),
        ("a: 1\n---\nb: 2\n", "llmd.yaml:2:1: a second YAML document begins here, expected one"),
        ("[1, 2]", "llmd.yaml:1:1: expected sections like `http:`, got a list"),
        ("just text", "llmd.yaml:1:1: expected sections like `http:`, got a single value"),
        ("http:\n  port: [1\n", "llmd.yaml:3:1: not valid YAML: while parsing a flow sequence expected ',' or ']', but got '<stream end>'"),
        ("http:\n\tport: 1", "llmd.yaml:2:1: not valid YAML: while scanning for the next token found character '\\t' that cannot start any token"),
        ("a: b\x00", "llmd.yaml:1:5: not valid YAML: character #x00 is not allowed"),
        (b"http:\n  host: \xff\xfe\n", "llmd.yaml:2:9: not UTF-8 (byte 0xff)"),
        ("? [a]\n: 1\n", "llmd.yaml:1:3: expected a key, got a list"),
        ("[" * 5000, "llmd.yaml:1:17: nested deeper than 16 levels"),
        ("#" * 200_000, "llmd.yaml: larger than 128 KiB, is it a configuration file?"),
    ],
)
def test_one_clear_fault(tmp_path: Path, text: str | bytes, fault: str) -> None:
    began = time.monotonic()
    assert faults(tmp_path, text) == [fault]
    assert time.monotonic() - began < 20 * SLOW


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    for path, why in ((tmp_path, "is a directory"), (tmp_path / "none.yaml", "No such file")):
        with pytest.raises(ConfigError) as caught:
            load_config(str(path), [], {})
        assert len(caught.value.faults) == 1
        assert str(path) in caught.value.faults[0] and why in caught.value.faults[0]


@pytest.mark.parametrize(
    ("override", "fault"),
    [
        ("http.port", "--set http.port: expected KEY=VALUE, like --set http.port=..."),
        (
            "http.prot",
            "--set http.prot: expected KEY=VALUE, like --set http.port=...; unknown key 'prot' in section 'http': did you mean 'port'?",
        ),
        ("http=1", "--set http: http is a section, set its keys one by one"),
        ("http.prot=1", "--set http.prot: unknown key 'prot' in section 'http': did you mean 'port'?"),
        ("htpp.port=1", "--set htpp.port: unknown key or section 'htpp' at the top level: did you mean 'http'?"),
        ("http.port=[", "--set http.port: cannot read '[': not valid YAML: while parsing a flow node expected the node content, but found '<stream end>'"),
        ("http.port=1\nport: 2", "--set http.port: cannot read '1\\nport: 2' as one value"),
    ],
)
def test_flags_are_checked_alike(override: str, fault: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, [override], {})
    assert caught.value.faults == [fault]


def test_foreign_variables_are_left_alone() -> None:
    cluster = {"LLMD_PORT": "tcp://10.0.0.1:80", "LLMD_PORT_80_TCP_ADDR": "10.0.0.1", "LLMD_SERVICE_HOST": "10.0.0.1", "LLMD_SERVICE_PORT_HTTP": "80"}
    assert load_config(None, [], cluster | dict.fromkeys(RESERVED - {"LLMD_CONFIG"}, "1")).args == load_config(None, [], {}).args
    assert {context.ENV_EPOCH, context.ENV_INCARNATION, context.ENV_PARENT} <= RESERVED


def test_every_key_has_a_variable_and_a_default() -> None:
    args = load_config(None, [], {}).args
    for field in FIELDS.values():
        assert field.env.startswith("LLMD_") and field.env not in RESERVED
        assert value_of(args, field.key) == field.default


def test_anchors_and_aliases_hide_no_other_fault(tmp_path: Path) -> None:
    text = "base: &b {port: 1}\nhttp: *b\nmodel: {path: &p /m}\nscheduler: {policy: no}\nadmin: {socket: *p}\nmemory: {<<: *b, page_size: 0}\n"
    found = faults(tmp_path, text)
    assert [fault.partition(":")[2].partition(": ")[0] for fault in found if "anchors" in fault] == ["1:7", "2:7", "3:15", "5:17", "6:14"]
    others = [fault for fault in found if "anchors" not in fault]
    assert [fault.partition(":")[2].partition(": ")[0] for fault in others] == ["1:1", "4:21", "6:29"]


def test_nested_aliases_cost_nothing(tmp_path: Path) -> None:
    text = "a0: &a0 [x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 200))
    began = time.monotonic()
    assert len(faults(tmp_path, text)) >= 200 * 9
    assert time.monotonic() - began < 20 * SLOW
