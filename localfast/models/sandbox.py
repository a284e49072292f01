"""Jinja for templates that came with an untrusted file: what they may call, each step of it under a `Meter`.

Jinja's own sandbox refuses attribute escapes; the limits it lacks are added here. They are cooperative: the clock is read
at every turn of a loop, call, filter and test, so no thread is interrupted from outside and no other code can be hit.
Knows nothing of chats.
"""

from __future__ import annotations

import functools
import json
import re
import types
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from datetime import datetime
from typing import Any

import markupsafe
from jinja2 import Template, TemplateAssertionError, TemplateError, nodes, pass_environment
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import do_indent, make_attrgetter
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from localfast.models.meter import OPERATORS, LimitExceeded, Limits, Meter, add, call_method, check_replace, join, modulo

MAX_OPTION = 100_000
MAX_FORMAT_CHARS = 200

_current: ContextVar[Meter] = ContextVar("meter")


class _Formatter(SandboxedFormatter):
    """str.format whose fields are checked one by one."""

    def format_field(self, value: Any, format_spec: str) -> Any:
        meter = _current.get()
        meter.tick()
        meter.room(sum(map(int, re.findall(r"\d+", format_spec))))
        return meter.made(super().format_field(value, format_spec))


# --- filters, tests and globals ---------------------------------------------------------------------------------------------


def _to_json(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False) -> str:
    """JSON as transformers writes it: Jinja's own filter would escape HTML."""
    for text in (indent, *(separators or ())):
        if (len(text) if isinstance(text, str) else text or 0) > 32:
            raise SecurityError("tojson takes an indent and separators of at most 32 characters")
    encoder = json.JSONEncoder(ensure_ascii=bool(ensure_ascii), indent=indent, separators=separators, sort_keys=bool(sort_keys))
    return join(_current.get(), "", encoder.iterencode(value))


@pass_environment
def _join_filter(environment: Any, value: Any, separator: Any = "", attribute: Any = None) -> str:
    parts = value if attribute is None else map(make_attrgetter(environment, attribute), value)
    return join(_current.get(), str(separator), parts)


@pass_environment
def _sum_filter(environment: Any, value: Any, attribute: Any = None, start: Any = 0) -> Any:
    parts = value if attribute is None else map(make_attrgetter(environment, attribute), value)
    return functools.reduce(functools.partial(add, _current.get()), parts, start)


def _replace_filter(value: Any, old: Any, new: Any, count: int | None = None) -> str:
    text, old, new = str(value), str(old), str(new)
    check_replace(_current.get(), text, old, new)
    return text.replace(old, new, -1 if count is None else count)


