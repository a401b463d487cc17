"""What values flags may have, which of them a resumed run may change, and what --help says: from the types alone."""

import dataclasses
import importlib.util
import inspect
import math
import re
import shlex
import sys
from dataclasses import dataclass
from types import SimpleNamespace

import helpers_scripts as h
import launch
import pytest
import torch
from helpers_flags import parsed

import eval as evaluation
import sft
import train_async
import train_dapo
import train_distill
import train_dpo
import train_grpo
import train_grpo_variants
import train_ppo
import train_prime
import train_reinforce
import train_reward
import train_self_distill
import train_self_distill_variants
from extras import help as help_boxes
from extras.lora import LoRA
from extras.plan import settle
from extras.samplers import SamplerFlags
from extras.samplers.local import devices_of
from rl import flags
from rl.flags import Above1, AtLeast1, Count, Free, NotNegative, Positive, PositiveShare, Seconds, Share, build
from rl.run import arguments, command_line, training
from rl.run.checkpoint_files import list_steps
from rl.run.tracking import LoggingRL
from rl.sampling.engines.flags import EngineFlags

pytestmark = pytest.mark.usefixtures("runs_here")

TRAINING = {
    "grpo": train_grpo,
    "grpo_variants": train_grpo_variants,
    "ppo": train_ppo,
    "dapo": train_dapo,
    "reinforce": train_reinforce,
    "dpo": train_dpo,
    "distill": train_distill,
    "self_distill": train_self_distill,
    "self_distill_variants": train_self_distill_variants,
    "prime": train_prime,
    "sft": sft,
    "reward": train_reward,
    "async": train_async,
}
SCRIPTS = TRAINING | {"eval": evaluation}

# Written out, so that a flag that decides what is learned does not become free by standing in another place.
MAY_CHANGE = set(
    """
    train_files val_files total_epochs total_training_steps
    reward_workers reward_timeout reward_memory_mb reward_max_error_frac allow_unsafe_code_execution
    tensor_model_parallel_size gpu_memory_utilization max_num_seqs free_cache_engine max_logprob_gap log_stats
    allow_dropped_text ppo_max_token_len_per_gpu max_token_len_per_gpu activation_checkpointing fsdp_size compile
    sequence_parallel_size expert_parallel_size optimizer_offload param_offload rollout_quantization router_replay
    val_before_train val_n val_temperature val_top_p val_top_k val_min_p
    test_freq log_val_generations log_samples_freq log_freq logger project_name experiment_name prometheus_port
    default_local_dir save_freq max_ckpt_to_keep resume_mode force_resume stall_timeout max_hours alarms
    samplers sampler_devices sampler_address sampler_timeout weights_transfer weights_dir
    critic_offload max_num_gen_batches environment_timeout teacher_url teacher_timeout teacher_offload prm_offload
    agents_at_once
    plan plan_response_length plan_host_memory
    """.split()
)

