"""What happens to checkpoints when processes are killed, disks fill up and bytes rot. docs/reliability.md has the list.

GLASSRL_RANDOM_KILLS=N (default 1) is how often runs are killed at random times in all: `make faults` asks for 50.
"""

import json
import math
import os
import pickle
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import helpers_scripts as h
import launch
import pyarrow.parquet as pq
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import sft
from rl.flags import build
from rl.ranks import init_ranks
from rl.run import checkpoint, resume, run_folder
from rl.run import checkpoint_files as files

pytestmark = pytest.mark.usefixtures("runs_here")

HERE = launch.TESTS / "faults"
RANDOM_KILLS = int(os.environ.get("GLASSRL_RANDOM_KILLS", "1"))
KILLED = {  # script, and what is special -> settings of a short run of it; one more is one more line
    "train_grpo": h.grpo_settings,
    "train_ppo": partial(h.ppo_settings, use_kl_loss=True, ref_update_steps=2),
    "train_dapo": h.dapo_settings,
    "train_reinforce": partial(h.reinforce_settings, ref_update_steps=2),
    "train_dpo": partial(h.dpo_settings, pairs="all", ref_update_steps=2),
    "train_distill": partial(h.distill_settings, loss_mode="jsd", reward_coef=1.0),
    "train_self_distill": h.self_distill_settings,
    "train_self_distill_variants": partial(h.self_distill_settings, hint_from="group", teacher="ema"),
    "train_prime": partial(h.prime_settings, gen_batch_size=6, prime_update="after"),
    "sft": h.sft_settings,
    "train_reward": h.reward_settings,
    "train_ppo with adapters, moments on the host": partial(h.ppo_settings, lora_rank=4, optimizer_offload=True),
}
COMBINATIONS = [(script, ranks) for ranks in (2, 0) for script in KILLED]  # 0 ranks: without torchrun


@pytest.fixture(scope="module")
def unbroken(task, tmp_path_factory):
    """An SFT run of four steps that nothing went wrong with, with a checkpoint after each."""
    folder = tmp_path_factory.mktemp("unbroken")
    sft.main(build(sft.Args, **h.sft_settings(task, folder, save_freq=1)))
    h.leave_distributed()
    return folder


@pytest.fixture
def solo():
    """A process group of one."""
    return init_ranks()


def assert_same_end(run_dir, unbroken, step):
    """Weights, optimizer and metrics of two runs are equal to the last bit."""
    one, two = run_dir / f"global_step_{step}", unbroken / f"global_step_{step}"
    h.assert_same(h.weights(one), h.weights(two))
    h.assert_same(h.saved_state(one), h.saved_state(two))
    assert h.timeless(h.read_jsonl(run_dir / "metrics.jsonl")) == h.timeless(h.read_jsonl(unbroken / "metrics.jsonl"))


def files_of(folder):
    return sorted(p for p in folder.rglob("*") if p.is_file())


# ---------------------------------------------------------------------------------------------------------------------
# Killed


def test_at_every_point_of_writing_exactly_one_intact_checkpoint_is_found(task, tmp_path):
    """The worker stops the world at each file operation of saving step 2 after 1, keeping one, and 2 again."""
    out = launch.run_file(HERE / "every_point.py", Path(task.model).parent, tmp_path / "run")
    (result,) = launch.objects(out, "complete")
    assert len(set(result["complete"])) == 3
    order = {digest: i for i, digest in enumerate(result["complete"])}
    sequence = [order[digest] for _, digest, _ in result["found"]]  # a KeyError: something that was never complete
    assert sequence == sorted(sequence) and set(sequence) == {0, 1, 2}  # never back, and never None
    assert min(sequence.count(i) for i in order.values()) > 5 and len(sequence) > 100
    for event, digest, names in result["found"]:
        allowed = {"run.lock", "STATUS.json", "global_step_1", "global_step_2"}
        assert set(names) <= allowed, f"{event}: {names} were not swept"
        assert "global_step_2" in names or order[digest] == 0


