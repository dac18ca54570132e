"""What a hostile program tries, and does not get: out of the sandbox, past its limits, or a reward that it did not earn."""

from __future__ import annotations

import os
import secrets
import socket
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nexrl_sdk.rollout.evaluator import BaseEvaluationTarget
from nexrl_sdk.rollout.sandbox import CodeEvaluator, Sandbox, SandboxResult, how_confined

MODE, REASON = how_confined()
pytestmark = [pytest.mark.timeout(120), pytest.mark.skipif(MODE == "none", reason=f"no sandbox on this machine: {REASON}")]
MIB = 1 << 20


def attack(code: str, **limits: Any) -> SandboxResult:
    """Run a program under small limits."""
    small = {"seconds": 20.0, "cpu_seconds": 10.0, "memory": 256 * MIB, "processes": 8, "output": 1 << 16, "disk": 4 * MIB, "files": 200}
    return Sandbox(**{**small, **limits}).run(textwrap.dedent(code))


def alive(marker: str) -> list[int]:
    """Processes of this machine with a word in their command line."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if marker.encode() in (folder / "cmdline").read_bytes() and int(folder.name) != os.getpid():
                found.append(int(folder.name))
        except OSError:
            continue
    return found


TRY = """
def tried(function, *args):
    try:
        return repr(function(*args))
    except BaseException as e:
        return "refused " + type(e).__name__
