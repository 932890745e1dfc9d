"""The admin plane's document says what the application does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from starlette.routing import Route

from llmd.control import openapi
from llmd.control.routes import build

ROOT = Path(__file__).parents[3]


def test_the_committed_document_is_current() -> None:
    assert (ROOT / openapi.FILE).read_text() == openapi.text(), "make docs"


def test_paths_and_methods_are_those_of_the_routes() -> None:
    unused: Any = None
    app = build(unused, unused, unused)
    routes = {(route.path, method.lower()) for route in app.routes if isinstance(route, Route) for method in (route.methods or ()) if method != "HEAD"}
    documented = {(path, method) for path, methods in openapi.document()["paths"].items() for method in methods}
    assert routes == documented


def references(node: Any) -> list[str]:
    if isinstance(node, dict):
        own = [node["$ref"]] if isinstance(node.get("$ref"), str) else []
        return own + [found for value in node.values() for found in references(value)]
    return [found for value in node for found in references(value)] if isinstance(node, list) else []


def test_every_reference_leads_somewhere_and_nothing_private_is_told() -> None:
    document = openapi.document()
    assert references(document)
    for reference in references(document):
        assert reference.rpartition("/")[2] in document["components"]["schemas"], reference
    assert "prepared" not in openapi.text()


@pytest.mark.parametrize("verb", ["reload", "config/reload", "log-level"])
def test_every_change_may_be_planned(verb: str) -> None:
    body = openapi.document()["paths"][f"/v1/{verb}"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert {"dry_run", "wait", "reason"} <= body["properties"].keys()
