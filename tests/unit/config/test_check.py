"""Every key at another value has an effect or is refused by name; nothing is open to the world by accident."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec import inspect

from llmd.config.check import NOT_YET, check_args, is_loopback, load_checked
from llmd.config.fields import FIELDS, Field, bare
from llmd.config.load import load_config
from llmd.config.server_args import HttpArgs, ServerArgs
from llmd.config.values import value_of
from llmd.errors import ConfigError
from tests.unit.config.examples import other_text, other_value

#: Keys whose other value of the walk needs a second one to be sensible.
TOGETHER = {"http.host": ["http.allow_unauthenticated=true"]}
#: Keys whose other value of the walk is refused for what it names; test_keys.py has values that work.
REFUSED = {
    "http.api_keys_file": "No such file", "http.admin_key_file": "No such file", "observability.metrics.require_key": "needs http.api_keys_file",
    "admin.listen": "HOST:PORT", "admin.tls_cert": "without admin.listen", "admin.tls_key": "without admin.listen",
}  # fmt: skip


def refusals(*overrides: str, allow_failpoints: bool = False) -> list[str]:
    try:
        check_args(load_config(None, list(overrides), {}).args, allow_failpoints=allow_failpoints)
    except ConfigError as error:
        return error.faults
    return []


@pytest.mark.parametrize("field", FIELDS.values(), ids=FIELDS)
def test_each_key_has_an_effect_or_is_refused_by_name(field: Field, tmp_path: Path) -> None:
    wanted: Any = other_value(field)
    assert wanted != field.default
    args = load_config(None, [f"{field.key}={other_text(field)}"], {}).args
    assert value_of(args, field.key) == wanted
    found = refusals(f"{field.key}={other_text(field)}", *TOGETHER.get(field.key, []))
    if field.key in NOT_YET and wanted not in NOT_YET[field.key].works:
        assert len(found) == 1 and found[0].startswith(f"{field.key}: ") and NOT_YET[field.key].what in found[0]
    elif field.key in REFUSED:
        assert len(found) == 1 and found[0].startswith(f"{field.key}: ") and REFUSED[field.key] in found[0]
    else:
        assert found == []


@pytest.mark.parametrize("key", NOT_YET)
def test_defaults_and_working_values_pass(key: str) -> None:
    rule = NOT_YET[key]
    assert FIELDS[key].default in (rule.works or (FIELDS[key].default,))
    assert refusals() == []


@pytest.mark.parametrize(
    "override",
    [
        "lora.max_rank=8",
        "supervision.spare_worker=true",
    ],
)
def test_a_missing_feature_is_named(override: str) -> None:
    (found,) = refusals(override)
    assert found.startswith(override.partition("=")[0]) and "this version does not have" in found


def test_all_refusals_at_once() -> None:
    found = refusals("parallel.tp=2", "parallel.pp=2", "model.path=dummy", "http.host=0.0.0.0")
    assert [fault.partition(":")[0] for fault in found] == ["parallel.tp", "parallel.pp", "model.path", "http.host"]


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.8.0.1", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("example.org", False),
        ("10.0.0.1", False),
    ],
)
def test_an_open_address_is_refused_unless_meant(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback
    assert bool(refusals(f"http.host={host}")) is not loopback
    assert refusals(f"http.host={host}", "http.allow_unauthenticated=true") == []


def test_the_scripted_model_needs_failpoints() -> None:
    assert "--allow-failpoints" in refusals("model.path=dummy")[0]
    assert refusals("model.path=dummy", allow_failpoints=True) == []


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("supervision:\n  heartbeat: 10s\n", "2:14: supervision.heartbeat: 10s does not go with supervision.helper_timeout: 5s"),
        ("supervision:\n  helper_timeout: 100ms\n", "2:19: supervision.helper_timeout: 100ms does not go with supervision.heartbeat: 500ms"),
    ],
)
def test_timeouts_shorter_than_two_heartbeats_are_refused_with_both_keys_where_they_were_written(tmp_path: Path, text: str, where: str) -> None:
    (tmp_path / "llmd.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_checked(str(tmp_path / "llmd.yaml"), [], {}, allow_failpoints=True)
    assert any(fault.startswith(f"{tmp_path}/llmd.yaml:{where}") for fault in caught.value.faults)
    assert all("two heartbeats" in fault for fault in caught.value.faults)


@pytest.mark.parametrize("host", ["127.0.0.1:80", "http://localhost", "a b", "[::1", "1.2.3", "-x"])
def test_what_is_no_host_is_not_taken_for_an_open_address(host: str) -> None:
    (found,) = refusals(f"http.host={host}")
    assert "is not an address" in found


def test_an_address_in_brackets_is_that_address() -> None:
    assert is_loopback("[::1]") and refusals("http.host=[::1]") == [] and refusals("http.host=my-host.example.", "http.allow_unauthenticated=true") == []


def test_waits_that_shrink_are_refused() -> None:
    assert "backoff" in refusals("supervision.restart.backoff=[5s, 1s, 30s]")[0]


def test_faults_of_the_file_and_of_what_it_asks_for_come_together_each_with_its_place(tmp_path: Path) -> None:
    file = tmp_path / "llmd.yaml"
    file.write_text("http:\n  host: 0.0.0.0\n  prot: 1\nparallel: {tp: 2}\nmemory: {max_running_requests: 100000}\n")
    with pytest.raises(ConfigError) as caught:
        load_checked(str(file), ["parallel.pp=2"], {"LLMD_PARALLEL__DP": "2"}, allow_failpoints=False)
    begins = [
        "llmd.yaml:2:9: http.host: '0.0.0.0' is not loopback",
        "llmd.yaml:3:3: unknown key 'prot'",
        "llmd.yaml:4:16: parallel.tp: 2 needs",
        "llmd.yaml:5:32: memory.max_running_requests: expected a whole number >= 1 and <= 4096",
        "--set parallel.pp: 2 needs",
        "environment LLMD_PARALLEL__DP: parallel.dp: 2 needs",
    ]
    found = [fault.replace(f"{tmp_path}/", "") for fault in caught.value.faults]
    assert len(found) == len(begins)
    assert all(fault.startswith(begin) for fault, begin in zip(found, begins, strict=True)), found


@pytest.mark.parametrize(("override", "guess"), [("memory.banana=1", None), ("lock.x=1", None), ("http.prt=1", "port"), ("modle.path=x", "model")])
def test_only_a_name_that_is_near_is_guessed(override: str, guess: str | None) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, [override], {})
    (fault,) = caught.value.faults
    assert (f"did you mean '{guess}'" in fault) if guess else ("did you mean" not in fault and "known are" in fault)


def test_a_file_that_is_not_there_has_a_hint() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config("/nonexistent/llmd.yaml", [], {})
    assert "etc/llmd/llmd.yaml" in caught.value.hint


@pytest.mark.parametrize("key", [key for key, field in FIELDS.items() if field.path or field.is_text])
def test_an_empty_path_or_name_is_a_fault(key: str, tmp_path: Path) -> None:
    kind = {"reload.allowed_dirs": '["/a", ""]', "lora.adapters": '{a: ""}'}.get(key, '""')
    *sections, leaf = key.split(".")
    text = "".join(f"{'  ' * depth}{name}:\n" for depth, name in enumerate(sections)) + f"{'  ' * len(sections)}{leaf}: {kind}\n"
    (tmp_path / "llmd.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_checked(str(tmp_path / "llmd.yaml"), [], {}, allow_failpoints=True)
    assert any(f"llmd.yaml:{len(sections) + 1}:" in fault and f"{key}: empty" in fault for fault in caught.value.faults)


def test_the_admin_plane_over_tcp_is_never_open(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("abc\n")
    key.chmod(0o600)
    with_key = f"http.admin_key_file={key}"
    assert refusals("admin.listen=127.0.0.1:8001", with_key) == []
    assert "needs http.admin_key_file" in refusals("admin.listen=127.0.0.1:8001")[0]
    assert "in clear" in refusals("admin.listen=0.0.0.0:8001", with_key)[0]
    assert "belong together" in refusals("admin.listen=127.0.0.1:8001", with_key, f"admin.tls_cert={key}")[0]
    assert "cannot be used" in refusals("admin.listen=0.0.0.0:8001", with_key, f"admin.tls_cert={key}", f"admin.tls_key={key}")[0]
    assert "HOST:PORT" in refusals("admin.listen=8001", with_key)[0]


def numbers(kind: inspect.Type) -> list[inspect.IntType | inspect.FloatType]:
    """The numbers that a value may be or hold."""
    kind = bare(kind)
    inner = {inspect.UnionType: "types", inspect.TupleType: "item_types"}.get(type(kind))
    return (
        [number for each in getattr(kind, inner) for number in numbers(each)]
        if inner
        else [kind]
        if isinstance(kind, inspect.IntType | inspect.FloatType)
        else []
    )


@pytest.mark.parametrize("field", [field for field in FIELDS.values() if numbers(field.type)], ids=lambda field: field.key)
def test_every_number_has_limits(field: Field) -> None:
    for number in numbers(field.type):
        assert number.ge is not None or number.gt is not None
        if field.unit != "s":  # no duration is longer than 24 days
            assert number.le is not None or number.lt is not None
        if field.unit is None and isinstance(number, inspect.IntType):
            with pytest.raises(ConfigError, match=rf"--set {field.key}: expected .* <= {number.le}"):
                load_config(None, [f"{field.key}={number.le + 1}"], {})  # type: ignore[operator]


@pytest.mark.parametrize(
    "override", ["memory.mem_fraction_static=0", "memory.mem_fraction_static=1", "memory.mem_fraction_static=1.5", "supervision.heartbeat=0.0001ms"]
)
def test_numbers_outside_of_their_limits_are_refused_by_type(override: str) -> None:
    with pytest.raises(ConfigError, match=override.partition("=")[0]):
        load_config(None, [override], {})


@pytest.mark.parametrize("text", ["1_", "8_0_", "1__0", "_1", "٣"])
def test_odd_digits_are_refused_in_our_own_words(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, [f"http.port={text}", f"memory.mem_fraction_static=0.{text}"], {})
    assert [fault.partition(", got")[0] for fault in caught.value.faults] == [
        "--set http.port: expected a whole number >= 0 and <= 65535",
        "--set memory.mem_fraction_static: expected a number > 0 and < 1, or auto",
    ]


@pytest.mark.parametrize(
    ("args", "fault"),
    [
        (ServerArgs(http=HttpArgs(port=99999)), "http.port: expected a whole number >= 0 and <= 65535, got 99999"),
        (ServerArgs(http=HttpArgs(port="x")), "http.port: expected a whole number >= 0 and <= 65535, got 'x'"),  # type: ignore[arg-type]
        (ServerArgs(http=HttpArgs(backlog=2**70)), "http.backlog: expected"),
        (ServerArgs(run_dir=Path("/x")), "run_dir: expected a path, or null, got PosixPath"),  # type: ignore[arg-type]
        (ServerArgs(http=None), "http: expected HttpArgs, got NoneType"),  # type: ignore[arg-type]
        (ServerArgs(run_dir=""), "run_dir: empty"),
    ],
)
def test_what_python_makes_is_held_to_the_same_types(args: ServerArgs, fault: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_args(args, allow_failpoints=True)
    assert [found.startswith(fault) for found in caught.value.faults] == [True]
