"""PEFT computes, learns and merges what extras/lora does, and loads the adapters that a run saves."""

import json
from pathlib import Path

import helpers_families as families
import pytest
import torch
from helpers_families import load_with_adapters, make_them_count
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from workers.objectives import largest_error, packed_backward, plain_gradients

from extras.engines import hf
from extras.judges import model_to_score, scalar_models
from extras.lora import adapters as lora
from rl.data.types import Sampling
from rl.model import load as models
from rl.model.sharding import Memory
from rl.sampling.engines.flags import EngineFlags
from rl.sampling.groups import sample_groups
from rl.sampling.verify import check_engine

CASE = ("ppo_clip", "token-mean")
SAMPLING = Sampling(n=2, temperature=0.7, max_tokens=12)


@pytest.fixture(scope="module")
def policy(tiny_model, world):
    return make_them_count(load_with_adapters(tiny_model, world, lora_alpha=12))


@pytest.fixture(scope="module")
def folder(policy, tmp_path_factory):
    """The adapters as a checkpoint has them."""
    folder = tmp_path_factory.mktemp("peft") / "adapter"
    weights = {name: x.detach().full_tensor() for name, x in learning(policy).items()}
    policy.packed.families[-1].save(folder.parent, "", weights)
    return folder


def learning(model):
    return {name: x for name, x in model.named_parameters() if x.requires_grad}


def peft_model(path, folder, **options):
    base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa")
    return PeftModel.from_pretrained(base, folder, **options)


def own_name(name):
    return name.removeprefix("base_model.model.").replace(".default", "")


def test_peft_has_the_same_parameters_and_files(tiny_model, policy, folder, tmp_path):
    config = json.loads((folder / "adapter_config.json").read_text())
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    theirs = get_peft_model(base, LoraConfig(r=4, lora_alpha=12, target_modules="all-linear", task_type="CAUSAL_LM"))
    theirs.save_pretrained(tmp_path)
    saved, expected = (load_file(Path(x) / "adapter_model.safetensors") for x in (folder, tmp_path))
    assert {name: x.shape for name, x in saved.items()} == {name: x.shape for name, x in expected.items()}
    written = json.loads((tmp_path / "adapter_config.json").read_text())
    layers = {name for name, x in policy.named_modules() if isinstance(x, lora.Adapted)}
    assert set(written.pop("target_modules")) == layers  # ours are the last parts of these names
    assert set(config.pop("target_modules")) == {name.rpartition(".")[2] for name in layers}
    assert config == {name: written[name] for name in config}


def test_base_and_adapter_in_peft_the_merged_model_and_the_engine_agree(tiny_model, policy, folder, world, tmp_path):
    """Log-probs of what the engine sampled: of policy, PEFT, export and engine."""
    engine = hf.Engine(tiny_model, world, longest=64)
    engine.update_weights(models.weights_for_engine(policy, world))
    rows = [dict(row_index=i, prompt_ids=[5 + i, 6, 7]) for i in range(3)]
    samples = sample_groups(engine, rows, SAMPLING, seed=1, on_group=lambda *_: None)
    assert check_engine(policy, samples, SAMPLING, EngineFlags(), world, num_probe=6) < 1e-5
    merged = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    merged.load_state_dict(dict(models.weights_for_engine(policy, world)), strict=False)
    merged.save_pretrained(tmp_path)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    for sample in samples:
        prompt, response = list(sample.prompt_ids), list(sample.response_ids)
        found = []
        for model in (peft_model(tiny_model, folder).eval(), exported.eval()):
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
            found.append((logits / 0.7).log_softmax(-1)[torch.arange(len(response)), response])
        engines = torch.from_numpy(sample.rollout_logprobs)
        for logp in found:
            torch.testing.assert_close(logp, engines, rtol=0, atol=1e-4)


def test_pefts_own_merge_is_ours_up_to_rounding(tiny_model, policy, folder, world):
    theirs = dict(peft_model(tiny_model, folder).merge_and_unload().named_parameters())
    ours = dict(models.weights_for_engine(policy, world))
    assert ours.keys() == theirs.keys()
    for name, x in ours.items():
        torch.testing.assert_close(x, theirs[name].detach(), rtol=1e-6, atol=1e-6)


def test_gradients_are_pefts(tiny_model, policy, folder, batch):
    theirs = peft_model(tiny_model, folder, is_trainable=True).eval().requires_grad_(True)  # all, or some have none
    _, expected = plain_gradients(theirs, batch, range(8), CASE)
    policy.zero_grad()
    packed_backward(policy, batch, range(8), CASE, max_tokens=60)
    expected = {own_name(name): x for name, x in expected.items() if "lora" in name}
    assert largest_error(families.gradients(policy), expected) < 5e-4


def test_peft_loads_a_reward_model_with_its_head(tiny_model, batch, world, tmp_path):
    options = dict(kind=model_to_score(3), longest=64, seed=0)
    model = models.load_model(tiny_model, world, lora.LoRA(lora_rank=4), Memory(compile=False), **options)
    make_them_count(model)
    weights = {name: x.detach().full_tensor() for name, x in learning(model).items()}
    model.packed.families[-1].save(tmp_path, "", weights)
    base = AutoModelForSequenceClassification.from_pretrained(tiny_model, num_labels=1, dtype=torch.float32)
    base.config.pad_token_id = None  # so that it scores the last token
    theirs = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    scores = scalar_models.sequence_scores(model, batch)
    for i, n in enumerate(batch.lengths.tolist()):
        expected = theirs(input_ids=batch.input_ids[i : i + 1, :n]).logits[0, 0]
        torch.testing.assert_close(scores[i], expected, rtol=0, atol=2e-5)
