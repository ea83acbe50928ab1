"""CheckpointStore: whole or absent, whatever happens; damage found by name; retention by rule."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from apprentice.core.config import AdapterConfig, CheckpointPolicy
from apprentice.core.errors import (
    ApprenticeError,
    CheckpointCorrupt,
    ConfigError,
    Conflict,
    InfrastructureError,
    InvalidRequest,
    UnknownCheckpoint,
)
from apprentice.core.training.base_models import ResolvedBase
from apprentice.core.training.checkpoints import Checkpoint, CheckpointState, CheckpointStore
from apprentice.core.training.policy import HostedModel

POLICY = "mail/agent-001"


def write(folder: Path) -> None:
    (folder / "adapter").mkdir()
    (folder / "adapter" / "weights").write_bytes(bytes(range(256)) * 40)
    (folder / "trainer").mkdir()
    (folder / "trainer" / "rng").write_bytes(b"state")


def publish(store: CheckpointStore, step: int, *, job: str | None = "job-1", **metrics: float) -> Checkpoint:
    return store.publish(POLICY, step, write, CheckpointState(step=step, job_id=job, metrics=metrics, config={"beta": 0.1}))


def steps(store: CheckpointStore) -> list[int]:
    return [checkpoint.step for checkpoint in store.list(POLICY)]


def leftovers(root: Path) -> list[str]:
    return [path.name for path in root.rglob("*") if path.name.startswith(".tmp-")]


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints")


def test_a_published_step_has_the_documented_layout_and_comes_back(store: CheckpointStore) -> None:
    checkpoint = publish(store, 3, **{"reward/mean": 0.5})
    assert checkpoint.path == store.root / "mail" / "agent-001" / "000003"
    assert sorted(p.relative_to(checkpoint.path).as_posix() for p in checkpoint.path.rglob("*") if p.is_file()) == [
        "adapter/weights",
        "manifest.json",
        "state.json",
        "trainer/rng",
    ]
    assert checkpoint.adapter.is_dir()
    assert checkpoint.trainer.is_dir()
    again = CheckpointStore(store.root).get(POLICY, 3)
    assert again == checkpoint
    assert (again.state.job_id, again.state.metrics, again.state.config) == ("job-1", {"reward/mean": 0.5}, {"beta": 0.1})
    store.verify(again)
    assert leftovers(store.root) == []


def test_latest_is_the_highest_step_and_list_is_in_order(store: CheckpointStore) -> None:
    assert store.latest(POLICY) is None
    assert store.list(POLICY) == ()
    for step in (2, 10, 1_000_000, 0):
        publish(store, step)
    latest = store.latest(POLICY)
    assert latest is not None
    assert latest.step == 1_000_000
    assert steps(store) == [0, 2, 10, 1_000_000]
    assert store.policies() == (POLICY,)


def test_an_unknown_step_is_named_with_the_steps_there_are(store: CheckpointStore) -> None:
    publish(store, 1)
    publish(store, 4)
    with pytest.raises(UnknownCheckpoint, match="no checkpoint of step 2; its steps: 1, 4"):
        store.get(POLICY, 2)
    with pytest.raises(UnknownCheckpoint, match="its steps: none"):
        store.delete("mail/other", 1)


@pytest.mark.parametrize(
    "policy", ["../evil/x", "a/..", "a/../b", "a/b/c", "a", "", "/a/b", "a/", "a/.hidden", "a/b\n", "ä/b", "a\\..\\/b"]
)
def test_names_that_could_leave_the_root_are_refused(store: CheckpointStore, policy: str) -> None:
    calls: list[Callable[[], object]] = [
        lambda: store.publish(policy, 1, write, CheckpointState(step=1)),
        lambda: store.get(policy, 1),
        lambda: store.list(policy),
        lambda: store.latest(policy),
        lambda: store.delete(policy, 1),
        lambda: store.pin(policy, 1),
        lambda: store.retain(policy, CheckpointPolicy()),
    ]
    for call in calls:
        with pytest.raises(InvalidRequest, match="a policy is named project/name"):
            call()
    assert list(store.root.iterdir()) == []


def test_negative_and_contradicting_steps_are_refused(store: CheckpointStore) -> None:
    with pytest.raises(InvalidRequest, match="0 or more"):
        store.get(POLICY, -1)
    with pytest.raises(InvalidRequest, match="the published step 2, got 3"):
        store.publish(POLICY, 2, write, CheckpointState(step=3))


def test_the_same_job_publishes_a_step_once_and_another_job_is_refused(store: CheckpointStore) -> None:
    first = publish(store, 1)

    def never(folder: Path) -> None:
        raise AssertionError("written again")

    assert store.publish(POLICY, 1, never, CheckpointState(step=1, job_id="job-1", metrics={"x": 1.0})) == first
    for job in ("job-2", None):
        with pytest.raises(Conflict, match=r"mail/agent-001@1 exists already, published by job job-1"):
            publish(store, 1, job=job)


def test_two_steps_without_a_job_conflict(store: CheckpointStore) -> None:
    publish(store, 1, job=None)
    with pytest.raises(Conflict):
        publish(store, 1, job=None)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "a flipped byte": (lambda folder: flip(folder / "adapter/weights"), "adapter/weights differs"),
    "a flipped byte in the state": (lambda folder: flip(folder / "state.json"), "state.json differs"),
    "a missing file": (lambda folder: (folder / "trainer/rng").unlink(), "trainer/rng is missing"),
    "an extra file": (lambda folder: (folder / "adapter/more").write_text("x"), "adapter/more is not listed"),
    "a link instead of a file": (
        lambda folder: ((folder / "trainer/rng").unlink(), (folder / "trainer/rng").symlink_to("/nowhere")),
        "trainer/rng is missing",
    ),
    "a cut file": (lambda folder: os.truncate(folder / "adapter/weights", 100), "adapter/weights has 100 bytes instead of 10240"),
    "a cut manifest": (lambda folder: os.truncate(folder / "manifest.json", 50), "manifest.json cannot be read"),
    "an empty manifest": (lambda folder: (folder / "manifest.json").write_text("{}"), "manifest.json does not have the expected form"),
    "a manifest of wrong types": (
        lambda folder: (folder / "manifest.json").write_text('{"format": 1, "files": {"a": 3}}'),
        "manifest.json does not have the expected form",
    ),
    "no manifest": (lambda folder: (folder / "manifest.json").unlink(), "manifest.json is missing"),
    "a binary manifest": (lambda folder: (folder / "manifest.json").write_bytes(b"\xff\xfe\x00"), "manifest.json cannot be read"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_found_and_named(store: CheckpointStore, kind: str) -> None:
    damage, said = DAMAGE[kind]
    checkpoint = publish(store, 1)
    damage(checkpoint.path)
    with pytest.raises(CheckpointCorrupt, match=rf"checkpoint mail/agent-001@1 in .* is damaged: {said}"):
        store.verify(checkpoint)


def test_every_single_flipped_byte_is_found(store: CheckpointStore) -> None:
    checkpoint = publish(store, 1)
    for file in ("state.json", "trainer/rng"):
        path = checkpoint.path / file
        whole = path.read_bytes()
        for position in range(len(whole)):
            path.write_bytes(whole[:position] + bytes([whole[position] ^ 0x20]) + whole[position + 1 :])
            with pytest.raises(CheckpointCorrupt, match=file):
                store.verify(checkpoint)
        path.write_bytes(whole)
    store.verify(checkpoint)


@pytest.mark.parametrize(
    ("content", "said"), [("{", "expected form"), ('{"step": 2}', "says step 2"), ('{"step": 1, "x": 1}', "expected form")]
)
def test_a_bad_state_is_refused_when_read(store: CheckpointStore, content: str, said: str) -> None:
    (publish(store, 1).path / "state.json").write_text(content)
    with pytest.raises(CheckpointCorrupt, match=said):
        store.get(POLICY, 1)
    store.delete(POLICY, 1)
    assert steps(store) == []


def test_a_writer_that_fails_leaves_nothing(store: CheckpointStore) -> None:
    def fails(folder: Path) -> None:
        write(folder)
        raise ConfigError("our own error")

    with pytest.raises(ConfigError, match="our own error"):
        store.publish(POLICY, 1, fails, CheckpointState(step=1))
    assert steps(store) == []
    assert leftovers(store.root) == []
    publish(store, 1)


def test_a_load_back_that_fails_or_changes_a_file_publishes_nothing(store: CheckpointStore) -> None:
    def differs(folder: Path) -> None:
        raise CheckpointCorrupt("the adapter loads back with other weights")

    with pytest.raises(CheckpointCorrupt, match="other weights"):
        store.publish(POLICY, 1, write, CheckpointState(step=1), verify=differs)
    with pytest.raises(CheckpointCorrupt, match="adapter/weights differs"):
        store.publish(POLICY, 1, write, CheckpointState(step=1), verify=lambda folder: flip(folder / "adapter/weights"))
    assert steps(store) == []
    assert leftovers(store.root) == []


def test_a_full_disk_is_a_clear_error_and_leaves_nothing(store: CheckpointStore) -> None:
    def full(folder: Path) -> None:
        write(folder)
        with Path("/dev/full").open("wb") as file:
            file.write(b"x" * 100_000)

    with pytest.raises(InfrastructureError, match=r"mail/agent-001@1 could not be written to .*No space left on device"):
        store.publish(POLICY, 1, full, CheckpointState(step=1))
    assert steps(store) == []
    assert leftovers(store.root) == []


def test_an_adapter_that_no_longer_fits_on_the_disk_is_a_clear_error(store: CheckpointStore, tiny_llama_folder: Path) -> None:
    """A real write error from the safetensors library: for a moment this process may not write files over 16 kB."""
    host = HostedModel.load(ResolvedBase("tiny", tiny_llama_folder, "0" * 64))
    host.add_adapter("a", AdapterConfig(rank=16), seed=0)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16384, hard))
    try:
        with pytest.raises(InfrastructureError, match="the adapter could not be written to"):
            store.publish(POLICY, 1, lambda folder: host.save_adapter("a", folder / "adapter"), CheckpointState(step=1))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert steps(store) == []
    assert leftovers(store.root) == []


def test_a_root_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be created"):
        CheckpointStore(tmp_path / "file" / "checkpoints")


def test_pinned_steps_stay_until_released(store: CheckpointStore) -> None:
    for step in range(1, 6):
        publish(store, step)
    assert store.pin(POLICY, 2).pinned
    with pytest.raises(UnknownCheckpoint):
        store.pin(POLICY, 9)
    with pytest.raises(Conflict, match="@2 is pinned"):
        store.delete(POLICY, 2)
    reopened = CheckpointStore(store.root)
    assert [c.step for c in reopened.list(POLICY) if c.pinned] == [2]
    assert reopened.retain(POLICY, CheckpointPolicy(keep_last=1, best_metric=None)) == (1, 3, 4)
    assert not reopened.pin(POLICY, 2, pinned=False).pinned
    assert reopened.retain(POLICY, CheckpointPolicy(keep_last=1, best_metric=None)) == (2,)
    assert steps(reopened) == [5]


@pytest.mark.parametrize("content", ["[1", '{"a": 1}', '["x"]'])
def test_damaged_pins_are_an_error_and_never_no_pins(store: CheckpointStore, content: str) -> None:
    publish(store, 1)
    (store.root / POLICY / "pins.json").write_text(content)
    with pytest.raises(CheckpointCorrupt, match=r"pins\.json"):
        store.retain(POLICY, CheckpointPolicy())


def test_retention_keeps_the_last_the_best_the_pinned_and_the_protected(store: CheckpointStore) -> None:
    rewards = {1: 0.1, 2: 0.9, 3: 0.9, 4: float("nan"), 5: 0.2, 6: 0.3, 7: 0.4}
    for step, reward in rewards.items():
        publish(store, step, **{"reward/mean": reward})
    rule = CheckpointPolicy(keep_last=2)
    assert store.retain(POLICY, rule, protect={1}, dry_run=True) == (2, 4, 5)
    assert steps(store) == [1, 2, 3, 4, 5, 6, 7]
    assert store.retain(POLICY, rule, protect={1}) == (2, 4, 5)
    assert steps(store) == [1, 3, 6, 7]
    assert leftovers(store.root) == []


def test_retention_without_the_metric_keeps_the_last(store: CheckpointStore) -> None:
    for step in range(4):
        publish(store, step)
    assert store.retain(POLICY, CheckpointPolicy(keep_last=3, best_metric="no/such")) == (0,)
    assert store.retain("mail/nothing-yet", CheckpointPolicy()) == ()


KILLS = '''
"""Fork a child per audit event of one publish; kill each at its event; check what a fresh store then sees."""
import json, os, signal, sys
from pathlib import Path
from apprentice.core.training.checkpoints import CheckpointState, CheckpointStore

root, action = Path(sys.argv[1]), sys.argv[2]
CONTENT = bytes(range(256)) * 400
countdown = 0

def hook(event, args):
    global countdown
    if countdown and event.split(".")[0] in ("open", "os", "shutil", "chunk"):
        countdown -= 1
        if countdown == 0:
            os.kill(os.getpid(), signal.SIGKILL)

def write(folder):
    for name in ("adapter", "trainer"):
        (folder / name).mkdir()
        with (folder / name / "data").open("wb", buffering=0) as file:
            for start in range(0, len(CONTENT), 16384):
                sys.audit("chunk.written")
                file.write(CONTENT[start:start + 16384])

def publish(store, step):
    return store.publish("p/a", step, write, CheckpointState(step=step, job_id="job"))

def act(store):
    if action == "publish":
        publish(store, 2)
    elif action == "delete":
        store.delete("p/a", 1)
    else:
        store.pin("p/a", 1)

sys.addaudithook(hook)
publish(CheckpointStore(root), 1)
seen, finished, number = [], False, 0
while not finished:
    number += 1
    child = os.fork()
    if child == 0:
        store = CheckpointStore(root)
        countdown = number
        act(store)
        os._exit(7)
    status = os.waitpid(child, 0)[1]
    finished = os.WIFEXITED(status)
    assert not finished or os.WEXITSTATUS(status) == 7, status
    store = CheckpointStore(root)
    assert not [p for p in root.rglob("*") if p.name.startswith(".tmp-")]
    there = []
    for checkpoint in store.list("p/a"):
        store.verify(checkpoint)
        assert (checkpoint.path / "adapter/data").read_bytes() == CONTENT
        there.append([checkpoint.step, checkpoint.pinned])
    seen.append(there)
    if not finished:
        if action == "publish" and [2, False] in there:
            store.delete("p/a", 2)
        if action == "delete" and not there:
            publish(store, 1)
        if action == "pin" and there == [[1, True]]:
            store.pin("p/a", 1, pinned=False)
print(json.dumps(seen))
'''


@pytest.mark.parametrize(
    ("action", "before", "after"),
    [("publish", [[1, False]], [[1, False], [2, False]]), ("delete", [[1, False]], []), ("pin", [[1, False]], [[1, True]])],
)
def test_killed_at_any_moment_an_action_has_happened_wholly_or_not_at_all(
    tmp_path: Path, action: str, before: list[list[object]], after: list[list[object]]
) -> None:
    done = subprocess.run([sys.executable, "-c", KILLS, str(tmp_path), action], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen[0] == before
    assert seen[-1] == after
    assert all(there in (before, after) for there in seen)
    assert sum(there == before for there in seen) >= 2


def test_a_running_writer_is_not_swept_by_another_store(store: CheckpointStore) -> None:
    def write_while_another_store_opens(folder: Path) -> None:
        write(folder)
        CheckpointStore(store.root)

    store.publish(POLICY, 1, write_while_another_store_opens, CheckpointState(step=1))
    store.verify(store.get(POLICY, 1))


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the system itself keeps when a process began")
def test_setting_the_clock_makes_no_running_writer_look_dead(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    as_before = psutil.Process.create_time

    def write_while_the_clock_is_set(folder: Path) -> None:
        write(folder)
        monkeypatch.setattr(psutil.Process, "create_time", lambda process: as_before(process) + 3600)
        CheckpointStore(store.root)

    store.publish(POLICY, 1, write_while_the_clock_is_set, CheckpointState(step=1))
    store.verify(store.get(POLICY, 1))


def test_what_a_dead_process_left_is_swept_though_its_id_is_used_again(store: CheckpointStore) -> None:
    publish(store, 1)
    for owner in (f"{os.getpid()}-1", "99999999-1"):
        (store.root / POLICY / f".tmp-000002-{owner}").mkdir()
    CheckpointStore(store.root)
    assert leftovers(store.root) == []
    assert steps(store) == [1]


def test_a_real_adapter_with_optimizer_and_random_state_survives_publishing(store: CheckpointStore, tiny_llama_folder: Path) -> None:
    host = HostedModel.load(ResolvedBase("tiny", tiny_llama_folder, "0" * 64))
    host.add_adapter("train", AdapterConfig(rank=4), seed=0)
    with torch.no_grad():
        for parameter in host.adapter_parameters("train").values():
            parameter.add_(0.01)

    def write_all(folder: Path) -> None:
        host.save_adapter("train", folder / "adapter")
        (folder / "trainer").mkdir()
        save_file({"rng": torch.get_rng_state()}, folder / "trainer" / "rng.safetensors")

    def load_back(folder: Path) -> None:
        host.load_adapter("check", folder / "adapter")
        ours, theirs = host.adapter_parameters("train"), host.adapter_parameters("check")
        if not all(torch.equal(ours[key], theirs[key]) for key in ours):
            raise CheckpointCorrupt("the adapter loads back with other weights")
        host.drop_adapter("check")

    checkpoint = store.publish(POLICY, 1, write_all, CheckpointState(step=1, job_id="j"), verify=load_back)
    host.load_adapter(f"{POLICY}@1", checkpoint.adapter)
    assert host.adapters() == {"train", f"{POLICY}@1"}
    assert load_file(checkpoint.trainer / "rng.safetensors")["rng"].dtype == torch.uint8


def test_every_error_of_this_room_is_one_sentence(store: CheckpointStore) -> None:
    publish(store, 1)
    for call in (lambda: store.get(POLICY, 5), lambda: publish(store, 1, job="other"), lambda: store.get("bad", 1)):
        with pytest.raises(ApprenticeError) as caught:
            call()
        assert "\n" not in caught.value.message
        assert not caught.value.message.endswith(".")
