"""Reads a YAML text of one document, and remembers the line of each value in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import yaml

Place = tuple[str | int, ...]
"""Where a value is in a document: field names and indices."""


class YamlTextError(Exception):
    """A text that is not one YAML document.

    Args:
        message: what is wrong with it.
        line: where, from 1, if known.
    """

    def __init__(self, message: str, line: int | None = None) -> None:
        super().__init__(message)
        self.line = line


@dataclass(frozen=True)
class YamlDocument:
    """A document's content, and the tree of nodes that it was read from."""

    content: Any
    root: yaml.Node

    def line(self, place: Place) -> int:
        """The line of the field at `place`, from 1, or of the nearest one that holds it."""
        node = self.root
        line = node.start_mark.line + 1
        for part in place:
            if isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
                node = node.value[part]
                line = node.start_mark.line + 1
            elif isinstance(node, yaml.MappingNode):
                found = next(((key, value) for key, value in node.value if key.value == part), None)
                if found is None:
                    return line
                line, node = found[0].start_mark.line + 1, found[1]
            else:
                return line
        return line


def dotted(place: Place) -> str:
    """A place as one would write it: `spec.containers[0].name`."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place)
    return text.removeprefix(".")


def read_document(text: str) -> YamlDocument:
    """The one document in `text`.

    Raises:
        YamlTextError: it is not YAML, or holds no document or several.
    """
    loader: _Loader | None = None
    try:
        loader = _Loader(text)
        roots = []
        while loader.check_node():
            roots.append(loader.get_node())
        full = [root for root in roots if root is not None and not _is_empty(root)]
        if len(full) != 1:
            raise YamlTextError(f"holds {f'{len(full)} documents' if full else 'nothing'}; it must hold one")
        return YamlDocument(loader.construct_document(full[0]), full[0])
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = error.problem or error.context or "it can't be parsed"
        if error.context_mark and mark and error.context_mark.line < mark.line:
            problem += f", {error.context} that begins in line {error.context_mark.line + 1}"
        raise YamlTextError(f"is not valid YAML: {problem}", mark.line + 1 if mark else None) from None
    except (yaml.YAMLError, ValueError) as error:
        raise YamlTextError(f"is not valid YAML: {str(error).partition(chr(10))[0]}") from None
    except RecursionError:
        raise YamlTextError("is not valid YAML: it is nested too deeply") from None
    finally:
        if loader is not None:
            loader.dispose()


class _Loader(yaml.SafeLoader):
    """The safe loader, which also minds a field that is there twice: else the last one wins silently."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: dict[str, yaml.Node] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the field {key.value!r} is there twice", key.start_mark
                    )
                seen[key.value] = key
        return super().construct_mapping(node, deep)


def _is_empty(node: yaml.Node) -> bool:
    return isinstance(node, yaml.ScalarNode) and node.tag == "tag:yaml.org,2002:null"