def run_until_random_kill(script, settings, ranks, seconds):
    """Start a script, kill -9 all its processes `seconds` after its first new line of metrics; whether it was alive."""
    metrics = Path(settings["default_local_dir"]) / "metrics.jsonl"
    before = metrics.stat().st_mtime_ns if metrics.exists() else 0
    run = launch.fork_file(f"{script}.py", *h.flags(settings), log=metrics.parent.with_suffix(".log"), nproc=ranks)

    def anybody() -> bool:
        return any(process.is_alive() for process in run.processes)

    launch.until(lambda: not anybody() or (metrics.exists() and metrics.stat().st_mtime_ns != before))
    time.sleep(seconds)
    alive = anybody()
    everybody = [pid for process in run.processes for pid in (process.pid, *launch.descendants(process.pid))]
    for pid in everybody if alive else []:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    codes = run.ends()
    assert alive or not any(codes), run.log.read_text()
    return alive


@pytest.mark.thorough
@pytest.mark.parametrize(("script", "ranks"), COMBINATIONS[:RANDOM_KILLS])
def test_runs_killed_at_random_times_end_as_if_nothing_had_happened(task, script, ranks, tmp_path):
    steps, rng, make = 8, random.Random(f"{script} {ranks}"), KILLED[script]
    script, changes = script.split()[0], dict(total_training_steps=steps, save_freq=1, max_ckpt_to_keep=2)
    launch.run_file(f"{script}.py", *h.flags(make(task, tmp_path / "unbroken", **changes)), nproc=ranks)
    kills, run_dir = 0, tmp_path / "run"
    while kills < RANDOM_KILLS / len(COMBINATIONS[:RANDOM_KILLS]):
        killed = run_until_random_kill(script, make(task, run_dir, **changes), ranks, rng.uniform(0, 0.7))
        kills += killed and steps not in files.list_steps(run_dir)  # in the middle
        if not killed:  # it came to its end: this one is done, kill another
            assert_same_end(run_dir, tmp_path / "unbroken", steps)
            shutil.rmtree(run_dir)
    launch.run_file(f"{script}.py", *h.flags(make(task, run_dir, **changes)), nproc=ranks)
    assert_same_end(run_dir, tmp_path / "unbroken", steps)
    assert {p.name for p in run_dir.iterdir() if p.is_dir()} == {f"global_step_{n}" for n in (steps - 1, steps)}


# ---------------------------------------------------------------------------------------------------------------------
# Damaged


def test_one_flipped_bit_in_any_file_is_detected(unbroken, solo, tmp_path):
    path, rng = shutil.copytree(unbroken / "global_step_4", tmp_path / "global_step_4"), random.Random(0)
    assert len(files_of(path)) >= 8
    for file in files_of(path):
        whole = file.read_bytes()
        for position in (0, rng.randrange(len(whole)), len(whole) - 1):
            damaged = bytearray(whole)
            damaged[position] ^= 1 << rng.randrange(8)
            file.write_bytes(damaged)
            with pytest.raises(ValueError, match="not a complete checkpoint") as error:
                resume.check_mode(str(path), solo)
            assert f"{file.relative_to(path)} is damaged" in str(error.value)
        file.write_bytes(whole)
    resume.check_mode(str(path), solo)


