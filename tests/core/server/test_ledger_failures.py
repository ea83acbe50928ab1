"""What goes wrong under a ledger: full disk, locks, other versions, damage, SIGKILL. Real files, real processes."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.recordings import POLICY, completion, recorded

from apprentice.core.errors import ApprenticeError, LedgerError, LedgerFull, LedgerLocked, LedgerVersionError, UnknownTrajectory
from apprentice.core.records import Completion, Trajectory
from apprentice.core.server import ledger_schema, ledger_tokens
from apprentice.core.server.ledger import Ledger
from apprentice.core.wire import RegisterModel, TrainJob

TESTS = Path(__file__).resolve().parents[2]
PREAMBLE = f"""
import os, sys, threading
sys.path.insert(0, {str(TESTS)!r})
from pathlib import Path
from support.recordings import POLICY, completion
from apprentice.core.errors import LedgerError, LedgerFull
from apprentice.core.records import Trajectory
from apprentice.core.server.ledger import Ledger
path = Path(sys.argv[1])
"""


def python(program: str, *arguments: object) -> list[str]:
    return [sys.executable, "-c", PREAMBLE + program, *map(str, arguments)]


def big(trajectory_id: str, number: int) -> Completion:
    """A completion of some 60 kB that no compression makes small."""
    return completion(trajectory_id, (number,), message={"role": "assistant", "content": os.urandom(30_000).hex()})


def one_sentence(error: ApprenticeError, *parts: object) -> bool:
    return "\n" not in error.message and all(str(part) in error.message for part in parts)


# a full disk


@contextmanager
def no_more_room(ledger: Ledger, pages: int = 0) -> Iterator[None]:
    """SQLite itself refuses to grow the file by more than `pages`: the real SQLITE_FULL."""
    connection = ledger._writing()._connection
    used = connection.execute("PRAGMA page_count").fetchone()[0]
    connection.execute(f"PRAGMA max_page_count = {used + pages}")
    try:
        yield
    finally:
        connection.execute("PRAGMA max_page_count = 1073741823")


def test_a_full_disk_is_said_leaves_nothing_half_written_and_passes(tmp_path: Path) -> None:
    with Ledger.open(tmp_path / "runs.db") as ledger:
        trajectory = ledger.open_trajectory(Trajectory(policy=POLICY)).id
        kept = completion(trajectory)
        ledger.append_completions([kept])
        lost = [big(trajectory, n) for n in range(3)]
        with no_more_room(ledger), pytest.raises(LedgerFull) as full:
            ledger.append_completions(lost)
        assert one_sentence(full.value, ledger.path, "disk is full")
        assert full.value.status == 507
        assert ledger.completions(trajectory) == (kept,)
        ledger.append_completions(lost)
        assert ledger.completions(trajectory) == (kept, *lost)
    connection = sqlite3.connect(tmp_path / "runs.db")
    assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    assert connection.execute("PRAGMA foreign_key_check").fetchall() == []
    connection.close()


def test_of_calls_committed_together_the_ones_that_still_fit_are_kept(tmp_path: Path) -> None:
    with Ledger.open(tmp_path / "runs.db") as ledger:
        trajectory = ledger.open_trajectory(Trajectory(policy=POLICY)).id
        ledger.append_completions([completion(trajectory, (0,))])
        small, large = completion(trajectory, (1,)), big(trajectory, 2)
        with no_more_room(ledger, pages=6):
            gate = threading.Event()
            ledger._writing().submit(lambda _: gate.wait(10))
            futures = [ledger.submit_completions([one]) for one in (large, small)]
            stray = ledger.submit_completions([completion("nowhere")])
            gate.set()
            assert isinstance(futures[0].exception(10), LedgerFull)
            assert futures[1].exception(10) is None
            assert isinstance(stray.exception(10), UnknownTrajectory)
        assert ledger.completions(trajectory)[1:] == (small,)
        follower = completion(trajectory, (*small.prompt_ids, *small.token_ids, 9), parent=small.id)
        ledger.append_completions([large, follower])
        with Ledger.open(ledger.path, read_only=True) as reader:
            assert reader.completions(trajectory)[1:] == (small, large, follower)


FILL = """
ledger = Ledger.open(path)
trajectory = ledger.open_trajectory(Trajectory(id="t", policy=POLICY)).id
if len(sys.argv) > 2:
    import resource
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))
for n in range(10_000):
    try:
        ledger.append_completions([completion(trajectory, (n,), message={"role": "assistant", "content": os.urandom(10_000).hex()})])
    except LedgerFull as error:
        full = error
        break
    print(n, flush=True)
else:
    sys.exit("never full")
assert "disk is full" in str(full), full
assert len(ledger.completions(trajectory)) == n, (len(ledger.completions(trajectory)), n)
if len(sys.argv) > 2:
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
else:
    (path.parent / "ballast").unlink()
