"""The live display: never too often, always up to date at the end, from any thread, and never in the way."""

from __future__ import annotations

import io
import itertools
import logging
import math
import os
import pty
import subprocess
import sys
import textwrap
import threading
import time

import pytest
from view_oracle import ATTACKS, check

from nexrl_sdk.types import ConfigError, Interrupted
from nexrl_sdk.view.live import Course, LineDisplay, Live, Progress, TerminalDisplay, brief, live_html, where


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class Recorder:
    def __init__(self, interval=0.25):
        self.interval, self.seen = interval, []

    def show(self, progress, title, state, cause):
        self.seen.append((progress.step, state, cause))


def test_updates_come_at_most_four_times_a_second_and_the_last_always():
    recorder = Recorder()
    begin = time.monotonic()
    with Live(10_000, display=recorder) as live:
        step = 0
        while time.monotonic() < begin + 0.9:
            step += 1
            live.update(step, {"reward/mean": 0.5})
    took = time.monotonic() - begin  # more where the machine is busy
    assert len(recorder.seen) <= 3 + took / 0.25 and recorder.seen[-1] == (step, "done", None)  # the first, the last, and one on its way


def test_a_late_update_appears_although_nothing_follows():
    recorder = Recorder(interval=0.05)
    with Live(10, display=recorder) as live:
        live.update(1)
        live.update(2)
        for _ in range(200):
            if recorder.seen[-1][0] == 2:
                break
            time.sleep(0.01)
        assert recorder.seen[-1] == (2, "running", None)


def test_many_threads():
    recorder, before = Recorder(interval=0.001), threading.active_count()
    with Live(400, display=recorder) as live:
        threads = [threading.Thread(target=lambda k=k: [live.update(100 * k + i, {"loss": i}) for i in range(100)]) for k in range(4)]
        [t.start() for t in threads]
        [t.join() for t in threads]
        live.update(400, {"loss": 0})
    assert recorder.seen[-1][:2] == (400, "done")
    assert threading.active_count() < before + 20


@pytest.mark.parametrize(("error", "state"), [(KeyboardInterrupt(), "stopped"), (Interrupted("x"), "stopped"), (ValueError("<b>"), "failed")])
def test_how_it_ended_is_shown_and_raised_again(error, state):
    recorder = Recorder()
    with pytest.raises(type(error)), Live(10, display=recorder) as live:
        live.update(3)
        raise error
    assert recorder.seen[-1] == (3, state, "ValueError: <b>" if state == "failed" else None)
    live.update(4)
    live.close()
    assert recorder.seen[-1][0] == 3  # what comes after the end is not shown


def test_a_broken_display_does_not_stop_the_run(caplog):
    class Broken:
        interval = 0.0

        def show(self, *_):
            raise BrokenPipeError("gone")

    with caplog.at_level(logging.WARNING), Live(3, display=Broken()) as live:
        for step in (1, 2, 3):
            live.update(step, {"loss": 1.0})
    assert caplog.text.count("given up") == 1 and live.progress.step == 3


def test_a_closed_stream_does_not_stop_the_run():
    out = io.StringIO()
    with Live(3, display=LineDisplay(out)) as live:
        out.close()
        live.update(1)


def test_speed_and_time_left_follow_the_last_steps():
    clock = Clock()
    p = Progress(1000, start=100, clock=clock)
    for step in range(101, 151):
        clock.now += 10
        p.update(step, {})
    assert math.isclose(p.speed, 0.1) and math.isclose(p.left, 8500)
    for step in range(151, 200):
        clock.now += 0.5
        p.update(step, {})
    assert math.isclose(p.speed, 2.0) and math.isclose(p.left, 801 / 2)
    p.update(120, {})  # gone back
    assert p.speed is None and p.left is None and p.step == 120
    clock.now += 1
    p.update(121, {})
    p.update(121, {"val/reward/mean": 0.5})  # a validation after the same step
    assert math.isclose(p.speed, 1.0) and p.metrics["val/reward/mean"] == 0.5
    assert Progress(None).left is None


def test_a_course_stays_small_and_goes_back():
    course = Course()
    for step in range(50_000):
        course.add(step, float(step))
    steps = [s for s, _ in course.values]
    assert len(steps) <= 512 and steps[-1] == 49_999 and steps == sorted(set(steps))
    gaps = [b - a for a, b in itertools.pairwise(steps[:-1])]
    assert max(gaps) <= 4 * min(gaps)
    course.add(100, 7.0)
    assert course.values[-1] == (100, 7.0) and all(s < 100 for s, _ in course.values[:-1])


