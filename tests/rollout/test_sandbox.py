"""The sandbox at work: results, limits as settings, tests of every form as a reward, faults of rows kept apart from faults of answers."""

from __future__ import annotations

import ctypes
import json
import logging
import os
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from nexrl_sdk.rollout import inside
from nexrl_sdk.rollout import sandbox as room
from nexrl_sdk.rollout.evaluator import BaseEvaluationTarget, EvaluationRunResult, as_evaluator, score
from nexrl_sdk.rollout.sandbox import CodeEvaluator, Sandbox, extract_code, how_confined, same_output, seccomp_filter
from nexrl_sdk.types import ConfigError, EvaluatorError

MODE, REASON = how_confined()
needs_sandbox = pytest.mark.skipif(MODE == "none", reason=f"no sandbox on this machine: {REASON}")
pytestmark = pytest.mark.timeout(120)
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def sandbox() -> Sandbox:
    if MODE == "none":
        pytest.skip(f"no sandbox on this machine: {REASON}")
    return Sandbox(seconds=30.0)


def judged(sandbox: Sandbox, code: str, row: dict[str, Any] | str, **settings_: Any) -> EvaluationRunResult:
    """A program's result under a row's tests."""
    full = {"tests": row} if isinstance(row, str) else row
    return CodeEvaluator(**{"reward": "fraction", "sandbox": sandbox, **settings_}).evaluate(full, BaseEvaluationTarget(code))


# --- running programs


def test_what_a_program_gets_and_gives(sandbox: Sandbox) -> None:
    result = sandbox.run("import sys\nprint(input(), sys.argv[1:], __name__, __file__)\nprint('é', file=sys.stderr)", stdin="été\n", args=["a", "b c"])
    assert (result.status, result.exit_code, result.cause) == ("ok", 0, None)
    assert result.stdout == "été ['a', 'b c'] __main__ /work/main.py\n" and result.stderr == "é\n" and result.ok


def test_several_files(sandbox: Sandbox) -> None:
    files = {"main.py": "import lib.part, json\nprint(lib.part.X, json.load(open('data.json')))", "lib/part.py": "X = 7", "data.json": b"[1]"}
    assert sandbox.run(files).stdout == "7 [1]\n"
    assert sandbox.run({"other.py": "print(1)"}).stdout == "1\n"
    with pytest.raises(ConfigError, match=r"one must be main\.py"):
        sandbox.run({"a.py": "", "b.py": ""})


@pytest.mark.parametrize(("code", "status", "exit_code"), [("raise SystemExit(3)", "failed", 3), ("1 / 0", "failed", 1), ("x =", "failed", 1), ("import os; os.kill(os.getpid(), 15)", "killed", 143), ("", "ok", 0)])
def test_statuses(sandbox: Sandbox, code: str, status: str, exit_code: int) -> None:
    result = sandbox.run(code)
    assert (result.status, result.exit_code) == (status, exit_code)


def test_a_traceback_shows_the_program_alone(sandbox: Sandbox) -> None:
    shown = sandbox.run("def f():\n    return 1 / 0\nf()").stderr
    assert shown.count("File") == 2 and '"/work/main.py", line 2, in f' in shown and "<sandbox>" not in shown


def test_programs_can_use_the_library_and_processes(sandbox: Sandbox) -> None:
    code = "import sqlite3, ssl, multiprocessing as m, tempfile, subprocess, sys\n"
    code += "print(m.get_context('fork').Pool(2).map(abs, [-1, -2]), tempfile.mkdtemp()[:6], subprocess.run([sys.executable, '-c', 'print(5)'], capture_output=True).stdout)"
    assert sandbox.run(code).stdout == "[1, 2] /work/ b'5\\n'\n"


def test_memory_is_shared_by_files_and_by_the_library(sandbox: Sandbox) -> None:
    code = """
    import mmap, multiprocessing as m, os
    from multiprocessing import shared_memory
    fork = m.get_context("fork")
    def work(number, array, block):
        with number.get_lock(): number.value += 1
        array[1], block.buf[0] = 7, 8
    if __name__ == "__main__":
        number, array, block = fork.Value("i", 1), fork.Array("d", 200_000), shared_memory.SharedMemory(create=True, size=1000)
        other = fork.Process(target=work, args=(number, array, block)); other.start(); other.join()
        print(number.value, array[1], block.buf[0], fork.Queue().empty())
        block.unlink()
        with open("x", "wb+") as f:
            f.truncate(5000)
            with mmap.mmap(f.fileno(), 0) as shared:
                if os.fork() == 0: shared[0] = 9; os._exit(0)
                os.wait(); print(shared[0])
        print(len(mmap.mmap(-1, 5000, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)), open("/dev/zero", "rb").read(3))
    """
    assert sandbox.run(textwrap.dedent(code)).stdout == "2 7.0 8 True\n9\n5000 b'\\x00\\x00\\x00'\n"