# What each number must be, in every script that has it.
LIMITS = {
    "at least 1": """
        train_batch_size ppo_mini_batch_size gen_batch_size max_num_gen_batches max_samples
        total_epochs total_training_steps max_prompt_length max_response_length max_length reward_model_max_length
        max_hinted_prompt_length
        max_turns max_tool_response_length agents_at_once agent_max_calls fsdp_size sequence_parallel_size
        expert_parallel_size
        max_ckpt_to_keep kl_horizon ppo_max_token_len_per_gpu max_token_len_per_gpu ref_update_steps lora_alpha
    """,
    "at least 1 and at most 65536": "rollout_n val_n ppo_epochs max_num_seqs tensor_model_parallel_size",
    "at least 1 and at most 1024": "reward_workers",
    "at least 0 and at most 65536": "lora_rank max_staleness",
    "at least 0 and at most 1024": "samplers",
    "at least 0 and at most 100": "partial_rollouts",
    "at least -1": "test_freq save_freq",
    "positive": """
        beta prime_beta grad_clip kl_target rollout_is_threshold rollout_mask_threshold off_policy_mask_threshold
        probability_mask_threshold dro_beta
        loss_scale_factor max_logprob_gap max_hours tau_pos tau_neg plan_response_length plan_host_memory
    """,
    "positive and at most 1e9": "stall_timeout reward_timeout teacher_timeout environment_timeout",
    "at least 5 and at most 1e9": "sampler_timeout",
    "0, or within 0.01 and 100": "val_temperature",
    "positive and at most 1": """
        gpu_memory_utilization top_p val_top_p top_entropy_quantile clip_cov_ratio kl_cov_ratio teacher_ema_rate
    """,
    "at least 0": """
        lr_warmup_steps critic_warmup reward_memory_mb log_freq log_samples_freq log_val_generations overlong_buffer_len
        seed
    """,
    "at least 0 and at most 1e6": """
        lr critic_lr prm_lr weight_decay clip_ratio_low clip_ratio_high cliprange_value overlong_penalty_factor
        kl_coef kl_loss_coef rollout_is_threshold_lower rollout_mask_threshold_lower pair_margin
        router_aux_loss_coef distillation_loss_coef echo_coef reward_coef reward_dpo_coef reward_gt_coef ppo_kl_coef
    """,
    "within 0 and 1": "label_smoothing reward_max_error_frac gamma lam beta2 min_p val_min_p jsd_beta "
    "accuracy_lower_bound accuracy_upper_bound",
    "at least 1, or -1 for all tokens": "top_k val_top_k distill_top_k",
    "above 1": "clip_ratio_c",
    "within 1 and 65535": "prometheus_port",
}
LIMITS = {flag: words for words, names in LIMITS.items() for flag in names.split()}
ANY_NUMBER = """
    reward_model_coef entropy_coeff
    correct_at right_score clip_cov_lb clip_cov_ub
""".split()  # has a meaning, or is compared with something else later
REFUSED_AND_TAKEN = {
    "at least 1": ([0, -1], [1, 10**9]),
    "positive": ([0, -1e-9], [1e-9, 1e9]),
    "positive and at most 1e9": ([0, -1e-9, 1.1e9, math.inf], [1e-9, 1e9]),
    "at least 5 and at most 1e9": ([0, -6, 1e-9, 1.0, 4.9, 1.1e9], [5, 60, 1e9]),
    "within 0.01 and 100": ([0, -1, 0.009, 101], [0.01, 100]),
    "0, or within 0.01 and 100": ([-1, 0.009, 101], [0, 0.01, 100]),
    "positive and at most 1": ([0, -0.1, 1.001], [1e-9, 1]),
    "at least 0": ([-1, -1e-9], [0, 1e9]),
    "at least 0 and at most 1e6": ([-1, -1e-9, 1.1e6, 1e9], [0, 1e-9, 1e6]),
    "at least 0 and at most 100": ([-1, -1e-9, 101, 1e9], [0, 0.5, 100]),
    "at least 0 and at most 65536": ([-1, 65537, 10**9], [0, 1, 65536]),
    "at least 1 and at most 65536": ([0, -1, 65537, 10**9], [1, 65536]),
    "at least 0 and at most 1024": ([-1, 1025, 10**7], [0, 1, 1024]),
    "at least 1 and at most 1024": ([0, -1, 1025, 10**7], [1, 1024]),
    "at least -1": ([-2, -7], [-1, 0, 1, 10**9]),
    "within 0 and 1": ([-1e-9, 1.001], [0, 0.5, 1]),
    "at least 1, or -1 for all tokens": ([0, -2], [-1, 1, 10**6]),
    "above 1": ([1, 0, -3], [1.001, 1e9]),
    "within 1 and 65535": ([0, -1, 65536], [1, 65535]),
}


def names_of(script):
    return set(flags.flat(script.Args()))


def numbers_of(script):
    """The flags whose value is one number, or None."""
    hints = {name: str(hint) for name, _, hint in flags._each(script.Args())}
    return {name for name, hint in hints.items() if re.search(r"\b(int|float)\b", hint) and "tuple" not in hint}


def limit_of(script, flag):
    """The temperature of eval.py may be 0, which is greedy."""
    prefix = "0, or " if script is evaluation else ""
    return f"{prefix}within 0.01 and 100" if flag == "temperature" else LIMITS[flag]


# ---------------------------------------------------------------------------------------------------------------------
# Limits


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_number_of_a_script_has_its_limit_or_may_be_any(name):
    script = SCRIPTS[name]
    assert numbers_of(script) - {"temperature", *ANY_NUMBER} == LIMITS.keys() & names_of(script)
    flags.check_limits(script.Args())


