"""`localfast run`: one answer or a chat in the terminal, with the model in an engine process of our own; no server, no port.

Only answers go to stdout. The event loop runs while an answer is made and stands still while the user types, so that Ctrl-C
means one thing at a time: it ends the answer, or the waiting for a line.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType

import click

from localfast.cli import print_error, render
from localfast.cli.options import with_settings
from localfast.cli.pull import installed_or_pulled
from localfast.core import Event, Failed, Finished, GenerateRequest, Message, Sampling, SequenceFinished, TextDelta
from localfast.errors import EngineMissing, LocalfastError
from localfast.models.catalog import InstalledModel
from localfast.models.manager import LoadedModel, ModelManager
from localfast.settings import Settings

# The engine ends by itself in a moment; a load that hangs is cut off after this time.
STOP_GRACE_S = 1.0
ASK = ">>> "
HELP = "/clear forgets what was said, /exit or Ctrl-D leaves, Ctrl-C stops an answer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Manner:
    """How the user wants the model to answer."""

    system: str | None
    max_tokens: int | None
    sampling: Sampling


@click.command()
@click.argument("model")
@click.argument("prompt", required=False)
@click.option("--system", help="what the model is told before anything else")
@click.option("--max-tokens", type=click.IntRange(min=1), help="longest answer in tokens  [default: until the context is full]")
@click.option("--temperature", type=click.FloatRange(min=0), help="0 always takes the likeliest token  [default: 0.8]")
@with_settings("engine", "storage")
def command(
    settings: Settings, model: str, prompt: str | None, system: str | None, max_tokens: int | None, temperature: float | None
) -> None:
    """Chat with MODEL, or answer one PROMPT. Text that is piped in is added to the prompt. A model that is not here is pulled."""
    if importlib.util.find_spec("llama_cpp") is None:
        raise EngineMissing(reason="there is no llama-cpp-python in this Python")
    logging.getLogger("localfast").addHandler(logging.NullHandler())  # what goes wrong reaches the user as an error, once
    question = _question(prompt)
    sampling = Sampling() if temperature is None else Sampling(temperature=temperature)
    manner = Manner(system=system, max_tokens=max_tokens, sampling=sampling)
    with Chat(settings, installed_or_pulled(model, settings), manner) as chat:
        if question is None:
            talk(chat)
        else:
            chat.ask(question)
            chat.say_how_it_went()


def _question(prompt: str | None) -> str | None:
    """The prompt and what was piped in; None when somebody sits at a terminal and gave no prompt."""
    if sys.stdin is None or sys.stdin.isatty():
        return prompt
    piped = sys.stdin.buffer.read().decode("utf-8-sig", "replace").strip()
    question = "\n\n".join(part for part in (prompt, piped) if part)
    if not question:
        raise click.UsageError("there is no prompt: give one, pipe one in, or start from a terminal to chat")
    return question


class Chat:
    """A loaded model and what was said so far. A context: leaving it ends the engine process, whatever happened."""

    def __init__(self, settings: Settings, installed: InstalledModel, manner: Manner) -> None:
        self._installed = installed
        self._manner = manner
        self._manager = ModelManager(settings, installed)
        self._runner = asyncio.Runner()
        self._said: list[Message] = []
        self._events: list[Event] = []
        self.clear()

    def __enter__(self) -> Chat:
        try:
            with render.busy(f"loading {self._installed}"):
                model = self._runner.run(self._load())
        except BaseException:
            self._close()
            raise
        self.title = f"{model.installed}: {model.plan.summary}; {model.engine.facts.context_tokens} tokens of context"
        for warning in model.plan.warnings:
            render.say(f"warning: {warning}", "yellow", stderr=True)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._close()

    def _close(self) -> None:
        with self._runner:
            self._runner.run(self._manager.close(STOP_GRACE_S))

    async def _load(self) -> LoadedModel:
        async with self._manager.lease("") as model:
            return model

    def clear(self) -> None:
        """Forget everything but the system message."""
        self._said = [Message("system", self._manner.system)] if self._manner.system else []

    def ask(self, question: str) -> None:
        """Stream the answer to stdout. An error or Ctrl-C (KeyboardInterrupt) passes; an answer that was begun is remembered."""
        self._events = []
        try:
            self._runner.run(self._answer([*self._said, Message("user", question)]))
        finally:
            if answer := "".join(event.text for event in self._events if isinstance(event, TextDelta)):
                _write("\n")
                self._said += [Message("user", question), Message("assistant", answer)]

    async def _answer(self, messages: Sequence[Message]) -> None:
        manner = self._manner
        request = GenerateRequest(
            model="",
            messages=tuple(messages),
            max_tokens=manner.max_tokens,
            sampling=manner.sampling,
            request_class="interactive",
        )
        async with self._manager.lease("") as model, contextlib.aclosing(await model.generate(request)) as events:
            async for event in events:
                self._events.append(event)
                match event:
                    case TextDelta(text=text):
                        _write(text)
                    case Failed(error):
                        raise error

    def say_how_it_went(self) -> None:
        """The speed of the last answer, for somebody who watches, and always whether it was cut off."""
        for event in self._events:
            match event:
                case SequenceFinished(reason="length"):
                    render.say("(cut off: the longest answer, or the end of the context, was reached)", "yellow", stderr=True)
                case Finished(usage, timings) if sys.stderr.isatty():
                    speed = usage.completion_tokens / timings.decode_s if timings.decode_s else 0.0
                    first = f"prompt of {usage.prompt_tokens} tokens in {timings.queue_s + timings.prefill_s:.2f} s"
                    render.say(f"({usage.completion_tokens} tokens, {speed:.1f} tokens/s; {first})", "dim", stderr=True)


def talk(chat: Chat) -> None:
    """Answer line after line, until the user leaves. Errors are told and the chat goes on."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (input() then has a history and keys to edit with; Windows has its own)
    render.say(chat.title, "dim", stderr=True)
    render.say(HELP, "dim", stderr=True)
    while (line := _read_line()) is not None:
        if line in ("/exit", "/bye", "/quit"):
            return
        if line == "/clear":
            chat.clear()
            render.say("(forgotten)", "dim", stderr=True)
        elif line in ("/help", "/?"):
            render.say(HELP, "dim", stderr=True)
        elif line:
            _ask_and_go_on(chat, line)


def _ask_and_go_on(chat: Chat, line: str) -> None:
    try:
        chat.ask(line)
    except KeyboardInterrupt:
        render.say("(stopped)", "dim", stderr=True)
    except LocalfastError as error:
        print_error(error)
    else:
        chat.say_how_it_went()


def _read_line() -> str | None:
    """What the user typed; empty after Ctrl-C, None at the end of input."""
    on_terminal = sys.stdout.isatty()
    if not on_terminal:  # input() would write its question into the file
        click.echo(ASK, nl=False, err=True)
    try:
        return input(ASK if on_terminal else "").strip()
    except EOFError:
        click.echo(err=True)
        return None
    except KeyboardInterrupt:
        click.echo(f"\n{HELP}", err=True)
        return ""


def _write(text: str) -> None:
    sys.stdout.write(render.printable(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()