def test_named_packages_can_be_imported_and_not_written() -> None:
    if MODE == "none":
        pytest.skip(REASON)
    with_numpy = Sandbox(seconds=60.0, packages=["numpy"])
    result = with_numpy.run("import numpy as np\nprint(np.linalg.norm([3.0, 4.0]))\ntry: open(np.__path__[0] + '/x', 'w')\nexcept OSError: print('read-only')")
    assert result.stdout == "5.0\nread-only\n", result
    answer = "import numpy as np\ndef scale(x, k): return np.asarray(x) * k\ndef mean(x): return np.mean(x)"
    tests = "import numpy as np\nassert np.allclose(scale(np.arange(3.0), 2), [0, 2, 4])\nassert scale([1], 2).shape == (1,)\nassert mean([1, 3]) == 2\nassert isinstance(mean([1]), float)"
    assert judged(with_numpy, answer, tests).reward == 1.0


def test_the_same_program_prints_the_same(sandbox: Sandbox) -> None:
    code = "print(list({'a', 'b', 'c', 'd'}), hash('x'))"
    assert sandbox.run(code).stdout == sandbox.run(code).stdout


def test_output_is_kept_to_the_limit() -> None:
    if MODE == "none":
        pytest.skip(REASON)
    small = Sandbox(output=10, seconds=30.0)
    exact, more = small.run("print('x' * 9)"), small.run("print('x' * 10)")
    assert (exact.status, exact.stdout_truncated) == ("ok", False)
    assert (more.status, more.cause, more.stdout_truncated, more.stderr_truncated, more.stdout) == ("killed", "output", True, False, "x" * 10)


def test_large_input_is_read(sandbox: Sandbox) -> None:
    assert sandbox.run("import sys\nprint(len(sys.stdin.read()))", stdin="x" * 5_000_000).stdout == "5000000\n"


def test_many_threads_at_once(sandbox: Sandbox) -> None:
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda i: sandbox.run(f"print({i})").stdout, range(24)))
    assert results == [f"{i}\n" for i in range(24)]
    assert not [t for t in threading.enumerate() if t.name == "sandbox"]


def test_another_interpreter(tmp_path: Path) -> None:
    if MODE == "none" or not Path("/usr/bin/python3").exists():
        pytest.skip("needs a sandbox and /usr/bin/python3")
    version = subprocess.run(["/usr/bin/python3", "-c", "import sys; print(sys.version_info >= (3, 11))"], capture_output=True, text=True, check=False).stdout.strip()
    if version != "True":
        pytest.skip("/usr/bin/python3 is older than 3.11")
    other = Sandbox(python="/usr/bin/python3", seconds=30.0)
    assert other.run("import json, sys; print(sys.prefix)").stdout == "/py\n"
    assert judged(other, "def f(x): return x", "assert f(1) == 1").reward == 1.0


def test_each_call_has_a_user_of_its_own() -> None:
    given: list[int] = []
    together = threading.Barrier(8)

    def take() -> None:
        together.wait()
        given.extend([room._user() for _ in range(5000)])

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as pool:
            for done in [pool.submit(take) for _ in range(8)]:
                done.result()
    finally:
        sys.setswitchinterval(before)
    assert len(set(given)) == 40_000 and all(user in room._spare_users() for user in given)
    forked = subprocess.run([sys.executable, "-c", "import os\nfrom nexrl_sdk.rollout import sandbox as s\nx = s._user()\nif os.fork() == 0: print(s._user() - x)\nelse: os.wait()"], capture_output=True, text=True, check=True)
    assert abs(int(forked.stdout)) > 1  # a process that was forked does not go on where its parent is


def test_no_more_run_at_once_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    if MODE == "none":
        pytest.skip(REASON)
    sandbox, seen, start = Sandbox(seconds=30.0), list[int](), room._Jobs.start
    monkeypatch.setattr(room, "_most", lambda: 2)
    monkeypatch.setattr(room._Jobs, "start", lambda *a, **k: (seen.append(room._PLACES.taken), start(*a, **k))[1])
    with ThreadPoolExecutor(12) as pool:
        rewards = list(pool.map(lambda i: judged(sandbox, "def f(x): return x", f"assert f({i}) == {i}").reward, range(12)))
    assert rewards == [1.0] * 12 and max(seen) == 2 and room._PLACES.taken == 0
    with pytest.raises(ConfigError):
        sandbox.run({})
    with pytest.raises(TypeError):
        sandbox.run("pass", args=[object()], stdin=object())  # type: ignore[arg-type,list-item]
    assert room._PLACES.taken == 0


