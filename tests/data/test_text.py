"""Rows become tokens: nothing is lost in silence, one BOS, no suffix, partial answers, dates and template arguments."""

import datetime
import json
from functools import partial

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

import sft
from extras.agents.chat import Chat, prompt_text
from extras.demonstrations.encode import add_given, encode_conversation, encode_demonstration
from extras.demonstrations.rows import read_comparisons, read_demonstrations
from extras.judges.reward_model import prepare_like
from rl.data.encode import encode_prompts
from rl.data.flags import Texts
from rl.data.rows import read_rows
from rl.data.template import prepare, rendering_of, variables
from rl.flags import build
from rl.run.training import check

SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<unk>", "[CLS]", "[SEP]"]

# The templates below have the structure of the models' own.
CHATML = """{%- for m in messages -%}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' -}}{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"""

# Qwen3's: thoughts are a field or stand in the content; those before the last message of a user are dropped; the last
# answer always has a thought, perhaps an empty one.
QWEN3 = """{%- set ns = namespace(last=-1) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- if tools -%}{{- '<|im_start|>system\n' -}}{%- for tool in tools -%}{{- tool | tojson -}}{%- endfor -%}
{{- '<|im_end|>\n' -}}{%- endif -%}
{%- for m in messages -%}
{%- if m.role == 'assistant' -%}
{%- set content, thought = m.content, m.reasoning_content or '' -%}
{%- if '</think>' in content -%}{%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\n') -%}
{%- set content = content.split('</think>')[-1].lstrip('\n') -%}{%- endif -%}
{{- '<|im_start|>assistant\n' -}}
{%- if loop.index0 > ns.last and (loop.last or thought) -%}
{{- '<think>\n' + thought.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') -}}
{%- else -%}{{- content -}}{%- endif -%}
{%- for call in m.tool_calls or [] -%}{{- '<tool_call>' + call.function.name + ' ' -}}
{{- call.function.arguments | tojson + '</tool_call>' -}}{%- endfor -%}{{- '<|im_end|>\n' -}}
{%- else -%}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}
{%- if enable_thinking is defined and enable_thinking is false -%}{{- '<think>\n\n</think>\n\n' -}}{%- endif -%}
{%- endif -%}"""

# Llama 3.2's: BOS and the date of today; contents are trimmed; tools as JSON, escaped for ASCII.
LLAMA = """{{- bos_token -}}
{%- if not date_string is defined -%}{%- if strftime_now is defined -%}
{%- set date_string = strftime_now('%d %b %Y') -%}{%- else -%}{%- set date_string = '26 Jul 2024' -%}{%- endif -%}
{%- endif -%}
{%- if messages[0].role == 'system' -%}{%- set system = messages[0].content | trim -%}
{%- set messages = messages[1:] -%}{%- else -%}{%- set system = '' -%}{%- endif -%}
{{- '<|im_start|>system\nToday Date: ' + date_string + '\n' -}}
{%- for tool in tools or [] -%}{{- tool | tojson(ensure_ascii=true, indent=4) -}}{%- endfor -%}
{{- system + '<|im_end|>' -}}
{%- for m in messages -%}{{- '<|im_start|>' + m.role + '\n' + m.content | trim + '<|im_end|>' -}}{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"""

# Gemma's: the assistant is called model, and there is no system message.
GEMMA = """{{- bos_token -}}{%- if messages[0].role == 'system' -%}{{- raise_exception('System role not supported') -}}
{%- endif -%}{%- for m in messages -%}
{{- '<|im_start|>' + ('model' if m.role == 'assistant' else m.role) + '\n' + m.content | trim + '<|im_end|>\n' -}}
{%- endfor -%}{%- if add_generation_prompt -%}{{- '<|im_start|>model\n' -}}{%- endif -%}"""

# Mistral's: tools before the last message of a user, nothing that makes the policy speak; calls replace the content.
MISTRAL = """{{- bos_token -}}{%- set users = messages | selectattr('role', 'equalto', 'user') | list -%}
{%- for m in messages -%}
{%- if m.role == 'user' -%}{%- if tools and m == users[-1] -%}
{{- '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' -}}{%- endif -%}
{{- '[INST] ' + m.content + '[/INST]' -}}
{%- elif m.tool_calls is defined -%}{{- '[TOOL_CALLS] ' -}}
{%- for call in m.tool_calls -%}{{- call.function | tojson -}}{%- endfor -%}{{- eos_token -}}
{%- elif m.role == 'assistant' -%}{{- ' ' + m.content + eos_token -}}
{%- elif m.role == 'tool' -%}{{- '[TOOL_RESULTS] ' + m.content + '[/TOOL_RESULTS]' -}}{%- endif -%}
{%- endfor -%}"""

