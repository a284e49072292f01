"""Holds the shape of the package: who may import whom, which file owns which library, and how large a thing may grow."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "localfast"
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_POSITIONAL = 5

# module: what it may import of ours. `x.*` is every module of x; everybody may import `localfast` itself (the version).
# Nobody imports what stands below.
IMPORTS = """
errors.base            :
errors.requests        : errors.base
errors.models          : errors.base
errors.engines         : errors.base
errors.machine         : errors.base
errors                 : errors.*
core                   : errors
engine.messages        : core errors

settings               : errors
cgroups                :
hardware.facts         :
hardware.spec_sheets   :
hardware.meter         :
hardware.processor     : cgroups
hardware.bandwidth     : cgroups hardware.processor hardware.spec_sheets
hardware.windows       : hardware.facts
hardware.matching      : hardware.facts
hardware.engine_probe  : hardware.facts
hardware.nvidia        : hardware.bandwidth hardware.facts
hardware.linux         : cgroups hardware.facts
hardware.memory        : cgroups hardware.windows
hardware.inventory     : errors hardware.facts
hardware.detection     : cgroups hardware.*
hardware               : hardware.*
engines                :
engines.builds         : hardware
engines.installed      : errors settings engines.builds
engines.pip            :
engines.install        : errors settings hardware engines.builds engines.installed engines.pip
models                 :
models.gguf_header     : errors
models.gguf            : errors models.gguf_header
models.meter           :
models.sandbox         : models.meter
models.template        : core errors models.meter models.sandbox
models.packages        : errors
models.shipped         :
models.names           : errors models.shipped
models.installed       : errors models.names
models.found           : settings models.installed models.names models.shipped
models.store           : errors settings models.found models.installed models.names models.shipped
models.catalog         : models.installed models.names models.shipped models.store
models.web             : errors
models.transfer        : errors models models.web
models.offers          : errors models.catalog
models.fetching        : errors settings models.catalog models.offers models.packages models.transfer models.web
models.hub             : errors settings models models.catalog models.fetching models.offers models.transfer models.web
models.remote          : errors settings models models.gguf_header models.hub models.offers models.transfer models.web
footprint              : engine.messages models.gguf
plan.wishes            : models.gguf
plan.budgets           : footprint hardware plan.wishes
plan.outcome           : footprint plan.budgets
plan.case              : footprint hardware models.gguf plan.budgets plan.wishes
plan.sharing           : footprint plan.case plan.wishes
plan.policy            : footprint plan.case plan.sharing
plan.speed             : footprint hardware models.gguf plan.budgets
plan.words             : footprint hardware plan.budgets plan.case plan.policy plan.sharing plan.speed plan.wishes
plan.planner           : footprint hardware models.gguf plan.budgets plan.case plan.outcome plan.policy plan.speed plan.wishes
                         plan.words
plan.quality           : models.gguf
plan.verdicts          : plan.budgets plan.outcome plan.quality plan.words
plan.quants            : footprint hardware models.gguf plan.case plan.outcome plan.planner plan.policy plan.quality
                         plan.verdicts plan.wishes
plan.entries           : plan.outcome plan.verdicts
plan                   : plan.*
doctor                 : errors hardware settings

engine                 :
engine.text            :
engine.prefixes        :
engine.states          : engine.prefixes
engine.disk            : engine.states
engine.sequence        : core engine.states
engine.cells           :
engine.queues          : core engine.sequence
engine.pace            :
engine.crowding        :
engine.placement       : engine.cells engine.prefixes engine.sequence engine.states
engine.scheduler       : core engine.placement engine.queues engine.sequence engine.states
engine.speculation     :
engine.llama           : errors engine.messages
engine.sampling        : core engine.llama
engine.generation      : core engine.llama engine.sampling engine.sequence engine.speculation engine.text
engine.keeping         : engine.disk engine.llama engine.messages engine.placement engine.scheduler engine.sequence engine.states
engine.drafting        : errors engine.llama engine.messages engine.pace engine.prefixes engine.sequence
engine.steps           : core errors engine.crowding engine.drafting engine.generation engine.keeping engine.llama
                         engine.messages engine.pace
                         engine.scheduler engine.sequence engine.speculation
engine.worker          : core errors engine.crowding engine.disk engine.drafting engine.keeping engine.llama engine.messages
                         engine.pace
                         engine.scheduler engine.states engine.steps