def test_the_wait_for_a_place_is_no_time_of_an_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    def waits(row: dict[str, Any], answer: str) -> float:
        with room._PLACES:
            return 1.0

    monkeypatch.setattr(room, "_most", lambda: 1)
    with ThreadPoolExecutor(1) as pool:
        with room._PLACES:
            found = pool.submit(score, as_evaluator(waits), {}, BaseEvaluationTarget("x"), timeout=3.0)
            time.sleep(3.5)
            assert not found.done()
        assert found.result().reward == 1.0


def test_a_forked_process_has_room_of_its_own() -> None:
    with room._PLACES:
        if (child := os.fork()) == 0:
            os._exit(room._PLACES.taken)
        assert os.waitpid(child, 0)[1] == 0 and room._PLACES.taken == 1


def test_room_is_by_processors_and_file_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(96)))
    most = {}
    for allowed in (64, 256, 1024, 1 << 20, resource.RLIM_INFINITY):
        monkeypatch.setattr(resource, "getrlimit", lambda kind, allowed=allowed: (allowed, allowed))
        monkeypatch.setattr(room, "_quota", lambda: float("inf"))
        most[allowed] = room._most()
        monkeypatch.setattr(room, "_quota", lambda: 3.5)
        assert room._most() == min(8, most[allowed])
    assert most == {64: 1, 256: 4, 1024: 16, 1 << 20: 192, resource.RLIM_INFINITY: 192}


def test_many_threads_with_few_file_descriptors() -> None:
    if MODE == "none":
        pytest.skip(REASON)
    code = "import os, resource\nfrom concurrent.futures import ThreadPoolExecutor\nfrom nexrl_sdk.rollout.sandbox import CodeEvaluator, Sandbox\nfrom nexrl_sdk.rollout.evaluator import score\n"
    code += "os.sched_getaffinity = lambda pid: set(range(64))\nevaluator = CodeEvaluator(sandbox=Sandbox(seconds=60.0))\nresource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))\n"
    code += "with ThreadPoolExecutor(40) as pool: print({s.error or s.reward for s in pool.map(lambda i: score(evaluator, {'tests': f'assert f({i}) == {i}'}, 'def f(x): return x'), range(40))})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "{1.0}\n"


def test_who_waits_for_a_place_can_be_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    if MODE == "none":
        pytest.skip(REASON)
    sandbox, asked = Sandbox(seconds=30.0), threading.Event()
    monkeypatch.setattr(room, "_most", lambda: asked.set() or 0)

    def interrupt() -> None:
        asked.wait()
        os.kill(os.getpid(), 2)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        sandbox.run("pass")
    monkeypatch.setattr(room, "_most", lambda: 1)
    assert sandbox.run("pass").ok and room._PLACES.taken == 0


BUSY = "import time\ndef f(x):\n    began = time.process_time()\n    while time.process_time() - began < 0.3: pass\n    return x"


