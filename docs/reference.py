"""Prints `docs/reference.md`: the public names of `adascale`, from their signatures and docstrings.

The sources are parsed, not imported, so that annotations are printed as they are written.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import re
import textwrap
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import adascale

HEADER = """\
# Reference

The public names of `adascale`, its [errors](#errors), and the
[environment variables](#environment-variables) of agents and trainers. Generated from their docstrings by
`make reference`; do not edit.
"""
VARIABLES = """\
Agents and trainers read these. The operator and `adascale run` set those that follow from the `AdaScaleJob`.
Set others in `env` of its worker container. They take precedence over the arguments of `ElasticTrainer`; the
batch size and its bounds are taken together, all from variables or all from arguments."""
SET_BY_AGENT = " Set by the agent."
_ARGUMENT = re.compile(r"The argument `\w+` of `ElasticTrainer`\.")
ERRORS = """\
All in `adascale.errors`. An error that a program does not catch is printed as its message, without a
traceback, and the process exits with the error's `exit_code`."""
WIDTH = 110
MADE_BY_OTHERS = frozenset({"Evaluation"})
"""Classes whose constructors users do not call."""

_SECTION = re.compile(r"(Args|Attributes|Returns|Yields|Raises):\Z")
_ITEM = re.compile(r"(?P<name>[\w, *]+): (?P<text>.*)", re.DOTALL)


def main() -> None:
    """Print the reference."""
    print(HEADER, *_reference(), sep="\n", end="")


def _reference() -> Iterator[str]:
    # The class that programs use first; then by name.
    modules = {**adascale._MODULE_OF, "ElasticDataLoader": "adascale_worker.batches.elastic_loader"}
    for name in sorted(modules, key=lambda name: (name != "ElasticTrainer", name)):
        match _definition(modules[name], name):
            case ast.ClassDef() as definition:
                yield from _class(definition)
            case function:
                yield from _function(function)
    yield from _errors()
    yield from _variables()


def _errors() -> Iterator[str]:
    yield "## Errors"
    yield ""
    yield from textwrap.wrap(ERRORS, WIDTH, break_on_hyphens=False)
    yield from ("", "| error | is a | |", "| --- | --- | --- |")
    for name in adascale.errors.__all__:
        error = getattr(adascale.errors, name)
        bases = ", ".join(f"`{base.__name__}`" for base in error.__bases__)
        yield f"| `{name}` | {bases} | {inspect.cleandoc(error.__doc__).splitlines()[0]} |"
    yield ""


def _variables() -> Iterator[str]:
    yield "## Environment variables"
    yield ""
    yield from textwrap.wrap(VARIABLES, WIDTH, break_on_hyphens=False)
    yield from ("", "| variable | |", "| --- | --- |")
    arguments, set_by_agent = [], []
    for statement, following in itertools.pairwise(_parse("adascale_core.names").body):
        match statement, following:
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=str(variable))),
                ast.Expr(value=ast.Constant(value=str(text))),
            ) if name.startswith("ENV_"):
                text = " ".join(text.split())
                if text.endswith(SET_BY_AGENT):
                    set_by_agent.append(f"`{variable}`")
                elif _ARGUMENT.fullmatch(text):
                    arguments.append(f"`{variable}`")
                else:
                    yield f"| `{variable}` | {text} |"
    yield f"| {', '.join(arguments)} | The arguments of `ElasticTrainer` with these names. |"
    yield f"| {', '.join(set_by_agent)} | Set by the agent for its trainer. |"
    yield ""


def _definition(module: str, name: str) -> ast.ClassDef | ast.FunctionDef:
    body = _parse(module).body
    return next(
        node for node in body if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name
    )


def _function(node: ast.FunctionDef) -> Iterator[str]:
    yield from (f"## {node.name}", "")
    returned = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    yield from _code(node.name, _arguments(node.args, bound=False), returned)
    yield from _markdown(ast.get_docstring(node))


def _parse(module: str) -> ast.Module:
    spec = find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    return ast.parse(Path(spec.origin).read_text())