engine.home            :
engine.devices         : engine.home engine.llama
engine.entry           : errors engine.home engine.messages engine.worker
engine.supervisor      : errors engine.messages engine.entry
engine.client          : core errors engine.messages engine.supervisor
engine.dryrun          : engine.home engine.llama engine.messages
measure.files          :
measure.answers        : footprint models.gguf
measure.oracle         : footprint models.gguf
measure.dryruns        : errors engine.supervisor footprint measure.files measure.answers measure.oracle models.gguf
measure.learned        : footprint hardware measure.files measure.answers
measure                : measure.*

dialects               : core
dialects.fields        : core errors
dialects.openai_answers : core errors dialects
dialects.openai        : core errors dialects dialects.fields dialects.openai_answers
dialects.simple        : core errors dialects dialects.fields dialects.openai dialects.openai_answers

fit                    : errors settings engines.installed footprint hardware measure plan models.gguf
choosing               : errors settings fit hardware measure plan models.catalog models.gguf models.hub models.remote
models.eviction        :
models.budget          : hardware plan plan.budgets models.eviction
models.ladder          : footprint models.gguf plan.policy
models.crashes         :
models.served          : errors settings models.catalog
models.loading         : core errors settings engines.builds fit hardware measure plan engine.client engine.messages
                         models.budget models.catalog models.eviction models.gguf models.ladder models.template
models.manager         : errors settings fit hardware plan plan.policy engine.messages models.*
bodies                 : errors
metrics                : core errors engine.messages
guard                  : errors settings
classes                : core errors
streaming              : core errors dialects engine.client metrics
admin                  : core errors settings bodies metrics plan.entries engine.messages models.catalog models.manager
pulls                  : errors settings bodies fit choosing models.catalog models.hub
app                    : core errors settings bodies classes dialects dialects.* guard metrics streaming admin pulls
                         models.manager

bench.client           : errors
bench.works            : errors bench.client
bench.report           :
bench.plots            : bench.report
bench.page             : bench.plots bench.report
bench.watch            : errors hardware bench.client
bench.turns            : bench.client bench.report bench.watch bench.works
bench                  : bench.*
cli                    : errors
cli.*                  : core errors settings hardware engines.* fit choosing measure plan plan.* doctor guard app bench
                         models.* cli cli.*
__main__               : cli"""
# Rows for what is still to be built: they need no module yet.
PLANNED: set[str] = set()

# Where `engine.llama` and so the native library may be: nobody else imports these, so the server stays clear of it.
CHILD = (
    "engine.llama",
    "engine.sampling",
    "engine.generation",
    "engine.keeping",
    "engine.drafting",
    "engine.steps",
    "engine.worker",
    "engine.devices",
    "engine.dryrun",
)

# library: its owners. Elsewhere, ask the owner.
FENCES = {
    "llama_cpp": "engine.llama",
    "llguidance": "engine.sampling",
    "numpy": "engine.llama engine.sampling engine.drafting",
    "multiprocessing": "engine.supervisor engine.worker engine.entry cli",
    "starlette": "app streaming admin bodies pulls guard cli.serve",
    "uvicorn": "cli.serve",
    "huggingface_hub": "models.hub",
    "jinja2": "models.template models.sandbox models.meter",
    "prometheus_client": "metrics",
    "httpx2": "models.web models.transfer models.remote",
    "pynvml": "hardware.nvidia hardware.meter",
    "click": "cli cli.*",
    "rich": "cli.*",
    "pickle": "",
}
ENVIRONMENT_READERS = {"settings"}

# Deciders: plain data in, plain data out.
PURE = (
    "core",
    "errors",
    "errors.*",
    "plan",
    "plan.*",
    "footprint",
    "classes",
    "models.eviction",
    "hardware.facts",
    "hardware.matching",
    "engines.builds",
    "measure.answers",
    "measure.oracle",
    "engine.scheduler",
    "engine.placement",
    "engine.cells",
    "engine.queues",
    "engine.pace",
    "engine.crowding",
    "engine.sequence",
    "engine.prefixes",
    "engine.states",
    "engine.speculation",
    "engine.text",
    "dialects",
    "dialects.*",
)
IMPURE_LIBRARIES = {"asyncio", "os", "pathlib", "random", "socket", "subprocess", "tempfile", "threading", "time", "urllib"}

EMPTY_WORDS = {"util", "utils", "helper", "helpers", "handler", "handlers", "common", "misc", "data", "info", "managers"}
# A word of the GGUF format itself, and the one manager there is.
ALLOWED_NAMES = {"TensorInfo", "ModelManager", "models.manager"}


@cache
def modules() -> dict[str, Path]:
    """Every module under its name without `localfast.`; the package itself is the empty name."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def tree(module: str) -> ast.Module:
    return ast.parse(modules()[module].read_text(encoding="utf-8"))


