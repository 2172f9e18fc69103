"""A row's values -> the whole text of its prompt.

Knows: which setting gives the text, which columns that reads, and which settings contradict each
other. Refuses to know: token ids, lengths, requests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pipeline.config import ChatMode, PromptConfig
from pipeline.prompts.chat import ChatTemplate, parse_messages
from pipeline.prompts.template import RowTemplate, require_columns

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class PromptText:
    """Composes text by the job's prompt settings. `columns` are the input columns they read.

    available: the input's columns, None when they are not known.
    Raises ValueError naming the key, the value and the remedy.
    """

    def __init__(
        self,
        config: PromptConfig,
        tokenizer: PreTrainedTokenizerBase,
        available: Sequence[str] | None,
        model_path: str,
    ) -> None:
        _refuse_contradictions(config)
        self._config = config
        self._template: RowTemplate | None = None
        if config.template is not None:
            self._template = RowTemplate(config.template, "prompt.template", available)
            self.columns = self._template.columns
        else:
            key, column = _column_setting(config)
            require_columns((column,), f"{key}={column}", available)
            self.columns = (column,)
        if config.truncate_column is not None and config.truncate_column not in self.columns:
            raise ValueError(
                f"prompt.truncate_column={config.truncate_column} is not part of the prompt: name a column "
                f"that it reads, which are: {', '.join(self.columns) or '(none)'}"
            )
        self._chat: ChatTemplate | None = None
        if config.chat is ChatMode.model and config.input_ids is None:
            self._chat = ChatTemplate(tokenizer, config, model_path)

    def compose(self, values: Mapping[str, Any]) -> str:
        """The prompt of a row with these values of `columns`. Raises ValueError for this row's faults."""
        if self._config.messages is not None:
            assert self._chat is not None
            text = self._chat.render(parse_messages(values[self._config.messages]))
        else:
            text = self._plain(values)
            text = text if self._chat is None else self._chat.ask(text)
        try:
            text.encode()
        except UnicodeEncodeError as error:
            # JSON can spell half a surrogate pair; the tokenizer would fail on it for a whole chunk of rows.
            raise ValueError(f"the prompt's text is not valid Unicode: {error.reason}") from error
        return text

    def check(self, values: Mapping[str, Any], where: str) -> None:
        """Raises ValueError when the chat template cannot take the system message; see ChatTemplate.check.

        values: the first row's. where: that row, for the error.
        """
        if self._chat is None:
            return
        messages = None
        if self._config.messages is not None:
            try:
                messages = parse_messages(values[self._config.messages])
            except ValueError:
                # A bad first row ends as that row's error; the job's own system prompt is still tried.
                messages = None
        self._chat.check(messages, where)

    def _plain(self, values: Mapping[str, Any]) -> str:
        if self._template is not None:
            return self._template.render(values)
        assert self._config.column is not None
        return column_text(values, self._config.column, "prompt.column")


def column_text(values: Mapping[str, Any], column: str, key: str) -> str:
    """The column's value, which must be text. Raises ValueError naming the key and the column."""
    value = values[column]
    if isinstance(value, str):
        return value
    found = "null" if value is None else f"of type {type(value).__name__}"
    raise ValueError(f"{key}={column} must be text, but is {found}")


def _column_setting(config: PromptConfig) -> tuple[str, str]:
    for name in ("column", "messages", "input_ids"):
        column = getattr(config, name)
        if column is not None:
            return f"prompt.{name}", column
    raise AssertionError("PromptConfig holds exactly one of column, messages, template, input_ids")


def _refuse_contradictions(config: PromptConfig) -> None:
    """A setting that could have no effect is a misunderstanding, and is said."""
    chats = config.chat is ChatMode.model and config.input_ids is None
    if not chats:
        without = "prompt.input_ids" if config.input_ids is not None else "prompt.chat=none"
        remedy = "remove it" if config.input_ids is not None else "remove it, or set prompt.chat=model"
        for name in ("messages", "system", "chat_template_kwargs", "continue_final_message"):
            if getattr(config, name):
                raise ValueError(
                    f"prompt.{name}={getattr(config, name)!r} needs a chat template, which {without} does "
                    f"not use: {remedy}"
                )
    if config.continue_final_message and config.messages is None:
        raise ValueError(
            "prompt.continue_final_message=true needs prompt.messages, a column whose last message is an "
            "assistant's beginning"
        )
    if config.truncate_column is not None and config.messages is not None:
        raise ValueError(
            f"prompt.truncate_column={config.truncate_column} shortens a column of text, not "
            "prompt.messages: use prompt.template, or remove it"
        )