"""
REFUSED = "refused "


def refused(code: str, **limits: Any) -> SandboxResult:
    """Run lines that print `tried(...)`: every line that is printed must be a refusal."""
    result = attack(TRY + textwrap.dedent(code), **limits)
    assert result.ok, result
    lines = result.stdout.splitlines()
    assert lines and all(line.startswith(REFUSED) for line in lines), result.stdout
    return result


# --- the network


def test_a_server_of_the_host_cannot_be_reached_by_tcp() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        refused(f"import socket\nprint(tried(socket.create_connection, ('127.0.0.1', {server.getsockname()[1]}), 2))")
        with pytest.raises(BlockingIOError):
            server.accept()


def test_there_is_no_way_out_by_tcp_or_udp() -> None:
    refused(
        """
        import socket
        print(tried(socket.create_connection, ("192.0.2.1", 80), 2))
        print(tried(socket.socket, socket.AF_INET, socket.SOCK_DGRAM))
        print(tried(socket.socket, socket.AF_INET6, socket.SOCK_RAW))
        """
    )


def test_names_are_not_resolved() -> None:
    refused("import socket\nprint(tried(socket.gethostbyname, 'example.com'))\nprint(tried(socket.getaddrinfo, 'localhost.localdomain', 80))")


def test_unix_sockets_of_the_host_cannot_be_reached(tmp_path: Path) -> None:
    name = f"\0nexrl-{secrets.token_hex(8)}"
    with socket.socket(socket.AF_UNIX) as by_path, socket.socket(socket.AF_UNIX) as abstract:
        by_path.bind(str(tmp_path / "s"))
        by_path.listen()
        abstract.bind(name)
        abstract.listen()
        for address in (str(tmp_path / "s"), name):
            refused(f"import socket\nprint(tried(socket.socket(socket.AF_UNIX).connect, {address!r}))")


def test_other_kinds_of_sockets_cannot_be_made() -> None:
    refused("import socket\nfor family in (16, 17, 38, 40, 44): print(tried(socket.socket, family, socket.SOCK_RAW))\nprint(tried(socket.socket, 40, socket.SOCK_STREAM))")


# --- what this machine holds


def test_files_of_the_host_are_not_there(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    paths = [str(tmp_path / "secret"), __file__, os.path.expanduser("~/.bashrc"), "/etc/shadow", "/etc/passwd", "/etc/hostname", "/proc/1/root/etc/passwd", "/var/lib/dpkg/status", "/sys/kernel/uevent_seqnum"]
    refused(f"for path in {paths!r}: print(tried(open, path))")
    refused(f"import os\nfor path in ('/root', '/home', '/etc', '/var', '/sys', {str(Path(__file__).parent)!r}): print(tried(os.listdir, path))")


def test_packages_of_the_host_cannot_be_imported() -> None:
    refused("for name in ('torch', 'numpy', 'nexrl_sdk', 'pip'): print(tried(__import__, name))")


def test_processes_of_the_host_are_not_seen() -> None:
    result = attack("import os\nprint(max(int(p) for p in os.listdir('/proc') if p.isdigit()) < 10)\nprint(os.path.exists('/proc/" + str(os.getpid()) + "'))")
    assert result.stdout.split() == ["True", "False"]


def test_the_environment_is_not_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    secret = secrets.token_hex(16)
    monkeypatch.setenv("WANDB_API_KEY", secret)
    result = attack(
        """
        import glob, os
        print(dict(os.environ))
        for path in glob.glob("/proc/[0-9]*/environ") + glob.glob("/proc/[0-9]*/cmdline"):
            try: print(open(path).read())
            except OSError: pass
        """
    )
    assert result.ok and secret not in result.stdout and "WANDB" not in result.stdout


def test_no_file_descriptors_are_inherited(tmp_path: Path) -> None:
    with open(tmp_path / "open", "w") as f:
        os.set_inheritable(f.fileno(), True)
        result = attack("import os\nfor n in os.listdir('/proc/self/fd'):\n    try: print(os.readlink(f'/proc/self/fd/{n}'))\n    except OSError: pass")
    lines = result.stdout.splitlines()
    assert result.ok and len(lines) <= 4 and not any("open" in line.split("/")[-1] for line in lines), lines


# --- processes


def test_a_fork_bomb_stops_at_the_limit() -> None:
    result = attack(
        """
        import os, time
        n = 0
        try:
            while n < 200:
                if os.fork() == 0: time.sleep(60)
                n += 1
        except OSError as e: print(n, type(e).__name__, flush=True)
        os._exit(0)
        """
    )
    assert result.stdout.split() == ["7", "BlockingIOError"]


def test_a_fork_bomb_without_an_end_is_ended() -> None:
    marker = secrets.token_hex(8)
    result = attack(f"import os\nmarker = '{marker}'\nwhile True:\n    try: os.fork()\n    except OSError: pass", seconds=1.0)
    assert result.status == "timeout"


def test_a_thread_bomb_stops_at_the_limit() -> None:
    result = attack(
        """
        import os, threading, time
        n = 0
        try:
            while n < 200:
                threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
                n += 1
        except RuntimeError: print(n, flush=True)
        os._exit(0)
        """,
        memory=1 << 30,
    )
    assert result.stdout.split() == ["7"]


def test_daemons_end_with_the_program() -> None:
    marker = f"marker-{secrets.token_hex(8)}"
    result = attack(
        f"""
        import os, sys
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                for fd in (0, 1, 2): os.close(fd)
                os.execv("/py/bin/python", ["python", "-S", "-c", "import signal,time\\nfor s in range(1, 32):\\n  try: signal.signal(s, signal.SIG_IGN)\\n  except OSError: pass\\ntime.sleep(60)", "{marker}"])
            os._exit(0)
        print("done")
        """
    )
    assert result.status == "ok" and result.stdout == "done\n" and result.seconds < 19
    assert not alive(marker)


def test_daemons_end_when_the_time_is_over() -> None:
    marker = f"marker-{secrets.token_hex(8)}"
    result = attack(
        f"""
        import os, signal, time
        for s in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP): signal.signal(s, signal.SIG_IGN)
        if os.fork() == 0:
            os.setsid()
            os.execv("/py/bin/python", ["python", "-S", "-c", "import time; time.sleep(60)", "{marker}"])
        time.sleep(60)
        """,
        seconds=1.0,
    )
    assert result.status == "timeout" and not alive(marker)


def test_signals_do_not_leave_the_sandbox() -> None:
    refused(f"import os\nfor pid in ({os.getpid()}, {os.getppid()}): print(tried(os.kill, pid, 9))")
    result = attack("import os\nos.kill(1, 9); os.kill(1, 15); print('still here')")  # the first process within does not hear it
    assert result.stdout in ("still here\n", "")
    result = attack("import os, signal\nsignal.signal(15, signal.SIG_IGN)\ntry: os.kill(-1, 15)\nexcept ProcessLookupError: os.kill(os.getpid(), 9)")
    assert (result.status, result.cause) == ("killed", "signal 9")


# --- time


@pytest.mark.parametrize(
    "code",
    ["while True: pass", "import time; time.sleep(60)", "import signal\nfor s in set(signal.valid_signals()) - {9, 19}: signal.signal(s, signal.SIG_IGN)\nsignal.pause()", "import sys\nsys.stdin = None\nimport threading; threading.Event().wait()"],
    ids=["loop", "sleep", "ignores signals", "waits"],
)
def test_a_program_without_an_end_is_ended(code: str) -> None:
    result = attack(code, seconds=0.5)
    assert (result.status, result.cause) == ("timeout", "time")


def test_processor_time_is_limited_where_the_signal_is_ignored_too() -> None:
    result = attack("import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass", cpu_seconds=1, seconds=60.0)
    assert (result.status, result.cause) == ("timeout", "cpu")


# --- memory, files, output


def test_memory_of_one_process_is_limited() -> None:
    assert "MemoryError" in attack("x = bytearray(1 << 29)").stderr
    result = attack("x = []\nwhile True: x.append(bytearray(1 << 20))")
    assert "MemoryError" in result.stderr or result.cause == "memory"  # whichever is first


def test_memory_of_all_processes_is_limited() -> None:
    result = attack(
        """
        import os, time
        for _ in range(5):
            if os.fork() == 0:
                x = bytearray(os.urandom(1)) * (60 << 20)
                time.sleep(60)
        time.sleep(60)
        """,
        memory=128 * MIB,
    )
    assert (result.status, result.cause) == ("killed", "memory")


def test_memory_that_no_limit_counts_cannot_be_had() -> None:
    refused(
        """
        import ctypes, os
        c = ctypes.CDLL(None, use_errno=True)
        print(tried(os.memfd_create, "x"))
        for call in ((29, 0, 1 << 20, 0o1600), (319, b"x", 0), (425, 8, 0), (68, 0, 0o1600), (64, 0, 8, 0o1600)):
            if c.syscall(*call) == -1: print("refused by the filter")
            else: print("made", call)
        """
        if os.uname().machine == "x86_64"
        else "import os\nprint(tried(os.memfd_create, 'x'))"
    )


def test_shared_memory_that_no_process_shows_cannot_be_had() -> None:
    refused(
        """
        import mmap, os
        for flags in (mmap.MAP_SHARED, mmap.MAP_SHARED | mmap.MAP_ANONYMOUS, mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | 0x4000):
            print(tried(mmap.mmap, -1, 1 << 20, flags))
        for path in ("/dev/zero", "/dev/full"):
            print(tried(mmap.mmap, os.open(path, os.O_RDWR), 1 << 20, mmap.MAP_SHARED))
        """
    )


def test_buffers_of_sockets_are_counted() -> None:
    refused("import socket\na = socket.socketpair()[0]\nfor name in ('SNDBUF', 'RCVBUF'): print(tried(a.setsockopt, socket.SOL_SOCKET, getattr(socket, 'SO_' + name), 1 << 20))\na.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)")
    result = attack(
        """
        import os, socket, time
        for _ in range(7):
            if os.fork() == 0:
                held = [socket.socketpair() for _ in range(28)]
                time.sleep(60)
        time.sleep(60)
        """,
        memory=64 * MIB,
    )
    assert (result.status, result.cause) == ("killed", "memory")
    assert attack("import asyncio, socket\nasync def f(): return [socket.socketpair() for _ in range(20)]\nprint(len(asyncio.run(f())))", memory=128 * MIB).stdout == "20\n"


def test_no_process_makes_itself_wait() -> None:
    refused("import os\nprint(tried(os.nice, 5))\nprint(tried(os.setpriority, os.PRIO_PROCESS, 0, 19))\nprint(tried(os.sched_setscheduler, 0, os.SCHED_IDLE, os.sched_param(0)))")


@pytest.mark.parametrize("folder", ["/work", "/tmp", "/dev/shm", "/", "/py", "/dev"])
def test_disks_cannot_be_filled(folder: str) -> None:
    result = attack(
        f"""
        written = 0
        try:
            for i in range(20):
                with open("{folder}/x%d" % i, "wb") as f:
                    for _ in range(8):
                        written += f.write(bytes(1 << 18))
                        f.flush()
        except OSError: print(written)
        """
    )
    assert result.ok and int(result.stdout) <= 4 * MIB, result


def test_one_file_cannot_be_huge() -> None:
    assert attack("f = open('x', 'wb')\nf.truncate(1 << 40)").status in ("failed", "killed")


@pytest.mark.parametrize("folder", ["/work", "/dev/shm"])
def test_files_without_number_are_ended(folder: str) -> None:
    result = attack(f"i = 0\nwhile True:\n    open('{folder}/' + str(i), 'w').close(); i += 1")
    assert (result.status, result.cause) == ("killed", "files")


@pytest.mark.parametrize(("stream", "descriptor"), [("stdout", 1), ("stderr", 2)])
def test_a_flood_of_output_is_ended(stream: str, descriptor: int) -> None:
    result = attack(f"import os\nwhile True: os.write({descriptor}, b'x' * 65536)")
    assert (result.status, result.cause) == ("killed", "output") and getattr(result, f"{stream}_truncated")
    assert len(getattr(result, stream)) == 1 << 16


# --- out of the sandbox


def test_nothing_outside_of_the_work_folder_can_be_written() -> None:
    refused("import os\nfor path in ('/x', '/usr/x', '/py/x', '/py/lib/x', '/dev/x', '/proc/sys/kernel/hostname', '/proc/sysrq-trigger'): print(tried(open, path, 'w'))\nprint(tried(os.mkdir, '/y'))")


def test_symlinks_lead_nowhere(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("as it was")
    refused(
        f"""
        import os
        for i, target in enumerate(({str(tmp_path / "victim")!r}, "/proc/1/root/{tmp_path}/victim", "/proc/1/cwd/../etc/passwd", "../../../../etc/shadow")):
            os.symlink(target, str(i))
            print(tried(open, str(i), "r+"))
        """
    )
    assert (tmp_path / "victim").read_text() == "as it was"


def test_root_is_not_had_and_not_regained() -> None:
    refused("import os\nprint(tried(os.setuid, 0))\nprint(tried(os.setgid, 0))\nprint(tried(os.chroot, '/work'))\nprint(tried(os.mknod, '/work/sda', 0o60600, os.makedev(8, 0)))")
    result = attack("print([l.split()[1] for l in open('/proc/self/status') if l.startswith(('CapEff', 'CapPrm', 'CapAmb', 'NoNewPrivs'))])")
    assert result.stdout.count("0" * 16) == 3 and "'1'" in result.stdout


CALLS = """
import ctypes
c = ctypes.CDLL(None, use_errno=True)
def tells(function, *args):
    ctypes.set_errno(0)
    done = getattr(c, function)(*args)
    print("refused" if done == -1 else f"done {function} {done}", ctypes.get_errno())