ledger.append_completions([completion(trajectory, (n,))])
assert [one.prompt_ids for one in ledger.completions(trajectory)] == [(k,) for k in range(n + 1)]
ledger.close()
print("recovered", flush=True)
"""


def test_a_quota_on_the_file_size_is_a_full_disk_and_writing_goes_on_when_it_is_lifted(tmp_path: Path) -> None:
    done = subprocess.run(python(FILL, tmp_path / "runs.db", 600_000), capture_output=True, text=True, timeout=60)
    assert done.stdout.split()[-1:] == ["recovered"], done.stderr
    assert len(done.stdout.split()) > 5


def test_a_full_file_system_is_a_full_disk_and_writing_goes_on_when_there_is_room(tmp_path: Path) -> None:
    inside = ["sh", "-c", 'mount -t tmpfs -o size=2m tmpfs "$1" && head -c 1000000 /dev/zero > "$1/ballast" && shift && exec "$@"', "sh"]
    namespace = ["unshare", "--user", "--map-root-user", "--mount"]
    if shutil.which("unshare") is None or subprocess.run([*namespace, "true"], capture_output=True).returncode != 0:
        pytest.skip("needs a mount namespace of its own")
    command = [*namespace, *inside, str(tmp_path), *python(FILL, tmp_path / "runs.db")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout.split()[-1:] == ["recovered"], done.stderr
    assert len(done.stdout.split()) > 5


# locks


def test_a_second_server_on_the_same_ledger_is_told_who_has_it(tmp_path: Path) -> None:
    path = tmp_path / "runs.db"
    holder = subprocess.Popen(
        python("ledger = Ledger.open(path); print('open', flush=True); sys.stdin.read()", path),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "open\n"
        with pytest.raises(LedgerLocked) as locked:
            Ledger.open(path)
        assert one_sentence(locked.value, path, f"process {holder.pid}")
        with Ledger.open(path, read_only=True) as reader:
            assert reader.policies() == ()
    finally:
        holder.kill()
        holder.communicate(timeout=10)
    Ledger.open(path).close()


def test_the_same_process_cannot_open_it_for_writing_twice_until_it_is_closed(tmp_path: Path) -> None:
    with Ledger.open(tmp_path / "runs.db"), pytest.raises(LedgerLocked, match=str(os.getpid())):
        Ledger.open(tmp_path / "runs.db")
    Ledger.open(tmp_path / "runs.db").close()


LOCK = """
import sqlite3
connection = sqlite3.connect(path, isolation_level=None)
connection.execute("BEGIN IMMEDIATE" if sys.argv[2] == "write" else "PRAGMA locking_mode = EXCLUSIVE")
if sys.argv[2] != "write":
    connection.execute("BEGIN EXCLUSIVE")