@pytest.fixture
def crowd() -> Iterator[None]:
    """One processor for this thread and what it starts, and three others that never rest on it."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    others = [subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"], start_new_session=True) for _ in range(3)]
    yield
    for other in others:
        other.kill()
        other.wait()
    os.sched_setaffinity(0, before)


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="this kernel does not count how long a process waits for a processor")
def test_a_crowd_makes_no_program_late(crowd: None, monkeypatch: pytest.MonkeyPatch) -> None:
    if MODE == "none":
        pytest.skip(REASON)
    short = Sandbox(seconds=0.5)
    assert judged(short, BUSY, "assert f(7) == 7").reward == 1.0
    for code in ("import time; time.sleep(60)", "while True: pass", "import os, time\nfor _ in range(3): os.fork()\nwhile True: pass"):
        result = short.run(code)
        assert (result.status, result.cause) == ("timeout", "time"), result
    monkeypatch.setattr(room, "_PATIENCE", 0.01 - short.processes)
    assert score(CodeEvaluator(sandbox=short), {"tests": "assert f(7) == 7"}, BUSY).status == "error"


def test_a_machine_that_stands_still_makes_no_program_late(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    look, stops = room._Jobs._look, list[int]()

    def stand_still(jobs: room._Jobs) -> None:
        if not stops and jobs.jobs[0].first is not None:
            stops.extend(room._tree(jobs.jobs[0].first[0]))
            for pid in stops:
                os.kill(pid, signal.SIGSTOP)
            time.sleep(2.0)
            for pid in stops:
                os.kill(pid, signal.SIGCONT)
        look(jobs)

    monkeypatch.setattr(room._Jobs, "_look", stand_still)
    assert Sandbox(seconds=1.5).run("import time\nwhile time.process_time() < 0.5: pass").ok and stops
    monkeypatch.setattr(room._Jobs, "_look", look)
    assert Sandbox(seconds=0.5).run("import time; time.sleep(60)").status == "timeout"


# --- settings


@pytest.mark.parametrize(("settings_", "words"), [({"seconds": 0}, "positive"), ({"memory": -1}, "memory=-1"), ({"seconds": float("inf")}, "finite"), ({"packages": "numpy"}, "list of names"), ({"packages": ["nmpy"]}, "not installed"), ({"python": "no-python"}, "no interpreter")])
def test_wrong_settings_are_refused(settings_: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Sandbox(**settings_)


def test_without_bubblewrap_it_says_how_to_install_it() -> None:
    with pytest.raises(ConfigError, match=r"no 'no-bwrap' here.*apt-get install bubblewrap.*unsafe_without_sandbox=True"):
        Sandbox(bwrap="no-bwrap")


def test_a_bubblewrap_that_fails_is_told_from_a_program_that_fails(tmp_path: Path) -> None:
    broken = tmp_path / "bwrap"
    broken.write_text("#!/bin/sh\necho 'setting up uid map: Permission denied' >&2\nexit 1\n")
    broken.chmod(0o755)
    with pytest.raises(ConfigError, match="uid map: Permission denied"):
        Sandbox(bwrap=str(broken))


def test_a_sandbox_that_stops_working_is_no_verdict(sandbox: Sandbox, tmp_path: Path) -> None:
    lost = Sandbox(seconds=30.0)
    lost.bwrap = "/bin/false"
    evaluator = CodeEvaluator(sandbox=lost)
    assert score(evaluator, {"tests": "assert f() == 1"}, "def f(): return 2").status == "error"
    assert score(evaluator, {"cases": [["", "1"]]}, "print(2)").status == "error"


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


class TestUnsafe:
    """Without bubblewrap, where it was asked for."""

    @pytest.fixture
    def unsafe(self, caplog: pytest.LogCaptureFixture) -> Sandbox:
        caplog.set_level(logging.WARNING)
        made = Sandbox(bwrap="no-bwrap", unsafe_without_sandbox=True, seconds=30.0)
        assert [r.levelname for r in caplog.records] == ["WARNING"] and "UNSAFE" in caplog.text
        return made

    def test_it_runs_with_limits_and_a_clean_environment(self, unsafe: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("API_KEY", "secret")
        result = unsafe.run("import os\nprint('API_KEY' in os.environ, os.getcwd() == os.environ['HOME'])\nopen('x', 'w')")
        assert result.stdout == "False True\n" and "UNSAFE" in repr(unsafe)
        assert "MemoryError" in unsafe.run("x = bytearray(2 << 30)").stderr
        assert judged(unsafe, "def f(x): return x + 1", "assert f(1) == 2").reward == 1.0

    def test_time_ends_it_and_its_children(self) -> None:
        short = Sandbox(bwrap="no-bwrap", unsafe_without_sandbox=True, seconds=1.0)
        result = short.run("import os, time\nprint(os.fork(), flush=True)\ntime.sleep(60)")
        child = max(int(n) for n in result.stdout.split())
        assert result.status == "timeout"
        while _lives(child):  # it was killed, and ends when the machine comes to it
            time.sleep(0.01)

    def test_one_that_ends_while_it_is_ended(self, unsafe: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
        within = room._Jobs._end_within

        def ended(jobs: room._Jobs, job: room._Job) -> None:
            within(jobs, job)
            os.waitid(os.P_PID, job.process.pid, os.WEXITED | os.WNOWAIT)

        monkeypatch.setattr(room._Jobs, "_end_within", ended)
        monkeypatch.setattr(unsafe, "seconds", 0.3)
        assert unsafe.run("import time; time.sleep(60)").status == "timeout"


def test_as_somebody_who_is_not_root(tmp_path: Path) -> None:
    """Root's user ids cannot be had then, and a user namespace does their work."""
    if MODE == "none" or os.geteuid() != 0 or not Path("/usr/bin/python3").exists():
        pytest.skip("needs a sandbox, root to become somebody else, and /usr/bin/python3")
    code = "from nexrl_sdk.rollout.sandbox import Sandbox, how_confined\nprint(how_confined()[0])\nprint(Sandbox(seconds=30.0).run('import socket\\nsocket.create_connection((\"192.0.2.1\", 1))').stderr.split()[-1])"
    paths = os.pathsep.join([str(ROOT), *(p for p in sys.path if p.endswith("site-packages"))])
    done = subprocess.run(["/usr/bin/python3", "-B", "-c", code], user=65534, group=65534, extra_groups=[], cwd="/", env={"PYTHONPATH": paths, "PATH": os.environ["PATH"]}, capture_output=True, text=True, check=False)  # fmt: skip
    if "Error" in done.stderr and "nexrl_sdk/rollout/sandbox" not in done.stderr:
        pytest.skip(f"that user cannot import the package here: {done.stderr.strip().splitlines()[-1]}")
    if done.stdout.split()[:1] == ["none"]:
        pytest.skip("user namespaces are refused here")
    assert done.stdout.splitlines() == ["namespace", "protocol"], done


