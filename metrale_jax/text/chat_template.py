"""Chat templates: a conversation becomes the text that the model was trained on.

A template comes with a checkpoint, so it is treated as a stranger's program. It runs in
minijinja, where it reaches no Python, no file and no network, and where its steps are
counted. What counting can't stop (a list that holds another twice, forty levels deep;
an expression of a hundred thousand terms, which overflows the native stack) is stopped
by a process of its own, with limits on time and memory.
"""

import dataclasses
import datetime
import importlib.util
import json
import pathlib
import re
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from metrale_jax.text import template_worker

# Message fields that hold reasoning, the usual one first.
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
# Marks what the model wrote, for training on it; it changes nothing in the text.
_GENERATION_TAG = re.compile(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}")

Message = Mapping[str, Any]


class ChatTemplateError(ValueError):
    """A chat template refused its messages, is malformed, or ran into a limit."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RenderLimits:
    """What rendering one conversation may cost.

    Attributes:
      steps: units of minijinja's fuel (an instruction, or a few bytes of text built).
      steps_per_character: further units per character of the conversation's JSON.
      seconds: wall time, the start of the process included.
      memory_bytes: address space of the process.
    """

    steps: int = 10_000_000
    steps_per_character: int = 16
    seconds: float = 10.0
    memory_bytes: int = 1 << 30

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not value > 0:
                raise ValueError(f"`{field.name}` must be positive, got {value}.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatTemplate:
    """A template and what it is rendered with; renders as transformers does.

    Attributes:
      source: the template's text.
      special_tokens: variables such as `bos_token` and `eos_token`.
      limits: what rendering may cost.
      is_isolated: render in a process of its own (about 60 ms a call). Without it only
        `limits.steps` holds: for a template that you have read, or where no process can
        be started.
    """

    source: str
    special_tokens: Mapping[str, str] = dataclasses.field(default_factory=dict)
    limits: RenderLimits = RenderLimits()
    is_isolated: bool = True

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        enable_thinking: bool | None = None,
        variables: Mapping[str, Any] | None = None,
        now: datetime.datetime | None = None,
    ) -> str:
        """Returns the text of one conversation; see `render_many`."""
        return self.render_many(
            [messages],
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            enable_thinking=enable_thinking,
            variables=variables,
            now=now,
        )[0]

    def render_many(
        self,
        conversations: Sequence[Sequence[Message]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        enable_thinking: bool | None = None,
        variables: Mapping[str, Any] | None = None,
        now: datetime.datetime | None = None,
    ) -> list[str]:
        """Returns the text of each conversation, all rendered by one process.

        Args:
          conversations: lists of messages, each a mapping with `role` and, mostly,
            `content`. Fields that are None count as missing; reasoning may be named
            `reasoning_content`, `reasoning` or `thinking`.
          tools: JSON schemas of the functions that the model may call.
          add_generation_prompt: end with the head of the assistant's next message.
          enable_thinking: the switch of that name; None leaves it undefined.
          variables: further variables of the template.
          now: time for templates that show it, the present local one by default.

        Raises:
          ChatTemplateError: the template refused a conversation, is malformed, or ran
            into a limit, which the message names.
          ValueError: a message is no mapping, or holds what JSON can't.
          NotImplementedError: isolation isn't available on this platform.
        """
        shared: dict[str, Any] = {
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **self.special_tokens,
        }
        if enable_thinking is not None:
            shared["enable_thinking"] = enable_thinking
        shared.update(variables or {})
        contexts = [
            _context_json(
                index, {**shared, "messages": _plain_messages(index, messages)}
            )
            for index, messages in enumerate(conversations)
        ]
        if not contexts:
            return []
        now = datetime.datetime.now() if now is None else now
        return self._render_contexts(contexts, now.isoformat())

    def _render_contexts(self, contexts: list[str], now: str) -> list[str]:
        source = _GENERATION_TAG.sub(_plain_tag, self.source)
        longest = max(len(context) for context in contexts)
        max_steps = self.limits.steps + self.limits.steps_per_character * longest
        if self.is_isolated:
            return _render_isolated(source, contexts, max_steps, now, self.limits)
        try:
            return template_worker.render_contexts(
                source, contexts, max_steps=max_steps, now=now
            )
        except template_worker.RenderError as error:
            raise _error(error.failure, error.message, max_steps, self.limits) from None


def select_template(
    templates: Mapping[str, str], name: str | None = None, *, has_tools: bool = False
) -> str:
    """Chooses among a checkpoint's templates by name, or else as transformers does.

    Without a name that is "tool_use" for a conversation with tools, if there is one,
    and "default" otherwise.

    Raises:
      ValueError: there is no template at all, or none of that name.
    """
    if not templates:
        raise ValueError(
            "this tokenizer has no chat template (no chat_template.jinja, and no "
            "`chat_template` in tokenizer_config.json); add the file, build a "
            "`ChatTemplate` from a source of your own, or encode plain text instead."
        )
    if name is None:
        name = "tool_use" if has_tools and "tool_use" in templates else "default"
    if name not in templates:
        raise ValueError(
            f"`name` must be one of this tokenizer's chat templates "
            f"{sorted(templates)}, got {name!r}."
        )
    return templates[name]


def _plain_tag(match: re.Match[str]) -> str:
    left, is_end, right = match.groups()
    return f"{{%{left} {'endif' if is_end else 'if true'} {right}%}}"


def _plain_messages(index: int, messages: Iterable[object]) -> list[dict[str, Any]]:
    """Messages without empty fields, and with reasoning under the usual name."""
    if isinstance(messages, (str, Mapping)):
        raise ValueError(
            f"`conversations`[{index}] must be a list of messages, "
            f"got {type(messages).__name__}."
        )
    plain = []
    for position, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise ValueError(
                f"`conversations`[{index}][{position}] must be a mapping such as "
                f"{{'role': 'user', 'content': 'Hello'}}, got {message!r}."
            )
        fields = {key: value for key, value in message.items() if value is not None}
        for name in _REASONING_FIELDS:
            if name in fields:
                # Some templates read the older name.
                fields.setdefault("thinking", fields[name])
                fields["reasoning_content"] = fields[name]
                break
        plain.append(fields)
    return plain


def _context_json(index: int, context: Mapping[str, Any]) -> str:
    try:
        text = json.dumps(context, ensure_ascii=False)
        # A lone surrogate is no text; no engine and no tokenizer could take it.
        text.encode("utf-8")
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"`conversations`[{index}], `tools` and `variables` must hold only what "
            f"JSON can (text, numbers, lists, mappings): {error}."
        ) from error
    return text


def _render_isolated(
    source: str, contexts: list[str], max_steps: int, now: str, limits: RenderLimits
) -> list[str]:
    if not sys.executable or importlib.util.find_spec("resource") is None:
        raise NotImplementedError(
            "`is_isolated` needs a Python program and a POSIX system; for a template "
            "that you trust, use dataclasses.replace(template, is_isolated=False)."
        )
    seconds = limits.seconds * len(contexts)
    request = {
        "source": source,
        "contexts": contexts,
        "max_steps": max_steps,
        "now": now,
        "memory_bytes": limits.memory_bytes,
        "seconds": int(seconds) + 1,
    }
    # -P keeps this folder's module names out of the worker's search path.
    command = [sys.executable, "-P", str(pathlib.Path(template_worker.__file__))]
    try:
        done = subprocess.run(
            command,
            input=json.dumps(request).encode(),
            capture_output=True,
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ChatTemplateError(
            f"the chat template did not end within `limits.seconds` = {seconds:g}; "
            "correct it, or raise the limit."
        ) from None
    if done.returncode != 0:
        raise _ended_early(done.returncode, done.stderr, limits)
    reply = json.loads(done.stdout)
    if "texts" in reply:
        return reply["texts"]
    raise _error(reply["failure"], reply["message"], max_steps, limits)


def _ended_early(returncode: int, stderr: bytes, limits: RenderLimits) -> Exception:
    """The error for a process that gave no answer."""
    last_line = stderr.decode(errors="replace").strip().rpartition("\n")[2]
    if returncode < 0:
        # Without memory or stack the native code ends its process by a signal.
        return ChatTemplateError(
            "the chat template nests too deep, or needs more than "
            f"`limits.memory_bytes` = {limits.memory_bytes} (its process ended by "
            f"{signal.Signals(-returncode).name}); correct it, or raise the limit."
        )
    if last_line.startswith("MemoryError"):
        return _error("memory", "", 0, limits)
    return RuntimeError(
        f"the process that renders chat templates failed (status {returncode}): "
        f"{last_line}"
    )


def _error(
    failure: template_worker.Failure, message: str, max_steps: int, limits: RenderLimits
) -> ChatTemplateError:
    match failure:
        case "refused":
            return ChatTemplateError(
                f"the chat template refused the messages: {message}"
            )
        case "steps":
            return ChatTemplateError(
                f"the chat template took more than {max_steps} steps (`limits.steps` = "
                f"{limits.steps} and more for a long conversation): {message}; correct "
                "it, or raise the limit."
            )
        case "memory":
            return ChatTemplateError(
                "the chat template needs more than `limits.memory_bytes` = "
                f"{limits.memory_bytes}; correct it, or raise the limit."
            )
        case "template":
            return ChatTemplateError(f"the chat template can't be rendered: {message}")
    raise AssertionError(f"{failure=}")