"""


def test_mounts_and_namespaces_are_refused() -> None:
    refused(CALLS + "\nfor flag in (0x10000000, 0x20000, 0x40000000, 0x20000000): tells('unshare', flag)\ntells('mount', b'none', b'/work', b'tmpfs', 0, None)\ntells('umount2', b'/work', 2)\ntells('setns', 0, 0)")


def test_clone_makes_no_namespaces() -> None:
    if os.uname().machine != "x86_64":
        pytest.skip("the numbers of the calls are x86_64's")
    refused(CALLS + "\nfor flag in (0x10000000, 0x20000, 0x02000000): tells('syscall', 56, flag | 17, 0, 0, 0, 0)\ntells('syscall', 435, 0, 88)")


def test_no_process_is_traced() -> None:
    refused(CALLS + "\ntells('ptrace', 16, 1, 0, 0)\ntells('ptrace', 0, 0, 0, 0)\ntells('process_vm_readv', 1, None, 0, None, 0, 0)")


def test_the_first_process_within_has_no_more_rights_than_the_program() -> None:
    result = attack("for p in ('1', 'self'): print(*[l.split()[1] for l in open(f'/proc/{p}/status') if l.startswith(('Seccomp:', 'NoNewPrivs:', 'CapEff:', 'CapPrm:'))])")
    rights = [line.split() for line in result.stdout.splitlines()]
    assert len(rights) == 2 and rights[1] == ["0" * 16, "0" * 16, "1", "2"] and rights[0][2:] == ["1", "2"], result
    if MODE == "namespace":  # with the same user, its memory can be written: it has the same limits too
        assert rights[0] == rights[1]
        limits = attack("for p in ('1', 'self'): print(sorted(l for l in open(f'/proc/{p}/limits') if 'time' not in l))").stdout.splitlines()
        assert limits[0] == limits[1] and "268435456" in limits[0]
    else:
        refused("print(tried(open, '/proc/1/mem', 'rb'))\nprint(tried(open, '/proc/1/root/work/x', 'w'))\nimport os\nprint(tried(os.kill, 1, 15))")


def test_limits_are_not_raised() -> None:
    refused("import resource as r\nfor name in ('AS', 'CPU', 'NPROC', 'FSIZE', 'NOFILE', 'CORE'): print(tried(r.setrlimit, getattr(r, 'RLIMIT_' + name), (-1, -1)))")


def test_file_descriptors_are_limited() -> None:
    refused("import os\nx = []\ntry:\n    while len(x) < 5000: x.append(os.open('/dev/null', 0))\nexcept OSError: print('refused at', len(x) < 64)\nprint(tried(os.dup2, 1, 1 << 30))")


def test_the_terminal_is_not_there() -> None:
    refused("import os\nprint(tried(os.open, '/dev/tty', os.O_RDWR))\nprint(tried(os.open, '/dev/vda', 0))\nprint(tried(os.open, '/dev/kmsg', 0))")


def test_deep_recursion_ends_the_program_alone() -> None:
    assert "RecursionError" in attack("def f(): f()\nf()").stderr
    result = attack("import sys, functools\nsys.setrecursionlimit(10**9)\nf = lambda: None\nfor _ in range(10**6): f = functools.partial(f)\nf()\nimport ctypes; ctypes.string_at(0)")
    assert result.status in ("killed", "failed")


def test_a_crash_is_a_signal() -> None:
    result = attack("import ctypes\nctypes.string_at(0)")
    assert (result.status, result.cause) == ("killed", "signal 11")


def test_files_given_cannot_lead_out() -> None:
    for name in ("../x", "/etc/x", "a/../../x", ""):
        with pytest.raises(ValueError, match="relative path"):
            Sandbox().run({name: "pass"})


# --- a reward that was not earned

TESTS = "assert add(1, 2) == 3\nassert add(-1, 1) == 0\nassert add(10, 5) == 15\n"
CHECK = "def check(candidate):\n    assert candidate(1, 2) == 3\n    assert candidate(-1, 1) == 0\n"
RIGHT = "def add(a, b):\n    return a + b\n"
LIAR = "class Liar(int):\n    def __eq__(self, other): return True\n    def __ne__(self, other): return False\n    def __hash__(self): return 0\n"
FAKES: dict[str, str] = {
    "exits with 0": "import sys\nsys.exit(0)",
    "exits at import": "import os\nos._exit(0)",
    "exits when called": "import os\ndef add(a, b): os._exit(0)",
    "raises SystemExit when called": "def add(a, b): raise SystemExit(0)",
    "prints success": "print('PASSED 3 passed in 0.01s OK\\n{\"passed\": true, \"done\": true, \"total\": 3}')\ndef add(a, b): print('OK'); return None",
    "at exit": "import atexit, os\natexit.register(lambda: (print('OK'), os._exit(0)))\ndef add(a, b): return None",
    "equal to everything": LIAR + "def add(a, b): return Liar(7)",
    "an object equal to everything": LIAR.replace("(int)", "") + "def add(a, b): return Liar()",
    "a class equal to everything": LIAR.replace("(int)", "").replace("Liar", "add") + "    def __init__(self, *a): pass\n",
    "a metaclass that is equal": "class M(type):\n    def __eq__(self, o): return True\n    def __hash__(self): return 1\nclass R(metaclass=M): pass\ndef add(a, b): return R",
    "a list equal to everything": LIAR.replace("int", "list") + "def add(a, b): return Liar()",
    "patched builtins": "import builtins\nbuiltins.AssertionError = Exception\nbuiltins.isinstance = lambda *a: True\nbuiltins.__build_class__ = None\ndef add(a, b): return None",
    "patched json": "import json\njson.dumps = lambda *a, **k: '{\"ok\": true}'\ndef add(a, b): return None",
    "patched unittest": "import unittest\nunittest.TestCase.assertEqual = lambda *a: None\nunittest.TestResult.addFailure = lambda *a: None\ndef add(a, b): return None",
    "a trace function": "import sys\ndef t(f, e, a):\n    f.f_globals['passed'] = True\n    return t\nsys.settrace(t)\ndef add(a, b): return None",
    "reads frames": """