def test_the_filter_has_the_kernels_numbers() -> None:
    """libseccomp knows them on its own."""
    try:
        library = ctypes.CDLL("libseccomp.so.2")
    except OSError:
        pytest.skip("libseccomp is not installed")
    resolve = library.seccomp_syscall_resolve_name_arch
    resolve.argtypes = [ctypes.c_uint32, ctypes.c_char_p]
    for i, (machine, (audit, clone, clone3, socket, mmap, setsockopt)) in enumerate(room._MACHINES.items()):
        known = {**{name: numbers[i] for name, numbers in room._DENIED.items()}, "clone": clone, "clone3": clone3, "socket": socket, "mmap": mmap, "setsockopt": setsockopt}
        assert {n: max(-1, resolve(audit, n.encode())) for n in known} == known, machine


def test_the_filter_is_refused_where_it_is_not_written() -> None:
    with pytest.raises(ConfigError, match="not for riscv64"):
        seccomp_filter("riscv64")


# --- values


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary() | st.complex_numbers(allow_nan=False) | st.fractions() | st.datetimes() | st.timedeltas() | st.decimals(allow_nan=False),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text() | st.integers(), inner),
    max_leaves=20,
)


def _refuse(*what: Any) -> Any:
    raise TypeError(f"not plain: {what[-1]!r}")


@given(PLAIN)
@settings(max_examples=80, deadline=None)
def test_values_come_back_as_they_were(value: Any) -> None:
    codec = inside.Codec(_refuse, _refuse)
    again = codec.decode(json.loads(json.dumps(codec.encode(value))))
    assert again == value and type(again) is type(value)


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), lambda i: st.lists(i) | st.dictionaries(st.sampled_from([*inside.PLAIN, "ref", "x"]), i)))
@settings(max_examples=80, deadline=None)
def test_whatever_a_program_sends_is_plain_or_refused(message: Any) -> None:
    codec = inside.Codec(_refuse, _refuse)
    try:
        value = codec.decode(message)
    except Exception:  # the test fails, and that is all
        return
    assert type(value).__module__ in ("builtins", "decimal", "fractions", "datetime", "collections", "numpy")


# --- tests of every form


MBPP = {"tests": ["assert first([3, 1, 2]) == 1", "assert first([5]) == 5", "assert first([2, 2]) == 2"]}
HUMANEVAL = {
    "prompt": "from typing import List\n\ndef below_zero(operations: List[int]) -> bool:\n    ''' Is the balance ever below zero? '''\n",
    "tests": "\n\nMETADATA = {'author': 'x'}\n\ndef check(candidate):\n    assert candidate([]) == False\n    assert candidate([1, 2, -4, 5]) == True\n",
    "entry_point": "below_zero",
}
UNITTEST = """
import unittest
from solution import first
class Cases(unittest.TestCase):
    def setUp(self): self.given = [3, 1]
    def test_small(self): self.assertEqual(first(self.given), 1)
    def test_error(self):
        with self.assertRaises(ValueError): first([])
if __name__ == '__main__':
    unittest.main()
"""
FUNCTIONS = "from solution import first\n\ndef test_one():\n    assert first([1]) == 1\n\nclass TestMore:\n    def test_two(self):\n        assert first([2, 3]) == 2\n"


@pytest.mark.parametrize("tests", [MBPP["tests"], "\n".join(MBPP["tests"]), UNITTEST, FUNCTIONS, "def check(f):\n    for x in ([1], [2, 1]):\n        assert f(x) == min(x)\ncheck(first)\n"], ids=["list", "text", "unittest", "functions", "check"])  # fmt: skip
def test_forms_of_tests(sandbox: Sandbox, tests: Any) -> None:
    assert judged(sandbox, "```python\ndef first(x):\n    return min(x)\n```", {"tests": tests}).reward == 1.0
    assert judged(sandbox, "def first(x):\n    return min(x or [0]) + 1", {"tests": tests}).reward == 0.0


def test_a_body_that_goes_on_from_the_prompt(sandbox: Sandbox) -> None:
    body = "    total = 0\n    for o in operations:\n        total += o\n        if total < 0:\n            return True\n    return False\n"
    assert judged(sandbox, body, HUMANEVAL, before="prompt").reward == 1.0
    assert judged(sandbox, "    return False\n", HUMANEVAL, before="prompt").reward == 0.0


