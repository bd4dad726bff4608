"""A process that behaves: threads by affinity and quota, priority kept, and no processor time while it waits."""

import json
import mmap
import os
import pty
import resource
import sys
import time
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch

from medusa_cli import device
from medusa_cli.__main__ import main
from medusa_cli.cli import COMMANDS
from medusa_cli.engine import packed_cache
from medusa_cli.files import cpus, process
from medusa_cli.model import chat_template
from medusa_cli.native import is_available, pages
from medusa_cli.serve import server
from tests.helpers import python, save_model, save_run
from tests.serving import IDS, serving, tiny_medusa

TICK_S = 1 / os.sysconf("SC_CLK_TCK")


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Sets a process of 8 processors in a control group without quotas; returns the groups' folder."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))
    monkeypatch.setattr(cpus, "CGROUPS", tmp_path)
    monkeypatch.setattr(cpus, "MEMBERSHIP", tmp_path / "cgroup")
    return tmp_path


@pytest.mark.parametrize(
    ("member", "files", "expected"),
    [
        ("0::/a/b", {}, 8),
        ("0::/a/b", {"cpu.max": "max 100000"}, 8),
        ("0::/a/b", {"cpu.max": "250000 100000"}, 2),
        ("0::/a/b", {"a/cpu.max": "300000 100000", "a/b/cpu.max": "500000 100000"}, 3),
        ("0::/", {"cpu.max": "50000 100000"}, 1),
        ("0::/a", {"cpu.max": "1600000 100000"}, 8),
        (
            "3:cpu,cpuacct:/docker/1\n2:memory:/docker/1",
            {"cpu,cpuacct/cpu.cfs_quota_us": "400000", "cpu,cpuacct/cpu.cfs_period_us": "100000"},
            4,
        ),
        ("3:cpu:/a", {"cpu/a/cpu.cfs_quota_us": "-1", "cpu/a/cpu.cfs_period_us": "100000"}, 8),
    ],
)
def test_threads_follow_affinity_and_quota(
    groups: Path, monkeypatch: pytest.MonkeyPatch, member: str, files: dict, expected: int
) -> None:
    (groups / "cgroup").write_text(f"{member}\n")
    for name, text in files.items():
        (groups / name).parent.mkdir(parents=True, exist_ok=True)
        (groups / name).write_text(f"{text}\n")
    assert cpus.cpu_count() == expected
    cpus.limit_threads()
    assert os.environ.get("OMP_NUM_THREADS") == (str(expected) if expected < 8 else None)
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert cpus.cpu_count() == 5