import sys
def add(a, b):
    f = sys._getframe()
    while f:
        for v in list(f.f_locals.values()) + list(f.f_globals.values()):
            if ''.join(reversed('dda tressa')) in str(v): return eval(str(v).split('==')[1].split()[0])
        f = f.f_back
""",
    "reads all objects": """
import gc
def add(a, b):
    for o in gc.get_objects():
        if ''.join(reversed('dda tressa')) in str(o)[:10000]: return 3
""",
    "reads /proc": """
import glob
def add(a, b):
    for path in glob.glob('/proc/*/cmdline') + glob.glob('/proc/*/environ') + glob.glob('/proc/*/fd/*') + glob.glob('/work/*') + glob.glob('/dev/shm/*'):
        try:
            import os
            fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            text = os.read(fd, 1 << 20).decode('utf-8', 'replace')
        except OSError: continue
        if ''.join(reversed('(dda tressa')) in text: return 3
""",
    "reads its own memory": """
import re
def add(a, b):
    for line in open('/proc/self/maps'):
        if ' rw-p ' not in line: continue
        low, high = (int(x, 16) for x in line.split()[0].split('-'))
        with open('/proc/self/mem', 'rb') as m:
            try: m.seek(low); data = m.read(high - low)
            except (OSError, ValueError): continue
        if bytes(reversed(b' == )2 ,1(dda')) in data: return 3
    return None