def test_a_share_or_all(sandbox: Sandbox) -> None:
    code = "def first(x): return x[0]"
    some, whole = judged(sandbox, code, MBPP), judged(sandbox, code, MBPP, reward="all")
    assert some.reward == pytest.approx(2 / 3) and whole.reward == 0.0
    assert whole.metrics == {"tests_passed": pytest.approx(2 / 3), "tests": 3.0, "timeout": 0.0, "fenced": 0.0}
    assert some.extra_info["failures"] == ["assert first([3, 1, 2]) == 1: AssertionError"]


def test_time_that_runs_out_keeps_what_passed() -> None:
    if MODE == "none":
        pytest.skip(REASON)
    result = judged(Sandbox(seconds=4.0), "def f(x):\n    while x: pass\n    return 0", "assert f(0) == 0\nassert f(1) == 0\nassert f(0) == 0\n")
    assert result.reward == pytest.approx(1 / 3) and result.metrics["timeout"] == 1.0 and "timeout" in result.extra_info["failures"][0]


@pytest.mark.parametrize(
    ("code", "tests"),
    [
        ("class Stack:\n    def __init__(self): self.x = []\n    def push(self, v): self.x.append(v)\n    def pop(self): return self.x.pop()\n    def __len__(self): return len(self.x)", "s = Stack()\ns.push(3)\ns.push((1, 2))\nassert len(s) == 2\nassert s.pop() == (1, 2)\nassert s.x == [3]"),
        ("class Solution:\n    def twoSum(self, nums, target):\n        return [(i, j) for i in range(len(nums)) for j in range(i) if nums[i] + nums[j] == target]", "assert Solution().twoSum([2, 7, 11], 9) == [(1, 0)]"),
        ("class Node:\n    def __init__(self, v, n=None): self.v, self.n = v, n\ndef last(node):\n    while node.n: node = node.n\n    return node", "a = Node(1)\na.n = Node(2)\nassert last(a).v == 2\nassert last(a).n is None"),
        ("class Empty(ValueError): pass\ndef f(x):\n    if not x: raise Empty('no x')\n    return x[0]", "try:\n    f([])\n    assert False\nexcept Empty as e:\n    assert str(e) == 'no x'\ntry:\n    f('')\nexcept ValueError:\n    pass\nelse:\n    assert False"),
        ("def apply(f, xs, key=None): return sorted((f(x) for x in xs), key=key)", "assert apply(lambda x: -x, [1, 2]) == [-2, -1]\nassert apply(abs, [-3, 1], key=lambda v: -v) == [3, 1]\nassert apply(math.floor, [1.5]) == [1]"),
        ("def sort(x): x.sort()\ndef drop(d): d.pop('a')", "x = [3, 1]\nassert sort(x) is None\nassert x == [1, 3]\nd = {'a': 1, 'b': {2}}\ndrop(d)\nassert d == {'b': {2}}"),
        ("def count(n):\n    i = n\n    while True:\n        yield i\n        i += 1", "g = count(5)\nassert next(g) == 5\nassert [next(g), next(g)] == [6, 7]\nfrom itertools import islice\nassert list(islice(count(0), 3)) == [0, 1, 2]"),
        ("from collections import Counter, namedtuple, OrderedDict\nP = namedtuple('P', 'x y')\ndef f(s): return Counter(s)\ndef p(): return P(1, 2)\ndef big(): return 2 ** 200\nLIMIT = 7", "assert f('aab') == {'a': 2, 'b': 1}\nassert p() == (1, 2)\nassert big() == 2 ** 200\nassert LIMIT == 7\nassert isinstance(f(''), dict)"),
        ("class Opened:\n    def __enter__(self): return 7\n    def __exit__(self, *e): self.done = e == (None, None, None)\nclass LRU:\n    def __init__(self): self.d = {}\n    def get(self, k): return self.d.get(k, -1)\n    def insert(self, k, v): self.d[k] = v", "o = Opened()\nwith o as x:\n    assert x == 7\nassert o.done\nc = LRU()\nassert c.get(1) == -1\nc.insert(1, [2])\nassert c.get(1) == [2]"),
        ("class Ledger:\n    def __init__(self): self.n = 0\n    def __enter__(self): return self\n    def __exit__(self, *e): return False\n    def add(self, x): self.n += x\n    def total(self): return self.n", "with Ledger() as l:\n    l.add(5)\n    assert l.total() == 5\ntry:\n    with Ledger() as l: l.add('x')\nexcept TypeError: pass\nelse: assert False"),
        ("Broke = Exception\nclass Own(AssertionError): pass\nERRORS = (ValueError, Own)\ndef pay(x):\n    if x > 1: raise Own('own')\n    if x: raise Broke('too much')", "try:\n    pay(1)\n    assert False\nexcept Broke as e:\n    assert str(e) == 'too much'\ntry:\n    pay(2)\n    assert False\nexcept ERRORS as e:\n    assert str(e) == 'own'"),
        ("import math\ndef root(x): return math.sqrt(x)", "assert math.isclose(root(2), 1.41421356, rel_tol=1e-6)\nassert abs(root(9) - 3.0) < 1e-9"),
        ("def add(a, b): return a + b", "def helper(a): return add(a, 1)\nassert helper(2) == 3\nassert sum(add(i, 1) for i in range(3)) == 6"),
    ],
    ids=["class", "solution", "nodes", "exceptions", "functions given", "changed arguments", "generators", "kinds of values", "more classes", "context managers", "exceptions by other names", "modules", "helpers"],
)
def test_honest_programs_of_every_kind_pass(sandbox: Sandbox, code: str, tests: str) -> None:
    result = judged(sandbox, code, tests)
    assert result.reward == 1.0, result.extra_info