@pytest.mark.parametrize("damage", ["truncated", "emptied", "removed", "longer"])
def test_any_file_truncated_emptied_removed_or_longer_is_detected(unbroken, solo, tmp_path, damage):
    path = shutil.copytree(unbroken / "global_step_4", tmp_path / "global_step_4")
    change = {"truncated": lambda x: x[: len(x) // 2], "emptied": lambda x: b"", "longer": lambda x: x + b"\0"}
    for file in files_of(path):
        whole = file.read_bytes()
        file.unlink()
        if damage != "removed":
            file.write_bytes(change[damage](whole))
        with pytest.raises(ValueError, match="not a complete checkpoint"):
            resume.check_mode(str(path), solo)
        file.write_bytes(whole)
    resume.check_mode(str(path), solo)


def test_no_bit_of_the_manifest_is_without_guard(unbroken, solo, tmp_path):
    path = shutil.copytree(unbroken / "global_step_4", tmp_path / "global_step_4")
    manifest = path / "MANIFEST.json"
    whole = manifest.read_bytes()
    shutil.rmtree(path / "state")  # accepted manifests are then refused for this, without much hashing
    for i in range(0, len(whole) * 8, 11):
        damaged = bytearray(whole)
        damaged[i // 8] ^= 1 << i % 8
        manifest.write_bytes(damaged)
        with pytest.raises(ValueError) as error:
            resume.check_mode(str(path), solo)
        assert "state/" not in str(error.value), f"bit {i} of the manifest is not missed"


def test_the_newest_intact_checkpoint_is_taken_and_the_others_are_named(task, unbroken, tmp_path, capsys):
    run_dir = shutil.copytree(unbroken, tmp_path / "run")
    shard = next((run_dir / "global_step_4" / "state").iterdir())
    shard.write_bytes(shard.read_bytes()[:-1] + bytes([shard.read_bytes()[-1] ^ 1]))
    (run_dir / "global_step_3" / "huggingface" / "config.json").write_text("")
    sft.main(build(sft.Args, **h.sft_settings(task, run_dir, save_freq=1)))
    printed = capsys.readouterr().out
    assert f"passed over: {run_dir}/global_step_4: state/{shard.name} is damaged" in printed
    assert f"passed over: {run_dir}/global_step_3: huggingface/config.json has 0 bytes instead of" in printed
    assert f"resumed from {run_dir}/global_step_2, steps 3-4" in printed
    assert_same_end(run_dir, unbroken, 4)


def test_if_all_are_damaged_the_run_does_not_start_over(task, unbroken, tmp_path):
    run_dir = shutil.copytree(unbroken, tmp_path / "run")
    for file in run_dir.glob("global_step_*/trainer_state.json"):
        file.unlink()
    (run_dir / "global_step_3" / "MANIFEST.json").unlink()
    with pytest.raises(ValueError, match="none of the checkpoints under .* is intact") as error:
        sft.main(build(sft.Args, **h.sft_settings(task, run_dir, save_freq=1)))
    assert str(error.value).count("trainer_state.json is missing") == 3 and "no MANIFEST.json" in str(error.value)


# ---------------------------------------------------------------------------------------------------------------------
# Hostile, or of another model


class Payload:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


def sealed(path):
    """Give a changed checkpoint a manifest that fits, as whoever changed it on purpose would."""
    manifest = json.loads((path / "MANIFEST.json").read_text())
    manifest["files"] = {name: files.size_and_hash(path / name) for name in manifest["files"]}
    manifest.pop("sha256")
    (path / "MANIFEST.json").write_text(json.dumps(manifest | {"sha256": files.hash_of(manifest)}))


def change_state(path, change):
    """`change` the tensors, by name, and the shards, in the file of rank 0."""
    file = path / "state" / "rank_0.safetensors"
    with safe_open(file, "pt") as f:
        tensors = {name: f.get_tensor(name).clone() for name in f.keys()}
        shards = json.loads(f.metadata()["shards"])
    change(tensors, shards)
    save_file(tensors, file, metadata={"shards": json.dumps(shards)})
    sealed(path)


def resume_from(task, path, run_dir, **changes):
    return sft.main(build(sft.Args, **h.sft_settings(task, run_dir, resume_mode=str(path), **changes)))


def test_a_pickle_that_runs_code_is_refused(task, unbroken, tmp_path):
    path = shutil.copytree(unbroken / "global_step_4", tmp_path / "global_step_4")
    marker, file = tmp_path / "marker", path / "state" / "rank_0.safetensors"
    file.write_bytes(pickle.dumps(Payload(marker)))
    sealed(path)
    with pytest.raises(ValueError, match=r"rank_0\.safetensors is not loaded: SafetensorError"):
        resume_from(task, path, tmp_path / "run")
    assert not marker.exists()
    pickle.loads(file.read_bytes())  # it would have run
    assert marker.exists()


def test_what_is_saved_is_tensors_and_json(unbroken):
    kinds = {p.suffix for p in files_of(unbroken / "global_step_4")}
    assert kinds == {".safetensors", ".json", ".jinja"}


def test_names_shapes_and_types_must_be_those_of_the_model(task, unbroken, tmp_path):
    path = shutil.copytree(unbroken / "global_step_4", tmp_path / "global_step_4")
    norm, moment = "actor/model/model.norm.weight", "actor/optimizer/model.norm.weight/exp_avg"

    def change(tensors, shards):
        for old, new in ((norm, "actor/model/extra"), (f"{moment}_sq", f"{moment}/sq")):
            tensors[new], shards[new] = tensors.pop(old), shards.pop(old)
        tensors["actor/model/model.embed_tokens.weight"] = torch.zeros(7, 96)
        shards["actor/model/model.embed_tokens.weight"] = [0, [7, 96]]
        tensors[moment] = tensors[moment].bfloat16()

    change_state(path, change)
    with pytest.raises(ValueError, match="the checkpoint is of another model: 5 tensors differ") as error:
        resume_from(task, path, tmp_path / "run")
    for words in (
        "actor/model/extra is not part of the model or the optimizer",
        "exp_avg/sq is not part of the model or the optimizer",
        "actor/model/model.norm.weight is missing",
        "actor/model/model.embed_tokens.weight is (7, 96) torch.float32, the model wants (",
        "exp_avg is (96,) torch.bfloat16, the model wants (96,) torch.float32",
    ):
        assert words in str(error.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tensors, shards: shards["actor/model/model.norm.weight"].__setitem__(0, 1), "is not there as a whole"),
        (
            lambda tensors, shards: shards["actor/model/model.norm.weight"].__setitem__(1, [97]),
            "is not there as a whole",
        ),
        (lambda tensors, shards: shards["actor/model/model.norm.weight"].__setitem__(1, []), "is not there as a whole"),
        (lambda tensors, shards: shards.update({"actor/model/x": [0, [1]]}), "rank_0.safetensors is not loaded"),
        (lambda tensors, shards: shards.update({"actor/model/x": "ab"}), "rank_0.safetensors is not loaded"),
        (lambda tensors, shards: shards.pop("actor/model/model.norm.weight"), "model.norm.weight is missing"),
        (lambda tensors, shards: shards.update({"actor/model/model.norm.weight": ["a", [96]]}), "is not loaded"),
        (lambda tensors, shards: shards.update({"actor/model/model.norm.weight": [0, ["a"]]}), "is not loaded"),
        (lambda tensors, shards: shards.update({"actor/model/model.norm.weight": [0.5, [96]]}), "is not loaded"),
        (
            lambda tensors, shards: tensors["actor/optimizer/model.norm.weight/step"].fill_(math.nan),
            "model.norm.weight/step is nan, and counts steps",
        ),
    ],
)
def test_rows_that_are_missing_or_do_not_fit_are_refused(task, unbroken, tmp_path, change, words):
    path = shutil.copytree(unbroken / "global_step_4", tmp_path / "global_step_4")
    change_state(path, change)
    with pytest.raises(ValueError, match=words):
        resume_from(task, path, tmp_path / "run")


WRONG = (None, "x", -1, 1.5, math.nan, True, [], {}, [None], {"a": None}, 10**30, [[1]], "global_step_1")
RIGHT = {  # of a field of trainer_state.json, what only says that the run was another one
    "args": [{}, {"a": None}],
    "script": ["x", "global_step_1"],
    "total_steps": [0, 7, 10**6],
    "data_sha256": [[], ["x"]],
    "tokenizer_sha256": ["x", "global_step_1"],
    "lora": [{}],
    "day": ["2020-02-29"],
    "memory": [{}, {"a": None}],
}


def test_every_field_that_is_read_of_a_checkpoint_is_checked(unbroken, solo, tmp_path, capsys):
    """A forged field is named and the checkpoint is passed over, or the run is told that its settings were others."""
    path = shutil.copytree(unbroken / "global_step_4", tmp_path / "global_step_4")
    shutil.copytree(unbroken / "global_step_3", tmp_path / "global_step_3")
    file = path / "trainer_state.json"
    written = json.loads(file.read_text())
    assert {"step", "world_size", "experts", *RIGHT} == written.keys()
    count = 0
    for field in written:
        without = {key: x for key, x in written.items() if key != field}
        may_lack = field in ("script", "experts", "lora", "day", "memory")  # as older checkpoints do
        states = [(without, may_lack), *((written | {field: x}, False) for x in WRONG if x not in RIGHT.get(field, []))]
        states += [(written | {field: x}, True) for x in RIGHT.get(field, [])]
        for state, is_right in states:
            file.write_text(json.dumps(state))
            sealed(path)
            found, printed = resume.find_checkpoint("auto", tmp_path, solo), capsys.readouterr().out
            if is_right:
                assert found == path, printed
                assert isinstance(resume.differences(resume.trainer_state(path), written, written["args"], set()), list)
                continue
            count += 1
            assert found == tmp_path / "global_step_3", (field, state.get(field))
            assert f"passed over: {path}: {file}: the field {field} is " in printed, (field, state.get(field))
            with pytest.raises(ValueError, match=f"not a complete checkpoint .*the field {field} is"):
                resume.check_mode(str(path), solo)
    assert count > 70
    for field, value in (("step", 3), ("world_size", 2)):  # which other files contradict
        file.write_text(json.dumps(written | {field: value}))
        sealed(path)
        with pytest.raises(ValueError, match=f"the field {field} is {value}, and "):
            resume.check_mode(str(path), solo)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "7", '"x"', "{'a': 1}", "\udcff", "[" * 100_000])