# gpt-oss': tools as types of TypeScript, with comments.
GPT_OSS = """{{- '<|im_start|>system\nCurrent date: ' + strftime_now('%Y-%m-%d') + '<|im_end|>' -}}
{%- for tool in tools or [] -%}{%- set f = tool.function -%}
{{- '// ' + f.description + '\ntype ' + f.name + ' = (_: {\n' -}}
{%- for name, x in f.parameters.properties.items() -%}{%- if x.description -%}{{- '// ' + x.description + '\n' -}}
{%- endif -%}{{- name -}}{%- if name not in (f.parameters.required or []) -%}{{- '?' -}}{%- endif -%}{{- ': ' -}}
{%- if x.enum -%}{{- '"' + x.enum | join('" | "') + '"' -}}{%- elif x.type == 'integer' -%}{{- 'number' -}}
{%- else -%}{{- x.type -}}{%- endif -%}{{- ',\n' -}}{%- endfor -%}{{- '}) => any;\n' -}}
{%- endfor -%}
{%- for m in messages -%}{{- '<|im_start|>' + m.role + '<|channel|>final<|message|>' + m.content + '<|im_end|>' -}}
{%- endfor -%}{%- if add_generation_prompt -%}{{- '<|im_start|>assistant' -}}{%- endif -%}"""

# DeepSeek-R1's: every answer is cut before </think>; the generation prompt begins a thought.
R1 = """{{- bos_token -}}{%- for m in messages -%}{%- if m.role == 'assistant' -%}
{{- '<A>' + m.content.split('</think>')[-1] + eos_token -}}{%- else -%}{{- '<U>' + m.content -}}{%- endif -%}
{%- endfor -%}{%- if add_generation_prompt -%}{{- '<A><think>\n' -}}{%- endif -%}"""

XML = CHATML.replace("m.content", "m.content | e").replace(
    "{%- for", "{%- for t in tools or [] -%}{{- t | string | e -}}{%- endfor -%}{%- for", 1
)
NO_SYSTEM = CHATML.replace("messages -%}", "messages if m.role != 'system' -%}")
FIRST_500 = CHATML.replace("m.content", "m.content[:500]")
LAST_500 = CHATML.replace("m.content", "m.content[-500:]")
DROPS_SECOND = "{%- set messages = messages[:1] + messages[2:] -%}" + CHATML
NAMES_ONLY = CHATML.replace(
    "{%- for",
    "{%- for t in tools or [] -%}{{- t.function.name + '(' -}}"
    "{{- t.function.parameters.properties | join(', ') + ')' -}}{%- endfor -%}{%- for",
    1,
)
NAMED = CHATML.replace("m.role +", "m.role + (' ' + m.name if m.name else '') +")
JSON_TEXT = CHATML.replace(  # DeepSeek-V3's: arguments have to be JSON already
    "m.content +",
    "m.content + (m.tool_calls[0].function.name + m.tool_calls[0].function.arguments if m.tool_calls else '') +",
)
UPPER = CHATML.replace("m.content", "m.content | upper")
LINES = CHATML.replace("m.content", "m.content.split('\n') | join('\n> ')")


def make_tokenizer(template=CHATML, before=(), after=(), **names):
    """Tokens are bytes. `before` and `after` are special tokens that it puts around a text by default."""
    backend = Tokenizer(
        models.BPE({x: i for i, x in enumerate(SPECIAL + sorted(pre_tokenizers.ByteLevel.alphabet()))}, [])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIAL)
    if before or after:
        backend.post_processor = processors.TemplateProcessing(
            single=[*before, "$A", *after], special_tokens=[(x, SPECIAL.index(x)) for x in {*before, *after}]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, chat_template=template, **{"bos_token": "<s>", "eos_token": "</s>"} | names
    )