@pytest.mark.parametrize("name", h.some(SCRIPTS, "grpo_variants", "ppo", "sft", "eval"))
def test_a_number_beyond_its_limit_is_refused_and_one_within_it_is_taken(name):
    script = SCRIPTS[name]
    numbers = numbers_of(script)
    for flag in numbers:
        for value in (math.nan, math.inf, -math.inf, 1e-300, -1e-300, 1e300):
            with pytest.raises(ValueError, match=f"--{flag.replace('_', '-')} {re.escape(str(value))} must be "):
                flags.check_limits(build(script.Args, **{flag: value}))
    if "gdpo_reward_weights" in names_of(script):
        with pytest.raises(ValueError, match="--gdpo-reward-weights inf must be 0, or between 1e-12 and 1e12 in size"):
            flags.check_limits(build(script.Args, gdpo_reward_weights=(1.0, math.inf)))
    for flag in numbers - set(ANY_NUMBER):
        words = limit_of(script, flag)
        refused, taken = REFUSED_AND_TAKEN[words]
        for value in refused:
            with pytest.raises(ValueError) as error:
                flags.check_limits(build(script.Args, **{flag: value}))
            assert str(error.value) == f"--{flag.replace('_', '-')} {value} must be {words}"
        for value in taken:
            args = build(script.Args, **{flag: value})
            try:
                flags.check_limits(args)
            except ValueError as error:  # beyond another flag, or without one, and not beyond its own limit
                of_another = flag.startswith(("rollout_", "accuracy_")) or "has no effect without" in str(error)
                assert " must be " not in str(error) and of_another, error


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_text_of_a_script_is_one(name):
    """Paths, ids and addresses among them."""
    args = SCRIPTS[name].Args()
    for flag, value, hint in flags._each(args):
        if not re.search(r"\bstr\b", str(hint)):
            continue
        for text in ("", " ", "\t", "a\0b", "a\nb", "/tmp/" + 256 * "n"):
            given = (text,) if "tuple" in str(hint) else text
            words = f"--{flag.replace('_', '-')} {text!r} must be a text without control characters and without names"
            with pytest.raises(ValueError, match=re.escape(words)):
                flags.check_limits(build(type(args), **{flag: given}))
        flags.check_limits(build(type(args), **{flag: value}))


CAPABILITIES = {
    "environment": ["--environment or --tools", dict(max_turns=3, max_tool_response_length=9)],
    "tools": ["--environment or --tools or --agent", dict(environment_timeout=9.0)],
    "agent": ["--agent", dict(agents_at_once=9, agent_max_calls=9)],
    "reward_model": ["--reward-model", dict(reward_model_coef=2.0, reward_model_max_length=9)],
    "lora_rank": ["--lora-rank", dict(lora_alpha=8, target_modules=("q_proj",), lora_experts=True)],
    "rollout_is": ["--rollout-is", dict(rollout_is_threshold=3.0, rollout_is_threshold_lower=0.1)],
    "rollout_mask": ["--rollout-mask", dict(rollout_mask_threshold=3.0, rollout_mask_threshold_lower=0.1)],
    "val_temperature": ["--val-temperature", dict(val_top_p=0.5, val_top_k=9, val_min_p=0.5)],
}
ON = dict(environment="a.py", reward_model="a", lora_rank=8, rollout_is="token", rollout_mask="veto")
ON |= dict(val_temperature=1.0, tools=("a.py",), agent="a")


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_a_flag_of_a_capability_says_nothing_without_it(capability):
    others, values = CAPABILITIES[capability]
    for flag, value in values.items():
        words = f"--{flag.replace('_', '-')} {value} has no effect without {others}; add that, or leave it out"
        with pytest.raises(ValueError, match=re.escape(words)):
            flags.check_limits(build(train_grpo.Args, **{flag: value}))
        flags.check_limits(build(train_grpo.Args, **{flag: value, capability: ON[capability]}))
        flags.check_limits(build(train_grpo.Args, **{flag: flags.flat(train_grpo.Args())[flag]}))
    flags.check_limits(build(train_grpo.Args, max_turns=3, tools=("a.py",)))  # any of several does
    flags.check_limits(build(train_async.Args, rollout_is_threshold=3.0))  # there a default switches it on
    with pytest.raises(ValueError, match="--rollout-is-threshold 3.0 has no effect without --rollout-is;"):
        flags.check_limits(build(train_async.Args, rollout_is_threshold=3.0, rollout_is="none"))
    with pytest.raises(ValueError, match="--teacher-timeout 5.0 has no effect without --teacher-url;"):
        flags.check_limits(build(train_distill.Args, teacher_timeout=5.0))
    with pytest.raises(ValueError, match=re.escape("--sampler-devices ('0',) has no effect without --samplers;")):
        flags.check_limits(build(train_async.Args, sampler_devices=("0",), samplers=0))


@pytest.mark.parametrize(
    "address",
    ["nonsense", "tcp://", "tcp://*", "tcp://127.0.0.1", "tcp://a:b", "tcp://a:123456", "tcp://a:99999", "udp://a:5"],
)
def test_an_address_is_one(address):
    with pytest.raises(ValueError, match=re.escape(f"--sampler-address {address!r} must be an address such as tcp://")):
        flags.check_limits(build(train_async.Args, sampler_address=address))
    with pytest.raises(ValueError, match=re.escape(f"--teacher-url {address!r} must be an address that begins with")):
        flags.check_limits(build(train_distill.Args, teacher_url=address))


