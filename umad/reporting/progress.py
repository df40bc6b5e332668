"""What the commands print: progress bars, plain lines, warnings, tables; safe for text that a model wrote.

Progress and warnings go to stderr, results (`say`, `table`) to stdout, so that output can be piped.
"""

from __future__ import annotations

import re
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

QUIET = 2.0
"""Seconds in which nothing is shown."""
EVERY = 10.0
"""Seconds between plain lines where stderr is no terminal."""
WINDOW = 30.0
"""Seconds over which the rate is taken."""

_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters but tab and newline, marks that reverse the direction of text, lone surrogates."""
_NUMBER = re.compile(r"^[-+−±]?[\d.,]+\s*[%a-zA-Z/]*$|^[-–—]?$")


def printable(text: str) -> str:
    """`text` with everything that could steer a terminal made visible (`\\x1b[31m`); tabs and newlines stay."""
    return _UNSAFE.sub(_escaped, text)


def _escaped(match: re.Match[str]) -> str:
    code = ord(match[0])
    return "\\r" if code == 13 else f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"


_logs: list[Path] = []
_silent = False


def silence() -> None:
    """Nothing is printed from here on: for the processes of a launch that are not its first."""
    global _silent
    _silent = True


@contextmanager
def logged(path: Path) -> Iterator[None]:
    """Within the block, what `say` and `warn` print is also appended to the file `path`, with the time."""
    _logs.append(path)
    try:
        yield
    finally:
        _logs.remove(path)


def _log(text: str) -> None:
    for path in dict.fromkeys(_logs):
        with path.open("a", encoding="utf-8") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")


def say(text: str = "") -> None:
    """Prints plain text to stdout, control characters made visible."""
    if _silent:
        return
    _write(sys.stdout, printable(text) + "\n")
    _log(printable(text))


def warn(text: str) -> None:
    """Prints a warning to stderr."""
    if _silent:
        return
    _write(sys.stderr, f"warning: {printable(text)}\n")
    _log(f"warning: {printable(text)}")


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Prints a table to stdout: boxed on a terminal, aligned plain text elsewhere. Columns of numbers stand right."""
    if _silent:
        return
    cells = [[printable("" if cell is None else str(cell)) for cell in row] for row in rows]
    right = [bool(cells) and all(_NUMBER.match(row[i].strip()) for row in cells) for i in range(len(columns))]
    if sys.stdout.isatty():
        _rich_table(title, columns, cells, right)
    else:
        _write(sys.stdout, plain_table(title, columns, cells, right))


def plain_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[bool]) -> str:
    """The text of a table without a terminal; `right` says which columns stand right."""
    from rich.cells import cell_len

    widths = [max(cell_len(row[i]) for row in (columns, *rows)) for i in range(len(columns))]

    def line(row: Sequence[str]) -> str:
        padding = [" " * (width - cell_len(cell)) for cell, width in zip(row, widths, strict=True)]
        parts = [pad + cell if r else cell + pad for cell, pad, r in zip(row, padding, right, strict=True)]
        return "  ".join(parts).rstrip()

    lines = [title, line(columns), "  ".join("-" * width for width in widths), *map(line, rows)]
    return "\n".join(lines) + "\n"


def _rich_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[bool]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    # Text, not str: model text may hold what rich takes for markup
    made = Table(title=Text(title), box=box.SIMPLE_HEAD, title_justify="left", title_style="bold", pad_edge=False)
    for name, is_right in zip(columns, right, strict=True):
        made.add_column(Text(name), justify="right" if is_right else "left")
    for row in rows:
        made.add_row(*(Text(cell) for cell in row))
    Console(file=sys.stdout).print(made)


class Bar:
    """A running count. `total` may be set or changed at any time; None: unknown."""

    def __init__(self, label: str, total: int | None, unit: str, done: int = 0) -> None:
        self.label, self.total, self.unit, self.done = label, total, unit, done
        self.started = time.monotonic()
        self._first = done
        self._marks: deque[tuple[float, int]] = deque([(self.started, done)])
        self.task: TaskID | None = None
        self.shown = False

    def advance(self, n: int = 1) -> None:
        """Counts `n` more units as done."""
        self.done += n
        now = time.monotonic()
        if now - self._marks[-1][0] >= 0.5:
            self._marks.append((now, self.done))
            while len(self._marks) > 2 and now - self._marks[1][0] > WINDOW:
                self._marks.popleft()

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.started

    def rate(self) -> float:
        """Units per second, lately; what a resumed count started from does not enter."""
        since, before = self._marks[0]
        passed = time.monotonic() - since
        return (self.done - before) / passed if passed > 0 else 0.0

    def remaining(self) -> float | None:
        """Seconds left at the present rate; None where it cannot be known."""
        rate = self.rate()
        if self.total is None or rate <= 0:
            return None
        return max(self.total - self.done, 0) / rate

    def count(self) -> str:
        count = f"{self.done}/{self.total}" if self.total is not None else str(self.done)
        return f"{count} {self.unit}".rstrip()

    def describe(self) -> str:
        """One plain line: 'evaluating: 120/500 responses · 24.1 responses/s · 0:16 left'."""
        if self.total is None and self.done == 0:
            return f"{printable(self.label)}: {clock(self.elapsed)} so far"
        parts = [f"{printable(self.label)}: {self.count()}", _rate(self.rate(), self.unit)]
        left = self.remaining()
        if left is not None:
            parts.append(f"{clock(left)} left")
        return " · ".join(part for part in parts if part)

    def closing(self) -> str:
        """The last plain line: 'evaluating: 500 responses in 0:21 (23.8 responses/s)'."""
        if self.done == 0:
            return f"{printable(self.label)}: done in {clock(self.elapsed)}"
        rate = _rate((self.done - self._first) / max(self.elapsed, 1e-9), self.unit)
        count = f"{self.done} {self.unit}".rstrip()
        return f"{printable(self.label)}: {count} in {clock(self.elapsed)}" + (f" ({rate})" if rate else "")


