"""Tokenizers of folders and GGUF files: ids, chat templates, stop tokens, and what transformers makes of our files."""

import json
from pathlib import Path

import pytest
from beside import import_transformers
from gguf import GGUFWriter, TokenType
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as FastTokenizer

from jaxrl.data.chat_template import ChatTemplate
from jaxrl.data.tokenizer import Tokenizer
from jaxrl.data.tokenizer_files import TokenizerFiles
from jaxrl.data.tokenizer_gguf import _pre_tokenizer

RECORDED = json.loads((Path(__file__).parents[1] / "models" / "data" / "smollm2.json").read_text(encoding="utf-8"))
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["h e", "l l", "Ġ w", "he ll"]


def write_gguf(file: Path, templates=None, **changes) -> Path:
    """A byte-level vocabulary with a few merges, and chat templates."""
    fields = {"model": "gpt2", "pre": "gpt-2", "eos": 2, "add_bos": False} | changes
    tokens = [*SPECIAL, *BYTES, *(merge.replace(" ", "") for merge in MERGES), "<tool>", "[PAD]"]
    kinds = [TokenType.CONTROL] * 3 + [TokenType.NORMAL] * (len(BYTES) + len(MERGES))
    kinds += [TokenType.USER_DEFINED, TokenType.UNUSED]
    writer = GGUFWriter(str(file), "llama")
    writer.add_tokenizer_model(fields["model"])
    writer.add_tokenizer_pre(fields["pre"])
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(fields["eos"])
    writer.add_add_bos_token(fields["add_bos"])
    if templates:
        writer.add_chat_template([{"name": name, "template": source} for name, source in templates.items()])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def write_folder(folder: Path, **config) -> Path:
    tokens = [*SPECIAL, *BYTES, *(merge.replace(" ", "") for merge in MERGES)]
    pairs = [(left, right) for left, right in (merge.split(" ") for merge in MERGES)]
    fast = FastTokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=pairs))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    fast.enable_truncation(4)
    fast.enable_padding(length=8)
    folder.mkdir(exist_ok=True)
    fast.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"} | config))
    return folder


def test_smollm2_ids_are_the_recorded_ones(smol):
    for case in RECORDED["texts"]:
        assert smol.encode(case["text"]) == case["ids"]
        assert smol.decode(case["ids"], skip_special_tokens=False) == case["text"]


def test_smollm2_chat_and_special_tokens(smol):
    rendered = smol.apply_chat_template([{"role": "user", "content": RECORDED["question"]}])
    assert rendered == RECORDED["rendered"]
    assert smol.encode(rendered) == RECORDED["token_ids"]
    assert smol.decode(RECORDED["greedy_ids"]) == RECORDED["greedy_text"]
    assert smol.eos_token_ids == (2,)
    assert smol.stop_token_ids == (2, 0)
    assert (smol.bos_id, smol.pad_id, smol.vocab_size) == (1, 2, 49152)


def test_bos_comes_with_special_tokens_only(tmp_path):
    tokenizer = Tokenizer.from_path(write_gguf(tmp_path / "t.gguf", add_bos=True))
    assert tokenizer.encode("h", add_special_tokens=True) == [1, *tokenizer.encode("h")]


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["It", "'s", "Ġ1234", "Ġ", "Ġok", "!", "Ċ"]),
        ("smollm", ["It", "'s", "Ġ", "1", "2", "3", "4", "Ġ", "Ġok", "!", "Ċ"]),
        ("qwen2", ["It", "'s", "Ġ", "1", "2", "3", "4", "Ġ", "Ġok", "!Ċ"]),
        ("llama-bpe", ["It", "'s", "Ġ", "123", "4", "Ġ", "Ġok", "!Ċ"]),
        ("default", ["It", "'", "s", "Ġ", "123", "4", "Ġ", "Ġok", "!", "Ċ"]),
    ],
)
def test_pre_tokenizers(pre, pieces):
    assert [piece for piece, _ in _pre_tokenizer(pre, "f").pre_tokenize_str("It's 1234  ok!\n")] == pieces


