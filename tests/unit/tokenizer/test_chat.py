"""Templates render as on the hub, refuse with their own sentence, and can neither hang nor break out."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from llmd.errors import ConfigError, RequestError
from llmd.tokenizer.chat import ChatTemplate
from tests.daemon import SLOW

USER = [{"role": "user", "content": '<é> & "x"'}]


def render(source: str, **variables: Any) -> str:
    return ChatTemplate(source).render(USER, **variables)


def refusal(source: str) -> RequestError:
    with pytest.raises(RequestError) as caught:
        render(source)
    assert (caught.value.status, caught.value.param) == (400, "messages")
    return caught.value


def test_text_is_not_escaped_and_block_lines_vanish() -> None:
    assert render("{% for m in messages %}\n    {% if true %}\n{{ m.content }}\n    {% endif %}\n{% endfor %}\n") == '<é> & "x"\n'


def test_tojson_is_plain_json() -> None:
    assert json.loads(render("{{ messages | tojson }}")) == USER
    assert "<é>" in render("{{ messages | tojson }}")
    assert render("{{ {'a': 1} | tojson(indent=2) }}") == '{\n  "a": 1\n}'


def test_loop_controls_and_generation_blocks() -> None:
    assert render("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}{% generation %}!{% endgeneration %}") == "01!"


def test_loop_variables_stay_exact() -> None:
    assert render("{% for i in [1, 2, 3] %}{{ loop.length }}{{ loop.last }}{{ loop.revindex }} {% endfor %}") == "3False3 3False2 3True1 "
    assert render("{% for m in messages if m.role == 'user' %}{{ loop.length }}{% endfor %}") == "1"


def test_variables_of_the_caller() -> None:
    source = "{{ tools is none }} {{ add_generation_prompt }} {{ enable_thinking }} {{ strftime_now('%Y') | length }}"
    assert render(source, enable_thinking=False) == "True True False 4"
    assert render("{{ tools[0].name }}", tools=[{"name": "f"}]) == "f"


def test_raise_exception_is_the_clients_fault_in_the_templates_words() -> None:
    assert refusal("{{ raise_exception('Roles must alternate') }}").message == "Roles must alternate"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content + none }}",
        "{{ nowhere.at.all }}",
        "{{ messages[5]['role'] }}",
        "{{ 1 / 0 }}",
        "{% include 'x' %}",
        "{{ messages.append(1) }}",
        "{{ ().__class__.__bases__ }}",
        "{{ cycler.__init__.__globals__ }}",
    ],
)
def test_any_fault_of_rendering_is_a_400(source: str) -> None:
    assert "chat template" in refusal(source).message


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
        "{% for a in range(10000) %}{{ 'x' * 100000 }}{% endfor %}",
        "{{ 'x' * 1000000000 }}",
        "{{ [1] * 1000000000 }}",
        "{{ 9 ** 9 ** 9 }}",
        "{{ '%1000000000d' % 1 }}",
        "{% set n = namespace(s='x') %}{% for i in range(100) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
        "{% set n = namespace(s='x') %}{% for i in range(100) %}{% set n.s = n.s + n.s %}{% endfor %}",
        "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(1) }}",
        "{% macro f(n) %}{% if n < 40 %}{{ f(n + 1) }}{{ f(n + 1) }}{% endif %}{% endmacro %}{{ f(1) }}",
    ],
)
def test_work_is_bounded(source: str) -> None:
    start = time.monotonic()
    refusal(source)
    assert time.monotonic() - start < 20 * SLOW


def test_budget_is_each_renderings_own() -> None:
    template = ChatTemplate("{% for i in range(99000) %}{% endfor %}ok")
    assert [template.render(USER) for _ in range(8)] == ["ok"] * 8


def test_refusals_do_not_repeat_long_texts() -> None:
    assert len(refusal("{{ raise_exception('x' * 100000) }}").message) < 600


def test_no_template_is_none(tmp_path: Path) -> None:
    assert ChatTemplate.load(tmp_path, None) is None


def test_sources_in_order(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "named {{ bos_token }}"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named, "bos_token": {"content": "<s>"}}))
    template = ChatTemplate.load(tmp_path, None)
    assert template is not None and template.render(USER) == "named <s>"
    (tmp_path / "chat_template.jinja").write_text("file {{ bos_token }}")
    template = ChatTemplate.load(tmp_path, None)
    assert template is not None and template.render(USER) == "file <s>"
    other = tmp_path / "other.jinja"
    other.write_text("override")
    template = ChatTemplate.load(tmp_path, str(other))
    assert template is not None and template.render(USER) == "override"


def test_token_texts_come_from_ids_where_no_file_names_them(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"bos_token_id": 1, "eos_token_id": [2, 3]}')
    tokens = [{"id": 1, "content": "<b>"}, {"id": 2, "content": "<e>"}]
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": tokens}))
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}{{ eos_token }}")
    template = ChatTemplate.load(tmp_path, None)
    assert template is not None and template.render(USER) == "<b><e>"


def test_missing_file_and_syntax_error_are_config_errors_with_the_place(tmp_path: Path) -> None:
    missing, broken = tmp_path / "none.jinja", tmp_path / "bad.jinja"
    with pytest.raises(ConfigError, match=r"none\.jinja: .*No such file"):
        ChatTemplate.load(tmp_path, str(missing))
    broken.write_text("line one\n\n{% if %}")
    with pytest.raises(ConfigError, match=r"bad\.jinja:3: "):
        ChatTemplate.load(tmp_path, str(broken))
