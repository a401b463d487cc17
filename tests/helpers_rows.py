"""What the tests of data files share: a tokenizer with a chat template, rows in verl's schema, and files of rows."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from rl.data.encode import encode_prompts

CHATML = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m['role'] == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def make_tokenizer(chat_template=CHATML, pad_token="<pad>"):
    """A byte-level BPE whose merges make `\\n\\n` one token, and that puts <s> before plain text."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    specials = ["<s>", "<|im_start|>", "<|im_end|>", "<pad>"]
    trainer = trainers.BpeTrainer(
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        vocab_size=300,
    )
    backend.train_from_iterator(["\n\n" * 20, "assistant\n" * 20, "the answer is " * 20], trainer)
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="<|im_end|>",
        pad_token=pad_token,
        extra_special_tokens=["<|im_start|>"],
        chat_template=chat_template,
    )


def rl_row(content="1 + 1?", truth="2", **changes):
    row = {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": content}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {"split": "train", "index": 0},
    }
    return {**row, **changes}


def without(row, *names):
    return {name: value for name, value in row.items() if name not in names}


def write(path, rows):
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        pq.write_table(pa.Table.from_pylist(rows), path, compression="zstd", write_page_checksum=True)
    return path


def render_prompt(tokenizer, row, **limit):
    """Token ids of one prompt."""
    return encode_prompts(tokenizer, [row], **limit)[0]["prompt_ids"]
