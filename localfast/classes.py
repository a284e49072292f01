"""The class of a request, and which older one it replaces: what headers say beyond the route. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import get_args

from localfast.core import GenerateRequest, RequestClass
from localfast.errors import InvalidRequest

CLASS_HEADER = "x-localfast-class"
FILE_HEADER = "x-localfast-file"
CLIENT_HEADER = "x-localfast-client"
MAX_NAME = 400


def classify(request: GenerateRequest, headers: Mapping[str, str], address: str) -> GenerateRequest:
    """Raises InvalidRequest for a class there is not.

    A newer `fim` request replaces an older one of the same client and file. It must name the file: without it, the two halves
    of a split editor would end each other. The client is who it says, or the address and program it calls from.
    """
    wanted = headers.get(CLASS_HEADER, request.request_class)
    known = {name: name for name in get_args(RequestClass)}
    if wanted not in known:
        raise InvalidRequest(reason=f"'{wanted[:40]}' is no class; there are {', '.join(known)}", param=CLASS_HEADER)
    replaces = ""
    if file := headers.get(FILE_HEADER, ""):
        client = headers.get(CLIENT_HEADER) or f"{address} {headers.get('user-agent', '')}"
        replaces = f"{client[:MAX_NAME]} {file[:MAX_NAME]}"
    return replace(request, request_class=known[wanted], replaces=replaces)
