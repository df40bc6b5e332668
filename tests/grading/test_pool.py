"""Workers: limits, launchers, threads, forks, and nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from umad.grading import GradeItem, Grader
from umad.grading.pool import Pool

INTEGRAL = {"op": "verify", "gold": "1/2", "candidate": "\\int_0^1 x\\,dx"}
SLOW = {"op": "verify", "gold": "5", "candidate": "\\sum_{k=1}^{10^9} k!"}

SCRIPT = """
import sys
from umad.grading import Grader, GradeItem
grader = Grader(workers=1)
grade = grader.grade([GradeItem("1/2", "\\\\boxed{\\\\int_0^1 x\\\\,dx}")])[0]
print(grade.equal, grade.status, flush=True)
"""


def alive(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def children(pid: int) -> list[int]:
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                stat = (folder / "stat").read_text()
            except OSError:
                continue
            if int(stat.rpartition(")")[2].split()[1]) == pid:
                found.append(int(folder.name))
    return found


def wait_until(condition, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.05)
    return bool(condition())


@pytest.fixture
def pool():
    pool = Pool(size=2, time_limit=6.0, memory_limit=400)
    yield pool
    pool.close()


def test_replies_keep_the_order_and_slow_jobs_are_killed_and_replaced(pool):
    replies = pool.run([INTEGRAL, SLOW, {**INTEGRAL, "gold": "1/3"}, SLOW, INTEGRAL])
    timeout = {"status": "timeout"}
    assert replies == [{"equal": True}, timeout, {"equal": False}, timeout, {"equal": True}]
    assert pool.started > 2
    assert pool.run([INTEGRAL]) == [{"equal": True}]


def test_a_job_over_the_memory_limit_is_wrong_and_its_worker_is_replaced(pool):
    hog = {"op": "code", "function": "tests_grading_hog:hog", "gold": "", "candidate": ""}
    assert pool.run([hog], "code") == [{"status": "memory"}]
    assert pool.run([{"op": "code", "function": "operator:eq", "gold": "1", "candidate": "1"}], "code") == [
        {"equal": True}
    ]


def test_a_job_that_kills_two_workers_is_wrong_not_ungraded(pool):
    crash = {"op": "code", "function": "tests_grading_hog:crash", "gold": "", "candidate": ""}
    assert pool.run([crash], "code") == [{"status": "memory"}]
    assert pool.started == 2


@pytest.fixture(autouse=True)
def user_module(tmp_path, monkeypatch):
    """A module of the user's, importable here and so in the workers."""
    (tmp_path / "tests_grading_hog.py").write_text(
        "import os, time\n"
        "def hog(gold, answer):\n    return len(bytearray(3_000_000_000)) == 1\n"
        "def crash(gold, answer):\n    os._exit(7)\n"
        "def raises(gold, answer):\n    raise KeyError('no such thing')\n"
        "def hangs(gold, answer):\n    time.sleep(60)\n"
        "def nan(gold, answer):\n    return float('nan')\n"
        "def text(gold, answer):\n    return 'yes'\n"
        "def noisy(gold, answer):\n    print('hello'); return gold in answer\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "equal", "status"),
    [
        ("raises", None, "error"),
        ("nan", None, "error"),
        ("text", None, "error"),
        ("missing", None, "error"),
        ("hangs", False, "timeout"),
        ("noisy", True, "ok"),
    ],
)
def test_a_users_function_that_misbehaves_is_counted_named_once_and_never_a_reward(name, equal, status, caplog):
    with Grader(kind=f"code:tests_grading_hog:{name}", time_limit=1.0, workers=1) as grader:
        items = [GradeItem("5", f"so it is 5{n}") for n in range(3)]
        grades = grader.grade(items)
        assert [(grade.equal, grade.status) for grade in grades] == [(equal, status)] * 3
        assert grader.counts == {status: 3}
    assert len(caplog.records) == (1 if status == "error" else 0)
    assert all(name in record.getMessage() for record in caplog.records)


def test_a_worker_for_mathematics_opens_no_file_and_no_process(tmp_path):
    code = """
import os, socket, subprocess, sys
from umad.grading import worker
worker._load_verify()
worker._seal()
path = sys.argv[1]
attempts = [
    lambda: open(path, "w"),
    lambda: open("/etc/passwd"),
    lambda: socket.socket().connect(("127.0.0.1", 9)),
    lambda: subprocess.Popen(["true"]),
    lambda: os.system("true"),
    lambda: os.remove(path),
]
for attempt in attempts:
    try:
        attempt()
    except PermissionError as error:
        print("refused", error)
    else:
        print("ALLOWED")
"""
    run = subprocess.run([sys.executable, "-c", code, str(tmp_path / "x")], capture_output=True, text=True, timeout=60)
    assert run.stdout.count("refused") == 6, run
    assert "ALLOWED" not in run.stdout


