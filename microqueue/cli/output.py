"""Print results: sentences and tables for people, one JSON document for programs."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from microqueue.cli import formats
from microqueue.masking import without_fragments, without_password
from microqueue.task import TaskStatus

Cell: TypeAlias = str | int | Text

STATUS_STYLES = {
    TaskStatus.PENDING: "blue",
    TaskStatus.PROCESSING: "yellow",
    TaskStatus.DONE: "green",
    TaskStatus.FAILED: "red",
}
PIPE_WIDTH = 100_000
"""Line width without a terminal: so large that nothing is cut or wrapped."""


class Output:
    """Prints results to stdout; errors, notes and hints to stderr."""

    def __init__(self, *, as_json: bool) -> None:
        self.as_json = as_json
        self.console = new_console()
        self.errors = new_console(stderr=True)

    @property
    def for_people(self) -> bool:
        """Whether stdout is a terminal and the format is not JSON."""
        return self.console.is_terminal and not self.as_json

    def json(self, value: Any, *, stream: bool = False) -> None:
        """Print one JSON document; in a stream of documents, one line each."""
        # Not with rich, which would wrap it.
        self.console.file.write(formats.json_text(value, indent=None if stream else 2) + "\n")
        self.console.file.flush()

    def print(self, text: str, style: str = "") -> None:
        """Print a line, unless the format is JSON."""
        if not self.as_json:
            self.console.print(Text(formats.printable(text), style=style), soft_wrap=True)

    def hint(self, text: str) -> None:
        """Print a line to stderr, at a terminal only."""
        if self.errors.is_terminal:
            self.note(text)

    def note(self, text: str) -> None:
        """Print a line to stderr."""
        self.errors.print(Text(formats.printable(text), style="dim"), soft_wrap=True)

    def error(self, error: BaseException, *, debug: bool = False) -> None:
        """Print an error in one line, with ``debug`` after its traceback; passwords are masked."""
        if debug:
            lines = "".join(traceback.format_exception(error))
            self.errors.print(Text(without_fragments(lines), style="dim"), soft_wrap=True)
        message = formats.one_line(without_password(str(error)))
        self.errors.print(Text(f"Error: {message}", style="red"), soft_wrap=True)

    def table(self, columns: Sequence[str], rows: Iterable[Sequence[Cell]], **wide: str) -> None:
        """Print a table; see :meth:`new_table`."""
        self.console.print(self.new_table(columns, rows, **wide))

    def new_table(
        self, columns: Sequence[str], rows: Iterable[Sequence[Cell]], **wide: str
    ) -> Table:
        """Return a table.

        Args:
            columns: The headings.
            rows: The cells.
            wide: ``fold`` or ``ellipsis`` by column; other columns are neither wrapped nor cut.
        """
        terminal = self.console.is_terminal
        table = Table(
            box=box.SIMPLE_HEAD if terminal else None,
            pad_edge=False,
            padding=(0, 2, 0, 0),
            header_style="bold",
            show_edge=False,
        )
        rows = list(rows)
        for number, column in enumerate(columns):
            numeric = bool(rows) and all(isinstance(row[number], int) for row in rows)
            overflow = wide.get(column.replace(" ", "_"))
            table.add_column(
                column,
                justify="right" if numeric else "left",
                no_wrap=overflow is None,
                overflow="ellipsis" if overflow == "ellipsis" else "fold",
            )
        for row in rows:
            table.add_row(*(_cell(value) for value in row))
        return table

    def facts(self, pairs: Iterable[tuple[str, Cell | None]]) -> None:
        """Print pairs of name and value; pairs without a value are left out."""
        self.console.print(self.new_facts(pairs))

    def new_facts(self, pairs: Iterable[tuple[str, Cell | None]]) -> Table:
        """Return a table of two columns, names and values."""
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="dim", no_wrap=True)
        grid.add_column(overflow="fold")
        for name, value in pairs:
            if value is not None:
                grid.add_row(name, _cell(value))
        return grid

    def heading(self, text: str) -> None:
        """Print a heading after an empty line."""
        self.console.print(Text(f"\n{text}", style="bold"))


def new_console(*, stderr: bool = False) -> Console:
    """Return a console that prints text verbatim, and wraps at a terminal only."""
    console = Console(stderr=stderr, markup=False, highlight=False, emoji=False)
    if not console.is_terminal:
        console.width = PIPE_WIDTH
    return console


def status(value: TaskStatus) -> Text:
    """Return a status in its colour."""
    return Text(value.value, style=STATUS_STYLES[value])


def _cell(value: Cell) -> Text:
    if isinstance(value, Text):
        return value
    if isinstance(value, int):
        return Text(formats.figure(value))
    return Text(formats.printable(value))