def plain_tokenizer(normalizer=None, characters="abcdefghijklmnopqrstuvwxyz1 \n<|>_", unk_token="<unk>"):
    """Tokens are characters, others become <unk>, or nothing."""
    names = ["<unk>", "<|im_start|>", "<|im_end|>", *characters.replace(" ", "▁")]
    backend = Tokenizer(models.BPE({x: i for i, x in enumerate(names)}, [], unk_token=unk_token))
    backend.normalizer = normalizers.Sequence([*filter(None, [normalizer]), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Replace("▁", " ")
    backend.add_special_tokens([AddedToken(x, normalized=False) for x in names[:3]])
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=CHATML, unk_token=unk_token)


def user(content, **more):
    return {"role": "user", "content": content, **more}


def says(content, **more):
    return {"role": "assistant", "content": content, **more}


def system(content):
    return {"role": "system", "content": content}


def calls(name, **arguments):
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def tool(description='Get the "weather" & more.\nIn °C.', **properties):
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": "weather", "description": description, "parameters": parameters}}


CITY = {"type": "string", "description": "The city's <name>"}
UNIT = {"type": "string", "enum": ["C", "F"], "description": "Unit"}
RESULT = {"role": "tool", "name": "weather", "tool_call_id": "a1", "content": '{"t": "3 °C"}'}
THOUGHT = "<think>\nsecret\n</think>\n\nyes"
ANY_CALL = [user("w?"), says("", tool_calls=[calls("weather", city='Zür"ich')]), RESULT, user("thanks")]

PASS = {  # template, messages, tools
    "ChatML": (CHATML, [system("be brief"), user("hi"), says("hi"), user("hi")], None),
    "white space": (LLAMA, [user("  two\n\n words \n")], None),
    "quotes in JSON": (QWEN3, [user("w?")], [tool(city=CITY)]),
    "ASCII in JSON": (LLAMA, [system("é"), user("é <b>")], [tool(city=CITY, unit=UNIT)]),
    "types of TypeScript": (GPT_OSS, [user("w?")], [tool(city=CITY, unit=UNIT, days={"type": "integer"})]),
    "properties called type and id": (GPT_OSS, [user("w?")], [tool(type=CITY, id={"type": "string"})]),
    "title and format of a schema": (
        LLAMA,
        [user("w?")],
        [tool(day={"type": "string", "title": "Day", "format": "date"})],
    ),
    "XML": (XML, [user("a < b & \"c\" 'd'")], [tool(city=CITY)]),
    "upper case": (UPPER, [user("Straße hi")], None),
    "lines with marks": (LINES, [user("one\ntwo\nthree")], None),
    "the role model": (GEMMA, [user("a"), says("b"), user("c")], None),
    "the last thought": (QWEN3, [user("a"), says(THOUGHT, reasoning_content=None), RESULT | {"name": None}], None),
    "calls": (QWEN3, ANY_CALL, [tool(city=CITY)]),
    "numbers and booleans": (
        QWEN3,
        [user("a"), says("", tool_calls=[calls("f", x=1, y=True, z=None)]), user("b")],
        None,
    ),
    "equal messages and tools at the last": (MISTRAL, [user("a"), says("b"), user("a")], [tool(city=CITY)]),
    "parts": (CHATML, [{"role": "user", "content": "one part"}], None),
    "tags and paths": (CHATML, [user("</b> /usr/bin [x] {y} <|z|> ")], None),
    "only signs": (CHATML, [user("?"), says("!?"), user("🙂")], None),
    "looks like a marker": (CHATML, [user("zq0zq zq1zq")], None),
    "a name that is written": (NAMED, [user("hi", name="bob")], None),
    "arguments as JSON": (JSON_TEXT, [user("a"), says("So", tool_calls=[calls("f", x='"é"')]), user("b")], None),
    "equal messages that are not dropped": (MISTRAL, [user("a"), says("a"), user("a")], [tool(city=CITY)]),
    "a thought of tags and white space": (R1, [user("a"), says("<think>\n\n</think>\n\n1 < 2"), user("b")], None),
}
DROP = {  # template, messages, tools, field
    "an earlier thought": (QWEN3, [user("a"), says(THOUGHT), user("b")], None, "prompt[1].content"),
    "reasoning_content": (
        QWEN3,
        [user("a"), says("yes", reasoning_content="no"), user("b")],
        None,
        "prompt[1].reasoning_content",
    ),
    "any thought": (R1, [user("a"), says(THOUGHT), user("b")], None, "prompt[1].content"),
    "a name": (CHATML, [user("hi", name="user")], None, "prompt[0].name"),
    "a system message that is elsewhere": (NO_SYSTEM, [system("user"), user("the user")], None, "prompt[0].content"),
    "Hi in This": (NO_SYSTEM, [system("Hi"), user("tHis: Hi")], None, "prompt[0].content"),
    "one of two equal messages": (DROPS_SECOND, [user("a"), says("a"), user("a")], None, "prompt[1].content"),
    "the end of a long text": (FIRST_500, [user("word " * 101)], None, "prompt[0].content"),
    "the beginning of a long text": (LAST_500, [user("word " * 101)], None, "prompt[0].content"),
    "the middle of a long text": (
        CHATML.replace("m.content", "m.content[:99] + m.content[-99:]"),
        [user("word " * 101)],
        None,
        "prompt[0].content",
    ),
    "a repeated text": (
        CHATML.replace("in messages", "in messages | unique(attribute='content')"),
        [user("a word"), says("b"), user("a word")],
        None,
        "prompt[0].content",
    ),
    "a text that equals another": (
        CHATML.replace("in messages", "in messages if m.content != 'ok'"),
        [user("a"), says("ok"), user("b")],
        None,
        "prompt[1].content",
    ),
    "a text like a marker": (NO_SYSTEM, [system("zq0zq"), user("ZQ0ZQ zq0zq")], None, "prompt[0].content"),
    "signs in a thought": (R1, [user("a"), says("<think>!?</think>!?"), user("b")], None, "prompt[1].content"),
    "signs in brackets": (R1, [user("a"), says("<think>[1] | 🙂</think>yes"), user("b")], None, "prompt[1].content"),
    "a thought in other tags": (
        R1.replace("</think>", "</seed:think>"),
        [user("a"), says("<seed:think>no</seed:think>yes"), user("b")],
        None,
        "prompt[1].content",
    ),
    "a thought in brackets": (
        R1.replace("</think>", "[/THINK]"),
        [user("a"), says("[THINK]No.[/THINK]yes"), user("b")],
        None,
        "prompt[1].content",
    ),
    "tools": (CHATML, [user("w?")], [tool(city=CITY)], "tools[0].function.name"),
    "a description": (
        NAMES_ONLY,
        [user("weather")],
        [tool("Get.", city={"type": "string"})],
        "tools[0].function.description",
    ),
    "a description of a parameter": (
        GPT_OSS.replace("{{- '// ' + x.description + '\n' -}}", ""),
        [user("w?")],
        [tool(city=CITY)],
        "tools[0].function.parameters.properties.city.description",
    ),
    "an enum in a list": (
        GPT_OSS,
        [user("C")],
        [tool(u={"type": "array", "items": {"type": "string", "enum": ["C"]}})],
        "tools[0].function.parameters.properties.u.items.enum[0]",
    ),
    "a default": (
        GPT_OSS,
        [user("w?")],
        [tool(city={"type": "string", "default": "w"})],
        "tools[0].function.parameters.properties.city.default",
    ),
    "content beside calls": (
        MISTRAL,
        [user("a"), says("So:", tool_calls=[calls("f")]), RESULT],
        None,
        "prompt[1].content",
    ),
    "an argument": (
        QWEN3.replace("arguments | tojson", "arguments.values() | list | tojson"),
        ANY_CALL,
        None,
        "prompt[1].tool_calls[0].function.arguments.city",
    ),
    "a call": (
        QWEN3.replace("m.tool_calls or []", "(m.tool_calls or [])[:1]"),
        [user("a"), says("", tool_calls=[calls("f", x=1), calls("f", x=1)]), user("b")],
        None,
        "prompt[1].tool_calls[1].function.name",
    ),
    "an argument called type": (
        QWEN3.replace("call.function.arguments | tojson", "'{'"),
        [user("a"), says("", tool_calls=[calls("f", type="f")]), user("b")],
        None,
        "prompt[1].tool_calls[0].function.arguments.type",
    ),
    "a nested field": (CHATML, [user("hi", meta={"deep": [{"note": "hi"}]})], None, "prompt[0].meta.deep[0].note"),
    "a result": (
        CHATML.replace("messages -%}", "messages if m.role != 'tool' -%}"),
        [user("3"), says("f"), {"role": "tool", "content": "3"}, user("3")],
        None,
        "prompt[2].content",
    ),
    "a text in parts": (
        "<s>{%- for m in messages -%}{%- for x in m.content -%}{{- x.text -}}{%- endfor -%}{%- endfor -%}",
        [user("seen")],
        None,
        "prompt[0].content",
    ),
}


def row_of(messages, tools, **more):
    return {"prompt": messages, "row_place": "train.jsonl: row 3", **({"tools": tools} if tools else {}), **more}


@pytest.mark.parametrize("case", PASS)
def test_rows_whose_text_is_all_there_pass(case):
    """Twice, since rows of a shape that is new and of one that is known take two ways."""
    template, messages, tools = PASS[case]
    messages = [{name: x for name, x in m.items() if x is not None} for m in messages]
    tokenizer = make_tokenizer(template)
    for _ in range(2):
        [row] = encode_prompts(tokenizer, [row_of(messages, tools)])
        assert row["prompt_ids"]


@pytest.mark.parametrize("case", DROP)
def test_text_that_a_template_drops_is_named_with_row_and_field(case):
    template, messages, tools, field = DROP[case]
    tokenizer, row = make_tokenizer(template), row_of(messages, tools)
    for _ in range(2):
        with pytest.raises(ValueError) as error:
            encode_prompts(tokenizer, [row])
        assert str(error.value).startswith(f"train.jsonl: row 3: {field}: the tokens do not contain ")
        assert "add --allow-dropped-text if that is meant" in str(error.value)
    prepare(tokenizer, Texts(allow_dropped_text=True), None)
    assert encode_prompts(tokenizer, [row])[0]["prompt_ids"]


def test_a_dropped_text_is_found_behind_rows_of_the_same_shape():
    tokenizer = make_tokenizer(R1)
    good = [row_of([user(f"{i}"), says(f"<b> {i}"), user("b")], None) for i in range(4)]
    with pytest.raises(ValueError, match=r"prompt\[1\].content: .*secret"):
        encode_prompts(tokenizer, [*good, row_of([user("a"), says(THOUGHT), user("b")], None)])


def test_a_dropped_text_is_found_where_a_row_of_the_same_shape_has_the_same_around_it():
    """A text that the template changed is not part of what stands around texts, and neither is one like a role."""
    tokenizer = make_tokenizer(R1.replace("[-1]", "[-1] | upper"))
    rows = [row_of([user("a"), says(said), user("b")], None) for said in ("yes", "<think>no</think>yes")]
    assert encode_prompts(tokenizer, rows[:1])
    with pytest.raises(ValueError, match=r"prompt\[1\].content: the tokens do not contain '<think>no"):
        encode_prompts(tokenizer, rows)
    tokenizer = make_tokenizer(CHATML.replace("messages -%}", "messages if m.role != 'system' or m.content != 'a' -%}"))
    assert encode_prompts(tokenizer, [row_of([system(x), user("so")], None) for x in ("s", "user", "system", "u")])
    for said in ("a", "user a", "<|im_start|>a"):
        with pytest.raises(ValueError, match=r"prompt\[0\].content: the tokens do not contain 'a'"):
            encode_prompts(tokenizer, [row_of([system("a"), user(said)], None)])


def test_rows_of_one_shape_are_rendered_once_each():
    """Except for the first, which is rendered again with markers."""
    tokenizer, count = make_tokenizer(LLAMA), []
    render = tokenizer.apply_chat_template
    tokenizer.apply_chat_template = lambda *x, **y: count.append(1) or render(*x, **y)
    encode_prompts(tokenizer, [row_of([system(f'"{i}"'), user(f" {i}\n")], [tool(city=CITY)]) for i in range(100)])
    assert len(count) == 101


def test_the_name_of_a_property_is_looked_for_in_front_of_its_description():
    """A message that has the name too would be taken for it, and each row would be rendered again."""
    tokenizer, count, weather = make_tokenizer(QWEN3), [], tool(city=CITY)
    del weather["function"]["parameters"]["required"]  # which names it behind its description
    render = tokenizer.apply_chat_template
    tokenizer.apply_chat_template = lambda *x, **y: count.append(1) or render(*x, **y)
    encode_prompts(tokenizer, [row_of([user(f"Is it warm in the city {i}?")], [weather]) for i in range(9)])
    assert len(count) == 10


def test_demonstrations_and_pairs_name_their_own_columns():
    tokenizer = make_tokenizer(R1)
    messages = [user("a"), says("b"), user("a"), says(THOUGHT)]
    with pytest.raises(ValueError, match=r"row 3: messages\[3\].content: the tokens do not contain '<think>"):
        encode_demonstration(tokenizer, {"messages": messages, "row_place": "x: row 3"})
    with pytest.raises(ValueError, match=r"row 3: chosen: the tokens do not contain '<think>"):
        encode_conversation(tokenizer, row_of([user("a")], None), THOUGHT, field="chosen")
    with pytest.raises(ValueError, match=r"row 3: prompt\[1\].content: the tokens do not contain '<think>"):
        encode_demonstration(tokenizer, row_of([user("a"), says(THOUGHT), user("b")], None, response="c"))
    ids, mask = encode_demonstration(
        tokenizer, row_of([user("a")], None, response=THOUGHT)
    )  # a response is written as it is
    assert tokenizer.decode([x for x, m in zip(ids, mask, strict=True) if m]) == THOUGHT + "</s>"


# ---------------------------------------------------------------------------------------------------------------------
# The vocabulary


@pytest.mark.parametrize(
    ("tokenizer", "text"),
    [
        (plain_tokenizer(), "abc 1"),
        (plain_tokenizer(normalizers.Lowercase()), "ABC"),
        (plain_tokenizer(normalizers.NFKC()), "ﬁ ①"),
        (plain_tokenizer(normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()])), "café"),
        (make_tokenizer(), "é 🙂 \x07 漢"),
    ],
    ids=["all there", "lower case", "NFKC", "accents", "bytes"],
)
def test_texts_that_a_normalizer_changes_pass(tokenizer, text):
    assert encode_prompts(tokenizer, [{"prompt": text}, {"prompt": [user(text)]}])


