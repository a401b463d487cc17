# SmolLM2 with LoRA in float32 on a CPU: the same 100 problems by a run's engine, by eval.py on its export, by PEFT
set -e
W=${1:-runs/peft}; mkdir -p $W
[ -d $W/smollm2 ] || python data/smollm2.py --output-dir $W/smollm2
[ -d $W/data ] || python data/word_problems.py --output-dir $W/data --num-test 2000
python -c "import pyarrow.parquet as p; p.write_table(p.read_table('$W/data/test.parquet')[:100], '$W/test100.parquet')"
python sft.py --model $W/smollm2 --train-files $W/data/sft.parquet --default-local-dir $W/sft --max-length 320 --train-batch-size 8 --lr 1e-4 \
  --lr-warmup-steps 10 --total-training-steps 60 --activation-checkpointing none --log-freq 10
python train_grpo.py --model $W/sft/global_step_60/huggingface --train-files $W/data/train.parquet --val-files $W/test100.parquet \
  --lora-rank 8 --lr 1e-3 --train-batch-size 8 --rollout-n 4 --max-prompt-length 288 --max-response-length 128 --total-training-steps 2 \
  --test-freq 2 --save-freq 2 --activation-checkpointing none --default-local-dir $W/grpo
python eval.py --model $W/grpo/global_step_2/huggingface --val-files $W/test100.parquet --max-prompt-length 288 --max-response-length 128 \
  --output $W/merged.jsonl | tee $W/eval.log
python peft_compare.py $W