print("locked", flush=True)
sys.stdin.read()
"""


@contextmanager
def locked_by_another_process(path: Path, how: str) -> Iterator[None]:
    other = subprocess.Popen(python(LOCK, path, how), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == "locked\n"
        yield
    finally:
        other.kill()
        other.communicate(timeout=10)


def test_a_file_locked_by_another_program_is_an_error_after_the_busy_timeout_and_reads_go_on(tmp_path: Path) -> None:
    with Ledger.open(tmp_path / "runs.db", busy_timeout=0.2) as ledger:
        made = recorded(ledger, 1)[0]
        second = completion(made.trajectory_id)
        with locked_by_another_process(ledger.path, "write"):
            with pytest.raises(LedgerLocked) as locked:
                ledger.append_completions([second])
            assert one_sentence(locked.value, ledger.path, "locked by another process")
            assert ledger.completions(made.trajectory_id or "") == (made,)
        ledger.append_completions([second])
        assert ledger.completions(made.trajectory_id or "") == (made, second)


@pytest.mark.parametrize("read_only", [True, False])
def test_opening_a_file_that_another_program_holds_exclusively_is_an_error(tmp_path: Path, read_only: bool) -> None:
    path = tmp_path / "runs.db"
    Ledger.open(path).close()
    with locked_by_another_process(path, "exclusive"), pytest.raises(LedgerLocked, match=r"runs\.db"):
        Ledger.open(path, read_only=read_only, busy_timeout=0.2)
    Ledger.open(path).close()


# versions


def set_version(path: Path, version: int) -> None:
    connection = sqlite3.connect(path)
    connection.execute(f"PRAGMA user_version = {version}")
    connection.commit()
    connection.close()


@pytest.mark.parametrize("read_only", [True, False])
def test_a_ledger_of_a_newer_version_is_refused_with_both_versions_and_left_as_it_is(tmp_path: Path, read_only: bool) -> None:
    path = tmp_path / "runs.db"
    Ledger.open(path).close()
    set_version(path, 99)
    before = path.read_bytes()
    with pytest.raises(LedgerVersionError) as refused:
        Ledger.open(path, read_only=read_only)
    assert one_sentence(refused.value, path, "version 99", ledger_schema.SCHEMA_VERSION)
    assert path.read_bytes() == before


def older_ledger(path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Completion]:
    """A ledger as version 1 wrote it: runs, but neither jobs nor checkpoints."""
    with monkeypatch.context() as older:
        older.setattr(ledger_schema, "STEPS", ledger_schema.STEPS[:1])
        with Ledger.open(path) as ledger:
            return recorded(ledger, 3)


def test_an_older_ledger_is_migrated_forward_with_all_it_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "runs.db"
    made = older_ledger(path, monkeypatch)
    connection = sqlite3.connect(path)
    assert connection.execute("PRAGMA user_version").fetchone() == (1,)
    assert connection.execute("SELECT name FROM sqlite_master WHERE name = 'jobs'").fetchone() is None
    connection.close()
    with pytest.raises(LedgerVersionError, match=r"schema version 1 .* version 2"):
        Ledger.open(path, read_only=True)
    with Ledger.open(path) as ledger:
        assert ledger.completions(made[0].trajectory_id or "") == tuple(made)
        job = TrainJob(id="j", policy=POLICY, kind="grpo", state="queued", phase="queued", created_at=0.0, updated_at=0.0)
        assert ledger.create_job(job, b"{}") == ledger.job("j")
    connection = sqlite3.connect(path)
    assert connection.execute("PRAGMA user_version").fetchone() == (ledger_schema.SCHEMA_VERSION,)
    connection.close()


def test_a_migration_that_fails_leaves_the_file_at_its_old_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "runs.db"
    made = older_ledger(path, monkeypatch)
    with monkeypatch.context() as broken:
        broken.setattr(ledger_schema, "STEPS", (ledger_schema.STEPS[0], "CREATE TABLE good (a);\nCREATE TABEL bad (b);\n"))
        with pytest.raises(LedgerError, match="syntax error"):
            Ledger.open(path)
    connection = sqlite3.connect(path)
    assert connection.execute("PRAGMA user_version").fetchone() == (1,)
    assert connection.execute("SELECT name FROM sqlite_master WHERE name = 'good'").fetchone() is None
    connection.close()
    with Ledger.open(path) as ledger:
        assert ledger.completions(made[0].trajectory_id or "") == tuple(made)


# files that are no ledger, or a damaged one


def test_another_programs_database_is_refused_and_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "browser.db"
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE bookmarks (url TEXT)")
    connection.commit()
    connection.close()
    before = path.read_bytes()
    for read_only in (True, False):
        with pytest.raises(LedgerError, match="another program"):
            Ledger.open(path, read_only=read_only)
    assert path.read_bytes() == before


@pytest.mark.parametrize("read_only", [True, False])
def test_a_file_that_is_no_database_is_refused(tmp_path: Path, read_only: bool) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("these are my notes, not a ledger\n" * 100)
    with pytest.raises(LedgerError) as refused:
        Ledger.open(path, read_only=read_only)
    assert one_sentence(refused.value, path, "damaged or no ledger")
    assert path.read_text().startswith("these are my notes")


def test_reading_where_there_is_nothing_makes_no_file(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match="there is no ledger"):
        Ledger.open(tmp_path / "runs.db", read_only=True)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LedgerError, match="could not be made"):
        Ledger.open(tmp_path / "file" / "runs.db")


def test_a_folder_in_the_place_of_the_ledger_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "runs.db").mkdir()
    with pytest.raises(LedgerError, match=r"runs\.db"):
        Ledger.open(tmp_path / "runs.db")
    with pytest.raises(LedgerError, match="there is no ledger"):
        Ledger.open(tmp_path / "runs.db", read_only=True)


def test_pages_overwritten_with_zeros_are_reported_as_damage(tmp_path: Path) -> None:
    path = tmp_path / "runs.db"
    with Ledger.open(path) as ledger:
        for _ in range(20):
            made = recorded(ledger, 5)
    content = bytearray(path.read_bytes())
    content[4096:] = bytes(len(content) - 4096)
    path.write_bytes(content)
    with Ledger.open(path, read_only=True) as reader, pytest.raises(LedgerError) as damaged:
        reader.completions(made[0].trajectory_id or "")
    assert one_sentence(damaged.value, "damaged")


def test_a_damaged_job_or_policy_is_one_sentence(tmp_path: Path) -> None:
    with Ledger.open(tmp_path / "runs.db") as ledger:
        ledger.put_policy(RegisterModel(project="mail", name="agent-001", base_model="x"))
        ledger.create_job(
            TrainJob(id="j", policy=POLICY, kind="grpo", state="queued", phase="queued", created_at=0.0, updated_at=0.0), b"{}"
        )
        connection = sqlite3.connect(ledger.path)
        connection.execute("UPDATE jobs SET state = 'sleeping'")
        connection.execute("UPDATE policies SET body = ?", (ledger_tokens.pack_text(b'{"project": 3}'),))
        connection.commit()
        connection.close()
        for call in (lambda: ledger.job("j"), ledger.policies, lambda: ledger.update_job("j", state="running")):
            with pytest.raises(LedgerError) as damaged:
                call()
            assert one_sentence(damaged.value, ledger.path, "damaged")


def test_two_names_of_one_file_are_one_ledger(tmp_path: Path) -> None:
    (tmp_path / "alias.db").symlink_to(tmp_path / "runs.db")
    with Ledger.open(tmp_path / "runs.db"), pytest.raises(LedgerLocked):
        Ledger.open(tmp_path / "alias.db")


def test_a_changed_blob_is_noticed_on_reading(tmp_path: Path) -> None:
    with Ledger.open(tmp_path / "runs.db") as ledger:
        made = recorded(ledger, 2)
    connection = sqlite3.connect(tmp_path / "runs.db")
    reply = connection.execute("SELECT reply FROM completions WHERE id = ?", (made[1].id,)).fetchone()[0]
    connection.execute(
        "UPDATE blobs SET data = ? WHERE seq = ?", (ledger_tokens.pack_text(b'{"role":"assistant","content":"forged"}'), reply)
    )
    connection.commit()
    connection.close()
    with Ledger.open(tmp_path / "runs.db", read_only=True) as reader:
        assert reader.completion(made[0].id) == made[0]
        with pytest.raises(LedgerError, match=made[1].id):
            reader.completion(made[1].id)


@pytest.mark.parametrize("column", ["tokens", "logprobs", "sampling_logprobs", "rest", "messages", "meta", "prefix"])
def test_a_changed_value_inside_a_sound_file_is_noticed_on_reading(tmp_path: Path, column: str) -> None:
    path = tmp_path / "runs.db"
    with Ledger.open(path) as ledger:
        made = recorded(ledger, 3, sampling_logprobs=(-0.5,) * 8, logprobs=(-0.25,) * 8)
    connection = sqlite3.connect(path)
    value = connection.execute(f"SELECT {column} FROM completions WHERE id = ?", (made[1].id,)).fetchone()[0]
    wrong = value - 1 if isinstance(value, int) else value[:-1] + bytes([value[-1] ^ 1])
    connection.execute(f"UPDATE completions SET {column} = ? WHERE id = ?", (wrong, made[1].id))
    connection.commit()
    connection.close()
    with Ledger.open(path, read_only=True) as reader:
        assert reader.completion(made[0].id) == made[0]
        with pytest.raises(LedgerError, match=made[1].id):
            reader.completion(made[1].id)


# SIGKILL

BURST = """
ledger = Ledger.open(path)
def work(number):
    trajectory = ledger.open_trajectory(Trajectory(policy=POLICY)).id
    prompt = (number,)
    while True:
        one = completion(trajectory, prompt)
        ledger.append_completions([one])
        os.write(1, f"{one.id}\\n".encode())
        prompt = (*prompt, *one.token_ids, 5)
