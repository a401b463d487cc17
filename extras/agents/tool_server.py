"""Tool servers: the tools of an MCP server, as schemas, and calls of them. It needs the package mcp."""

import asyncio
import json
from collections.abc import Callable
from typing import Any


def listed(url: str) -> list[dict]:
    """The schemas of a server's tools. Raises ValueError for a server whose pages lead back to each other, and whatever
    the client raises.
    """

    async def ask(client: Any) -> list[Any]:
        page = await client.list_tools()
        tools, cursors = [*page.tools], set()
        while page.next_cursor is not None:
            if page.next_cursor in cursors:
                raise ValueError(f"{url} lists its tools in a circle: page {page.next_cursor!r} came before")
            cursors.add(page.next_cursor)
            page = await client.list_tools(cursor=page.next_cursor)
            tools += page.tools
        return tools

    return [dict(name=x.name, description=x.description or "", parameters=x.input_schema) for x in _answer(url, ask)]


def call(url: str, name: str, /, **arguments: Any) -> str:
    """What a tool of a server returns, as text. Raises RuntimeError with it if that is an error."""
    result = _answer(url, lambda client: client.call_tool(name, arguments))
    text = "\n".join(map(_text, result.content))
    if result.is_error:
        raise RuntimeError(text)
    return text if result.content or result.structured_content is None else json.dumps(result.structured_content)


def _answer(url: str, ask: Callable[[Any], Any]) -> Any:
    """What `ask` gets from a client of the server, for which it may wait."""
    from mcp import Client

    async def connect() -> Any:
        async with Client(url) as client:
            return await ask(client)

    return asyncio.run(connect())


def _text(part: Any) -> str:
    """A part of a result as text. A part that is none is named, so that the policy knows of it."""
    source = getattr(part, "resource", part)
    described = [str(x) for x in (getattr(source, "mime_type", None), getattr(source, "uri", None)) if x]
    name = " ".join([part.type.replace("_", " "), *described])
    return getattr(source, "text", f"[the result has a part that is not text and cannot be shown: {name}]")