def test_lines_are_few_and_plain():
    out, clock = io.StringIO(), Clock()
    with Live(100, title="run\x1b[31m", display=LineDisplay(out), clock=clock) as live:
        for step in range(1, 101):
            clock.now += 0.5
            live.update(step, {"reward/mean": step / 100, "loss": math.nan})
    lines = out.getvalue().splitlines()
    assert 8 <= len(lines) <= 14
    assert lines[-1] == "run␛[31m  step 100/100  reward 1  loss NaN  2.0 steps/s  50 s  done"
    assert "left" in lines[5]


def test_a_terminal_gets_a_bar():
    lead, follow = pty.openpty()
    code = "import sys\nfrom nexrl_sdk.view.live import *\nassert where() == 'terminal'\nwith Live(3, title='[bold]x') as l:\n    [l.update(i, {'reward/mean': 0.25}) for i in (1, 2, 3)]\n"
    env = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "120"}
    done = subprocess.Popen([sys.executable, "-c", code], stderr=follow, stdout=subprocess.PIPE, env=env)
    os.close(follow)
    seen = b""
    while True:
        try:
            part = os.read(lead, 4096)
        except OSError:
            break
        if not part:
            break
        seen += part
    os.close(lead)
    assert done.wait(60) == 0
    text = seen.decode()
    assert "[bold]x" in text and "3/3" in text and "reward 0.25" in text and "done" in text
    assert done.stdout.read() == b""  # standard output belongs to results
    done.stdout.close()


def test_a_terminal_without_an_end_in_sight():
    out = io.StringIO()
    with Live(None, display=TerminalDisplay(out)) as live:
        live.update(5, {"reward/mean": 0.5})
    assert "reward 0.5" in out.getvalue()


def test_where_without_a_terminal(monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert where() == "lines"
    monkeypatch.setattr(sys, "stderr", None)
    assert where() == "lines"
    with pytest.raises(ConfigError, match="did you mean 'terminal'"):
        Live(3, display="terminals")


@pytest.mark.parametrize("attack", ATTACKS, ids=[str(i) for i in range(len(ATTACKS))])
def test_attacks_are_inert(attack):
    p = Progress(3)
    p.update(1, {attack or "k": 1.0, "reward/mean": attack, "loss": math.inf, "grad_norm": None})
    p.update(2, {"reward/mean": 10**400})
    check(str(live_html(p, attack, "failed", attack)), limit=40_000)
    assert "\n" not in brief({"reward/mean": attack}) or "\n" in attack


def test_in_a_real_kernel():
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    cells = [
        """
        from nexrl_sdk.view.live import Live, where
        import threading, time
        assert where() == "notebook"
        with Live(40, title="here") as live:
            for step in range(1, 41): live.update(step, {"reward/mean": step / 40})
        """,
        """
        back = Live(40, title="behind").__enter__()
        thread = threading.Thread(target=lambda: [back.update(s, {"loss": s}) for s in range(1, 31)])
        thread.start(); thread.join()
        """,
        "time.sleep(0.6)",
        "back.close()",
        "live",
    ]
    nb = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(textwrap.dedent(c).strip()) for c in cells])
    nbclient.NotebookClient(nb, timeout=120, kernel_name="python3").execute()
    first, second = (nb.cells[i].outputs[0]["data"]["text/html"] for i in (0, 1))
    assert len(nb.cells[0].outputs) == 1 and "step 40 of 40" in first and ">done<" in first
    assert "step 30 of 40" in second and ">done<" in second
    assert all(not nb.cells[i].outputs for i in (2, 3))
    assert ">done<" in nb.cells[4].outputs[0]["data"]["text/html"]
    check(first)


def test_what_is_zero_but_for_rounding_reads_zero():
    assert brief({"policy/kl": -4.5e-8, "grad_norm": 2e-6}) == "KL 0  grad 2e-6"  # KL alone may be what is learned from
    assert brief({"distill/reverse_kl": 1.25, "reward/mean": 0.5}) == "reward 0.5  reverse KL 1.25"


def test_what_must_be_zero_is_left_out_and_agents_numbers_are_not():
    on_policy = {"reward/mean": 0.25, "loss": 1.8e-8, "policy/kl": 3.7e-8, "policy/entropy": 0.26, "grad_norm": 0.649, "eval/turns": 2.0, "eval/tool_calls": 1.5}
    assert brief(on_policy, 6) == "reward 0.25  turns 2  calls 1.5  entropy 0.26  grad 0.649"
    assert "loss 0.5  KL 0" in brief({**on_policy, "loss": 0.5}, 9) and "loss 0  KL 0.2" in brief({**on_policy, "policy/kl": 0.2}, 9)
    assert brief({"loss": 0.0, "grad_norm": 1.0}) == "loss 0  grad 1"  # without a KL it is no on-policy step: what is imitated is known by heart
    p = Progress(3)
    p.update(1, on_policy)
    page = check(str(live_html(p)))
    assert "tool calls" in page.text and "turns" in page.text and "entropy" in page.text and "loss" not in page.text and "KL" not in page.text
