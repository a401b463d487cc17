# How verl.log was made. MODEL: the random 7B of benchmarks/make_model.py, of which one token in 400 ends a response, and whose
# chat template was replaced by "{% for m in messages %}{{ m['content'] }}{% endfor %}"; DATA: 1,024 prompts of 128 digits in
# verl's parquet. Micro-batches have 12,288 tokens. Everything that is not here is verl's default. The command ran for 610 s, of
# which 350 s passed before the first step. A worker of its data loader was killed at the end, behind the last step.
VLLM_USE_FLASHINFER_SAMPLER=0 python -m verl.trainer.main_ppo \
  algorithm.adv_estimator=grpo algorithm.use_kl_in_reward=False \
  data.train_files=DATA/train.parquet data.val_files=DATA/val.parquet data.train_batch_size=128 data.shuffle=False \
  data.max_prompt_length=512 data.max_response_length=1024 \
  actor_rollout_ref.model.path=MODEL actor_rollout_ref.model.use_remove_padding=True \
  actor_rollout_ref.model.enable_gradient_checkpointing=True +actor_rollout_ref.model.override_config.attn_implementation=flash_attention_2 \
  actor_rollout_ref.actor.strategy=fsdp2 actor_rollout_ref.actor.fsdp_config.strategy=fsdp2 actor_rollout_ref.ref.fsdp_config.strategy=fsdp2 actor_rollout_ref.ref.strategy=fsdp2 \
  actor_rollout_ref.actor.optim.lr=1e-6 actor_rollout_ref.actor.ppo_mini_batch_size=64 actor_rollout_ref.actor.ppo_epochs=1 \
  actor_rollout_ref.actor.use_dynamic_bsz=True actor_rollout_ref.actor.ppo_max_token_len_per_gpu=12288 \
  actor_rollout_ref.ref.log_prob_use_dynamic_bsz=True actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True \
  actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.001 actor_rollout_ref.actor.kl_loss_type=low_var_kl actor_rollout_ref.actor.entropy_coeff=0 actor_rollout_ref.actor.loss_agg_mode=token-mean \
  actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.tensor_model_parallel_size=2 actor_rollout_ref.rollout.n=8 \
  actor_rollout_ref.rollout.temperature=1.0 actor_rollout_ref.rollout.max_model_len=1536 \
  actor_rollout_ref.rollout.gpu_memory_utilization=0.6 actor_rollout_ref.rollout.max_num_seqs=1024 \
  reward.custom_reward_function.path=benchmarks/noise_reward.py reward.custom_reward_function.name=compute_score \
  trainer.logger='["console"]' trainer.val_before_train=False trainer.test_freq=-1 trainer.save_freq=-1 trainer.resume_mode=disable \
  trainer.n_gpus_per_node=4 trainer.nnodes=1 trainer.total_epochs=100 trainer.total_training_steps=4 \
  ray_kwargs.ray_init.num_cpus=64 +ray_kwargs.ray_init.include_dashboard=False +ray_kwargs.ray_init.object_store_memory=16000000000