def test_a_vision_tower_learns_only_if_there_are_images():
    with pytest.raises(ValueError, match="--no-freeze-vision-tower has no effect without images in the data"):
        LoRA(freeze_vision_tower=False).check_model("a model that is not even looked for")
    LoRA().check_model("a model that is not even looked for")
    assert not LoRA().keeps_weights


def test_only_the_policy_needs_routers_for_the_loss_that_evens_out_experts(task):
    LoRA(router_aux_loss_coef=0.1).check_model("a model that is not even looked for")
    LoRA().check_policy("a model that is not even looked for")
    with pytest.raises(ValueError, match=r"--router-aux-loss-coef 0\.1 needs a mixture of experts"):
        LoRA(router_aux_loss_coef=0.1).check_policy(task.model)
    with pytest.raises(ValueError, match="--model /no/such/model"):  # which is looked at before
        training.check(build(sft.Args, model="/no/such/model", router_aux_loss_coef=0.1, train_files=("x.jsonl",)))


def test_every_sampler_has_a_gpu_of_its_own_name():
    cpu = SimpleNamespace(device=torch.device("cpu"))
    assert devices_of(SamplerFlags(samplers=2), 1, cpu) == [None, None]
    assert devices_of(SamplerFlags(2, ("0", "0")), 1, cpu) == [None, None]
    for count, named in ((2, ("0",)), (1, ("0", "1")), (1, ())):
        words = f"--sampler-devices {named} must name {count} GPU(s), as --samplers {count} needs them"
        with pytest.raises(ValueError, match=re.escape(words)):
            devices_of(SamplerFlags(count, named), 1, cpu)


def test_a_sampler_of_several_gpus_gets_neighbors_that_no_trainer_uses(monkeypatch):
    gpu = SimpleNamespace(device=torch.device("cuda"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert devices_of(SamplerFlags(samplers=2), 1, gpu) == ["2", "3"]
    assert devices_of(SamplerFlags(samplers=2), 2, gpu) == ["2,3", "4,5"]
    assert devices_of(SamplerFlags(1, ("6", "0")), 2, gpu) == ["6,0"]
    each = "with 2 GPUs each (--tensor-model-parallel-size)"
    with pytest.raises(ValueError, match=re.escape(f"--samplers 3 {each}: 5 of this machine's 7 GPUs have no trainer")):
        devices_of(SamplerFlags(samplers=3), 2, gpu)
    words = f"--sampler-devices ('5', '6') must name 4 GPU(s), as --samplers 2 {each} needs them"
    with pytest.raises(ValueError, match=re.escape(words)):
        devices_of(SamplerFlags(2, ("5", "6")), 2, gpu)


def test_addresses_that_are_right():
    for address in ("tcp://127.0.0.1:*", "tcp://0.0.0.0:5555", "tcp://[::1]:65000", "tcp://a.host:1", "ipc:///tmp/x"):
        flags.check_limits(build(train_async.Args, sampler_address=address))
    for address in ("http://localhost:8000", "https://a.b/c", "http://10.0.0.1:80/v1"):
        flags.check_limits(build(train_distill.Args, teacher_url=address))


def test_a_lower_bound_is_not_above_its_upper_one():
    bounds = dict(rollout_mask="token", rollout_mask_threshold=1.5, rollout_mask_threshold_lower=1.5)
    flags.check_limits(build(train_grpo.Args, **bounds))
    words = "--rollout-mask-threshold-lower 1.5 is above --rollout-mask-threshold 1.4; lower it"
    with pytest.raises(ValueError, match=words):
        flags.check_limits(build(train_grpo.Args, **bounds | dict(rollout_mask_threshold=1.4)))
    with pytest.raises(ValueError, match="--clip-cov-lb 6 is above --clip-cov-ub 5.0; lower it"):
        flags.check_limits(build(train_grpo_variants.Args, clip_cov_lb=6))
    with pytest.raises(ValueError, match="--accuracy-lower-bound 0.9 is above --accuracy-upper-bound 0.8; lower it"):
        flags.check_limits(build(train_prime.Args, accuracy_lower_bound=0.9))

    @dataclass(frozen=True)
    class Copied:  # of a user, whose flag only sounds like the end of a range
        entropy_lower: float = 0.1

    flags.check_limits(Copied())


def test_no_limit_is_of_a_flag_that_is_none():
    every = set().union(*map(names_of, SCRIPTS.values()))
    assert {*LIMITS, *ANY_NUMBER, *MAY_CHANGE} <= every and not LIMITS.keys() & set(ANY_NUMBER)


@dataclass(frozen=True)
class Typed:
    count: Free[AtLeast1 | None] = None
    other: Free[AtLeast1] | None = 2
    share: Share | None = 0.5
    both: Free[Positive] = 1.0
    several: tuple[Above1, ...] = (2.0,)
    mixed: AtLeast1 | str = "auto"
    switch: bool = False
    text: str = "0"
    finite: Seconds = 1.0
    rest: tuple[NotNegative, Count] = (0.0, 0)
    part: PositiveShare = 1.0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(count=0), "--count 0 must be at least 1"),
        (dict(other=0), "--other 0 must be at least 1"),
        (dict(share=1.5), "--share 1.5 must be within 0 and 1"),
        (dict(share=math.nan), "--share nan must be within 0 and 1"),
        (dict(both=0.0), "--both 0.0 must be positive"),
        (dict(several=(2.0, 1.0)), "--several 1.0 must be above 1"),
        (dict(several=(2.0, math.nan)), "--several nan must be above 1"),
        (dict(mixed=0), "--mixed 0 must be at least 1"),
        (dict(finite=math.inf), "--finite inf must be positive and at most 1e9"),
        (dict(rest=(0.0, -1)), "--rest -1 must be at least 0"),
        (dict(part=0.0), "--part 0.0 must be positive and at most 1"),
    ],
)
def test_a_limit_is_found_wherever_it_stands_in_the_type(changes, words):
    flags.check_limits(Typed())
    flags.check_limits(Typed(count=3, other=None, share=None, several=(), mixed=1, switch=True))
    with pytest.raises(ValueError, match=words):
        flags.check_limits(Typed(**changes))


