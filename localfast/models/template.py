"""From the messages of a chat to the one prompt its model was trained on, through the model's own chat template.

Owns the variables a template sees, what is tried when it refuses the messages, and the form used when a model has no template.
The template runs in `sandbox.py`. Called from worker threads of the server process; keeps no state but compiled templates.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

from jinja2 import TemplateError

from localfast.core import Message
from localfast.errors import TemplateFailed
from localfast.models.meter import LimitExceeded, Limits
from localfast.models.sandbox import DoesNotCompile, SandboxedTemplate

TemplateKind = Literal["model", "chatml", "plain"]

CHATML = """\
{%- for message in messages -%}
    {{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif -%}
"""
PLAIN = """\
{%- for message in messages -%}
    {{ (message.content if message.role == 'system' else message.role | capitalize + ': ' + message.content) + '\n' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ 'Assistant:' }}{% endif -%}
"""
STOPS: dict[TemplateKind, tuple[str, ...]] = {"model": (), "chatml": ("<|im_end|>",), "plain": ("\nUser:",)}
END_OF_PREFILL = "\ue000prefill\ue001"
MAX_REASON_CHARS = 300
FINAL = (DoesNotCompile, LimitExceeded)
"""Other messages would not change it."""


class ChatTemplate:
    """The chat template of one model; compiled at the first rendering.

    Without a template of its own (`source` None or blank) a model gets ChatML if its vocabulary has `<|im_start|>`, else a plain
    "User: / Assistant:" form; `kind` says which, and `stops` are the stop strings that this form needs.
    """

    def __init__(
        self,
        source: str | None,
        bos_token: str,
        eos_token: str,
        has_token: Callable[[str], bool] | frozenset[str],
        limits: Limits | None = None,
    ) -> None:
        has = has_token.__contains__ if isinstance(has_token, frozenset) else has_token
        self.kind: TemplateKind = "model" if source and source.strip() else "chatml" if has("<|im_start|>") else "plain"
        self.stops = STOPS[self.kind]
        self.source = source if source and self.kind == "model" else CHATML if self.kind == "chatml" else PLAIN
        self._limits = limits or Limits()
        self._template = SandboxedTemplate(self.source, self._limits)
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._in_parts: bool | None = None

    def render(self, messages: Sequence[Message]) -> str:
        """The prompt. If the last message is the assistant's, it ends right after that text, to be continued.

        The messages are given to the template as they are; only if it raises or drops text are they rearranged
        (`rearrangements`). Raises TemplateFailed, with the template's own words or the limit it met.
        """
        deadline = time.monotonic() + self._limits.time_s
        turns = list(messages)
        if "developer" not in self.source:
            turns = [replace(turn, role="system") if turn.role == "developer" else turn for turn in turns]
        if not turns:
            raise TemplateFailed("there are no messages")
        try:
            return self._first_complete(turns, deadline)
        except LimitExceeded as error:
            raise TemplateFailed(f"it was stopped: {error}") from None
        except DoesNotCompile as error:
            raise TemplateFailed(f"it does not compile: {str(error)[:MAX_REASON_CHARS]}") from None

    def _first_complete(self, turns: list[Message], deadline: float) -> str:
        """The first rendering with all that was said to the model, else the first rendering at all."""
        incomplete: str | None = None
        refusal: Exception | None = None
        for attempt in (turns, *rearrangements(turns)):
            try:
                text = self._render(attempt, deadline)
            except FINAL:
                raise
            except Exception as error:  # a template can make Python raise anything
                refusal = refusal or error
                continue
            if all(turn.role == "assistant" or turn.content.strip() in text for turn in turns):
                return text
            incomplete = text if incomplete is None else incomplete
        if incomplete is not None:
            return incomplete
        assert refusal is not None
        raise TemplateFailed(_words(refusal)) from refusal

    def _render(self, turns: list[Message], deadline: float) -> str:
        if turns[-1].role != "assistant":
            return self._run(turns, deadline, prompt=True)
        marker = END_OF_PREFILL
        while any(marker in turn.content for turn in turns):
            marker += marker
        *earlier, last = turns
        try:
            text = self._run([*earlier, replace(last, content=last.content + marker)], deadline, prompt=False)
        except FINAL:
            raise
        except Exception:  # it wants the last word to be the user's; without earlier messages there is nothing else to try
            if not earlier:
                raise
            text = ""
        if marker in text:
            return text[: text.rindex(marker)]
        return self._run(earlier, deadline, prompt=True) + last.content

    def _run(self, turns: list[Message], deadline: float, *, prompt: bool) -> str:
        if self._in_parts is None:
            self._in_parts = self._wants_parts(deadline)
        return self._template.render(self._variables(turns, self._in_parts, prompt), deadline)

    def _wants_parts(self, deadline: float) -> bool:
        """Whether the template reads only contents that are lists of typed parts."""
        if "text" not in self.source:
            return False
        probe = [Message("user", END_OF_PREFILL)]
        for in_parts in (False, True):
            try:
                if END_OF_PREFILL in self._template.render(self._variables(probe, in_parts, True), deadline):
                    return in_parts
            except FINAL:
                raise
            except Exception:  # a refusal answers the question too
                continue
        return False

    def _variables(self, turns: list[Message], in_parts: bool, prompt: bool) -> dict[str, Any]:
        messages = [
            {"role": turn.role, "content": [{"type": "text", "text": turn.content}] if in_parts else turn.content}
            for turn in turns
        ]
        return {**self._tokens, "messages": messages, "add_generation_prompt": prompt, "tools": None, "documents": None}


def rearrangements(turns: Sequence[Message]) -> Iterator[list[Message]]:
    """What strict templates accept, mildest first; nothing that was said is lost.

    First: the leading system messages become one, later ones and unknown roles become the user's, neighbours of one role are
    joined, and the user speaks first. Then: the system message becomes the beginning of the user's first.
    """
    leading = next((index for index, turn in enumerate(turns) if turn.role != "system"), len(turns))
    system = "\n\n".join(turn.content for turn in turns[:leading])
    rest = [turn if turn.role in ("user", "assistant") else replace(turn, role="user") for turn in turns[leading:]]
    if rest and rest[0].role == "assistant":
        rest.insert(0, Message("user", ""))
    if system:
        yield [Message("system", system), *_joined(rest)]
        rest.insert(0, Message("user", system))
    yield _joined(rest)


def _joined(turns: Sequence[Message]) -> list[Message]:
    joined: list[Message] = []
    for turn in turns:
        if joined and joined[-1].role == turn.role:
            both = filter(None, (joined[-1].content, turn.content))
            joined[-1] = replace(turn, content="\n\n".join(both))
        else:
            joined.append(turn)
    return joined


def _words(error: Exception) -> str:
    own = isinstance(error, TemplateError) and error.message
    return str(own or f"{type(error).__name__}: {error}")[:MAX_REASON_CHARS]
