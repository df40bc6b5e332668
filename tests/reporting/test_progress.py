from __future__ import annotations

import io
import os
import pty
import re
import select
import subprocess
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from umad.reporting import progress as module
from umad.reporting.progress import Bar, clock, printable, progress, say, table, warn


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same behaviour in a tenth of the time."""
    monkeypatch.setattr(module, "QUIET", 0.2)
    monkeypatch.setattr(module, "EVERY", 0.6)


def test_nothing_is_printed_within_two_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("quick", 10, "steps") as bar:
        bar.advance(10)
        time.sleep(0.6)
    assert capsys.readouterr() == ("", "")


@pytest.mark.usefixtures("fast")
def test_plain_lines_tell_count_rate_and_time_left_on_stderr_only(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("evaluating", 40, "responses") as bar:
        for _ in range(20):
            time.sleep(0.05)
            bar.advance()
    out, err = capsys.readouterr()
    assert out == ""
    first, *_, last = err.splitlines()
    assert re.fullmatch(r"evaluating: \d+/40 responses · [\d.]+ responses/s · 0:0\d left", first)
    assert re.fullmatch(r"evaluating: 20 responses in 0:01 \(\d+\.\d responses/s\)", last)
    assert 2 <= len(err.splitlines()) <= 4, "lines come at the set distance, not at every advance"


@pytest.mark.usefixtures("fast")
def test_a_bar_that_never_advances_still_shows(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("loading", 3):
        time.sleep(0.7)
    assert capsys.readouterr().err.startswith("loading: 0/3\n")


@pytest.mark.usefixtures("fast")
def test_nested_bars_share_a_line_and_only_the_outermost_says_how_it_ended(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("training", 2, "steps") as outer:
        for _ in range(2):
            with progress("generating", 5, "responses") as inner:
                time.sleep(0.6)
                inner.advance(5)
            outer.advance()
    lines = capsys.readouterr().err.splitlines()
    assert any(line.startswith("training: ") and "  >  generating: " in line for line in lines)
    assert lines[-1].startswith("training: 2 steps in")
    assert not any(line.startswith("generating") for line in lines)


@pytest.mark.usefixtures("fast")
def test_an_exception_passes_through_and_leaves_no_bar(capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted() -> None:
        with progress("a", 2), progress("b", 2):
            time.sleep(0.6)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    before = capsys.readouterr().err
    assert " in 0:" not in before, "no closing line of something that did not end well"
    time.sleep(0.7)
    assert capsys.readouterr().err == ""
    assert module._display.bars == []


def test_what_a_resumed_count_started_from_does_not_enter_the_rate() -> None:
    bar = Bar("x", 1000, "steps", done=900)
    bar.started -= 10
    bar._marks[0] = (bar.started, 900)
    bar.advance(10)
    assert bar.rate() == pytest.approx(1.0, rel=0.05)
    assert bar.remaining() == pytest.approx(90, rel=0.05)


def test_the_rate_is_that_of_the_last_half_minute() -> None:
    bar = Bar("x", None, "")
    now = time.monotonic()
    bar._marks.clear()
    bar._marks.extend([(now - 100, 0), (now - 40, 1000), (now - 10, 1010)])
    bar.done = 1010
    bar.advance(10)
    assert bar.rate() == pytest.approx(20 / 40, rel=0.05)


def test_a_terminal_gets_a_bar_and_text_that_is_printed_meanwhile_survives() -> None:
    code = (
        "import time\nfrom umad.reporting import progress as p\np.QUIET = 0.2\n"
        "with p.progress('training', 3, 'steps') as bar:\n"
        "    time.sleep(0.8); bar.advance(2); p.say('a line\\x1b[31m'); time.sleep(0.5)\n"
    )
    text = in_terminal(code)
    assert "━" in text
    assert "2/3 steps" in text
    assert "a line\\x1b[31m" in text
    assert "training: 2 steps in 0:01" in text


def test_a_piped_stdout_stays_apart_from_bars_on_a_terminal() -> None:
    code = (
        "import time, sys\nfrom umad.reporting import progress as p\np.QUIET = 0.2\n"
        "with p.progress('training', 3, 'steps'):\n    time.sleep(0.8); print('{}')\n"
    )
    out = io.BytesIO()
    assert "━" in in_terminal(code, stdout=out)
    assert out.getvalue() == b"{}\n"


def in_terminal(code: str, stdout: io.BytesIO | None = None) -> str:
    """What a terminal of 100 columns receives from a Python process; with `stdout`, only stderr is the terminal."""
    ours, theirs = pty.openpty()
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "30"}
    out = theirs if stdout is None else subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-c", code], stdin=theirs, stdout=out, stderr=theirs, env=env)
    os.close(theirs)
    received = b""
    while select.select([ours], [], [], 20)[0]:
        try:
            piece = os.read(ours, 65536)
        except OSError:  # Linux's end of a terminal
            break
        if not piece:
            break
        received += piece
    if stdout is not None and process.stdout is not None:
        stdout.write(process.stdout.read())
    assert process.wait(timeout=20) == 0, received.decode()
    os.close(ours)
    return received.decode()


@given(st.text())
def test_printable_text_holds_nothing_that_steers_a_terminal(text: str) -> None:
    shown = printable(text)
    assert not any((ord(c) < 32 and c not in "\n\t") or 127 <= ord(c) < 160 or 0xD800 <= ord(c) < 0xE000 for c in shown)
    assert printable(shown) == shown
    shown.encode()


def test_printable_shows_escape_codes_and_keeps_ordinary_text() -> None:
    assert printable("a\x1b[31mb\r\u202ec\udc80\n\td é 漢") == "a\\x1b[31mb\\r\\u202ec\\udc80\n\td é 漢"


def test_say_and_warn_make_control_characters_visible(capsys: pytest.CaptureFixture[str]) -> None:
    say("x\x07")
    warn("y\x1b")
    assert capsys.readouterr() == ("x\\x07\n", "warning: y\\x1b\n")


def test_an_output_that_cannot_hold_a_character_gets_an_escape(monkeypatch: pytest.MonkeyPatch) -> None:
    narrow = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", narrow)
    say("π")
    narrow.seek(0)
    assert narrow.read() == "\\u03c0\n"


def test_tables_without_a_terminal_are_aligned_text(capsys: pytest.CaptureFixture[str]) -> None:
    table("Title", ["agent", "n", "share"], [["漢字", 5, "10.0%"], ["b\x1b", 1234, None]])
    assert capsys.readouterr().out.splitlines() == [
        "Title",
        "agent     n  share",
        "-----  ----  -----",
        "漢字      5  10.0%",
        "b\\x1b  1234",
    ]


def test_a_table_without_rows_has_its_head(capsys: pytest.CaptureFixture[str]) -> None:
    table("Title", ["a", "bc"], [])
    assert capsys.readouterr().out == "Title\na  bc\n-  --\n"


def test_markup_in_cells_is_not_interpreted_on_a_terminal() -> None:
    text = in_terminal("from umad.reporting.progress import table\ntable('T', ['a'], [['[red]x[/red]'], ['[/]']])")
    assert "[red]x[/red]" in text
    assert "[/]" in text


def test_times_read_as_people_write_them() -> None:
    assert [clock(s) for s in (0, 7.4, 65, 3600, 90061)] == ["0:00", "0:07", "1:05", "1:00:00", "1 d 1:01:01"]
