"""Conversations and the model's chat template.

Knows: what a valid list of messages is, how it becomes text, and how to tell before the model loads
that a template cannot take a system message. Refuses to know: rows, token counts, truncation.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pipeline.config import PromptConfig, mapping

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]

# Arguments of apply_chat_template that are decided here.
_OURS = ("conversation", "tokenize", "add_generation_prompt", "continue_final_message")


def parse_messages(value: Any) -> list[Message]:
    """A column's value as messages: a list of {role, content} dicts, or the JSON text of one.

    Keys without a value are dropped: Arrow gives each struct all the keys of the column.
    Raises ValueError saying what is wrong.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise ValueError(f"messages are text, but not JSON: {error}") from error
    if not isinstance(value, list) or not value:
        raise ValueError(f"messages must be a list with at least one message, not {_shown(value)}")
    return [_parse_message(position, message) for position, message in enumerate(value)]


def _parse_message(position: int, message: Any) -> Message:
    if not isinstance(message, Mapping):
        raise ValueError(f"message {position} must have role and content, but is {_shown(message)}")
    message = {name: value for name, value in message.items() if value is not None}
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        raise ValueError(f"message {position} has no role: {_shown(message)}")
    # Lists of parts are refused: many templates would print them as Python code.
    if not isinstance(content, str) and not (content is None and "tool_calls" in message):
        raise ValueError(f"message {position} ({role}) must have text as content, not {_shown(content)}")
    return message


class ChatTemplate:
    """The tokenizer's chat template with the job's system prompt and arguments.

    Raises ValueError when the tokenizer has no template (named by `model_path`), or when
    prompt.chat_template_kwargs sets what is decided elsewhere.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, config: PromptConfig, model_path: str) -> None:
        self._tokenizer = tokenizer
        self._system = config.system
        self._continue = config.continue_final_message
        self._kwargs = mapping("prompt.chat_template_kwargs", config.chat_template_kwargs)
        for name in _OURS:
            if name in self._kwargs:
                raise ValueError(
                    f"prompt.chat_template_kwargs.{name} is set by the job itself: remove it"
                    " (prompt.continue_final_message=true drops the generation prompt)"
                )
        try:
            tokenizer.get_chat_template(self._kwargs.get("chat_template"), self._kwargs.get("tools"))
        except ValueError as error:
            raise ValueError(
                f"prompt.chat=model needs a chat template, and model.path={model_path} has none that can "
                "be used: set prompt.chat=none, or take an instruct model"
            ) from error

    def ask(self, text: str) -> str:
        """The conversation that consists of one user message, as text."""
        return self.render([{"role": "user", "content": text}])

    def render(self, messages: list[Message]) -> str:
        """Messages as text, ready to be answered. The row's own system message goes before the job's.

        Raises ValueError with the template's own words.
        """
        if self._continue and messages[-1]["role"] != "assistant":
            raise ValueError(
                "prompt.continue_final_message=true continues an assistant's message, but the last one is "
                f"from {messages[-1]['role']!r}"
            )
        if self._system is not None and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self._system}, *messages]
        return self._apply(messages)

    def check(self, messages: list[Message] | None, where: str) -> None:
        """Finds out before any model is loaded whether the template refuses or drops system messages.

        messages: the first row's, None when there is no usable row. where: that row, for the error.
        Raises ValueError with row and template error. A fault of the row alone is not raised: it
        becomes that row's error.
        """
        question: list[Message] = [{"role": "user", "content": "Hello"}]
        if self._continue:
            question.append({"role": "assistant", "content": "Hello"})
        plain = self._attempt(question)
        if self._system is not None:
            self._check_system(self._system, question, plain, where)
        elif messages is None and isinstance(plain, ValueError):
            raise ValueError(f"The chat template cannot render a user message ({where}): {plain}")
        if messages is None or messages[0]["role"] != "system" or len(messages) == 1:
            return
        refusal = self._attempt(messages)
        if isinstance(refusal, ValueError) and isinstance(self._attempt(messages[1:]), str):
            raise ValueError(
                f"The chat template refuses the system message of {where}: {refusal}; move its text into "
                "the first user message of each row"
            )

    def _check_system(
        self, system: str, question: list[Message], plain: str | ValueError, where: str
    ) -> None:
        told = self._attempt([{"role": "system", "content": system}, *question])
        remedy = "set prompt.system=null and say it in the prompt itself"
        if isinstance(told, ValueError):
            raise ValueError(
                f"The chat template refuses prompt.system={_shown(system)} ({where}): {told}; {remedy}"
            )
        # Some templates skip roles that they do not know, without a word.
        if told == plain and system.strip():
            raise ValueError(f"The chat template drops prompt.system={_shown(system)} ({where}); {remedy}")

    def _attempt(self, messages: list[Message]) -> str | ValueError:
        try:
            return self._apply(messages)
        except ValueError as error:
            return error

    def _apply(self, messages: list[Message]) -> str:
        try:
            text = self._tokenizer.apply_chat_template(
                messages,
                tokenize=False,
                add_generation_prompt=not self._continue,
                continue_final_message=self._continue,
                **self._kwargs,
            )
        # The template is the model author's code: it raises what it likes, and it is about this row.
        except Exception as error:
            raise ValueError(f"the chat template says: {error}") from error
        assert isinstance(text, str)
        return text


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
