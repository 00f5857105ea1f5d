"""The page at `/docs`: the OpenAPI document for people, without scripts and other sites."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from html import escape
from typing import Any

from vitascope.deploy.server.settings import TOKEN


def api_page(description: Mapping[str, Any], address: str) -> str:
    """The HTML page of an OpenAPI document; `address` is the server's, for the examples."""
    title = escape(f"{description['info']['title']} {description['info']['version']}")
    routes = [
        _route(method, path, operation, address)
        for path, operations in description["paths"].items()
        for method, operation in operations.items()
    ]
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}: API</title>'
        '<meta name="viewport" content="width=device-width"><link rel="icon" href="web/icon.svg">'
        '<link rel="stylesheet" href="web/docs.css">'
        f"<h1>{title}</h1><p>Errors are JSON, <code>{{&quot;error&quot;: &quot;why&quot;}}</code>. "
        f'For programs: <a href="openapi.json">openapi.json</a>.</p>{"".join(routes)}</html>'
    )


def _route(method: str, path: str, operation: Mapping[str, Any], address: str) -> str:
    rows = "".join(
        f"<tr><td><code>{escape(one['name'])}</code><td>{escape(one.get('description', ''))}{_default(one)}"
        for one in operation.get("parameters", ())
    )
    statuses = "".join(
        f"<tr><td>{escape(status)}<td>{escape(answer['description'])}"
        for status, answer in operation["responses"].items()
    )
    text = escape(operation.get("description", ""))
    token = f' -H "Authorization: Bearer ${TOKEN}"' if "security" in operation else ""
    body = "" if method == "get" else " --data-binary @cat.jpg"
    example = escape(f"curl{token}{body} {shlex.quote(address + path)}")
    return (
        f"<h2><code>{method.upper()} {escape(path)}</code></h2><p>{text}</p>"
        f"<pre>{example}</pre><table>{rows}{statuses}</table>"
    )


def _default(parameter: Mapping[str, Any]) -> str:
    default = parameter["schema"].get("default")
    return "" if default is None else f"; default <code>{escape(str(default))}</code>"