for number in range(6):
    threading.Thread(target=work, args=(number,)).start()
"""


@pytest.mark.parametrize("after", [1, 40, 150])
def test_a_writer_killed_in_a_burst_loses_no_append_that_returned_and_doubles_none(tmp_path: Path, after: int) -> None:
    path = tmp_path / "runs.db"
    writer = subprocess.Popen(python(BURST, path), stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    returned = [writer.stdout.readline().strip() for _ in range(after)]
    writer.send_signal(signal.SIGKILL)
    returned += [line.strip() for line in writer.stdout.read().splitlines(keepends=True) if line.endswith("\n")]
    assert writer.wait(10) == -signal.SIGKILL
    with Ledger.open(path) as ledger:
        found = [one for batch in ledger.scan() for one in batch]
        ids = [one.id for one in found]
        assert len(ids) == len(set(ids))
        assert set(returned) <= set(ids)
        for trajectory in ledger.trajectories():
            rows = ledger.completions(trajectory.id)
            for before, one in itertools.pairwise(rows):
                assert one.prompt_ids == (*before.prompt_ids, *before.token_ids, 5)
        assert ledger.append_completions(found[:3]) is None
        assert ledger.counts().completions == len(ids)


def test_the_reader_of_a_killed_server_sees_what_was_committed(tmp_path: Path) -> None:
    path = tmp_path / "runs.db"
    writer = subprocess.Popen(python(BURST, path), stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    returned = {writer.stdout.readline().strip() for _ in range(20)}
    writer.kill()
    writer.communicate(timeout=10)
    with Ledger.open(path, read_only=True) as reader:
        assert returned <= {one.id for batch in reader.scan() for one in batch}