@pytest.mark.parametrize("launch", ["stdin", "-c", "file", "module"])
def test_workers_start_under_any_main(launch, tmp_path):
    (tmp_path / "script_of_mine.py").write_text(SCRIPT)
    command = {
        "stdin": [sys.executable, "-"],
        "-c": [sys.executable, "-c", SCRIPT],
        "file": [sys.executable, str(tmp_path / "script_of_mine.py")],
        "module": [sys.executable, "-m", "script_of_mine"],
    }[launch]
    text = SCRIPT if launch == "stdin" else None
    run = subprocess.run(command, input=text, capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert run.stdout == "True ok\n", run.stderr


def parent_with_worker(body: str) -> tuple[subprocess.Popen[str], list[int]]:
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT + body], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "True ok\n"
    workers = children(process.pid)
    assert len(workers) == 1
    return process, workers


@pytest.mark.skipif(not Path("/proc").exists(), reason="reads /proc")
@pytest.mark.parametrize("end", ["exit", "sigint", "sigkill", "sigterm"])
def test_no_worker_outlives_its_parent(end):
    body = "" if end == "exit" else "import time; time.sleep(60)\n"
    process, workers = (
        parent_with_worker("sys.stdin.readline()\n" if end == "exit" else body)
        if end != "exit"
        else (parent_with_worker("import time; time.sleep(1)\n"))
    )
    if end != "exit":
        process.send_signal(getattr(signal, end.upper()))
    process.wait(30)
    assert wait_until(lambda: not any(alive(worker) for worker in workers), 10)
    process.communicate()


@pytest.mark.skipif(not Path("/proc").exists(), reason="reads /proc")
def test_ctrl_c_in_the_middle_of_a_bomb_gets_through_at_once_and_leaves_no_worker():
    body = (
        "import time; print('go', flush=True); start = time.monotonic()\n"
        "grader._pool.time_limit = 60.0\n"
        "try: grader.grade([GradeItem('5', '\\\\boxed{\\\\sum_{k=1}^{10^9} k!}')])\n"
        "except KeyboardInterrupt: print('interrupted', time.monotonic() - start < 30, flush=True)\n"
    )
    process, workers = parent_with_worker(body)
    assert process.stdout is not None
    assert process.stdout.readline() == "go\n"
    time.sleep(1.0)
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "interrupted True\n"
    process.wait(30)
    assert wait_until(lambda: not any(alive(worker) for worker in workers), 10)
    process.communicate()


@pytest.mark.slow
def test_a_busy_worker_dies_by_the_kernels_alarm_when_its_parent_is_gone():
    body = "grader.grade([GradeItem('5', '\\\\boxed{\\\\sum_{k=1}^{10^9} k!}')])\n"
    script = SCRIPT.replace("Grader(workers=1)", "Grader(workers=1, time_limit=2.0)")
    process = subprocess.Popen([sys.executable, "-c", script + body], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "True ok\n"
    workers = children(process.pid)
    time.sleep(0.5)
    process.kill()
    process.wait()
    assert wait_until(lambda: not any(alive(worker) for worker in workers), 12)
    process.communicate()


def test_a_forked_child_starts_its_own_workers():
    with Grader(workers=1) as grader:
        item = GradeItem("1/2", "\\boxed{\\int_0^1 x\\,dx}")
        assert grader.grade([item])[0].equal
        other = GradeItem("1/3", "\\boxed{\\int_0^1 x^2\\,dx}")
        child = os.fork()
        if child == 0:
            code = 1
            try:
                code = 0 if grader.grade([other])[0].equal else 2
                grader.close()
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert grader.grade([GradeItem("1/4", "\\boxed{\\int_0^1 x^3\\,dx}")])[0].equal
        assert grader.workers_started == 1


def test_many_threads_share_a_few_workers():
    with Grader(workers=2) as grader:
        results: list[bool | None] = []

        def work(n: int) -> None:
            items = [GradeItem(f"{n}", f"\\boxed{{\\int_0^{{{n}}} 1\\,dx + {k} - {k}}}") for k in range(5)]
            results.extend(grade.equal for grade in grader.grade(items))

        threads = [threading.Thread(target=work, args=(n,)) for n in range(1, 9)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results == [True] * 40
        assert grader.workers_started <= 2


def test_a_closed_grader_still_grades_what_needs_no_worker_and_leaves_the_rest_ungraded():
    grader = Grader()
    grader.close()
    grades = grader.grade([GradeItem("1/2", "0.5"), GradeItem("1/2", "\\boxed{\\int_0^1 x\\,dx}")])
    assert [(grade.equal, grade.status) for grade in grades] == [(True, "ok"), (None, "error")]


def test_limits_must_be_positive():
    for settings in ({"workers": 0}, {"time_limit": 0}, {"memory_limit": 0}):
        with pytest.raises(ValueError, match="positive"):
            Grader(**settings)


def test_importing_the_package_loads_nothing_heavy():
    code = "import sys, umad.grading; print([m for m in ('sympy','math_verify','mpmath','torch','numpy') if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert run.stdout.strip() == "[]"