def test_files_that_hold_no_fields_are_named(unbroken, solo, tmp_path, text):
    path = shutil.copytree(unbroken / "global_step_4", tmp_path / "global_step_4")
    data = text.encode("utf-8", "surrogateescape")
    for name in ("trainer_state.json", "loop/rank_0.json", "MANIFEST.json"):
        whole = (path / name).read_bytes()
        (path / name).write_bytes(data)
        if name != "MANIFEST.json":
            sealed(path)
        with pytest.raises(ValueError, match=f"{name} (is damaged|is not loaded|holds a .* instead of fields)"):
            resume.check_mode(str(path), solo)
            checkpoint.load_states(path)
        (path / name).write_bytes(whole)
    sealed(path)
    resume.check_mode(str(path), solo)
    assert len(checkpoint.load_states(path)) == 1


def test_a_manifest_that_fits_itself_but_lists_no_files_is_damaged(unbroken, solo, tmp_path):
    path = shutil.copytree(unbroken / "global_step_4", tmp_path / "global_step_4")
    written = json.loads((path / "MANIFEST.json").read_text())
    del written["sha256"]
    unlisted = {name: x for name, x in written["files"].items() if name != "trainer_state.json"}
    for listed in (None, [], {}, 7, {"trainer_state.json": None}, {"trainer_state.json": {"size": 1}}, unlisted):
        manifest = written | {"files": listed}
        (path / "MANIFEST.json").write_text(json.dumps(manifest | {"sha256": files.hash_of(manifest)}))
        with pytest.raises(ValueError, match=r"not a complete checkpoint \(MANIFEST.json is damaged\)"):
            resume.check_mode(str(path), solo)