def test_operators_of_a_class_count_where_they_are_asked_for(sandbox: Sandbox) -> None:
    code = "class V:\n    def __init__(self, *x): self.x = x\n    def __add__(self, o): return V(*(a + b for a, b in zip(self.x, o.x)))\n    def __mul__(self, k): return V(*(a * k for a in self.x))\n    __rmul__ = __mul__\n    def __eq__(self, o): return self.x == o.x\n    def __lt__(self, o): return sum(self.x) < sum(o.x)\n    def __contains__(self, v): return v in self.x\n"
    tests = "assert V(1, 2) + V(3, 4) == V(4, 6)\nassert 2 * V(1, 1) == V(1, 1) * 2\nassert 3 in V(3)\nassert V(1) < V(2)\nassert V(1) != V(2)"
    assert judged(sandbox, code, tests, objects=True).reward == 1.0
    strict = judged(sandbox, code, tests)
    assert strict.reward == 0.2 and "objects=True" in strict.extra_info["failures"][0]


def test_tests_run_in_their_order(sandbox: Sandbox) -> None:
    tests = "x = [1]\nassert total(x) == 1\nx.append(2)\nassert total(x) == 3\nx = []\nassert total(x) == 0\ndef test_last():\n    assert total(x) == 7\nx = [7]\n"
    assert judged(sandbox, "def total(x): return sum(x)", tests).reward == 1.0
    stopped = judged(sandbox, "def total(x): return sum(x)", "assert total([1]) == 1\ny = missing(1)\nassert total([2]) == 2")
    assert stopped.reward == 0.5 and "missing" in stopped.extra_info["failures"][0]


def test_setup_serves_the_tests(sandbox: Sandbox) -> None:
    row = {"tests": "assert f(N) == poly(N)", "setup": "N = 3\ndef poly(x): return x * x"}
    assert judged(sandbox, "def f(x): return x * x", row).reward == 1.0


def test_a_name_like_a_modules(sandbox: Sandbox) -> None:
    assert judged(sandbox, "def bisect(x): return x // 2", "assert bisect(4) == 2\nassert math.floor(1.5) == 1").reward == 1.0


# --- inputs and outputs


@pytest.mark.parametrize("cases", [[{"input": "1 2", "output": "3"}], {"inputs": ["1 2"], "outputs": ["3"]}, '[["1 2", "3"]]', {"input": [["1 2"]], "output": [["3", ""]]}])
def test_forms_of_cases(sandbox: Sandbox, cases: Any) -> None:
    assert judged(sandbox, "print(sum(map(int, input().split())))", {"cases": cases}).reward == 1.0
    assert judged(sandbox, "print(0)", {"cases": cases}).reward == 0.0


def test_cases_by_share_and_with_a_comparison_of_ones_own(sandbox: Sandbox) -> None:
    row = {"cases": [["1", "0.5"], ["4", "2.0"], ["0", "none"]]}
    code = "x = int(input())\nprint(x / 2 + 1e-9) if x else 1 / 0"
    result = judged(sandbox, code, row, same=lambda a, b: abs(float(a) - float(b)) < 1e-6)
    assert result.reward == pytest.approx(2 / 3) and "ZeroDivisionError" in result.extra_info["stderr"] and "ZeroDivisionError" in result.extra_info["failures"][0]
    assert same_output("a \nb\n\n", "a\nb") and not same_output("a b", "a  b") and not same_output("", "x")