def _indent_filter(value: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    meter, text = _current.get(), str(value)
    lines = 1 + sum(map(text.count, "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"))
    meter.items(lines)
    meter.room(len(text) + lines * (len(width) if isinstance(width, str) else width))
    return do_indent(text, width, first, blank)


def _format_filter(value: Any, *args: Any, **kwargs: Any) -> Any:
    return modulo(_current.get(), str(value), kwargs or args)


def _plain(value: Any) -> str:
    """`safe`: nothing is escaped here, so nothing has to be marked."""
    return str(value)


def _escape(value: Any) -> str:
    return str(markupsafe.escape(str(value)))


FILTERS: dict[str, Callable[..., Any]] = {
    "e": _escape,
    "escape": _escape,
    "format": _format_filter,
    "indent": _indent_filter,
    "join": _join_filter,
    "replace": _replace_filter,
    "safe": _plain,
    "sum": _sum_filter,
    "tojson": _to_json,
}
NO_FILTERS = frozenset(["forceescape", "pprint", "random", "striptags", "urlencode", "urlize", "wordwrap", "xmlattr"])
LISTING = frozenset(["batch", "groupby", "list", "map", "max", "min", "reject", "rejectattr", "select", "selectattr", "slice"])
LISTING |= {"sort", "sum", "title", "unique", "wordcount"}
FREE_OPTIONS = frozenset(["d", "default", "float", "int", "replace"])


def _guarded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    position = 1 if hasattr(function, "jinja_pass_arg") else 0

    @functools.wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        meter, value = _current.get(), args[position]
        meter.tick()
        if name in LISTING and isinstance(value, str):
            meter.items(len(value))
        for option in (*args[position + 1 :], *kwargs.values()):
            if isinstance(option, int) and abs(option) > MAX_OPTION and name not in FREE_OPTIONS:
                raise LimitExceeded(f"it gave {option} to the filter {name!r}; at most {MAX_OPTION}")
        result = function(*args, **kwargs)
        return result if result is value else meter.made(result)

    return guarded


def _guarded_test(function: Any) -> Callable[..., Any]:
    @functools.wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        _current.get().tick()
        return function(*args, **kwargs)

    return guarded


class _Namespace(Namespace):
    """Prints as its name only: two of them could hold each other."""

    def __repr__(self) -> str:
        return "namespace"


def _dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return _current.get().made(dict(*args, **kwargs))


def _raise_exception(message: object = "") -> None:
    raise TemplateError(str(message))


def _strftime_now(format: str) -> str:
    _current.get().room(0 if len(format) <= MAX_FORMAT_CHARS else len(format) ** 2)
    return datetime.now().strftime(format)


# --- the environment --------------------------------------------------------------------------------------------------------


class _Generation(Extension):
    """`{% generation %}` marks what an assistant said, for training; here it only groups."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own type

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


class _Instrument(NodeTransformer):
    """Puts the meter into a template's syntax tree, where no intercepted operator, call or filter would meet it."""

    def _call(self, name: str, *args: nodes.Expr, lineno: int) -> nodes.Call:
        function = nodes.EnvironmentAttribute(name, lineno=lineno)
        return nodes.Call(function, list(args), [], None, None, lineno=lineno)

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        tick = self._call("tick", lineno=node.lineno)
        node.body.insert(0, nodes.ExprStmt(tick, lineno=node.lineno))
        if node.test is not None:
            node.test = nodes.And(tick, node.test, lineno=node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return self._call("join_texts", *node.nodes, lineno=node.lineno)

    def _made(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        return self._call("made", node, lineno=node.lineno)

    visit_List = visit_Dict = _made  # noqa: N815

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:  # noqa: N802
        return self._made(node) if node.ctx == "load" else self.generic_visit(node)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802
        return self._made(node) if isinstance(node.arg, nodes.Slice) else self.generic_visit(node)

    def visit_ScopedEvalContextModifier(self, node: nodes.ScopedEvalContextModifier) -> nodes.Node:  # noqa: N802
        raise TemplateAssertionError("autoescape is not available to chat templates", node.lineno)


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(OPERATORS)

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, optimized=False, extensions=[_Generation, loopcontrols])
        filters = {name: function for name, function in self.filters.items() if name not in NO_FILTERS} | FILTERS
        self.filters = {name: _guarded_filter(name, function) for name, function in filters.items()}
        self.tests = {name: _guarded_test(function) for name, function in self.tests.items()}
        del self.globals["lipsum"]
        self.globals.update(dict=_dict, namespace=_Namespace, raise_exception=_raise_exception, strftime_now=_strftime_now)

    def tick(self) -> bool:
        _current.get().tick()
        return True

    def made(self, value: Any) -> Any:
        return _current.get().made(value)

    def join_texts(self, *parts: Any) -> str:
        return join(_current.get(), "", parts)

    def concat(self, parts: Iterable[str]) -> str:
        return join(_current.get(), "", parts)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        meter = _current.get()
        meter.tick()
        return OPERATORS[operator](meter, left, right)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        meter = _current.get()
        meter.tick()
        if isinstance(__obj, types.BuiltinMethodType):
            kwargs.pop("_loop_vars", None)  # Jinja's own, for functions that take the context
            kwargs.pop("_block_vars", None)
            return call_method(meter, __obj, args, kwargs)
        return super().call(__context, __obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        if not isinstance(value, types.BuiltinMethodType) or value.__name__ not in ("format", "format_map"):
            return None
        text = value.__self__
        if not isinstance(text, str):
            return None
        formatter = _Formatter(self)
        if value.__name__ == "format_map":
            return lambda mapping: _current.get().made(formatter.vformat(text, (), mapping))
        return lambda *args, **kwargs: _current.get().made(formatter.vformat(text, args, kwargs))


class DoesNotCompile(Exception):
    """The template is not a template; the text says why. No messages can help."""


class SandboxedTemplate:
    """One template, compiled at its first rendering and kept. May be rendered by several threads at once."""

    def __init__(self, source: str, limits: Limits) -> None:
        self._source = source
        self.limits = limits
        self._template: Template | DoesNotCompile | None = None

    def render(self, variables: Mapping[str, Any], deadline: float) -> str:
        """The text. `deadline` is on the clock of time.monotonic.

        Raises DoesNotCompile, LimitExceeded, or whatever the template makes Python raise: treat any other Exception as a refusal.
        """
        meter = Meter(self.limits, deadline)
        token = _current.set(meter)
        try:
            if self._template is None:
                self._template = self._compile()
            if isinstance(self._template, DoesNotCompile):
                raise self._template
            return self._collect(meter, self._template.generate(**variables))
        finally:
            _current.reset(token)

    def _compile(self) -> Template | DoesNotCompile:
        if len(self._source) > self.limits.source_chars:
            return DoesNotCompile(f"it is longer than {self.limits.source_chars} characters")
        environment = _Environment()
        try:
            tree = _Instrument().visit(environment.parse(self._source))
            return Template.from_code(environment, environment.compile(tree), environment.make_globals(None))
        except Exception as error:  # Jinja and Python each have their own ways to dislike a source
            return DoesNotCompile(str(error) or type(error).__name__)

    def _collect(self, meter: Meter, chunks: Iterable[str]) -> str:
        texts, size = [], 0
        for chunk in chunks:
            size += len(chunk)
            if size > self.limits.output_chars:
                raise LimitExceeded(f"it wrote more than {self.limits.output_chars} characters")
            meter.tick()
            texts.append(chunk)
        return "".join(texts)
