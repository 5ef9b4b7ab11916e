"""Chat templates: limits, refusals, and where a checkpoint keeps them."""

import datetime
import json
import pathlib
import subprocess
import sys
import time
from typing import Any

import pytest

from metrale_jax.text import (
    ChatTemplate,
    ChatTemplateError,
    RenderLimits,
    Tokenizer,
    chat_template,
    select_template,
)
from text import qwen_like_templates, text_tokenizers

_HELLO = [{"role": "user", "content": "Hello"}]
# Enough for the start of a process on a busy machine.
_SECONDS = 8.0


def _template(source: str, **options: Any) -> ChatTemplate:
    """Rendered in this process, for speed, where isolation isn't the matter."""
    return ChatTemplate(source=source, is_isolated=False, **options)


def _isolated(source: str, **limits: Any) -> ChatTemplate:
    limits.setdefault("seconds", _SECONDS)
    return ChatTemplate(source=source, limits=RenderLimits(**limits))


_ENDLESS = {
    "nested_loops": "{% for i in range(99999) %}{% for j in range(99999) %}"
    "{{ j }}{% endfor %}{% endfor %}",
    "doubling_macro": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}"
    "{% endif %}{% endmacro %}{{ f(40) }}",
    "long_text": "{{ ('x' * 10 ** 9) | length }}",
    "doubling_text": "{% set n = namespace(x='x') %}{% for i in range(60) %}"
    "{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x | length }}",
    "doubling_join": "{% set n = namespace(x='x') %}{% for i in range(60) %}"
    "{% set n.x = [n.x, n.x] | join %}{% endfor %}{{ n.x | length }}",
    "doubling_replace": "{% set n = namespace(x='x') %}{% for i in range(60) %}"
    "{% set n.x = n.x | replace('x', 'xx') %}{% endfor %}{{ n.x | length }}",
    "wide_format": "{{ '%1000000000d' | format(1) | length }}",
    "wide_indent": "{{ 'a\\nb' | indent(10 ** 9) | length }}",
    "wide_batch": "{{ [1] | batch(10 ** 9, 0) | length }}",
}


@pytest.mark.parametrize("source", _ENDLESS.values(), ids=_ENDLESS)
def test_endless_work_is_stopped_by_the_limit_on_steps(source: str) -> None:
    limits = RenderLimits(steps=200_000)
    with pytest.raises(ChatTemplateError, match="`limits.steps` = 200000"):
        _template(source, limits=limits).render(_HELLO)


_OUT_OF_RANGE = {
    "long_range": ("{{ range(10 ** 9) | length }}", "too many elements"),
    "long_loop": ("{% for i in range(10 ** 9) %}x{% endfor %}", "too many elements"),
    "long_list": ("{% for i in [0] * 10 ** 9 %}x{% endfor %}", "too large"),
    "endless_macro": (
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "recursion limit",
    ),
    "nested_brackets": ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "recursion"),
    "huge_power": ("{{ 10 ** 400 }}", "unable to calculate"),
}


@pytest.mark.parametrize(
    ("source", "message"), _OUT_OF_RANGE.values(), ids=_OUT_OF_RANGE
)
def test_impossible_values_are_template_errors(source: str, message: str) -> None:
    with pytest.raises(ChatTemplateError, match=message):
        _template(source).render(_HELLO)