def test_a_mac_uses_its_fast_cores_and_is_named_by_its_chip(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {
        "hw.perflevel0.logicalcpu": (6).to_bytes(4, sys.byteorder),
        "machdep.cpu.brand_string": b"Apple M2 Pro\0",
    }
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(cpus, "MEMBERSHIP", tmp_path / "none")
    monkeypatch.setattr(cpus, "sysctl", values.get)
    monkeypatch.setattr(device, "sysctl", values.get)
    monkeypatch.setattr(device, "_CPUS", tmp_path / "none")
    assert cpus.cpu_count() == 6
    assert device.processor() == "Apple M2 Pro"


@pytest.fixture
def mac(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Takes from this process what macOS lacks: /proc and huge pages; returns a folder without files."""
    monkeypatch.setattr(sys, "platform", "darwin")
    for owner, name in (
        *((device, name) for name in ("_STATUS", "_SYSTEM", "_CPUS")),
        (cpus, "MEMBERSHIP"),
        (packed_cache, "BOOT"),
        (chat_template, "STATM"),
    ):
        monkeypatch.setattr(owner, name, tmp_path / "none")
    monkeypatch.delattr(mmap, "MADV_NOHUGEPAGE", raising=False)
    monkeypatch.setattr(pages, "HAS_HUGE_PAGES", False)
    monkeypatch.setattr(pages, "_NO_RESERVE", 0)
    return tmp_path


def test_a_mac_tells_its_memory(mac: Path) -> None:
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert device.free_memory(torch.device("cpu")) == whole // 2
    assert device.peak_memory(torch.device("cpu")) > 0
    device.keep_freed_memory()
    device.return_freed_memory()
    memory = pages.aligned(4 << 20)
    assert memory.nbytes == 4 << 20
    assert memory.ctypes.data % 64 == 0
    assert not memory.any()


def test_a_mac_takes_dropped_pages_back(mac: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    advice: list[int] = []

    class Libc:
        @staticmethod
        def madvise(start: object, size: object, number: int) -> None:
            advice.append(number)

    monkeypatch.setattr(pages, "_libc", Libc)
    pages.drop_pages(pages.lazy_zeros(1 << 16))
    assert advice == [mmap.MADV_FREE]


def test_a_mac_checks_packed_weights_once_per_start(
    mac: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = [7, 1, 0]
    file = mac / "packed.bin"
    file.touch()
    monkeypatch.setattr(packed_cache, "home", lambda: mac)
    monkeypatch.setattr(
        packed_cache,
        "sysctl",
        lambda name: b"".join(number.to_bytes(8, sys.byteorder) for number in start),
    )
    packed_cache.note_checked(file)
    # The microseconds follow the clock when it is set.
    start[1] = 2
    assert packed_cache.is_checked(file)
    start[0] = 8
    assert not packed_cache.is_checked(file)


def test_a_mac_bounds_a_template_by_the_peak_of_memory(
    mac: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    peak = 1 << 30
    limits = resource.getrlimit(resource.RLIMIT_AS)
    monkeypatch.setattr(process, "owned", True)
    monkeypatch.setattr(chat_template, "TICK_S", 0.01)
    monkeypatch.setattr(resource, "getrusage", lambda who: type("Usage", (), {"ru_maxrss": peak}))
    with chat_template._bounded():
        assert resource.getrlimit(resource.RLIMIT_AS) == limits
    with pytest.raises(MemoryError), chat_template._bounded():
        peak += chat_template.MAX_BYTES + 1
        while True:
            pass


@pytest.mark.parametrize("refused", [False, True])
def test_open_files_are_raised_as_far_as_the_system_lets_them(
    monkeypatch: pytest.MonkeyPatch, refused: bool
) -> None:
    """macOS reports no hard limit, and refuses to go without one."""
    limit = [256, resource.RLIM_INFINITY]

    def change(which: int, wanted: tuple[int, int]) -> None:
        if refused and wanted[0] == resource.RLIM_INFINITY:
            raise ValueError("not allowed")
        limit[0] = wanted[0]

    monkeypatch.setattr(resource, "getrlimit", lambda which: tuple(limit))
    monkeypatch.setattr(resource, "setrlimit", change)
    assert server.file_limit() == (server.MAC_FILES if refused else sys.maxsize)
    assert limit[0] == (server.MAC_FILES if refused else resource.RLIM_INFINITY)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("model\t\t: 1\nmodel name\t: AMD EPYC\n", "AMD EPYC"),
        ("CPU part\t: 0xd0b\nModel\t\t: Raspberry Pi 5 Model B\n", "Raspberry Pi 5 Model B"),
        ("CPU implementer\t: 0x41\nCPU part\t: 0xd40\n", "ARM 0x41 0xd40"),
    ],
)
def test_processors_have_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, name: str
) -> None:
    (tmp_path / "cpuinfo").write_text(text)
    monkeypatch.setattr(device, "_CPUS", tmp_path / "cpuinfo")
    assert device.processor() == name


THREADS = """
import json, os, sys
from pathlib import Path
from medusa_cli import cli
from medusa_cli.files import cpus
cpus.CGROUPS = Path(sys.argv[1])
cpus.MEMBERSHIP = cpus.CGROUPS / "cgroup"
os.nice(3)
sys.argv = ["medusa", "--version"]
try:
    cli.main()
except SystemExit:
    pass
import torch
import numpy
from medusa_cli.native import PackedMatrix, RawMatrix
quota = torch.get_num_threads()
os.environ["OMP_NUM_THREADS"] = "3"
matrix = PackedMatrix.pack(RawMatrix.of(numpy.ones((256, 64), numpy.float32)))
matrix.multiply(numpy.ones((1, 64), numpy.float32))  # starts the library's threads
tasks = [path.read_text().rsplit(")", 1)[1].split() for path in Path("/proc/self/task").glob("*/stat")]
print(json.dumps({"torch": quota, "nice": [int(fields[16]) for fields in tasks]}))
"""


@pytest.mark.slow
@pytest.mark.skipif(
    not (is_available() and Path("/proc/self/task").is_dir()),
    reason="starts the library's threads and reads Linux's /proc",
)
def test_torch_keeps_a_quota_and_all_threads_the_priority(tmp_path: Path) -> None:
    (tmp_path / "cgroup").write_text("0::/\n")
    (tmp_path / "cpu.max").write_text("100000 100000\n")
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    code = THREADS.replace("sys.argv[1]", repr(str(tmp_path)))
    done = python(code, env=environment)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen["torch"] == 1
    assert len(seen["nice"]) >= 3
    assert set(seen["nice"]) == {min(19, os.nice(0) + 3)}


INTERRUPTED = """
import pathlib  # Python 3.13 cannot import it again after an interruption
import sys

class Interrupt:
    def __init__(self, count):
        self.left = count
    def find_spec(self, name, path=None, target=None):
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt

from medusa_cli.__main__ import main
before = set(sys.modules)
sys.argv = ["medusa", "chat", "--model", "nowhere/nothing/no", "--prompt", "hi"]
for count in (1, 2, 5, 20, 80, 200):
    for name in set(sys.modules) - before:
        if name.startswith("medusa_cli"):
            del sys.modules[name]
    finder = Interrupt(count)
    sys.meta_path.insert(0, finder)
    try:
        main()
    except SystemExit as done:
        print(count, done.code, finder.left > 0, file=sys.stdout, flush=True)
    sys.meta_path.remove(finder)
"""


def test_ctrl_c_while_modules_are_imported_is_one_line() -> None:
    done = python(INTERRUPTED)
    codes = [line.split()[1:] for line in done.stdout.splitlines()]
    interrupted = codes.count(["130", "False"])
    # An import that is interrupted late may come after the command's end.
    assert interrupted >= 4, done.stdout + done.stderr
    assert codes[:4] == [["130", "False"]] * 4, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.count("interrupted\n") == interrupted


def run_with_closed_streams(lines: list[list[str]], results: Path) -> None:
    """Runs commands without standard streams; writes the exit code of each, and what the streams are."""
    for number in (0, 1, 2):
        os.close(number)
    sys.stdin = sys.stdout = sys.stderr = None
    codes = {}
    for words in lines:
        sys.argv = ["medusa", *words]
        try:
            main()
        except SystemExit as done:
            codes[words[0]] = done.code
    streams = [os.readlink(f"/proc/self/fd/{number}") for number in (0, 1, 2)]
    results.write_text(json.dumps([codes, streams]))


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="reads Linux's /proc")
def test_commands_run_with_closed_standard_streams(tmp_path: Path) -> None:
    chat = ["chat", "--model", save_model(tmp_path / "model"), "--max-new-tokens", "3"]
    lines = [*([name, "--nonsense"] for name in COMMANDS), ["--version"], chat]
    child = get_context("fork").Process(
        target=run_with_closed_streams, args=(lines, tmp_path / "codes")
    )
    child.start()
    child.join()
    codes, streams = json.loads((tmp_path / "codes").read_text())
    assert codes.pop("--version") == 0
    assert codes.pop("chat") == 0
    assert set(codes.values()) == {2}
    assert len(codes) > 10
    assert streams == [os.devnull] * 3


@pytest.mark.slow
def test_an_idle_server_uses_no_processor(tmp_path: Path) -> None:
    with tiny_medusa(tmp_path) as medusa, serving(medusa) as server:
        server.post({"model": "tiny", "prompt": IDS, "max_tokens": 12})
        time.sleep(0.2)
        before = time.process_time()
        time.sleep(1.5)
        assert time.process_time() - before < 0.03


@pytest.mark.slow
def test_an_idle_chat_uses_no_processor(tmp_path: Path) -> None:
    run = save_run(tmp_path / "run", save_model(tmp_path / "model"))
    words = ["chat", "--run", f"{run.path}/", "--dtype", "fp32", "--max-new-tokens", "8"]
    process, terminal = pty.fork()
    if process == 0:
        os.execv(sys.executable, [sys.executable, "-m", "medusa_cli", *words])
    try:
        wait_for(terminal, b"> ")
        os.write(terminal, b"w1 w2\n")
        wait_for(terminal, b"tokens/s")
        wait_for(terminal, b"> ")
        time.sleep(0.5)
        before = seconds_of(process)
        time.sleep(2)
        assert seconds_of(process) - before <= 0.02 + TICK_S
    finally:
        os.kill(process, 9)
        os.waitpid(process, 0)
        os.close(terminal)


def wait_for(terminal: int, part: bytes) -> None:
    """Reads a terminal until a text has come."""
    seen, end = b"", time.monotonic() + 60
    while part not in seen:
        assert time.monotonic() < end, seen
        seen += os.read(terminal, 4096)


def seconds_of(process: int) -> float:
    """Returns the processor time of a process and its threads."""
    fields = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) * TICK_S