@contextmanager
def progress(label: str, total: int | None = None, unit: str = "", *, done: int = 0) -> Iterator[Bar]:
    """Shows how far something is, at what rate and how long it will still take, once it has taken two seconds.

    A bar on a terminal, else a plain line about every ten seconds; on stderr. May be nested; `done` units of a resumed
    count do not enter the rate. Nothing is printed when the block ends within two seconds.
    """
    bar = Bar(label, total, unit, done)
    if _silent:
        yield bar
        return
    _display.push(bar)
    try:
        yield bar
    except BaseException:
        _display.pop(bar, finished=False)
        raise
    _display.pop(bar, finished=True)


class _Display:
    """All bars that are open, outermost first, shown by one ticking thread that lives only as long as there are any."""

    def __init__(self) -> None:
        self.bars: list[Bar] = []
        self.lock = threading.RLock()
        self.stop = threading.Event()
        self.live: Progress | None = None
        self.last_line = 0.0

    def push(self, bar: Bar) -> None:
        with self.lock:
            self.bars.append(bar)
            if len(self.bars) == 1:
                self.stop = threading.Event()
                self.last_line = time.monotonic() - EVERY
                threading.Thread(target=self._tick, args=(self.stop,), daemon=True, name="umad-progress").start()

    def pop(self, bar: Bar, *, finished: bool) -> None:
        with self.lock:
            self.bars.remove(bar)
            if self.live is not None and bar.task is not None:
                self.live.remove_task(bar.task)
            if not self.bars:
                self.stop.set()
                if self.live is not None:
                    self.live.stop()
                    self.live = None
            # nested bars come back many times: only the outermost says how it ended
            if bar.shown and finished and not self.bars:
                _write(sys.stderr, bar.closing() + "\n")

    def _tick(self, stop: threading.Event) -> None:
        while not stop.wait(0.25):
            with self.lock:
                if stop.is_set():
                    return
                due = [bar for bar in self.bars if bar.elapsed >= QUIET]
                if due and sys.stderr.isatty():
                    self._draw(due)
                elif due:
                    self._print(due)

    def _draw(self, due: list[Bar]) -> None:
        if self.live is None:
            self.live = _live()
            self.live.start()
        for bar in due:
            left = bar.remaining()
            fields: dict[str, Any] = {
                "count": bar.count(),
                "rate": _rate(bar.rate(), bar.unit),
                "left": f"{clock(left)} left" if left is not None else "",
            }
            if bar.task is None:
                bar.task = self.live.add_task(printable(bar.label), total=bar.total, **fields)
            self.live.update(bar.task, completed=bar.done, total=bar.total, **fields)
            bar.shown = True

    def _print(self, due: list[Bar]) -> None:
        now = time.monotonic()
        if now - self.last_line < EVERY:
            return
        self.last_line = now
        for bar in due:
            bar.shown = True
        _write(sys.stderr, "  >  ".join(bar.describe() for bar in due) + "\n")


_display = _Display()


def _live() -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    columns: list[Any] = [
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=28),
        TextColumn("{task.fields[count]}", markup=False),
        TextColumn("{task.fields[rate]}", style="dim", markup=False),
        TextColumn("{task.fields[left]}", style="cyan", markup=False),
    ]
    # a piped stdout must stay apart from the bars; one that shares the terminal has to be drawn around them
    return Progress(
        *columns,
        console=Console(file=sys.stderr),
        transient=True,
        refresh_per_second=4,
        redirect_stdout=sys.stdout.isatty(),
    )


def clock(seconds: float) -> str:
    """'0:07', '12:30', '3:05:00', '2 d 4:00:00'."""
    whole = round(seconds)
    days, whole = divmod(whole, 86400)
    hours, whole = divmod(whole, 3600)
    minutes, secs = divmod(whole, 60)
    text = f"{hours}:{minutes:02}:{secs:02}" if hours or days else f"{minutes}:{secs:02}"
    return f"{days} d {text}" if days else text


def _rate(rate: float, unit: str) -> str:
    """Units per second, or seconds per unit where that reads better."""
    if rate <= 0:
        return ""
    if rate >= 0.95:
        return f"{rate:,.{0 if rate >= 100 else 1}f} {unit}".rstrip() + "/s"
    one = unit[:-1] if unit.endswith("s") else unit
    return f"{1 / rate:.1f} s/{one}" if one else f"{1 / rate:.1f} s each"


def _write(stream: TextIO, text: str) -> None:
    """Writes what the stream's encoding can hold, the rest as escapes: a bar must not end a run under LANG=C."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
    stream.flush()