@pytest.mark.parametrize("unk_token", ["<unk>", None])
def test_a_character_without_a_token_is_named(unk_token):
    tokenizer = plain_tokenizer(unk_token=unk_token)
    for row, field in (
        ({"prompt": "ab é"}, "prompt"),
        ({"prompt": [user("ab"), says("a é"), user("b")]}, r"prompt\[1\].content"),
        ({"prompt": "ab", "response": "é"}, "response"),
        ({"messages": [user("é"), says("a")]}, r"messages\[0\].content"),
    ):
        encode = encode_demonstration if len(row) == 2 or "messages" in row else lambda x, row: encode_prompts(x, [row])
        tokenizer.eos_token = "<|im_end|>"
        with pytest.raises(ValueError, match=f"row 3: {field}: the tokens do not contain 'é' .*has no token"):
            encode(tokenizer, row | {"row_index": 3})
    rows = [{"prompt": "ab", "chosen": "a", "rejected": "é", "row_index": 3}]
    with pytest.raises(ValueError, match="row 3: rejected: the tokens do not contain 'é'"):
        list(add_given(rows, tokenizer, ("chosen", "rejected"), 9))


class Longest:
    """A tokenizer that notes the longest text that it is asked to tokenize."""

    def __init__(self, tokenizer):
        self.tokenizer, self.longest = tokenizer, 0

    def __call__(self, text, **options):
        self.longest = max(self.longest, *map(len, [text] if isinstance(text, str) else text))
        return self.tokenizer(text, **options)

    def __getattr__(self, name):
        return getattr(self.tokenizer, name)