# Two lists of 2 ** 60 ones, in some hundred bytes each.
_SHARED = (
    "{% set n = namespace(x=[1], y=[1]) %}{% for i in range(60) %}"
    "{% set n.x = [n.x, n.x] %}{% set n.y = [n.y, n.y] %}{% endfor %}"
)
_BEYOND_STEPS = {
    # What no count of steps sees: each is ended by its own process's limits.
    "shown_shared_list": (_SHARED + "{{ n.x }}", "limits.seconds|limits.memory_bytes"),
    "compared_shared_list": (_SHARED + "{{ n.x == n.y }}", "limits.seconds"),
    "growing_python_list": (
        "{% for i in range(60) %}{% set _ = messages.extend(messages) %}{% endfor %}",
        "limits.memory_bytes|limits.seconds",
    ),
    "wide_json": ("{{ [[1]] | tojson(indent=10 ** 9) }}", "limits.memory_bytes"),
    "long_expression": ("{{ " + "1 + " * 100_000 + "1 }}", "nests too deep"),
    "deep_list": (
        "{% set n = namespace(x=[]) %}{% for i in range(90000) %}"
        "{% set n.x = [n.x] %}{% endfor %}{{ n.x }}",
        "nests too deep",
    ),
}


@pytest.mark.parametrize(
    ("source", "message"), _BEYOND_STEPS.values(), ids=_BEYOND_STEPS
)
def test_isolation_stops_what_counting_does_not(source: str, message: str) -> None:
    template = _isolated(source, seconds=2.0, memory_bytes=1 << 29)
    start = time.monotonic()
    with pytest.raises(ChatTemplateError, match=message):
        template.render(_HELLO)
    # Far below what any of them would take; a bound on hanging, not a measurement.
    assert time.monotonic() - start < 30


def test_limit_on_time_is_named() -> None:
    source = _SHARED + "{{ n.x == n.y }}"
    with pytest.raises(ChatTemplateError, match=r"`limits.seconds` = 0\.5;"):
        _isolated(source, seconds=0.5).render(_HELLO)


def test_a_fault_of_the_process_is_not_blamed_on_the_template() -> None:
    stderr = b"Traceback\nModuleNotFoundError: No module named 'minijinja'\n"
    error = chat_template._ended_early(1, stderr, RenderLimits())
    assert isinstance(error, RuntimeError)
    assert "No module named 'minijinja'" in str(error)


def test_lower_limits_of_the_system_are_kept() -> None:
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (1 << 29, 1 << 29));"
        "from metrale_jax.text import template_worker;"
        "template_worker._limit_process(1 << 40, 1 << 20);"
        "print(resource.getrlimit(resource.RLIMIT_AS)[1] == 1 << 29)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout == "True\n"


_INNER = {
    "class": "{{ messages.__class__ }}{{ ''.__class__ }}{{ messages[0].__class__ }}",
    "attr_filter": "{{ messages | attr('__class__') }}",
    "subscript": "{{ messages['__class__'] }}{{ ''['__class__'] }}",
    "globals": "{{ raise_exception.__globals__ }}{{ strftime_now.__globals__ }}",
    "self": "{{ strftime_now.__self__ }}{{ messages.append.__self__ }}",
    "module": "{{ raise_exception.__module__ }}{{ range.__module__ }}",
}


@pytest.mark.parametrize("source", _INNER.values(), ids=_INNER)
def test_python_internals_are_out_of_reach(source: str) -> None:
    assert _template(source).render(_HELLO) == ""