# ---------------------------------------------------------------------------------------------------------------------
# Full disks


class FullDisk:
    """Files of this process may not grow beyond 100 kB: weights do not fit, logs do."""

    def __enter__(self):
        self.limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, self.limits[1]))

    def __exit__(self, *_):
        resource.setrlimit(resource.RLIMIT_FSIZE, self.limits)


def full_disk_at(*steps, write=checkpoint.Saver._write, rank=0):
    """A `_write` that finds a full disk at these steps, on one rank."""

    def limited(saver, step, *rest):
        if step not in steps or saver.ranks.rank != rank:
            return write(saver, step, *rest)
        with FullDisk():
            return write(saver, step, *rest)

    return limited


def test_a_full_disk_costs_one_checkpoint(task, unbroken, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(checkpoint.Saver, "_write", full_disk_at(1, 2))
    sft.main(build(sft.Args, **h.sft_settings(task, tmp_path / "run", save_freq=1, max_ckpt_to_keep=1)))
    assert {p.name for p in (tmp_path / "run").iterdir() if p.is_dir()} == {"global_step_4"}
    h.assert_same(h.weights(tmp_path / "run" / "global_step_4"), h.weights(unbroken / "global_step_4"))
    failed = [x for x in h.read_jsonl(tmp_path / "run" / "metrics.jsonl") if "checkpoint/failed" in x]
    # Known when the next save has begun: the first failure in step 3, and both in step 4.
    assert [(x["step"], x["checkpoint/failed"]) for x in failed] == [(1, 0.0), (2, 0.0), (3, 1.0), (4, 2.0)]
    printed = capsys.readouterr().out
    assert "CHECKPOINT OF STEP 1 NOT WRITTEN (1 in a row): rank 0: " in printed and "File too large" in printed
    assert "CHECKPOINT OF STEP 2 NOT WRITTEN (2 in a row): rank 0: " in printed


def test_a_disk_that_is_full_for_the_log_too_costs_no_more(task, unbroken, tmp_path):
    """Messages go to the same disk, so not even the failure can be told."""
    settings = h.sft_settings(task, tmp_path / "run", save_freq=1, logger=("tensorboard",))
    code = f"""
import sys
sys.path[:0] = {[str(HERE), str(launch.TESTS)]!r}
sys.stdout = sys.stderr = open("/dev/full", "w")
import test_checkpoint_faults as faults
from rl.flags import build
from rl.run import checkpoint
import sft
checkpoint.Saver._write = faults.full_disk_at(2)
sft.main(build(sft.Args, **{settings!r}))
import os
os._exit(0)  # or Python complains that it cannot flush stdout
"""
    (tmp_path / "worker.py").write_text(code)
    launch.run_file(tmp_path / "worker.py")
    h.assert_same(h.weights(tmp_path / "run" / "global_step_4"), h.weights(unbroken / "global_step_4"))
    assert files.list_steps(tmp_path / "run") == [1, 3, 4]


def test_three_failures_in_a_row_stop_the_run_and_leave_the_old_checkpoint(task, tmp_path, monkeypatch, solo):
    monkeypatch.setattr(checkpoint.Saver, "_write", full_disk_at(*range(2, 9)))
    settings = h.sft_settings(task, tmp_path / "run", save_freq=1, max_ckpt_to_keep=1, total_training_steps=8)
    with pytest.raises(RuntimeError, match="3 checkpoints in a row could not be written to .*File too large"):
        sft.main(build(sft.Args, **settings))
    assert {p.name for p in (tmp_path / "run").iterdir() if p.is_dir()} == {"global_step_1"}
    assert resume.find_checkpoint("auto", tmp_path / "run", solo) == tmp_path / "run" / "global_step_1"


def test_a_run_whose_result_was_not_written_ends_with_an_error(task, unbroken, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint.Saver, "_write", full_disk_at(4))
    settings = h.sft_settings(task, tmp_path / "run", save_freq=2)
    with pytest.raises(RuntimeError, match="the last checkpoint could not be written"):
        sft.main(build(sft.Args, **settings))
    monkeypatch.undo()
    sft.main(build(sft.Args, **settings))  # the same command, on a disk that has space again
    h.assert_same(h.weights(tmp_path / "run" / "global_step_4"), h.weights(unbroken / "global_step_4"))


def test_without_enough_free_space_nothing_is_begun(task, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(checkpoint, "FREE_SPACE", 1e9)  # times 3.4 MB: more than any disk has
    with pytest.raises(RuntimeError, match="the last checkpoint could not be written"):
        sft.main(build(sft.Args, **h.sft_settings(task, tmp_path / "run")))
    assert "GB are needed in" in capsys.readouterr().out
    assert not [p for p in (tmp_path / "run").iterdir() if p.is_dir()]


def limit_files():
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))


