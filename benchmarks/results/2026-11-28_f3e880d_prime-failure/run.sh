# From the repository's root: bash benchmarks/results/FOLDER/run.sh. parts.diff makes train_prime.py log what its returns are made of.
here=$(dirname "$0") work=runs/prime_failure
export OMP_NUM_THREADS=1 PYTHONPATH=.
mkdir -p $work
patch -o $work/train_prime_parts.py train_prime.py "$here/parts.diff"
python data/arithmetic.py --output-dir $work/data --num-sft 57600 --max-total 19
python sft.py --model $work/data/model --train-files $work/data/sft.parquet --default-local-dir $work/sft --max-length 128 \
  --lr 4e-3 --beta2 0.98 --lr-warmup-steps 30 --activation-checkpointing none --total-training-steps 350
run() { # run NAME SCRIPT FLAGS...
  for seed in 0 1 2; do
    python "${@:2}" --model $work/sft/global_step_350/huggingface --train-files $work/data/train.parquet \
      --val-files $work/data/test.parquet --max-prompt-length 32 --max-response-length 56 --activation-checkpointing none \
      --test-freq 20 --save-freq 0 --log-samples-freq 0 --train-batch-size 32 --rollout-n 8 --ppo-mini-batch-size 8 \
      --lr 3e-5 --total-training-steps 60 --seed $seed --default-local-dir $work/$1/seed_$seed
  done
}
prime=$work/train_prime_parts.py
run grpo train_grpo.py
run outcome $prime --prm-lr 3e-5 --reward-dpo-coef 0
run all $prime --prm-lr 3e-5
run all_slow $prime --prm-lr 3e-6
run chosen $prime --prm-lr 3e-5 --gen-batch-size 128
run chosen_slow $prime --prm-lr 3e-6 --gen-batch-size 128
run not_divided $prime --prm-lr 3e-6 --prime-norm none
run light $prime --prm-lr 3e-5 --reward-dpo-coef 0.5
python "$here/collect.py" $work > "$here/runs.json"
