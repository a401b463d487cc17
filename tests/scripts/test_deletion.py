"""The law of deletion: with every extra deleted, except for its door, a default run trains to the same bits."""

import shutil

import helpers_scripts as h
import launch
from launch import ROOT


def test_a_default_run_needs_no_file_of_an_extra_except_doors(tmp_path):
    h.needs_vllm()
    doors = sorted(ROOT.glob("extras/*/__init__.py"))
    task, copy = h.make_task(tmp_path), tmp_path / "copy"
    shutil.copytree(ROOT / "rl", copy / "rl", ignore=shutil.ignore_patterns("__pycache__"))
    for path in (ROOT / "train_grpo.py", ROOT / "extras" / "__init__.py", *doors):
        (copy / path.relative_to(ROOT)).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy / path.relative_to(ROOT))

    def settings(name: str) -> dict[str, object]:
        chosen = h.grpo_settings(task, tmp_path / name, total_training_steps=3)
        return {flag: x for flag, x in chosen.items() if flag not in ("engine", "val_before_train", "test_freq")}

    whole = launch.fork("train_grpo", settings("whole"), tmp_path / "log")
    program = (
        "import sys, train_grpo\n"
        "from rl.flags import build\n"
        f"train_grpo.main(build(train_grpo.Args, **{settings('doors')!r}))\n"
        "print('LOADED', train_grpo.__file__, *sorted(name for name in sys.modules if name.startswith('extras')))\n"
    )
    output = launch.run("-c", program, cwd=copy, PYTHONPATH=copy)
    (line,) = [x for x in output.splitlines() if x.startswith("LOADED")]
    _, script, *loaded = line.split()
    assert script == str(copy / "train_grpo.py") and "extras.plan" in loaded
    assert set(loaded) <= {"extras", *(f"extras.{door.parent.name}" for door in doors)}

    assert not any(whole.ends()), whole.log.read_text()
    old, new = (tmp_path / name for name in ("whole", "doors"))
    for read in (h.saved_state, h.weights):
        h.assert_same(read(old / "global_step_3"), read(new / "global_step_3"))
    metrics = [h.timeless(h.read_jsonl(folder / "metrics.jsonl")) for folder in (old, new)]
    assert metrics[0] == metrics[1]
    assert [line["step"] for line in metrics[0]] == [0, 1, 2, 3, 3]  # evaluations before and after three steps