@pytest.mark.thorough
def test_a_file_size_limit_below_a_checkpoint_costs_no_more_than_a_full_disk(task, tmp_path):
    """`ulimit -f` in the shell: the run goes on to its end without its result."""
    run = launch.fork("sft", h.sft_settings(task, tmp_path / "run", save_freq=2), tmp_path / "log", fault=limit_files)
    assert run.ends() == [1]
    printed = run.log.read_text()
    found = re.findall(r"CHECKPOINT OF STEP (\d) NOT WRITTEN \((\d) in a row\): rank 0: .*File too large", printed)
    assert found == [("2", "1"), ("4", "2")]
    assert printed.count("Traceback") == 1 and "RuntimeError: the last checkpoint could not be written" in printed
    assert [x["step"] for x in h.read_jsonl(tmp_path / "run" / "metrics.jsonl")] == [1, 2, 3, 4]
    assert not [p for p in (tmp_path / "run").iterdir() if p.is_dir()]


RANK_1_FULL = f"""
import sys
sys.path[:0] = [{str(launch.TESTS)!r}, {str(HERE)!r}]
from rl import flags
from rl.run import arguments
from rl.run import checkpoint
import sft, test_checkpoint_faults as faults

checkpoint.Saver._write = faults.full_disk_at(2, rank=1)
sft.main(arguments.parse(sft.Args, None))
"""