def test_free_is_found_wherever_it_stands_in_the_type():
    assert flags.marked(Typed(), flags.FREE) == {"count", "other", "both"}


# ---------------------------------------------------------------------------------------------------------------------
# What a resumed run may change


@pytest.mark.parametrize("name", TRAINING)
def test_a_resumed_run_may_change_these_and_no_other(name):
    assert flags.marked(TRAINING[name].Args(), flags.FREE) == MAY_CHANGE & names_of(TRAINING[name])


def test_what_decides_what_a_supervised_run_learns_is_kept():
    kept = """model train_batch_size max_length filter_overlong lr beta2 lr_warmup_steps lr_scheduler_type weight_decay
        grad_clip seed lora_rank lora_alpha target_modules lora_experts freeze_vision_tower
        router_aux_loss_coef apply_chat_template_kwargs dtype""".split()
    for script in (sft, train_reward):
        assert names_of(script) - flags.marked(script.Args(), flags.FREE) == set(kept)


OWN = """    my_share: Share | None = 0.25  # words of mine about a share
    my_pace: Free[AtLeast1 | None] = 7  # words of mine about a pace
"""


@pytest.fixture(scope="module")
def mine(tmp_path_factory):
    """A copy of sft.py with two flags of its own: nothing but the line of each is written."""
    file = tmp_path_factory.mktemp("mine") / "my_sft.py"
    text = (launch.ROOT / "sft.py").read_text()
    changes = {"import AtLeast1,": "import AtLeast1, Free, Share,", "    seed: Count = 0": f"{OWN}    seed: Count = 0"}
    for old, new in changes.items():
        assert text.count(old) == 1
        text = text.replace(old, new)
    file.write_text(text)
    spec = importlib.util.spec_from_file_location("my_sft", file)
    module = sys.modules["my_sft"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules["my_sft"]


def test_a_flag_of_ones_own_has_its_limit_and_its_place_in_resuming(mine, tmp_path):
    task = h.make_task(tmp_path / "task")

    def train(steps, **changes):
        settings = h.sft_settings(task, tmp_path / "run", total_training_steps=steps, lr_scheduler_type="constant")
        mine.main(build(mine.Args, **settings | changes))

    with pytest.raises(ValueError, match="--my-share 1.5 must be within 0 and 1"):
        train(1, my_share=1.5)
    with pytest.raises(ValueError, match="--my-pace 0 must be at least 1"):
        train(1, my_pace=0)
    assert not (tmp_path / "run").exists()
    train(1)
    with pytest.raises(ValueError, match="other settings") as error:
        train(2, my_share=0.5, my_pace=8)
    assert "--my-share: was 0.25, is 0.5" in str(error.value) and "--my-pace" not in str(error.value)
    with pytest.raises(ValueError, match="--my-share: was 0.25, is None"):
        train(2, my_share=None)
    train(2, my_pace=8)
    train(3, my_share=0.5, force_resume=True)
    assert list_steps(tmp_path / "run") == [1, 2, 3]


def test_a_reference_that_follows_the_policy_is_no_base_of_adapters():
    with pytest.raises(
        ValueError, match="--ref-update-steps 5: with --lora-rank 8 the reference is the policy without"
    ):
        training.check(build(train_grpo_variants.Args, ref_update_steps=5, lora_rank=8))


# ---------------------------------------------------------------------------------------------------------------------
# Flags by name, wherever they stand


def test_build_and_change_find_a_flag_in_its_group_and_refuse_what_is_none():
    args = build(train_grpo.Args, lr=1e-5, lora_rank=8, experiment_name="mine", engine="hf")
    assert (args.lr, args.lora.lora_rank, args.logging.experiment_name, args.rollout.engine) == (1e-5, 8, "mine", "hf")
    assert args.logging.alarms == train_grpo.Args().logging.alarms and args.rollout_n == 8
    other = flags.change(args, lora_rank=0, rollout_n=4)
    assert (other.lora.lora_rank, other.rollout_n, other.lr, args.lora.lora_rank) == (0, 4, 1e-5, 8)
    assert flags.flat(other) == flags.flat(args) | {"lora_rank": 0, "rollout_n": 4}
    with pytest.raises(TypeError, match=r"Args has no flags \['adv_estimator', 'lora'\]"):
        build(train_grpo.Args, adv_estimator="rloo", lora=8)


@pytest.mark.parametrize("name", SCRIPTS)
def test_no_flag_of_a_script_stands_twice(name):
    every = [flag for flag, _, _ in flags._each(SCRIPTS[name].Args())]
    assert len(every) == len(set(every))


def test_the_command_line_reaches_every_group(monkeypatch):
    words = ["--lr", "1", "--lora-rank", "3", "--no-compile", "--experiment-name", "x", "--alarms", "a>1", "b<2"]
    monkeypatch.setattr(sys, "argv", ["script.py", *words])
    args = arguments.parse(train_grpo.Args, None)
    changes = dict(lr=1.0, lora_rank=3, compile=False, experiment_name="x", alarms=("a>1", "b<2"))
    assert args == build(train_grpo.Args, **changes) == parsed(train_grpo.Args, words)


def test_a_flag_that_a_script_lacks_ends_with_the_name_of_the_script_that_has_it(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train_grpo.py", "--adv-estimator", "rloo"])
    with pytest.raises(SystemExit) as ended:
        arguments.parse(train_grpo.Args, None, hint="that one has it")
    assert ended.value.code == 2 and capsys.readouterr().err.splitlines()[-1] == "that one has it"


# ---------------------------------------------------------------------------------------------------------------------
# Quantized rollouts


@pytest.mark.parametrize(
    ("engine", "words"), [("hf", "needs --engine vllm"), ("vllm", "needs a GPU that computes in FP8")]
)
def test_quantized_rollouts_are_refused_where_nothing_computes_them(engine, words):
    assert not torch.cuda.is_available()
    with pytest.raises(ValueError, match=f"--rollout-quantization fp8 {words}"):
        training.check(build(train_grpo.Args, engine=engine, rollout_quantization="fp8"))


@pytest.mark.parametrize("name", ["grpo", "ppo", "distill", "prime"])  # train_dapo.py always corrects
def test_quantized_rollouts_want_a_word_about_their_correction(name, monkeypatch, tiny_model):
    """The policy that samples is not quite the one that learns."""
    script, here = TRAINING[name], training.hardware()
    monkeypatch.setattr(training, "hardware", lambda: here)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(training, "hardware", lambda: None)  # no GPU whose memory could be asked for
    quantized = dict(model=tiny_model, rollout_quantization="fp8", max_prompt_length=8, max_response_length=8)
    with pytest.raises(ValueError, match="--rollout-quantization fp8: .*; add --rollout-is token, .*-is none"):
        training.check(build(script.Args, **quantized))
    for choice in ("token", "none"):
        training.check(build(script.Args, **quantized, rollout_is=choice))
    training.check(build(script.Args, **quantized | dict(rollout_quantization="none")))


def test_preference_pairs_have_no_policy_loss_to_correct():
    assert "rollout_is" not in names_of(train_dpo) and "rollout_quantization" in names_of(train_dpo)


# ---------------------------------------------------------------------------------------------------------------------
# --help


@pytest.fixture
def help_of(capsys, monkeypatch):
    """(Args) -> what --help says: {title of a box: {flag: its text}}, in order."""
    monkeypatch.setenv("COLUMNS", "100")  # one box below the other, words two columns or more behind the flag

    def show(cls):
        monkeypatch.setattr(sys, "argv", ["script.py", "--help"])
        with pytest.raises(SystemExit) as ended:
            arguments.parse(cls, "A description.")
        assert ended.value.code == 0
        boxes = {}
        for line in capsys.readouterr().out.splitlines():
            if title := re.fullmatch(r" (?:([a-z]+) )?options *", line):
                boxes[title[1]] = box = {}
            elif flag := re.match(r"  (?:-h, )?--([a-z0-9][a-z0-9-]*)", line):
                box[flag[1].replace("-", "_")] = line.strip().partition("  ")[2].strip()
            elif line[:8].isspace() and line.strip():
                box[list(box)[-1]] = f"{box[list(box)[-1]]} {line.strip()}".strip()
        return boxes

    return show


def groups_of(args):
    """{name of a box: its flags} of Args: -h stands alone, then come its own flags, and then its groups."""
    values = {field.name: getattr(args, field.name) for field in dataclasses.fields(args)}
    groups = {name: list(flags.flat(value)) for name, value in values.items() if dataclasses.is_dataclass(value)}
    return {None: ["help"], "script": [name for name in values if name not in groups], **groups}


@pytest.mark.parametrize("name", SCRIPTS)
def test_help_shows_a_scripts_own_flags_first_then_the_others_in_groups(help_of, name):
    args = SCRIPTS[name].Args()
    boxes = help_of(type(args))
    assert [(title, list(box)) for title, box in boxes.items()] == list(groups_of(args).items())
    assert boxes.pop(None) == {"help": "show this help message and exit"}
    for box in boxes.values():
        for flag, text in box.items():
            value = flags.flat(args)[flag]
            if value in (None, ()):
                comment = text
                assert re.search(r"\b([Dd]efault|[Ww]ithout)\b", text), f"--{flag}: what happens without it? {text!r}"
            else:
                comment, default = re.fullmatch(r"(.*) \(default: (.*)\)", text).groups()
                values = value if isinstance(value, tuple) else [value]
                assert shlex.split(default) == [str(x) for x in values]
            assert "None" not in text
            assert re.fullmatch(r"[A-Za-z1_-].* .*\.", comment), f"{flag}: {comment!r} is not a sentence"


def commented_flags():
    """(class, flag, default, lines of the comment) of each flag of each script. --help shows the comment."""
    groups = [x for s in SCRIPTS.values() for x in (s.Args(), *vars(s.Args()).values()) if dataclasses.is_dataclass(x)]
    for kind in {kind for group in groups for kind in type(group).__mro__ if dataclasses.is_dataclass(kind)}:
        above = []
        for line in inspect.getsource(kind).splitlines():
            if comment := re.match("    # (.*)", line):
                above.append(comment[1])
            elif flag := re.match(r"    (\w+): (?:.* = )?([^#]*)(?:  # (.*))?$", line):
                yield kind, flag[1], flag[2], [flag[3]] if flag[3] else above
            if not comment:
                above = []


def test_a_flag_without_a_default_says_what_happens_without_it():
    unset = [(kind, name, " ".join(lines)) for kind, name, value, lines in commented_flags() if value in ("None", "()")]
    assert len(unset) > 40
    assert [x for x in unset if not re.search(r"\b([Dd]efault|[Ww]ithout)\b", x[2])] == []


def test_no_line_of_a_comment_of_a_flag_begins_with_what_is_not_a_letter():
    """tyro would begin a new line of its text there."""
    later = [(kind, name, line) for kind, name, _, lines in commented_flags() for line in lines[1:]]
    assert len(later) > 40
    assert [x for x in later if not x[2][0].isalpha()] == []


def test_every_box_of_flags_has_a_sentence_as_its_title(capsys, monkeypatch):
    titles = {
        type(x).__doc__
        for script in SCRIPTS.values()
        for x in vars(script.Args()).values()
        if dataclasses.is_dataclass(x)
    }
    assert len(titles) > 12
    assert [title for title in titles if not re.fullmatch(r"[A-Z][^\n]*\.", title)] == []
    monkeypatch.setattr(sys, "argv", ["script.py", "--help"])
    with pytest.raises(SystemExit):
        arguments.parse(train_grpo.Args, "A description.")
    words = " ".join(capsys.readouterr().out.split())
    assert "--fsdp-size INT" in words and "{None}" not in words
    for box, title in (("script", help_boxes.TITLE), ("data", type(train_grpo.Args().data).__doc__)):
        assert re.search(rf"{box} options -+ {re.escape(title)} ", words)


def test_help_has_the_words_of_the_comments(help_of, mine):
    boxes = help_of(mine.Args)
    assert boxes["script"]["my_share"] == "words of mine about a share (default: 0.25)"
    assert boxes["script"]["my_pace"] == "words of mine about a pace (default: 7)"
    saving = "Save at this interval, in steps, and at the end. -1 saves only at the end, and 0 never. (default: -1)"
    assert boxes["checkpoints"]["save_freq"] == saving
    assert boxes["logging"]["experiment_name"].endswith("(default: sft)")  # as the script says
    assert help_of(train_dapo.Args)["data"]["total_training_steps"].endswith("By default --total-epochs decides.")


@dataclass(frozen=True)
class Derived(train_grpo.Args):
    my_list: list[int] = dataclasses.field(default_factory=lambda: [1, 2])  # numbers of mine
    logging: LoggingRL = LoggingRL(log_samples_freq=3)
    rollout: EngineFlags = EngineFlags(engine="hf")


def test_help_of_args_that_extend_a_scripts_own(help_of):
    boxes = help_of(Derived)
    assert set(boxes) == set(groups_of(train_grpo.Args()))
    assert list(boxes["script"])[0] == "model" and list(boxes["script"])[-1] == "my_list"
    assert boxes["script"]["my_list"] == "numbers of mine (default: 1 2)"
    assert boxes["logging"]["log_samples_freq"].endswith("(default: 3)")
    assert boxes["rollout"]["engine"].endswith("(default: hf)")


# ---------------------------------------------------------------------------------------------------------------------
# Flags that may be "auto"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", "auto"),
        ("--optimizer-offload", True),
        ("--optimizer_offload --lr 1", True),
        ("--optimizer-offload True", True),  # as users of verl write it
        ("--optimizer-offload=True", True),
        ("--no-optimizer-offload", False),
        ("--no_optimizer_offload --lr 1", False),
        ("--optimizer-offload False", False),
        ("--optimizer-offload auto", "auto"),
    ],
)
def test_a_switch_is_given_by_its_name_alone_or_with_a_value(words, expected, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train_grpo.py", *words.split()])
    monkeypatch.setattr(command_line, "outlive_output", lambda: None)
    args = command_line.parse(train_grpo.Args, None)
    assert args.memory.optimizer_offload is expected or args.memory.optimizer_offload == expected == "auto"
    assert args.lr == (1.0 if "--lr" in words else 1e-6)


def test_every_switch_may_be_auto_and_is_auto_by_default():
    switches = flags.marked(train_grpo.Args(), flags.SWITCH)
    assert switches >= {"optimizer_offload", "param_offload"}
    assert {flags.flat(train_grpo.Args())[name] for name in switches} == {"auto"}


def test_auto_is_settled_by_values_and_what_a_user_gave_stays():
    memory = build(train_grpo.Args, param_offload=False, ppo_max_token_len_per_gpu=5000).memory
    values = dict(param_offload=True, optimizer_offload=True, ppo_max_token_len_per_gpu=7)
    found = flags.settled(memory, **values)
    assert (found.param_offload, found.optimizer_offload, found.ppo_max_token_len_per_gpu) == (False, True, 5000)
    assert found.activation_checkpointing == "auto"


LENGTHS = dict(max_prompt_length=10, max_response_length=32)


def settled(args):
    """The memory flags of a run without a GPU."""
    return settle(args, [None]).memory


@pytest.mark.parametrize(
    ("script", "changes", "expected"),
    [
        ("grpo", LENGTHS, 16384),
        ("grpo", dict(max_prompt_length=10000, max_response_length=6385), 16385),  # one sequence is never divided
        ("grpo", LENGTHS | dict(ppo_max_token_len_per_gpu=50), 50),
        ("grpo", LENGTHS | dict(reward_model="x", reward_model_max_length=20000), 20000),
        ("dpo", dict(max_prompt_length=8000, max_response_length=1000), 18000),  # a pair
        ("sft", dict(max_length=20000), 20000),
        ("reward", dict(max_length=20000), 40000),
    ],
)
def test_a_micro_batch_has_16384_tokens_or_one_unit_where_nothing_is_computed(script, changes, expected):
    memory = settled(build(TRAINING[script].Args, **changes))
    assert training.budget_of(memory)[1] == expected
    assert memory.activation_checkpointing == "selective"
    assert memory.optimizer_offload is memory.param_offload is False


def test_with_param_offload_the_moments_are_on_the_host_already():
    memory = settled(build(train_grpo.Args, param_offload=True, optimizer_offload=True))
    assert memory.param_offload is True and memory.optimizer_offload is False