@pytest.mark.parametrize(
    "source",
    [
        "{% include 'tokenizer.json' %}",
        "{% import 'os' as os %}",
        "{% extends 'base' %}",
        "{{ open('x') }}",
        "{{ __import__('os') }}",
        "{{ messages.__class__.__mro__ }}",
        "{{ messages.__init__() }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    ],
)
def test_files_and_python_calls_are_errors(source: str) -> None:
    with pytest.raises(ChatTemplateError, match="can't be rendered"):
        _template(source).render(_HELLO)


def test_template_can_not_change_the_callers_messages() -> None:
    messages = [{"role": "user", "content": "Hello", "parts": [1]}]
    source = "{% set _ = messages[0].parts.append(2) %}{% set _ = messages.clear() %}"
    _template(source).render(messages)
    assert messages == [{"role": "user", "content": "Hello", "parts": [1]}]


@pytest.mark.parametrize("is_isolated", [True, False], ids=["isolated", "in_process"])
def test_refusal_carries_the_templates_words(is_isolated: bool) -> None:
    template = ChatTemplate(
        source=qwen_like_templates.TAGGED_CALLS, is_isolated=is_isolated
    )
    with pytest.raises(ChatTemplateError, match="refused.*: Unknown role: füchse"):
        template.render([{"role": "füchse", "content": "?"}])


@pytest.mark.parametrize("is_isolated", [True, False], ids=["isolated", "in_process"])
@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("line\n{% if %}", "syntax error.*2"),
        ("{{ messages[0].content.missing.deeper }}", "undefined value"),
        ("{{ messages | nosuch }}", "nosuch"),
        ("{{ 'a' + 1 }}", "unsupported types"),
        ("{{ {1: 2}.__init__ | tojson(sort_keys=3, nosuch=4) }}", "nosuch"),
    ],
    ids=["syntax", "undefined", "filter", "types", "argument"],
)
def test_faults_of_a_template_are_told(
    source: str, message: str, is_isolated: bool
) -> None:
    template = ChatTemplate(source=source, is_isolated=is_isolated)
    with pytest.raises(ChatTemplateError, match=message):
        template.render(_HELLO)


def test_isolated_text_equals_text_rendered_in_process() -> None:
    conversations = [
        [{"role": "user", "content": text}] for text in ("a", "ünï 😀\x00", "x" * 5000)
    ]
    for source in (qwen_like_templates.JSON_CALLS, qwen_like_templates.TAGGED_CALLS):
        isolated = _isolated(source).render_many(conversations)
        assert isolated == _template(source).render_many(conversations)
        assert isolated[2] == _isolated(source).render(conversations[2])
    assert _isolated("").render_many([]) == []


def test_long_conversation_stays_within_the_default_limits() -> None:
    turns = [
        {"role": "user", "content": "q" * 200},
        {"role": "assistant", "content": "<think>\nz\n</think>\n\n" + "a" * 200},
    ]
    messages = [*turns * 1000, {"role": "user", "content": "b" * 1_000_000}]
    text = _isolated(qwen_like_templates.JSON_CALLS).render(messages)
    assert text.count("<|im_start|>") == 2002


def test_time_is_an_argument() -> None:
    now = datetime.datetime(2031, 2, 3, 4, 5, 6)
    source = "{{ strftime_now('%Y-%m-%d %H:%M') }}"
    assert _template(source).render(_HELLO, now=now) == "2031-02-03 04:05"
    assert _isolated(source).render(_HELLO, now=now) == "2031-02-03 04:05"
    today = _template("{{ strftime_now('%Y') }}").render(_HELLO)
    assert abs(int(today) - datetime.datetime.now().year) <= 1


def test_empty_fields_count_as_missing() -> None:
    source = "{{ messages[0].content is defined }} {{ 'tool_calls' in messages[0] }}"
    messages = [{"role": "user", "content": None, "tool_calls": None}]
    assert _template(source).render(messages) == "False False"


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_may_have_any_of_its_names(name: str) -> None:
    source = "{{ messages[0].reasoning_content }} {{ messages[0].thinking }}"
    messages = [{"role": "assistant", "content": "4", name: "2+2"}]
    assert _template(source).render(messages) == "2+2 2+2"


def test_variables_reach_the_template() -> None:
    source = (
        "{{ bos_token }}{{ enable_thinking }}{{ effort }}{{ tools }}{{ documents }}"
    )
    template = _template(source, special_tokens={"bos_token": "<s>"})
    shown = template.render(_HELLO, enable_thinking=False, variables={"effort": "low"})
    assert shown == "<s>FalselowNoneNone"
    assert template.render(_HELLO) == "<s>NoneNone"


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("Hello", r"`conversations`\[0\] must be a list of messages, got str"),
        ({"role": "user"}, r"must be a list of messages, got dict"),
        (["Hello"], r"`conversations`\[0\]\[0\] must be a mapping"),
        ([*_HELLO, 3], r"`conversations`\[0\]\[1\] must be a mapping .* got 3"),
    ],
)
def test_malformed_messages_are_refused(messages: Any, message: str) -> None:
    # Below the annotated surface, whose types the tests check at run time.
    with pytest.raises(ValueError, match=message):
        chat_template._plain_messages(0, messages)