@cache
def imports(module: str) -> tuple[tuple[str, int], ...]:
    """(dotted name, line) of everything imported anywhere in the file, also inside functions and through importlib."""
    return tuple(_imports(module))


def _imports(module: str) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree(module)):
        match node:
            case ast.Import(names=names):
                yield from ((name.name, node.lineno) for name in names)
            case ast.ImportFrom(module=source, level=level, names=names):
                assert level == 0, f"localfast/{module}:{node.lineno}: write the whole name instead of a relative import"
                yield from ((f"{source}.{name.name}", node.lineno) for name in names)
            case ast.Call(
                func=ast.Attribute(attr="import_module") | ast.Name(id="import_module" | "__import__"), args=[first, *_]
            ):
                if isinstance(first, ast.Constant):
                    yield str(first.value), node.lineno


def own_imports(module: str) -> Iterator[tuple[str, int]]:
    """The modules of ours it imports: `from localfast.x import y` means x.y where that is a module, else x."""
    for name, line in imports(module):
        if name.split(".")[0] == "localfast":
            inner = name.partition(".")[2]
            target = inner if inner in modules() else inner.rpartition(".")[0]
            if target:
                yield target, line


@cache
def table() -> dict[str, list[str]]:
    rows = (line.partition(":") for line in IMPORTS.replace("\n  ", " ").splitlines() if line)
    return {name.strip(): allowed.split() for name, _, allowed in rows}


def row_of(module: str) -> str | None:
    rows = table()
    return module if module in rows else next((row for row in rows if fnmatchcase(module, row)), None)


