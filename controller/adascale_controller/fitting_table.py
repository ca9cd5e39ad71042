"""A table that leaves out columns where not all of them fit, so that no cell is cut or wrapped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table

Padding = tuple[int, int] | tuple[int, int, int, int]

_UNLIMITED = 10_000


@dataclass(frozen=True)
class Column:
    """A column."""

    header: str  # its header, of one or more lines
    cells: Sequence[str]  # its cells, one for each row
    rank: int = 0  # 0 for a column that is always shown; of the others, the highest rank is left out first


class FittingTable:
    """A table of as many columns as fit; a renderable of rich."""

    def __init__(self, columns: Sequence[Column], padding: Padding, row_styles: Sequence[str] = ()) -> None:
        self._columns = columns
        self._padding = padding
        self._row_styles = row_styles or [""] * len(columns[0].cells)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the table with the columns that fit."""
        shown = list(self._columns)
        unlimited = options.update(max_width=_UNLIMITED)
        while True:
            table = self._table(shown)
            width = Measurement.get(console, unlimited, table).maximum
            dispensable = [column for column in shown if column.rank]
            if width <= options.max_width or not dispensable:
                break
            shown.remove(max(dispensable, key=lambda column: column.rank))
        yield table

    def _table(self, columns: Sequence[Column]) -> Table:
        table = Table(box=box.SIMPLE_HEAD, padding=self._padding, header_style="bold", show_edge=False)
        for column in columns:
            table.add_column(column.header, justify="right", no_wrap=True)
        for row, style in enumerate(self._row_styles):
            table.add_row(*(column.cells[row] for column in columns), style=style)
        return table