_CYCLE: list[Any] = []
_CYCLE.append(_CYCLE)


@pytest.mark.parametrize(
    "content",
    [object(), {1, 2}, b"bytes", "\ud800", _CYCLE],
    ids=["object", "set", "bytes", "lone_surrogate", "cycle"],
)
def test_values_outside_of_json_are_refused(content: Any) -> None:
    with pytest.raises(ValueError, match="must hold only what JSON can"):
        _template("x").render([{"role": "user", "content": content}])


@pytest.mark.parametrize("name", ["steps", "seconds", "memory_bytes"])
def test_limits_must_be_positive(name: str) -> None:
    with pytest.raises(ValueError, match=f"`{name}` must be positive, got 0"):
        RenderLimits(**{name: 0})


def _load(folder: pathlib.Path, chat_template: Any = None) -> Tokenizer:
    config = {"eos_token": "<|im_end|>", "chat_template": chat_template}
    return Tokenizer.from_folder(text_tokenizers.write_folder(folder, config=config))


def test_missing_template_names_the_way_out(tmp_path: pathlib.Path) -> None:
    tokenizer = _load(tmp_path)
    for ask in (tokenizer.chat_template, lambda: tokenizer.encode_chat(_HELLO)):
        with pytest.raises(ValueError, match="no chat template .* chat_template.jinja"):
            ask()


def test_template_of_the_config_is_read(tmp_path: pathlib.Path) -> None:
    assert _load(tmp_path, "from config").chat_templates == {"default": "from config"}


def test_template_file_goes_before_the_config(tmp_path: pathlib.Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("from file")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("with tools")
    templates = _load(tmp_path, "from config").chat_templates
    assert templates == {"default": "from file", "tool_use": "with tools"}


def test_templates_are_chosen_by_name_and_by_tools(
    tmp_path: pathlib.Path,
) -> None:
    entries = [
        {"name": "default", "template": "D"},
        {"name": "tool_use", "template": "T"},
        {"name": "rag", "template": "R"},
    ]
    templates = _load(tmp_path, entries).chat_templates
    assert select_template(templates) == "D"
    assert select_template(templates, has_tools=True) == "T"
    assert select_template(templates, "rag", has_tools=True) == "R"
    with pytest.raises(ValueError, match="'default', 'rag', 'tool_use'.* got 'other'"):
        select_template(templates, "other")
    with pytest.raises(ValueError, match="got 'default'"):
        select_template({"rag": "R"}, has_tools=True)


def test_chat_is_encoded_with_its_special_tokens(tmp_path: pathlib.Path) -> None:
    tokenizer = _load(tmp_path, qwen_like_templates.JSON_CALLS)
    ids = tokenizer.encode_chat(_HELLO, enable_thinking=False)
    expected = (
        "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
        "<think>\n\n</think>\n\n"
    )
    assert tokenizer.decode(ids, skip_special_tokens=False) == expected
    # The template writes all of them; nothing is put around its text.
    assert ids == tokenizer.encode(expected, add_special_tokens=False)
    assert ids.count(tokenizer.token_id("<|im_start|>")) == 2


def test_request_reaches_the_process_whatever_it_holds() -> None:
    messages = [{"role": "user", "content": "'\"\\\n\x00\x1b</script>{{ 1 }}{% x %}"}]
    source = "{{ messages[0].content }}|{{ messages | tojson }}"
    expected = messages[0]["content"] + "|" + json.dumps(messages, ensure_ascii=False)
    assert _isolated(source).render(messages) == expected