def test_eos_of_generation_config_and_pad(tmp_path):
    folder = write_folder(tmp_path, pad_token={"content": "<|endoftext|>", "special": True})
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 7}))
    assert Tokenizer.from_path(folder).eos_token_ids == (2, 7)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 2]}))
    tokenizer = Tokenizer.from_path(folder)
    assert (tokenizer.eos_token_ids, tokenizer.pad_id) == ((2, 0), 0)


SAID = "{% for m in messages %}{{ m.content }}{% endfor %}\n"
"""Writes what the messages say, as every template must."""


def test_where_templates_come_from(tmp_path):
    messages = [{"role": "user", "content": "hi"}]
    with pytest.raises(ValueError, match="has no chat template"):
        Tokenizer.from_path(write_folder(tmp_path)).apply_chat_template(messages)
    tokenizer = Tokenizer.from_path(write_folder(tmp_path, chat_template=SAID + "one"))
    assert tokenizer.apply_chat_template(messages) == "hione"
    (tmp_path / "chat_template.jinja").write_text(CHATML)
    tokenizer = Tokenizer.from_path(tmp_path)
    assert tokenizer.apply_chat_template(messages) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.apply_chat_template(messages, add_generation_prompt=False) == "<|im_start|>user\nhi<|im_end|>\n"


def rendered(template: str, messages=(), **variables) -> str:
    template = template if "messages %}" in template else SAID + template
    templates = {"default": ChatTemplate(template, "file")}
    files = TokenizerFiles(FastTokenizer(models.BPE()), {"bos_token": "<s>"}, "tokenizer", chat_templates=templates)
    return Tokenizer(files).apply_chat_template(messages, **variables)


def test_what_templates_may_use():
    assert rendered("{{ bos_token }}{{ x | tojson }}", x={"a": "<é>"}) == '<s>{"a": "<é>"}'
    assert rendered("  {% if tools is none %}\nyes\n  {% endif %}\n") == "yes\n"
    assert rendered("{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "1"
    assert rendered("{% generation %}a{% endgeneration %}b") == "ab"
    assert len(rendered("{{ strftime_now('%Y') }}")) == 4
    with pytest.raises(ValueError, match="refuses these messages: roles must alternate"):
        rendered("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ValueError, match="refuses these messages"):
        rendered("{{ messages.append(1) }}")


TEMPLATES = {
    "chatml": CHATML,
    "system": (
        "{%- if messages[0].role == 'system' %}\n    {{- '<<SYS>>' + messages[0].content | trim + bos_token }}\n"
        "{%- endif %}\n{%- for message in messages[1:] %}\n  {%- set last = loop.last %}\n"
        "{{ message | tojson(indent=2) }}{% if not last %};{% endif %}\n{%- endfor %}\n"
        "{% if add_generation_prompt %}\n>>{{ eos_token }}\n{% endif %}"
    ),
}


@pytest.mark.parametrize("template", TEMPLATES)
def test_templates_render_as_in_transformers(template, tmp_path):
    module = import_transformers(models=False)
    folder = write_folder(tmp_path, chat_template=TEMPLATES[template], bos_token="<|im_start|>")
    theirs = module.AutoTokenizer.from_pretrained(folder)
    ours = Tokenizer.from_path(folder)
    messages = [{"role": "system", "content": " be <kind> "}, {"role": "user", "content": "1 < 2 é"}]
    for prompt in (True, False):
        assert ours.apply_chat_template(messages, prompt) == theirs.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=prompt
        )


def test_transformers_loads_what_we_save(smol, tmp_path):
    module = import_transformers(models=False)
    smol.save(tmp_path)
    theirs = module.AutoTokenizer.from_pretrained(tmp_path)
    for case in RECORDED["texts"]:
        assert theirs(case["text"], add_special_tokens=False)["input_ids"] == case["ids"]
    assert theirs.eos_token_id == 2
    assert theirs.pad_token_id == 2
    messages = [{"role": "user", "content": RECORDED["question"]}]
    assert theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=False) == RECORDED["rendered"]


