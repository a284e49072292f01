"""Reads the JSON body of a request, never more than the limit."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request

from localfast.errors import BodyTooLarge, InvalidRequest


async def read_json(request: Request, limit_bytes: int, nothing: Any = None) -> Any:
    """The body, decoded; `nothing` stands for an empty one, if that may be. Raises BodyTooLarge before more than the limit is
    read, InvalidRequest for what is not JSON."""
    declared = request.headers.get("content-length", "0")
    if declared.isdecimal() and int(declared) > limit_bytes:
        raise BodyTooLarge(limit_bytes=limit_bytes)
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > limit_bytes:
            raise BodyTooLarge(limit_bytes=limit_bytes)
    if not body and nothing is not None:
        return nothing
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(reason=f"the body is not JSON: {error}") from None
    except RecursionError:
        raise InvalidRequest(reason="the body is nested too deeply") from None
