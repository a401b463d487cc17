#!/usr/bin/env bash
# GRPO at its defaults on a Qwen2.5-shaped model with random weights and real GSM8K prompts (data/gsm8k/*.parquet).
# The reward is a hash of the response: a random model solves nothing, and equal rewards would leave nothing to train.
#   bash benchmarks/h200.sh TOKENIZER_FOLDER LOG_FOLDER [SHAPE] [STEPS] [GPUS] [NAME_SUFFIX FLAGS...]
set -uo pipefail
tokenizer=$1 logs=$2 shape=${3:-1.5B} steps=${4:-3} gpus=${5:-1} suffix=${6:-}
extra=("${@:7}")
mkdir -p "$logs"
model=/tmp/qwen-$shape
[ -d "$model" ] || python3 benchmarks/make_model.py --shape "$shape" --tokenizer "$tokenizer" --out "$model" 2>&1 | tail -2
run() { # run NAME NPROC FLAGS...
  local name=$1 nproc=$2; shift 2
  echo "== $name: torchrun --nproc_per_node $nproc train_grpo.py $* ${extra[*]}"
  torchrun --nproc_per_node "$nproc" train_grpo.py --model "$model" --total-training-steps "$steps" --no-val-before-train --test-freq -1 \
    --save-freq 0 --log-samples-freq 0 --default-local-dir "/tmp/runs/$name" \
    --custom-reward-function benchmarks/noise_reward.py "$@" "${extra[@]}" 2>&1 | tr '\r' '\n' | grep -v "it/s" > "$logs/$name.log"
  echo "exit ${PIPESTATUS[0]}"
  grep -E "^step|Error" "$logs/$name.log" | tail -8
  cp "/tmp/runs/$name/metrics.jsonl" "$logs/$name.metrics.jsonl" 2>/dev/null
}
nvidia-smi --query-gpu=name,memory.total,clocks.sm --format=csv,noheader
python3 -c "import torch, vllm, transformers; print('torch', torch.__version__, 'vllm', vllm.__version__, 'transformers', transformers.__version__)" 2>/dev/null
if [ "$gpus" = 1 ]; then
  run "grpo_${shape}_1gpu$suffix" 1
else
  run "grpo_${shape}_${gpus}gpu_tp1$suffix" "$gpus" --tensor-model-parallel-size 1
  run "grpo_${shape}_${gpus}gpu_tp2$suffix" "$gpus" --tensor-model-parallel-size 2
fi
