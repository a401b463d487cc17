#!/usr/bin/env bash
# three seeds: top_p 0.7 with the trainer's log-probs of the whole vocabulary ("before") and of the truncated distribution ("after"), and other settings
cd /tmp/topp; export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1
T=/tmp/topp/tree; PY=.venv/bin/python
[ -d data ] || $PY $T/data/arithmetic.py --output-dir data --num-sft 57600 > data.log 2>&1
[ -d sft ] || $PY $T/sft.py --model data/model --train-files data/sft.parquet --max-length 128 --lr 4e-3 --beta2 0.98 --lr-warmup-steps 30 --activation-checkpointing none --log-freq 50 --total-training-steps 450 --default-local-dir sft > sft.log 2>&1
F="--model sft/global_step_450/huggingface --train-files data/train.parquet --val-files data/test.parquet --max-prompt-length 32 --max-response-length 40 --activation-checkpointing none --test-freq 5 --save-freq 0 --log-samples-freq 0 --train-batch-size 32 --rollout-n 8 --lr 1e-4 --total-training-steps 60 --engine vllm"
one() { # NAME SCRIPT FLAGS
  local name=$1 script=$2; shift 2
  [ -f $name/done ] || { timeout 900 $PY $script $F --default-local-dir $name "$@" > $name.log 2>&1 && touch $name/done; }
  tail -1 $name.log | cut -c1-150
}
for seed in 0 1 2; do
  one whole_$seed $T/train_grpo.py --seed $seed
  one before_$seed $T/before.py --seed $seed --top-p 0.7 --max-logprob-gap 5
  one after_$seed $T/train_grpo.py --seed $seed --top-p 0.7
  one grail_$seed $T/train_grpo.py --seed $seed --temperature 0.7 --top-p 0.95 --top-k 50
done
for seed in 0 1 2; do
  one before09_$seed $T/before.py --seed $seed --top-p 0.9 --max-logprob-gap 5
  one after09_$seed $T/train_grpo.py --seed $seed --top-p 0.9
done
