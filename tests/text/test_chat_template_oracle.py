"""Rendered chats equal those of transformers, which runs jinja2."""

import json
from typing import Any

import jinja2
import pytest
import tokenizers

from metrale_jax.text import ChatTemplate, ChatTemplateError
from text import qwen_like_templates, text_tokenizers

transformers = pytest.importorskip("transformers")

_NAMED_TOKENS = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": 'Weather "now" <b>é</b> & more',
            "parameters": {
                "type": "object",
                "properties": {
                    "zone": {"type": "array", "items": {"type": "string"}},
                    "a": {"type": "number", "default": 1.0, "minimum": -0.5},
                },
                "required": [],
                "additionalProperties": False,
                "nullable": None,
            },
        },
    },
    {"type": "function", "function": {"name": "stop", "parameters": {}}},
]
_ARGUMENTS = {
    "city": "Zürich\n",
    "days": 3,
    "exact": True,
    "none": None,
    "ratio": 1.5,
    "whole": 2.0,
    "list": [1, "a", None, {"k": 1.25}],
    "map": {"z": 1, "a": [True]},
    "empty": "",
}
_SYSTEM = {"role": "system", "content": " Be brief. "}
_USER = {"role": "user", "content": "What's <the> weather?\n"}
_CALL = {
    "role": "assistant",
    "content": "<think>\nI should look.\n</think>\n\nLet me look.",
    "tool_calls": [
        {
            "type": "function",
            "function": {"name": "get_weather", "arguments": _ARGUMENTS},
        },
        {"name": "stop", "arguments": {}},
    ],
}
_CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "user": [_USER],
    "system": [_SYSTEM, _USER],
    "turns": [
        _SYSTEM,
        _USER,
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nSun."},
        {"role": "user", "content": "😀 你好 {{ 1 }}"},
    ],
    "tool_calls": [
        _SYSTEM,
        _USER,
        _CALL,
        {"role": "tool", "content": '{"sun": true}'},
        {"role": "tool", "content": "stopped"},
        {"role": "assistant", "content": "Sun.", "reasoning_content": "\nfine\n"},
    ],
    "only_calls": [_USER, {**_CALL, "content": None}],
    "calls_as_text": [
        _USER,
        {**_CALL, "tool_calls": [{"name": "f", "arguments": '{"a": 1}'}]},
    ],
    "response_by_user": [
        _USER,
        _CALL,
        {"role": "user", "content": "<tool_response>\nx\n</tool_response>"},
    ],
    "parts": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "See "},
                {"type": "image", "image": "x"},
                {"type": "image_url", "image_url": {"url": "y"}},
            ],
        }
    ],
    "reasoning_names": [
        _USER,
        {"role": "assistant", "content": "a", "reasoning": "b", "tool_calls": None},
    ],
    "system_later": [_USER, _SYSTEM],
    "image_in_system": [{"role": "system", "content": [{"type": "image"}]}, _USER],
    "bad_part": [{"role": "user", "content": [{"type": "sound"}]}],
    "bad_content": [{"role": "user", "content": 5}],
    "skipped": [{"role": "skip", "content": "x"}, _USER, _USER, _SYSTEM, _USER],
}
_TEMPLATES = {
    "json_calls": qwen_like_templates.JSON_CALLS,
    "tagged_calls": qwen_like_templates.TAGGED_CALLS,
    "plain": qwen_like_templates.PLAIN,
}
_OPTIONS = {
    "prompt": {"add_generation_prompt": True},
    "no_prompt": {"add_generation_prompt": False},
    "thinking_off": {"add_generation_prompt": True, "enable_thinking": False},
    "thinking_on": {"add_generation_prompt": True, "enable_thinking": True},
    "tools": {"add_generation_prompt": True, "tools": _TOOLS},
    "no_tools": {"add_generation_prompt": False, "tools": []},
    "variable": {"add_generation_prompt": False, "add_vision_id": True},
}


@pytest.fixture(scope="module")
def oracle() -> Any:
    backend = tokenizers.Tokenizer.from_str(text_tokenizers.byte_level_json())
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, **_NAMED_TOKENS
    )


def _outcome(render: Any) -> str | None:
    """The text, or None if the template refused."""
    try:
        return render()
    except (ChatTemplateError, jinja2.TemplateError, TypeError):
        return None