def within(name: str, patterns: list[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def report(problems: list[str]) -> None:
    assert not problems, "\n" + "\n".join(problems)


# --- who imports whom ---------------------------------------------------------------------------------------------------------


def test_imports_follow_the_table() -> None:
    problems = []
    for module in filter(None, modules()):
        row = row_of(module)
        if row is None:
            problems.append(f"{module} has no row: add one to IMPORTS, as high up as its work allows")
            continue
        for target, line in own_imports(module):
            if not within(target, table()[row]):
                problems.append(f"localfast/{module}:{line} imports {target}: move the code, or extend its row on purpose")
    report(problems)


def test_package_root_imports_nothing() -> None:
    assert not list(own_imports("")), "localfast/__init__.py holds the version only: importing it must stay cheap"


def test_table_names_only_what_exists() -> None:
    known = [*filter(None, modules()), *PLANNED]
    names = {name for row, allowed in table().items() for name in (row, *allowed)}
    report(
        [f"IMPORTS names {name}, which does not exist: remove it" for name in names if not any(within(k, [name]) for k in known)]
    )


def test_table_is_in_order() -> None:
    rows = list(table())
    problems = []
    for position, row in enumerate(rows):
        for name in table()[row]:
            below = [other for other in rows[position + 1 :] if fnmatchcase(other, name)]
            if below:
                problems.append(f"{row} may import {name}, but {below[0]} stands below it: move a row up or a dependency down")
    report(problems)


def test_only_the_engine_process_imports_the_engine() -> None:
    importers = {m for m in modules() for target, _ in own_imports(m) if target in CHILD and m not in CHILD}
    assert importers <= {"engine.entry"}, f"{importers} import the engine: talk to it through engine.client instead"
    in_functions = [n for f in ast.walk(tree("engine.entry")) if isinstance(f, ast.FunctionDef) for n in ast.walk(f)]
    worker = [n for n in ast.walk(tree("engine.entry")) if isinstance(n, ast.ImportFrom) and n.names[0].name == "worker"]
    assert all(node in in_functions for node in worker), "engine.entry is imported by the server: import worker inside main()"


@pytest.mark.parametrize("library", FENCES)
def test_library_stays_with_its_owners(library: str) -> None:
    owners = FENCES[library].split()
    problems = [
        f"localfast/{module}:{line} imports {name}: only {FENCES[library] or 'nobody'} may, call that instead"
        for module in modules()
        for name, line in imports(module)
        if name.split(".")[0] == library and not within(module, owners)
    ]
    report(problems)


def test_environment_is_read_by_settings_only() -> None:
    names = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
    problems = []
    for module in modules():
        uses = [(name.removeprefix("os."), line) for name, line in imports(module) if name.startswith("os.")]
        uses += [(n.attr, n.lineno) for n in ast.walk(tree(module)) if isinstance(n, ast.Attribute) and _is_os(n.value)]
        if module not in ENVIRONMENT_READERS:
            problems += [f"localfast/{module}:{line} uses os.{name}: make it a setting" for name, line in uses if name in names]
    report(problems)


def _is_os(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "os"


def test_deciders_touch_nothing() -> None:
    problems = [
        f"localfast/{module}:{line} imports {name}: it decides from plain data; let its caller look and pass the result in"
        for module in modules()
        if within(module, list(PURE))
        for name, line in imports(module)
        if name.split(".")[0] in IMPURE_LIBRARIES
    ]
    report(problems)


SERVER = ("starlette", "uvicorn", "huggingface_hub", "rich", "numpy")


@pytest.mark.parametrize(
    ("imported", "absent"),
    [
        ("localfast", (*SERVER, "click", "llama_cpp")),
        ("localfast.cli", (*SERVER, "llama_cpp")),  # --version and --help must not wait for them
        ("localfast.engine.entry", (*SERVER, "click", "llama_cpp")),  # an engine process starts here
        ("localfast.app, localfast.cli.serve", ("llama_cpp", "numpy", "huggingface_hub")),  # the server never loads the engine
    ],
)
def test_import_loads_only_what_it_needs(imported: str, absent: tuple[str, ...]) -> None:
    code = f"import sys, {imported}; print(*[name for name in {absent!r} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=PACKAGE.parent)
    assert result.returncode == 0, result.stderr
    assert not result.stdout.split(), f"'import {imported}' also loads {result.stdout.strip()}: import that inside a function"


# --- sizes and names ----------------------------------------------------------------------------------------------------------


def functions(module: str) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree(module)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def test_files_and_functions_stay_small() -> None:
    problems = []
    for module, path in modules().items():
        count = len(path.read_text(encoding="utf-8").splitlines())
        if count > MAX_FILE_LINES:
            problems.append(
                f"localfast/{module} has {count} lines, {MAX_FILE_LINES} are allowed: find its second concept and name it"
            )
        for function in functions(module):
            length = (function.end_lineno or 0) - function.lineno + 1
            if length > MAX_FUNCTION_LINES:
                problems.append(f"localfast/{module}:{function.lineno} {function.name} has {length} lines: split it by concept")
    report(problems)


def test_functions_take_few_positional_parameters() -> None:
    problems = []
    for module in modules():
        for function in functions(module):
            names = [argument.arg for argument in (*function.args.posonlyargs, *function.args.args)]
            names = [name for name in names if name not in ("self", "cls")]
            # A command's parameters are its flags: click passes them by name.
            if len(names) > MAX_POSITIONAL and not (module.startswith("cli.") and function.name == "command"):
                problems.append(f"localfast/{module}:{function.lineno} {function.name} takes {len(names)}: group them or use `*`")
    report(problems)


def test_every_module_says_what_it_owns() -> None:
    empty = [module for module, path in modules().items() if path.stat().st_size and not ast.get_docstring(tree(module))]
    report([f"localfast/{module} has no docstring: say in 2-6 lines what it owns and what it must not do" for module in empty])


def test_names_mean_something() -> None:
    classes = [node.name for module in modules() for node in ast.walk(tree(module)) if isinstance(node, ast.ClassDef)]
    names = {
        name: re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name) for name in [*modules(), *classes] if name not in ALLOWED_NAMES
    }
    problems = [f"{name}: '{word}' says nothing; name what it does" for name, words in names.items() for word in words
                if word.lower() in EMPTY_WORDS]  # fmt: skip
    problems += [f"{name}: ModelManager is the only manager; name what it owns" for name in names if "manager" in name.lower()]
    report(problems)
