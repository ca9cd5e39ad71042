"""Groups of kinds of demands and nodes, which share no node."""

from __future__ import annotations

from collections.abc import Sequence

Element = tuple[str, int]


class Groups:
    """Disjoint groups of elements, which can be joined (union-find)."""

    def __init__(self) -> None:
        self._parents: dict[Element, Element] = {}

    def of(self, element: Element) -> Element:
        """Return an element that is the same for all elements of a group."""
        parent = self._parents.setdefault(element, element)
        while parent != element:
            above = self._parents[parent]
            self._parents[element] = above
            element, parent = parent, above
        return element

    def join(self, elements: Sequence[Element]) -> None:
        """Join the groups of some elements."""
        first = self.of(elements[0])
        for element in elements[1:]:
            self._parents[self.of(element)] = first

    def copy(self) -> Groups:
        """Return the same groups."""
        copied = Groups()
        copied._parents = dict(self._parents)
        return copied
