"""Chat templates of four kinds, and tokenizers that have them."""

from __future__ import annotations

import copy

from jaxrl.data.chat_template import ChatTemplate
from jaxrl.data.tokenizer import Tokenizer

# Written as the families write theirs, in the special tokens of SmolLM2's vocabulary.
CHATML = """
{%- for m in messages %}{{ '<|im_start|>' ~ m.role ~ '\n' ~ m.content ~ '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
TOOLS_TOGETHER = """
{%- if messages[0].role != 'system' %}{{ '<|im_start|>system\nYou help.<|im_end|>\n' }}{% endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\n<answer>\n' ~ m.content ~ '\n</answer>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}
{%- else %}{{ '<|im_start|>' ~ m.role ~ '\n' ~ m.content ~ '<|im_end|>\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
HEADERS = """
{{- bos_token }}{% for m in messages %}
{{- '<repo_name>' ~ ('ipython' if m.role == 'tool' else m.role) ~ '<file_sep>\n' ~ m.content | trim ~ '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<repo_name>assistant<file_sep>\n' }}{% endif %}"""
THINKS = """
{%- set last = namespace(user=0) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- set said = m.content.split('</think>')[-1].lstrip('\n') if loop.index0 < last.user else m.content %}
{{- '<|im_start|>' ~ m.role ~ '\n' ~ (said if m.role == 'assistant' else m.content) ~ '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
TEMPLATES = {"chatml": CHATML, "tools together": TOOLS_TOGETHER, "headers": HEADERS, "thinks": THINKS}


def renders(tokenizer: Tokenizer, template: str) -> Tokenizer:
    """The same tokenizer, with this template."""
    found = copy.copy(tokenizer)
    found.chat_templates = {"default": ChatTemplate(template.strip(), "test")}
    return found