""",
    "answers on every descriptor": """
import os
for fd in range(3, 64):
    try:
        for _ in range(9): os.write(fd, b'{"ok": true}\\n{"nonce": "", "test": 0, "passed": true}\\n')
    except OSError: pass
def add(a, b): return None
""",
    "answers what is no message": "import os\nfor fd in range(3, 64):\n    try: os.write(fd, b'[' * 100000 + b'\\n')\n    except OSError: pass\ndef add(a, b): return None",
    "a name that the judge knows": "def check(c): pass\ndef run_case(*a): pass\nclass Remote: pass\nlen = sum = abs = isinstance = lambda *a: True\n__name__ = 'tests'\ndef add(a, b): return None",
    "sets what the tests see": "import sys\nclass Name(str): pass\ndef add(a, b):\n    sys.modules['__main__'].__dict__.update(add=lambda a, b: a + b, passed=3)\n    return None",
    "another module of the tests": "open('tests.py', 'w').write('pass')\nopen('json.py', 'w').write('pass')\nopen('setup.py', 'w').write('pass')\ndef add(a, b): return None",
    "too much of an answer": "def add(a, b): return 'x' * (17 << 20)",
    "names that were not asked for": """
import sys
f = sys._getframe()
while 'candidate' not in f.f_locals: f = f.f_back
c = f.f_locals['candidate']
do = c.do
yes = lambda *a, **k: True
extra = dict.fromkeys(['abs', 'isinstance', 'len', 'run_case', 'check', 'sorted', 'sum', '__builtins__', 'AssertionError'], yes)
c.do = lambda op, args, kwargs: {**do(op, args, kwargs), **extra} if op == 'names' else do(op, args, kwargs)
def add(a, b): return 7.0
""",
    "kills all": "import os\nos.kill(-1, 9)\ndef add(a, b): return None",
    "nothing": "",
    "is no Python": "I would add the two numbers.",
}


@pytest.fixture(scope="module")
def judge() -> Callable[[str, str], float | None]:
    evaluator = CodeEvaluator(reward="fraction", sandbox=Sandbox(seconds=20.0, memory=512 * MIB, processes=8))

    def reward(code: str, tests: str = TESTS) -> float | None:
        return evaluator.evaluate({"tests": tests, "entry_point": "add"}, BaseEvaluationTarget(code)).reward

    return reward


def test_the_right_program_is_rewarded(judge: Callable[..., float | None]) -> None:
    assert judge(RIGHT) == 1.0 and judge(RIGHT, CHECK) == 1.0


@pytest.mark.parametrize("code", FAKES.values(), ids=FAKES)
def test_a_fake_is_not_rewarded(judge: Callable[..., float | None], code: str) -> None:
    assert judge(code) == 0.0


@pytest.mark.parametrize("name", ["equal to everything", "an object equal to everything", "exits when called", "reads frames", "prints success"])
def test_a_fake_is_not_rewarded_by_a_check_function(judge: Callable[..., float | None], name: str) -> None:
    assert judge(FAKES[name], CHECK) == 0.0


@pytest.mark.parametrize("test", ["assert abs(add(1, 2) - 3.0) < 1e-6", "assert add(1, 2) < 4", "assert 3 in add(1, 2)", "assert add(1, 2).startswith('3')", "assert 2 < add(1, 2)", "assert not add(1, 2) != 3", "assert 3 == add(1, 2)", "assert [3] == [add(1, 2)]"])  # fmt: skip
def test_an_object_that_agrees_to_everything_passes_no_kind_of_test(judge: Callable[..., float | None], test: str) -> None:
    methods = "\n".join(f"    def __{n}__(self, *a): return True" for n in ("eq", "lt", "gt", "le", "ge", "contains", "bool"))
    methods += "\n    def __sub__(self, o): return 0.0\n    __rsub__ = __sub__\n    def __abs__(self): return 0.0\n    def startswith(self, x): return True\n    def __ne__(self, o): return False"
    yes = f"class Yes:\n{methods}\n"
    assert judge(yes + "def add(a, b): return Yes()", test) == 0.0
    assert judge(yes.replace("class Yes:", "class add:\n    def __init__(self, *a): pass"), test) == 0.0 or "startswith" in test


@pytest.mark.parametrize("name", ["names that were not asked for", "an object equal to everything"])
def test_functions_of_the_tests_stay_theirs(judge: Callable[..., float | None], name: str) -> None:
    tests = "assert abs(add(1, 2) - 3.0) < 1e-6\nassert len([add(1, 2)]) == 2\nassert isinstance(add(1, 2), str)\nassert sum([add(1, 2)]) is True\nassert sorted([add(1, 2)]) is True"
    assert judge(FAKES[name], tests) == 0.0


@pytest.mark.parametrize("code", ["import os\nos._exit(0)", "import os\ndef add(a, b): os._exit(0)", "def add(a, b): raise SystemExit", "import os\ndef add(a, b): os.closerange(3, 1000)"])
def test_a_program_that_ends_is_no_exception_that_a_test_expects(judge: Callable[..., float | None], code: str) -> None:
    tests = "import unittest\nclass T(unittest.TestCase):\n    def test_a(self):\n        with self.assertRaises(Exception): add('x', 1)\n"
    tests += "def test_b():\n    try: add('x', 1)\n    except: return\n    assert False\n"
    assert judge(code, tests) == 0.0
    assert judge(RIGHT, tests) == 1.0


BOX = "class Box:\n    def __enter__(self): return self\n    def __exit__(self, *e): {end}\n    def keep(self, x): return self\n"
CASE = "import unittest\nclass T(unittest.TestCase):\n    def test_a(self):\n        {}\n"
EARLY = {  # programs that would end a test before it fails
    "exit": ("with Box() as b:\n    b.add(5)\n    assert b.total() == 5", BOX.format(end="return True")),
    "exit in a method": (CASE.format("with Box() as b: self.assertEqual(b.total(), 5)"), BOX.format(end="return True")),
    "exit around a failure": (CASE.format("with Box() as b, self.assertRaises(ValueError): b.keep(5)"), BOX.format(end="return True")),
    "exit that raises": (CASE.format("with self.assertRaises(ValueError), Box() as b: self.assertEqual(b.keep(5), 5)"), BOX.format(end="raise ValueError")),
    "stop in all": ("assert all(map(lambda c: add(*c) == sum(c), [(1, 2), (2, 2)]))", "def add(a, b): raise StopIteration"),
    "stop in a loop": ("for got, want in zip(map(lambda c: add(*c), [(1, 2)]), [3]):\n    assert got == want", "class Done(StopIteration): pass\ndef add(a, b): raise Done"),
    "stop of its own class": ("from solution import Done\nassert all(map(lambda c: add(*c) == sum(c), [(1, 2)]))", "class Done(StopIteration): pass\ndef add(a, b): raise Done"),
    "stop as an attribute": ("assert all(map(lambda c: Box().total == 3, [1]))", "class Box:\n    @property\n    def total(self): raise StopIteration"),
    **{f"{name} as an exception": ("def test_a():\n    try:\n        pay(5)\n        raise AssertionError('it does not raise')\n    except Broke:\n        pass", f"Broke = {name}\ndef pay(x): pass") for name in ("AssertionError", "Exception", "BaseException")},
    "exceptions in a tuple": ("def test_a():\n    try:\n        assert pay(5) == 1\n    except ERRORS:\n        pass", "ERRORS = (ValueError, AssertionError)\ndef pay(x): pass"),
}


@pytest.mark.parametrize(("tests", "code"), EARLY.values(), ids=EARLY)
def test_a_program_cannot_end_a_test_before_it_fails(judge: Callable[..., float | None], tests: str, code: str) -> None:
    assert judge(code, tests) == 0.0


def test_what_a_context_manager_hears_of_the_tests(judge: Callable[..., float | None]) -> None:
    code = "class Box:\n    heard = None\n    def __enter__(self): return self\n    def __exit__(self, kind, error, trace): Box.heard = kind and kind.__name__ + str(error)\n    def fail(self): raise KeyError('own')\ndef heard(): return Box.heard"
    tests = "try:\n    with Box(): raise ValueError('expected: 42')\nexcept ValueError: pass\nassert heard() == 'ValueError'\ntry:\n    with Box() as b: b.fail()\nexcept KeyError: pass\nassert heard().startswith('KeyError') and 'own' in heard()\nwith Box(): pass\nassert heard() is None"
    assert judge(code, tests) == 1.0


def test_printed_outputs_are_compared_outside() -> None:
    evaluator = CodeEvaluator(sandbox=Sandbox(seconds=20.0))
    row = {"cases": [{"input": "1 2\n", "output": "3\n"}]}
    assert evaluator.evaluate(row, BaseEvaluationTarget("print(sum(map(int, input().split())))")).reward == 1.0
    for code in ("print('OK')", "import os; os._exit(0)", "print(3); raise SystemExit(1)", "import sys; print(sys.argv, sys.modules, vars())"):
        assert evaluator.evaluate(row, BaseEvaluationTarget(code)).reward == 0.0


def test_nothing_is_left_behind() -> None:
    sandbox = Sandbox(seconds=20.0)
    sandbox.run("pass")
    descriptors, folders, threads = set(os.listdir("/proc/self/fd")), set(os.listdir(os.environ.get("TMPDIR", "/tmp"))), threading.active_count()
    for code in ("pass", "while True: print('x' * 1000)", "import os\nif os.fork() == 0: os.setsid(); import time; time.sleep(60)"):
        sandbox.run(code)
    assert set(os.listdir("/proc/self/fd")) == descriptors and threading.active_count() == threads
    assert not [f for f in set(os.listdir(os.environ.get("TMPDIR", "/tmp"))) - folders if f.startswith("nexrl")]
    try:
        assert os.waitpid(-1, os.WNOHANG)[0] == 0
    except ChildProcessError:
        pass


def test_no_process_stays_for_somebody_else_to_wait_for() -> None:
    result = attack("import os\nfor _ in range(3):\n    if os.fork() == 0:\n        os.setsid()\n        if os.fork() == 0: import time; time.sleep(60)\n        os._exit(0)\nprint(open('/proc/1/status').read())")
    assert result.ok and "bwrap" not in result.stdout, result  # the first process is not bubblewrap's, which nobody but the machine's own would wait for


def test_interrupting_a_call_ends_its_program() -> None:
    sandbox, marker = Sandbox(seconds=60.0), f"marker-{secrets.token_hex(8)}"

    def interrupt() -> None:
        while not alive(marker):
            time.sleep(0.01)
        os.kill(os.getpid(), 2)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        sandbox.run(f"import os\nos.execv('/py/bin/python', ['python', '-S', '-c', 'import time; time.sleep(60)', '{marker}'])")
    assert not alive(marker)
