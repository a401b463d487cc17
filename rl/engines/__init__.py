"""Rollout engines. Each module has the same six functions:

    make_engine(model, *, d, dtype, max_model_len, ...) -> engine
    generate(engine, prompts, sampling, *, seed)    one list of Completions per prompt
    update_weights(engine, named_tensors)           push the policy's weights, a stream of (name, whole tensor)
    sleep(engine), wake(engine)                     give the accelerator's memory back between rollouts, if there is any
    close(engine)

`vllm` is the fast one; `hf` needs nothing but transformers. `update_weights` runs between `wake` and `generate`.
"""