@pytest.mark.thorough
def test_a_disk_that_is_full_for_one_rank_of_two(task, tmp_path):
    """All ranks agree to leave step 2 out, and nobody waits for anybody; a second run in the folder is turned away."""
    (tmp_path / "worker.py").write_text(RANK_1_FULL)
    settings = h.sft_settings(task, tmp_path / "run", save_freq=1)
    output = launch.run_file(tmp_path / "worker.py", *h.flags(settings), nproc=2)
    assert output.count("CHECKPOINT OF STEP 2 NOT WRITTEN (1 in a row): rank 1: ") == 1
    assert {p.name for p in (tmp_path / "run").iterdir() if p.is_dir()} == {f"global_step_{n}" for n in (1, 3, 4)}


def test_saving_ranks_and_training_ranks_never_wait_for_each_other(task, tmp_path):
    """33 saves are written while the main threads call collectives; failures on rank 1 are known to both, in time."""
    names = [str(HERE / "saving_ranks.py"), task.model, task.train, tmp_path / "run"]
    output = launch.run_file(*names, nproc=2)
    results = launch.objects(output, "rank")
    assert sorted(x["rank"] for x in results) == [0, 1]
    for result in results:
        # Step 10 failed, which the save of step 11 finds out; 31 and 32 failed, and 33 was the third in a row.
        assert result["failures"] == [0] * 10 + [1] + [0] * 20 + [1, 2]
        assert "3 checkpoints in a row could not be written" in result["end"] and "rank 1: " in result["end"]
        assert result["busy"] > 30  # of 660: it did train while its thread wrote
    assert output.count(" NOT WRITTEN (1 in a row): rank 1: ") == 2
    assert output.count(" NOT WRITTEN (3 in a row): rank 1: ") == 1
    assert {p.name for p in (tmp_path / "run").iterdir() if p.is_dir()} == {"global_step_29", "global_step_30"}
    for step in (29, 30):
        saved = tmp_path / "run" / f"global_step_{step}"
        assert checkpoint.load_states(saved) == [{"rank": rank, "step": step} for rank in (0, 1)]
        state = {n: x for n, x in h.saved_state(saved).items() if n.startswith("actor/model/")}
        assert state and all((x == step).all() for x in (state | h.weights(saved)).values())
    status = json.loads((tmp_path / "run" / "STATUS.json").read_text())
    assert (status["state"], status["step"], status["total_steps"]) == ("running", 30, 33)  # it did not end well