@pytest.mark.parametrize("options", _OPTIONS.values(), ids=_OPTIONS)
@pytest.mark.parametrize("name", _TEMPLATES)
def test_text_equals_that_of_transformers(
    oracle: Any, name: str, options: dict[str, Any]
) -> None:
    template = ChatTemplate(
        source=_TEMPLATES[name], special_tokens=_NAMED_TOKENS, is_isolated=False
    )
    named = dict(options)
    vision = named.pop("add_vision_id", None)
    variables = {} if vision is None else {"add_vision_id": vision}
    outcomes = {}
    for case, messages in _CONVERSATIONS.items():
        ours = _outcome(
            lambda m=messages: template.render(m, **named, variables=variables)
        )
        theirs = _outcome(
            lambda m=messages: oracle.apply_chat_template(
                m, chat_template=_TEMPLATES[name], tokenize=False, **options
            )
        )
        assert ours == theirs, case
        outcomes[case] = ours
    # The comparison would be empty if everything were refused.
    assert sum(text is not None for text in outcomes.values()) >= 8


_EXPRESSIONS = [
    "{{ t }}{{ f }}{{ n }}{{ i }} {{ x }} {{ list }} {{ map }}",
    "{{ 'a' ~ t ~ n ~ list }} {{ t | string }}{{ n | string }}{{ x | string }}",
    "{{ map | tojson }}{{ list | tojson(indent=2) }}{{ text | tojson }}",
    "{{ {'b': 1, 'a': 2} | tojson }} {{ map | tojson(sort_keys=true) }}",
    "{{ [1, 2] | tojson(separators=(',', ':')) }}",
    "{% for k, v in map.items() %}{{ k }}{{ v }}{% endfor %}",
    "{% for k, v in map | dictsort %}{{ k }}{% endfor %}",
    "{{ undefined }}|{{ map.missing }}|{{ list[99] }}|{{ 'a' if f }}",
    "{{ undefined is defined }}{{ n is none }}{{ map is mapping }}{{ t is boolean }}",
    "{{ text | trim }}|{{ text.strip() }}|{{ text | e }}|{{ text.upper() | lower }}",
    "{{ text.split('l')[-1] }}|{{ text.split() }}|{{ 'a,b,c'.split(',', 1) }}",
    "{{ 'abc'[::-1] }}{{ 'abc'[1:] }}{{ list[::-1] }}{{ list[-1] }}",
    "{{ -7 // 2 }} {{ -7 % 3 }} {{ 7 / 2 }} {{ 2 ** 10 }} {{ 1 + 1.5 }}",
    "{{ nums | sort }}{{ nums | join(', ') }}{{ nums | first }}{{ nums | sum }}",
    "{{ [map] | selectattr('b', 'equalto', 1) | list | length }}",
    "{{ '%s-%d' | format('a', 3) }} {{ '{} {}'.format('a', 1) }}",
    "{{ undefined | default('q') }}{{ n | default('q', true) }}",
    "{{ 'a' in 'abc' }}{{ 1 in nums }}{{ 'b' in map }}{{ 'q' not in map }}",
    "{% for v in nums %}{{ loop.index }}{{ loop.previtem }}{{ loop.last }}{% endfor %}",
    "{% set q %}a{{ t }}{% endset %}{{ q }}{% filter upper %}b{% endfilter %}",
    "{% for v in nums if v > 1 %}{{ v }}{% else %}none{% endfor %}",
    "{{ 'y' if {} else 'n' }}{{ 'y' if [] else 'n' }}{{ f or 'z' }}{{ t and 'z' }}",
    "  {% if t %}\n  a\n  {%- endif %}\n\n{% if f %}{% else -%}  b\n{% endif +%}\nc\n",
    "{{ text.startswith('  H') }}{{ text.find('l') }}{{ 'ab cd'.title() }}",
    "{{ '\\n'.join(['a', 'b']) }}{{ 'a\\nb' | indent(2) }}",
    "{{ text | replace('l', 'L') }}{{ text.replace('l', 'L') }}",
    "{{ u | upper }}{{ u | capitalize }}{{ u | length }}{{ 'ß' | upper }}",
]


@pytest.mark.parametrize("source", _EXPRESSIONS)
def test_expressions_mean_what_they_mean_in_jinja2(oracle: Any, source: str) -> None:
    values = {
        "t": True,
        "f": False,
        "n": None,
        "i": 10**30,
        "x": 2.0,
        "list": [1, "a", None, True, 2.5, "it's", {"k": "é"}],
        "map": {"b": 1, "a": [1, 2], "x y": None},
        "nums": [3, 1, 2],
        "text": "  He<llo>\n",
        "u": "ünï",
    }
    messages = [{"role": "user", "content": "x"}]
    theirs = oracle.apply_chat_template(
        messages, chat_template=source, tokenize=False, **json.loads(json.dumps(values))
    )
    template = ChatTemplate(source=source, is_isolated=False)
    assert template.render(messages, variables=values) == theirs
