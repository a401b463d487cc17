"""A worker of test_checkpoint_faults.py, for two ranks: `saving_ranks.py MODEL TRAIN_FILE RUN_FOLDER`.

It begins 33 saves while the main threads train: they change the weights and never stop calling collectives of their
own, at a different pace on each rank. The disk of rank 1 is full at steps 10 and 31 to 33. Each rank prints as JSON the
failures it knew of after each save, the collectives it made while one was written, and how the run ended.
"""

import json
import sys
import time

import test_checkpoint_faults as faults
import torch
import torch.distributed as dist
from transformers import AutoTokenizer

import train_grpo
from rl.flags import build
from rl.model import load as models
from rl.model.sharding import shard
from rl.ranks import init_ranks, shutdown_ranks
from rl.run import checkpoint, loop_state, resume, run_folder


def main(model: str, train_file: str, root: str) -> None:
    ranks = init_ranks()
    policy = shard(models.load_pretrained(model, ranks), ranks)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    trained = {"actor": (policy, optimizer)}
    args = build(train_grpo.Args, model=model, train_files=(train_file,))
    tokenizer = AutoTokenizer.from_pretrained(model)
    folder = run_folder.RunFolder(root, ranks, 33)
    resume_from, _, record = resume.choose_checkpoint(args, tokenizer, folder)
    saver = checkpoint.Saver(folder, record, tokenizer, keep=2, resume_from=resume_from)
    checkpoint.Saver._write = faults.full_disk_at(10, 31, 32, 33, rank=1)
    failures, busy, end = [], 0, ""
    for step in range(1, 34):
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.fill_(step)
        saver.save(step, trained, loop_state.encode({"rank": ranks.rank, "step": step}))
        failures.append(saver.failures)
        saver.wait_until_copied()
        for parameter in policy.parameters():
            parameter.data.fill_(-1.0)  # of no step: what is saved must be of the moment of the call
        for i in range(20):
            writing = not saver.pending[1].done()
            total = ranks.all_reduce_sum(torch.tensor(1.0))
            assert total == ranks.size
            busy += writing
            time.sleep(0.001 * ((step + i + 2 * ranks.rank) % 3))
    try:
        saver.close("completed", 33)
    except RuntimeError as error:
        end = str(error)
    found = {"rank": ranks.rank, "failures": failures, "busy": busy, "end": end}
    sys.stdout.write(json.dumps(found) + "\n")  # in one write: two lines of ranks that print at once stay two
    sys.stdout.flush()
    dist.barrier()
    shutdown_ranks()


if __name__ == "__main__":
    main(*sys.argv[1:])