@pytest.mark.parametrize("make", [lambda text: text, lambda text: [user(text)]], ids=["text", "messages"])
def test_a_long_text_is_looked_up_in_the_vocabulary_piece_by_piece(make):
    """Tokenizing takes some 350 bytes of memory for each character."""
    text, tokenizer = "ab " * 100_000, Longest(plain_tokenizer())
    with pytest.raises(ValueError, match="over --max-prompt-length 9"):
        encode_prompts(tokenizer, [{"prompt": make(text)}], max_prompt_length=9)
    with pytest.raises(ValueError, match="the tokens do not contain 'é' .*has no token"):
        encode_prompts(tokenizer, [{"prompt": make(text + "é")}], max_prompt_length=9)
    assert 9 < tokenizer.longest <= 2**16


# ---------------------------------------------------------------------------------------------------------------------
# What stands around a text


@pytest.mark.parametrize(
    ("before", "after", "text", "expected"),
    [
        (["<s>"], [], "hi", "<s>hi"),
        (["<s>"], [], "<s>hi", "<s>hi"),
        (["<s>"], [], " \n<s>hi", " \n<s>hi"),
        (["<s>"], [], " \nhi<s>", "<s> \nhi<s>"),
        (["<s>"], ["</s>"], "hi", "<s>hi"),
        (["<s>"], ["</s>"], "<s>hi</s>", "<s>hi</s>"),
        ([], ["</s>"], "hi", "hi"),
        ([], ["</s>"], "hi</s>", "hi</s>"),
        ([], [], "<s>hi", "<s>hi"),
        (["[CLS]"], ["[SEP]"], "hi", "[CLS]hi"),
        (["[CLS]"], ["[SEP]"], "[CLS]hi", "[CLS]hi"),
        (["[CLS]", "<s>"], [], "[CLS]<s>hi", "[CLS]<s>hi"),
        (["[CLS]", "<s>"], [], "hi", "[CLS]<s>hi"),
        (["<s>"], [], "<|im_start|>user\nhi", "<s><|im_start|>user\nhi"),
    ],
)
def test_a_text_gets_one_bos_and_nothing_behind_it(before, after, text, expected):
    tokenizer = make_tokenizer(before=before, after=after)
    assert tokenizer.decode(encode_prompts(tokenizer, [{"prompt": text}])[0]["prompt_ids"]) == expected
    ids, mask = encode_demonstration(tokenizer, {"prompt": text, "response": "so"})
    assert tokenizer.decode(ids) == expected + "so</s>" and sum(mask) == 3
    assert tokenizer.decode(encode_conversation(tokenizer, {"prompt": text}, "so")) == expected + "so</s>"