# ---------------------------------------------------------------------------------------------------------------------
# Two runs in one folder


HOLD = """
import sys
from pathlib import Path
from rl.run import run_folder
lock = run_folder.lock(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


def test_a_second_run_in_a_folder_is_refused_on_all_ranks_until_the_first_has_gone(task, tmp_path):
    first = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "run")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=launch.ROOT,
        text=True,
    )
    try:
        assert first.stdout.readline() == "held\n"
        settings = h.sft_settings(task, tmp_path / "run")
        second = launch.fork("sft", settings, tmp_path / "log", ranks=2)  # not as a command, whose second rank waits
        assert second.ends() == [1, 1]
        sentence = f"Failed: {tmp_path / 'run'} is in use by another run (process {first.pid} on "
        assert second.log.read_text().count(sentence) == 2, second.log.read_text()
        assert [p.name for p in (tmp_path / "run").iterdir()] == ["run.lock"]
    finally:
        first.kill()
        first.wait()
    sft.main(build(sft.Args, **settings))
    assert files.list_steps(tmp_path / "run") == [4]


def test_a_folder_that_cannot_be_written_is_refused(task, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="--default-local-dir: .*/file/run cannot be written"):
        sft.main(build(sft.Args, **h.sft_settings(task, tmp_path / "file" / "run")))


def test_a_lock_that_is_a_link_or_a_pipe_is_refused_and_its_target_left_alone(tmp_path):
    (tmp_path / "mine").write_text("my thesis")
    for name, make in (("link", lambda p: p.symlink_to(tmp_path / "mine")), ("pipe", os.mkfifo)):
        (tmp_path / name).mkdir()
        make(tmp_path / name / "run.lock")
        with pytest.raises(ValueError, match=f"--default-local-dir: .*/{name} cannot be written"):
            run_folder.lock(tmp_path / name)
    assert (tmp_path / "mine").read_text() == "my thesis"


def folder_of_own(base):
    os.chdir(base / os.environ["RANK"])


def test_ranks_with_other_training_files_are_refused(task, tmp_path):
    lines = pq.read_table(task.sft).to_pylist()
    for rank in (0, 1):  # the second machine has an older file: one row less
        (tmp_path / str(rank)).mkdir()
        (tmp_path / str(rank) / "train.jsonl").write_text("\n".join(map(json.dumps, lines[: len(lines) - rank])))
    settings = h.sft_settings(task, tmp_path / "run", train_files=("train.jsonl",))
    run = launch.fork("sft", settings, tmp_path / "log", fault=partial(folder_of_own, tmp_path), ranks=2)
    assert run.ends() == [1, 1]
    printed = run.log.read_text()
    assert printed.count("ValueError: --train-files: rank 1 has other contents than rank 0 (data_sha256 ") == 2
    assert "RANK" not in printed  # each has said it for itself


def test_only_own_checkpoints_are_deleted_across_restarts(task, tmp_path):
    run_dir = tmp_path / "run"
    settings = h.sft_settings(task, run_dir, save_freq=1, max_ckpt_to_keep=2, lr_scheduler_type="constant")
    sft.main(build(sft.Args, **settings | {"total_training_steps": 2}))
    foreign = [run_dir / name for name in ("global_step_0", "global_step_x", "keep")]  # no manifest, or no number
    for folder in foreign:
        folder.mkdir()
        (folder / "notes").write_text("mine")
    for steps in (3, 5):
        sft.main(build(sft.Args, **settings | {"total_training_steps": steps}))
    assert files.list_steps(run_dir) == [0, 4, 5]
    assert all((folder / "notes").read_text() == "mine" for folder in foreign)
