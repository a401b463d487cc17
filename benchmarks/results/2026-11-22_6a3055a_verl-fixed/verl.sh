# How verl_fixed.log was made. MODEL: the random model of benchmarks/step_time.py (--lengths fixed), whose chat template was
# replaced by "{% for m in messages %}{{ m['content'] }}{% endfor %}", so that a prompt is its 128 digits as in train_grpo.py;
# DATA: those prompts in verl's parquet. verl imports a class that TRL 1.16 no longer has, so TRL must not be installed.
# max_num_seqs: one wave instead of the default's two. Everything that is not here is verl's default.
VLLM_USE_FLASHINFER_SAMPLER=0 python -m verl.trainer.main_ppo \
  algorithm.adv_estimator=grpo algorithm.use_kl_in_reward=False \
  data.train_files=DATA/train.parquet data.val_files=DATA/val.parquet data.train_batch_size=64 data.shuffle=False \
  data.max_prompt_length=128 data.max_response_length=1024 \
  actor_rollout_ref.model.path=MODEL actor_rollout_ref.model.use_remove_padding=True \
  actor_rollout_ref.model.enable_gradient_checkpointing=True +actor_rollout_ref.model.override_config.attn_implementation=flash_attention_2 \
  actor_rollout_ref.actor.optim.lr=1e-6 actor_rollout_ref.actor.ppo_mini_batch_size=64 actor_rollout_ref.actor.ppo_epochs=1 \
  actor_rollout_ref.actor.use_dynamic_bsz=True actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384 \
  actor_rollout_ref.actor.use_kl_loss=False actor_rollout_ref.actor.entropy_coeff=0 actor_rollout_ref.actor.loss_agg_mode=token-mean \
  actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.tensor_model_parallel_size=1 actor_rollout_ref.rollout.n=8 \
  actor_rollout_ref.rollout.temperature=1.0 actor_rollout_ref.rollout.ignore_eos=True actor_rollout_ref.rollout.max_model_len=1152 \
  actor_rollout_ref.rollout.gpu_memory_utilization=0.5 actor_rollout_ref.rollout.max_num_seqs=512 \
  reward.custom_reward_function.path=benchmarks/noise_reward.py reward.custom_reward_function.name=compute_score \
  trainer.logger='["console"]' trainer.val_before_train=False trainer.test_freq=-1 trainer.save_freq=-1 trainer.resume_mode=disable \
  trainer.n_gpus_per_node=1 trainer.nnodes=1 trainer.total_epochs=100 trainer.total_training_steps=6 \
  ray_kwargs.ray_init.num_cpus=16 +ray_kwargs.ray_init.include_dashboard=False +ray_kwargs.ray_init.object_store_memory=4000000000