def test_a_template_that_writes_bos_gives_one():
    for tokenizer in (make_tokenizer(GEMMA, ["<s>"], ["</s>"]), make_tokenizer(GEMMA)):
        [chat] = encode_prompts(tokenizer, [{"prompt": [user("hi")]}])
        text = tokenizer.decode(chat["prompt_ids"])
        assert text == "<s><|im_start|>user\nhi<|im_end|>\n<|im_start|>model\n"
        assert encode_prompts(tokenizer, [{"prompt": text}])[0]["prompt_ids"] == chat["prompt_ids"]  # rendered before


# ---------------------------------------------------------------------------------------------------------------------
# Conversations that end with the assistant


@pytest.mark.parametrize(
    ("template", "last", "end"),
    [
        (CHATML, says("The answer is"), "<|im_start|>assistant\nThe answer is"),
        (CHATML, says("<think>\nLet me"), "<|im_start|>assistant\n<think>\nLet me"),
        (LLAMA, says("The answer is "), "<|im_start|>assistant\nThe answer is"),
        (GEMMA, says("The"), "<|im_start|>model\nThe"),
        (MISTRAL, says("The"), "[INST] q[/INST] The"),
        (GPT_OSS, says("The"), "<|im_start|>assistant<|channel|>final<|message|>The"),
        (QWEN3, says("The"), "<|im_start|>assistant\n<think>\n\n</think>\n\nThe"),
        (QWEN3, says("<think>\nLet me"), "<|im_start|>assistant\n<think>\nLet me"),
        (QWEN3, says("<think>\nso\n</think>\n\nThe"), "<|im_start|>assistant\n<think>\nso\n</think>\n\nThe"),
        (QWEN3, says("", reasoning_content="so"), "<|im_start|>assistant\n<think>\nso\n</think>\n\n"),
        (R1, says("<think>\nLet me"), "<U>q<A><think>\nLet me"),
        (R1, says("<think>\nso\n</think>The"), "<U>q<A><think>\nso\n</think>The"),
        (R1, says("The"), "<U>q<A>The"),
    ],
)
def test_a_partial_answer_is_continued(template, last, end):
    tokenizer, prompt = make_tokenizer(template), [user("q"), last]
    [row] = encode_prompts(tokenizer, [{"prompt": prompt}])
    assert tokenizer.decode(row["prompt_ids"]).endswith(end)
    ids, mask = encode_demonstration(tokenizer, {"prompt": prompt, "response": " 7"})
    assert tokenizer.decode(ids).endswith(end + " 7</s>") and sum(mask) == 3


def test_partial_answers_that_cannot_be_continued_are_refused_by_name():
    drops = CHATML.replace("messages -%}", "messages if m.role != 'assistant' -%}")
    for template, last, message in (
        (drops, says("The"), "row 3: the chat template rejects the messages .*continue_final_message"),
        (QWEN3, says("", tool_calls=[calls("f")]), "row 3: the chat template rejects .*it calls tools; end the prompt"),
    ):
        with pytest.raises(ValueError, match=message):
            encode_prompts(make_tokenizer(template), [row_of([user("q"), last], None)])
    with pytest.raises(
        ValueError, match="row 3: the prompt ends with a message of the assistant, which a conversation"
    ):
        rows = [row_of([user("q"), says("The")], None)]
        encode_prompts(make_tokenizer(), rows, text_of=partial(prompt_text, tools=[]))