def _class(node: ast.ClassDef) -> Iterator[str]:
    members = [
        member
        for member in node.body
        if isinstance(member, ast.FunctionDef)
        and not member.name.startswith("_")
        and not {"classmethod", "overload", f"{member.name}.setter"} & set(_decorators(member))
    ]
    constructor = next(
        (item for item in node.body if isinstance(item, ast.FunctionDef) and item.name == "__init__"), None
    )
    yield f"## {node.name}"
    yield ""
    parameters = _parameters(node, constructor)
    if parameters and node.name not in MADE_BY_OTHERS:
        yield from _code(f"class {node.name}", parameters, "")
    yield from _markdown(ast.get_docstring(node))
    settable = {
        decorator.removesuffix(".setter")
        for item in node.body
        if isinstance(item, ast.FunctionDef)
        for decorator in _decorators(item)
        if decorator.endswith(".setter")
    }
    attributes = [*_attributes(constructor)] if constructor else []
    for name, text in attributes:
        yield from (f"### {node.name}.{name}", "", *_markdown(text))
    for member in members:
        yield f"### {node.name}.{member.name}"
        yield ""
        returned = f" -> {ast.unparse(member.returns)}" if member.returns else ""
        if "property" in _decorators(member):
            can_be_set = ", can be set" if member.name in settable else ""
            yield f"`{returned.removeprefix(' -> ')}`{can_be_set}"
            yield ""
        else:
            yield from _code(member.name, _arguments(member.args), returned)
        yield from _markdown(ast.get_docstring(member))


def _decorators(node: ast.FunctionDef) -> list[str]:
    return [ast.unparse(decorator) for decorator in node.decorator_list]


def _parameters(node: ast.ClassDef, constructor: ast.FunctionDef | None) -> list[str]:
    """Return the parameters of the constructor, which are the fields of a dataclass."""
    if constructor is not None:
        return _arguments(constructor.args)
    return [ast.unparse(field) for field in node.body if isinstance(field, ast.AnnAssign)]


def _attributes(constructor: ast.FunctionDef) -> Iterator[tuple[str, str]]:
    """Yield the names and docstrings of the public attributes that the constructor sets."""
    for parent in ast.walk(constructor):
        body = getattr(parent, "body", [])
        if not isinstance(body, list):  # of a lambda
            continue
        for statement, following in itertools.pairwise(body):
            if (
                isinstance(statement, ast.Assign)
                and isinstance(target := statement.targets[0], ast.Attribute)
                and not target.attr.startswith("_")
                and isinstance(following, ast.Expr)
                and isinstance(text := following.value, ast.Constant)
                and isinstance(text.value, str)
            ):
                yield target.attr, text.value


def _arguments(arguments: ast.arguments, *, bound: bool = True) -> list[str]:
    """Return the arguments as they are written, those of a method without `self`."""
    positional = arguments.args[1:] if bound else arguments.args
    defaults = [None] * (len(positional) - len(arguments.defaults)) + list(arguments.defaults)
    written = [_argument(*pair) for pair in zip(positional, defaults, strict=True)]
    if arguments.kwonlyargs:
        written.append("*")
    written += [_argument(*pair) for pair in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]
    if arguments.kwarg:
        written.append(f"**{ast.unparse(arguments.kwarg)}")
    return written


def _argument(argument: ast.arg, default: ast.expr | None) -> str:
    equals = " = " if argument.annotation else "="
    return ast.unparse(argument) + ("" if default is None else f"{equals}{ast.unparse(default)}")


def _code(name: str, arguments: list[str], returned: str) -> Iterator[str]:
    """Yield a signature; one that is too long for a line has a line for each argument."""
    line = f"{name}({', '.join(arguments)}){returned}"
    if len(line) > WIDTH:
        line = f"{name}(\n{''.join(f'    {argument},{chr(10)}' for argument in arguments)}){returned}"
    yield from ("```python", *line.splitlines(), "```", "")


def _markdown(docstring: str | None) -> Iterator[str]:
    """Yield a docstring of Google's style as lines of Markdown."""
    section = ""
    for paragraph in re.split(r"\n\s*\n", inspect.cleandoc(docstring or "")):
        title, _, body = paragraph.partition("\n")
        if match := _SECTION.match(title):
            section = match[1]
            yield from (f"**{section}**", "")
            for item in re.split(r"\n(?=\S)", textwrap.dedent(body)):
                yield from _item(item, section)
        elif all(line.startswith("    ") for line in paragraph.splitlines()):
            yield from ("```python", *textwrap.dedent(paragraph).splitlines(), "```")
        else:
            yield from textwrap.wrap(paragraph, WIDTH, break_on_hyphens=False)
        yield ""


def _item(item: str, section: str) -> list[str]:
    text = " ".join(item.split())
    if section in ("Args", "Attributes", "Raises") and (match := _ITEM.match(text)):
        text = f"- `{match['name']}`: {match['text']}"
    return textwrap.wrap(
        text, WIDTH, subsequent_indent="  " if text[:2] == "- " else "", break_on_hyphens=False
    )


main()