def test_a_row_with_both(sandbox: Sandbox) -> None:
    row = {"tests": "assert f(2) == 4", "cases": [["3", "9"]]}
    code = "def f(x): return x * x\nif __name__ == '__main__': print(f(int(input())))"
    assert judged(sandbox, code, row, reward="all").reward == 1.0
    wrong = code.replace("print(f(", "print(-f(")
    assert judged(sandbox, wrong, row, reward="all").reward == 0.0 and judged(sandbox, wrong, row).reward == 0.5


# --- faults of rows are no faults of answers


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({}, "no tests"),
        ({"tests": "assert f( == 2"}, "cannot be run: SyntaxError"),
        ({"tests": "x = 3"}, "there is no test in them"),
        ({"tests": "def check(c):\n    assert c(1) == 1"}, "there is no test in them"),
        ({"tests": "import no_such_module\nassert f(1) == 1"}, "no_such_module"),
        ({"tests": "from math import no_such_name\nassert f(1) == 1"}, "no_such_name"),
        ({"tests": "assert np.allclose(f(1), 1)"}, "numpy"),
        ({"tests": "assert f(1) == 1", "setup": "x ="}, "SyntaxError"),
        ({"tests": "assert f(1) == 1\nreturn"}, "SyntaxError"),
        ({"tests": 7}, "is a text"),
        ({"cases": [{"in": "1"}]}, "KeyError"),
        ({"cases": {"inputs": ["1", "2"], "outputs": ["1"]}}, "ValueError"),
        ({"cases": "no json"}, "JSONDecodeError"),
    ],
)
def test_a_row_that_cannot_judge_is_an_error(sandbox: Sandbox, row: dict[str, Any], words: str) -> None:
    with pytest.raises(EvaluatorError, match=words):
        judged(sandbox, "def f(x): return x", row)


def test_an_answer_larger_than_the_disk_is_a_program_that_failed() -> None:
    if MODE == "none":
        pytest.skip(REASON)
    small = Sandbox(seconds=30.0, disk=64 << 10)
    for code in ("#" * (100 << 10), "x = 1\n" * (4 << 20)):
        assert small.run(code).status == "failed"
        assert judged(small, code, "assert f(1) == 1").reward == 0.0


@pytest.mark.parametrize(
    "code",
    ["import no_such_module\ndef f(x): return x", "def f(x):\n    import no_such_module", "import types\nf = types.ModuleType('msvcrt')", "def g(x): return x", "def f(x): raise ImportError('x')", "raise KeyError", "import sys\nsys.modules.clear()\ndef f(x): return 0"],
)  # fmt: skip
def test_an_answer_cannot_make_itself_unscored(sandbox: Sandbox, code: str) -> None:
    for tests in ("assert f(1) == 1", "from solution import f\nassert f(1) == 1"):
        assert judged(sandbox, code, tests).reward == 0.0


def test_wrong_kinds_of_reward_are_refused(sandbox: Sandbox) -> None:
    with pytest.raises(ConfigError, match="did you mean 'fraction'"):
        CodeEvaluator(reward="fractions", sandbox=sandbox)


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        ("```python\na\n```\ntext\n```python\nb\n```", "b\n"),
        ("```python\na\n```\noutput:\n```\n1\n```", "a\n"),
        ("```\na\n```", "a\n"),
        ("~~~py\na\n~~~", "a\n"),
        ("````python\n```\nx\n```\n````", "```\nx\n```\n"),
        ("```python\na\n", "a\n"),
        ("  ```Python\n  a\n  ```", "  a\n"),
        ("```js\nx\n```", "x\n"),
        ("a = 1", "a = 1"),
        ("<think>\n```python\ndraft\n```\n</think>\nAs I said.", "\nAs I said."),
        ("maybe\n```python\ndraft\n```\n</think>\n```python\nb\n```", "b\n"),
        ("<think>\n```python\ndraft\n```\n", ""),
        ("", ""),
        ("```python title=x\na\n```", "a\n"),
        ("~~~~\na\n~~~\n~~~~", "a\n~~~\n"),
        ("```\na\n ``` x\n\t```\t", "a\n ``` x\n"),
    ],
)
def test_code_in_answers(answer: str, code: str) -> None:
    assert extract_code(answer)[0] == code


@pytest.mark.parametrize("part", ["```" + "a" * 200_000, "~~~~" + "~" * 200_000, " " * 200_000 + "```", "``` " + " " * 200_000 + "`", "```a`\n" * 50_000, "```\n" + " " * 200_000 + "x", "```\n" + "```" + " " * 200_000 + "x", "`" * 200_000 + "\n" + "`" * 199_999], ids=range(8))
@pytest.mark.timeout(20)
def test_code_is_found_in_a_time_that_grows_with_the_answer(part: str) -> None:
    extract_code(part)
    assert extract_code(part + "\n\n```python\nx = 1\n")[0].endswith("x = 1\n")