def test_a_reward_model_reads_a_partial_answer_and_its_rest_as_one_message():
    tokenizer = make_tokenizer()
    ids = encode_conversation(tokenizer, {"prompt": [user("q"), says("The ")]}, "end")
    assert tokenizer.decode(ids) == "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\nThe end<|im_end|>\n"


# ---------------------------------------------------------------------------------------------------------------------
# Columns


def rl_row(**more):
    return {"prompt": [user("hi")], "data_source": "s", "reward_model": {"ground_truth": "1"}, **more}


def write(path, *rows):
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        pq.write_table(pa.Table.from_pylist(list(rows)), path)
    return path


@pytest.mark.parametrize("name", ["x.jsonl", "x.parquet"])
def test_tools_of_a_row_are_in_its_prompt(tmp_path, name):
    tokenizer, schema = make_tokenizer(QWEN3), [tool(city=CITY)]
    rows = read_rows(write(tmp_path / name, rl_row(tools=json.dumps(schema)), rl_row(tools=None)))
    with_tools, without = (tokenizer.decode(row["prompt_ids"]) for row in encode_prompts(tokenizer, rows))
    assert with_tools == tokenizer.apply_chat_template(
        [user("hi")], tools=schema, tokenize=False, add_generation_prompt=True
    )
    assert "weather" in with_tools and "weather" not in without and "tools" not in rows[1]
    with pytest.raises(ValueError, match=r"row 0: has tools, and --environment or --tools answer calls of others"):
        encode_prompts(tokenizer, rows, text_of=partial(prompt_text, tools=[]))
    with pytest.raises(ValueError, match="row 3: the prompt is a text; rows with tools need messages"):
        encode_prompts(tokenizer, [row_of("hi", schema)])
    with pytest.raises(ValueError, match=r"row 0: tools is 'f' \(str\); it must be a list"):
        read_rows(write(tmp_path / name, rl_row(tools="f")))


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("videos", ["a.mp4"]),
        ("audios", ["a.wav"]),
        ("audio", "a.wav"),
        ("image", "a.png"),
        ("documents", [{"a": "b"}]),
        ("system", "be brief"),
        ("functions", [{"name": "f"}]),
        ("tool_choice", "auto"),
        ("enable_thinking", False),
        ("chat_template", "{{ 1 }}"),
        ("chat_template_kwargs", {"a": 1}),
        ("conversations", [{"from": "human"}]),
        ("messages", [user("other")]),
    ],
)
def test_columns_that_could_change_a_prompt_are_refused_by_name(tmp_path, column, value):
    pair = {"prompt": "a", "chosen": "b", "rejected": "c", column: value}
    demonstration = {"messages": [user("a"), says("b")], column: value}
    readers = {read_rows: rl_row(**{column: value}), read_comparisons: pair, read_demonstrations: demonstration}
    for read, row in readers.items():
        if (read, column) != (read_demonstrations, "messages"):
            with pytest.raises(ValueError, match=rf"x\.jsonl: row 0: has .*{column}"):
                read(write(tmp_path / "x.jsonl", row))
    empty = {column: None if isinstance(value, bool) else type(value)()}
    assert len(read_rows(write(tmp_path / "x.jsonl", rl_row(**empty), rl_row(**{column: None})))) == 2


def test_columns_of_metadata_pass(tmp_path):
    more = dict(ability="math", agent_name="single", index=3, uid="u", question="hi", answer="1", level="5", source="x")
    assert read_rows(write(tmp_path / "x.parquet", rl_row(**more)))[0]["agent_name"] == "single"


def test_a_column_that_the_template_reads_is_refused():
    tokenizer = make_tokenizer(QWEN3)
    assert encode_prompts(tokenizer, [row_of([user("a")], None, enable_thinking=None, reasoning_effort="high")])
    with pytest.raises(ValueError, match="row 3: has a column enable_thinking, which the chat template reads but does"):
        encode_prompts(tokenizer, [row_of([user("a")], None, enable_thinking=False)])


def test_content_in_parts_of_text_becomes_one_text(tmp_path):
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    for name in ("x.jsonl", "x.parquet"):
        [row] = read_rows(write(tmp_path / name, rl_row(prompt=[user(parts)])))
        assert row["prompt"] == [user("one two")]
    with pytest.raises(ValueError, match=r"prompt\[0\] is .* must hold a role and a content, both strings"):
        read_rows(write(tmp_path / "x.jsonl", rl_row(prompt=[user([{"type": "image", "url": "a"}])])))


