# From the repository's root. CHECKPOINT: SmolLM2 after SFT on word problems, by benchmarks/pretrained.py, in bfloat16.
here=$(dirname "$0")
for rank in 1 8 32; do
  python sft.py --model "$CHECKPOINT" --train-files runs/pretrained/word_problems/data/sft.parquet --default-local-dir runs/lora_$rank \
    --max-length 640 --max-token-len-per-gpu 4096 --train-batch-size 8 --lr 1e-3 --lr-warmup-steps 0 --total-training-steps 12 --lora-rank $rank
  python "$here/lora_rounding.py" "$CHECKPOINT" runs/lora_$rank/global_step_12 \
    benchmarks/results/2026-11-23_9dcc2ce_smollm2-lora-fp8/grpo_2.generations.jsonl | tee "$here/rank_$rank.log"
done