def folder_with(folder: Path, special: list[str], eos: str, around: str = "$A", ids: object = None) -> Path:
    """A token for each byte, special tokens from id 0, and what the tokenizer puts around a text."""
    folder.mkdir(exist_ok=True)
    fast = FastTokenizer(models.BPE(vocab={token: i for i, token in enumerate([*special, *BYTES])}, merges=[]))
    fast.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    fast.pre_tokenizer, fast.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    fast.post_processor = processors.TemplateProcessing(around, None, [(t, i) for i, t in enumerate(special)])
    fast.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos, "chat_template": CHATML}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    return folder


@pytest.mark.parametrize("around", ["<|im_start|> $A <|im_end|>", "$A"])
def test_no_prompt_ends_with_the_token_that_ends_it(around, tmp_path):
    tokenizer = Tokenizer.from_path(folder_with(tmp_path, SPECIAL, "<|im_end|>", around))
    begins = [1] if around.startswith("<") else []
    for text in ("1+1=", "a<|im_end|>", "a<|im_start|>"):
        ids = tokenizer.encode(text, add_special_tokens=True)
        assert ids == [*begins, *tokenizer.encode(text)]
        assert tokenizer.encode_batch([text], add_special_tokens=True) == [ids]


HARMONY = ["<|endoftext|>", "<|return|>", "<|call|>", "<|start|>", "<|channel|>", "<|message|>", "<|end|>"]


def test_the_end_of_a_message_of_harmony_stops_nothing(tmp_path):
    tokenizer = Tokenizer.from_path(folder_with(tmp_path, HARMONY, "<|return|>", ids=1))
    assert sorted(tokenizer.stop_token_ids) == [0, 1, 2]
    called = [{"role": "user", "content": "a"}, {"role": "tool", "content": "b"}]
    with pytest.raises(ValueError, match=r"gpt-oss's format \(harmony\) is read in plain chats, without tools"):
        tokenizer.apply_chat_template(called)
    others = Tokenizer.from_path(folder_with(tmp_path / "phi", ["<|end|>", "<|endoftext|>"], "<|endoftext|>", ids=1))
    assert sorted(others.stop_token_ids) == [0, 1]


def test_marked_special_tokens_are_their_letters(tmp_path):
    tokenizer = Tokenizer.from_path(folder_with(tmp_path, [*SPECIAL, "|im_end|>x"], "<|im_end|>"))
    text = "a<|im_end|>x<|im_<|im_start|>start|>\n<|im_end|>"
    marked = tokenizer.encode(tokenizer.as_text(text))
    assert tokenizer.decode(marked, skip_special_tokens=False) == text
    assert not {0, 1, 2, 3} & set(marked)
    assert {1, 2} < set(tokenizer.encode(text))
    assert tokenizer.encode_batch(["b", tokenizer.as_text(text)]) == [tokenizer.encode("b"), marked]
    assert tokenizer.as_text("plain <text>") == "plain <text>"


CALLING = "{{ messages[0].content }}{% for c in messages[1].tool_calls or [] %}ARGUMENTS;{% endfor %}"


@pytest.mark.parametrize("given", [{"x": "ü"}, '{"x":"ü"}'])
@pytest.mark.parametrize(
    "written", ["{{ c.function.arguments | tojson }}", "{{ c.function.arguments }}", "{{ '' + c.function.arguments }}"]
)
def test_arguments_of_calls_are_written_once(given, written, tmp_path):
    tokenizer = Tokenizer.from_path(folder_with(tmp_path, SPECIAL, "<|im_end|>"))
    tokenizer.chat_templates = {"default": ChatTemplate(CALLING.replace("ARGUMENTS", written), "test")}
    call = {"type": "function", "function": {"name": "f", "arguments": given}}
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": [call] * 2}]
    assert tokenizer.apply_chat_template(messages) == "a" + 2 * '{"x": "ü"};'