def test_nulls_of_arguments_stay_unless_arrow_may_have_added_them(tmp_path):
    """A struct of parquet has the keys of all rows. JSON texts and jsonl have what was written."""

    def row(arguments, **more):
        call = {"id": None, "type": "function", "function": {"name": "f", "arguments": arguments}}
        return {"messages": [user("a", name=None), says("", tool_calls=[call]), user("b")], **more}

    def read(path, *rows):
        found = [x["messages"] for x in read_demonstrations(write(path, *rows))]
        assert all("name" not in x[0] and "id" not in x[1]["tool_calls"][0] for x in found)
        return [x[1]["tool_calls"][0]["function"]["arguments"] for x in found]

    both = {"unit": None, "at": [{"x": None}]}
    assert read(tmp_path / "x.jsonl", row(both), row(json.dumps(both))) == [both, both]
    assert read(tmp_path / "x.parquet", row(json.dumps(both))) == [both]
    rows = row({"a": 1, "b": None}), row({"a": 2, "b": "x"})
    assert read(tmp_path / "x.parquet", *rows) == [{"a": 1}, {"a": 2, "b": "x"}]
    schema = [tool(unit={"type": ["string", "null"], "default": None})]
    for path in (tmp_path / "x.jsonl", tmp_path / "x.parquet"):
        rows = [row("{}", tools=json.dumps(schema))] + ([row("{}", tools=schema)] if path.suffix == ".jsonl" else [])
        assert all(x["tools"] == schema for x in read_demonstrations(write(path, *rows)))


# ---------------------------------------------------------------------------------------------------------------------
# Arguments and dates


def test_arguments_reach_every_rendering():
    flags = Texts(apply_chat_template_kwargs='{"enable_thinking": false}')
    tokenizer = prepare(make_tokenizer(QWEN3), flags, None)
    end = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert tokenizer.decode(encode_prompts(tokenizer, [{"prompt": [user("a")]}])[0]["prompt_ids"]).endswith(end)
    ids, _ = encode_demonstration(tokenizer, {"prompt": [user("a")], "response": "b"})
    assert tokenizer.decode(ids).endswith(end + "b</s>")
    chat = CHATML.replace(
        "assistant\n' -}}", "assistant\n' -}}{%- if not enable_thinking -%}{{- 'off' -}}{%- endif -%}"
    )
    assert Chat(prepare(make_tokenizer(chat), flags, None), [], [3]).opening == "<|im_start|>assistant\noff"
    assert rendering_of(prepare_like(make_tokenizer(CHATML), tokenizer)).arguments == {}
    assert rendering_of(prepare_like(make_tokenizer(QWEN3), tokenizer)).arguments == {"enable_thinking": False}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("{", "is not a JSON object; write one such as"),
        ("[1]", "is not a JSON object"),
        ('{"tokenize": true}', "does not read 'tokenize', or this program sets it; leave it out"),
        (
            '{"add_generation_prompt": false}',
            "does not read 'add_generation_prompt', or this program sets it; .* reads enable_thinking\\)",
        ),
        ('{"messages": []}', "does not read 'messages', or this program sets it"),
        ('{"enable_thinkin": false}', "does not read 'enable_thinkin', .*reads enable_thinking"),
        ('{"date_string": "x"}', "does not read 'date_string'"),
    ],
)
def test_wrong_arguments_name_the_flag(value, message):
    with pytest.raises(ValueError, match=rf"^--apply-chat-template-kwargs .*{message}"):
        prepare(make_tokenizer(QWEN3), Texts(apply_chat_template_kwargs=value), None)


def test_the_date_is_that_of_the_day_that_is_asked_for():
    for template, written in ((LLAMA, "31 Jan 2020"), (GPT_OSS, "2020-01-31"), (QWEN3, "")):
        tokenizer = prepare(make_tokenizer(template), Texts(), "2020-01-31")
        [row] = encode_prompts(tokenizer, [{"prompt": [user("a")]}])
        assert written in tokenizer.decode(row["prompt_ids"])
        [today] = encode_prompts(make_tokenizer(template), [{"prompt": [user("a")]}])
        assert (row["prompt_ids"] == today["prompt_ids"]) == (not written)
    assert rendering_of(make_tokenizer()).day == datetime.date.today().isoformat()
    tokenizer = prepare(make_tokenizer(LLAMA), Texts('{"date_string": "today"}'), None)
    assert "Date: today" in tokenizer.decode(encode_prompts(tokenizer, [{"prompt": [user("a")]}])[0]["prompt_ids"])
    assert {"strftime_now", "date_string"} <= variables(tokenizer)


def test_a_resumed_run_has_the_date_of_its_first_day(tmp_path, tiny_model):
    flag = dict(model=tiny_model, max_length=128, default_local_dir=str(tmp_path / "run"))

    def day(**more):
        return rendering_of(check(build(sft.Args, **flag, **more))).day

    today = datetime.date.today().isoformat()
    assert day() == today
    state = dict(step=1, world_size=1, total_steps=9, args={}, data_sha256=[], tokenizer_sha256="")
    dated = json.dumps(state | {"day": "2020-01-31"})
    for step, text in ((1, dated), (2, dated), (3, "{broken")):
        (tmp_path / f"run/global_step_{step}").mkdir(parents=True)
        (tmp_path / f"run/global_step_{step}/trainer_state.json").write_text(text)
    assert day() == "2020-01-31"
    assert day(resume_mode=str(tmp_path / "run/global_step_1")) == "2020-01-31"
    assert day(resume_mode="disable") == today
    (tmp_path / "run/global_step_2/trainer_state.json").write_text(json.dumps(state))  # of a version without date
    assert day() == today
