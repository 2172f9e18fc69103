"""Rows become token ids: every way of writing a prompt, every way of being too long or wrong."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prompt_fakes import (
    CHAT,
    CHAT_WITH_BOS,
    DROPS_SYSTEM,
    REFUSES_SYSTEM,
    FakeRow,
    byte_level,
    rows_of,
    tiny,
)

from pipeline.config import ChatMode, OverLong, PromptConfig, TruncateAt
from pipeline.prompts.chat import parse_messages
from pipeline.prompts.prompts import Prompt, PromptBuilder, longest_prompt
from pipeline.request import FinishReason, Refusal, SamplingParams


def builder(
    tokenizer: Any = None, limit: int = 400, available: list[str] | None = None, **prompt: Any
) -> Any:
    return PromptBuilder(PromptConfig(**prompt), tokenizer or tiny(), limit, available, "some/model")


def built(builder: Any, **columns: Any) -> Prompt:
    prompt = builder.build(FakeRow(columns))
    assert isinstance(prompt, Prompt), prompt
    return prompt


def refused(builder: Any, **columns: Any) -> Any:
    refusal = builder.build(FakeRow(columns))
    assert isinstance(refusal, Refusal), refusal
    assert refusal.finish_reason is FinishReason.ERROR
    assert refusal.error is not None
    return refusal.error


# --- the four ways, with and without the chat template


def test_column_is_a_user_message_or_plain_text() -> None:
    assert built(builder(column="text"), text="hi").text == "<|user|>hi<|end|><|assistant|>"
    plain = built(builder(column="text", chat=ChatMode.none), text="hi")
    assert plain.text == "hi"
    assert plain.ids.dtype == np.int32
    assert plain.ids.tolist() == tiny()("hi")["input_ids"]
    assert plain.truncated_tokens == 0


def test_messages_as_a_list_or_as_json_text() -> None:
    # Arrow gives every struct every key: those without a value are as good as absent.
    messages = [
        {"role": "user", "content": "2+2?", "name": None},
        {"role": "assistant", "content": "4", "name": None},
        {"role": "user", "content": "3+3?", "name": None},
    ]
    rendered = "<|user|>2+2?<|end|><|assistant|>4<|end|><|user|>3+3?<|end|><|assistant|>"
    build = builder(messages="chat")
    assert built(build, chat=messages).text == rendered
    assert built(build, chat=json.dumps(messages)).text == rendered
    np.testing.assert_array_equal(
        built(build, chat=messages).ids,
        tiny().apply_chat_template(messages, add_generation_prompt=True, return_dict=False),
    )


def test_template_reads_the_columns_it_names() -> None:
    build = builder(template="{% for x in items %}{{ x }},{% endfor %}{{ q }}", available=["q", "items", "z"])
    assert build.columns == ("items", "q")
    assert built(build, q="sum?", items=[1, 2]).text == "<|user|>1,2,sum?<|end|><|assistant|>"


def test_a_column_may_have_the_name_of_a_jinja_global() -> None:
    build = builder(template="{{ range }} {{ dict(a=1).a }}", chat=ChatMode.none, available=["range"])
    assert build.columns == ("range",)
    assert built(build, range="0..9").text == "0..9 1"


def test_template_is_sandboxed() -> None:
    assert "unsafe" in refused(builder(template="{{ q.__class__.__mro__ }}"), q="x").message
    assert refused(builder(template="{{ q.append(1) or '' }}"), q=[]).code == "prompt_invalid"


def test_input_ids_are_taken_as_they_are() -> None:
    tokenizer = byte_level(bos=True)
    ids = tokenizer("one two")["input_ids"][1:]
    build = builder(tokenizer, input_ids="ids")
    for value in (ids, json.dumps(ids)):
        prompt = built(build, ids=value)
        assert prompt.ids.tolist() == ids
        assert prompt.ids.dtype == np.int32
        assert prompt.text == "one two"


def test_keys_without_a_value_never_reach_the_template() -> None:
    # `{% if message.tool_calls is defined %}` is how many templates ask.
    assert parse_messages([{"role": "user", "content": "hi", "tool_calls": None}]) == [
        {"role": "user", "content": "hi"}
    ]


def test_system_prompt_gives_way_to_the_rows_own() -> None:
    build = builder(messages="chat", system="Be brief.")
    user = {"role": "user", "content": "hi"}
    assert built(build, chat=[user]).text == "<|system|>Be brief.<|end|><|user|>hi<|end|><|assistant|>"
    own = [{"role": "system", "content": "Sing."}, user]
    assert built(build, chat=own).text == "<|system|>Sing.<|end|><|user|>hi<|end|><|assistant|>"


def test_chat_template_kwargs_reach_the_template() -> None:
    tokenizer = byte_level("{% if enable_thinking %}<think>{% endif %}{{ messages[0].content }}")
    assert built(builder(tokenizer, column="q"), q="hi").text == "hi"
    thinking = builder(tokenizer, column="q", chat_template_kwargs={"enable_thinking": True})
    assert built(thinking, q="hi").text == "<think>hi"


def test_continue_final_message_leaves_the_answer_open() -> None:
    build = builder(messages="chat", continue_final_message=True)
    user, begun = {"role": "user", "content": "Count."}, {"role": "assistant", "content": "1, 2,"}
    assert built(build, chat=[user, begun]).text == "<|user|>Count.<|end|><|assistant|>1, 2,"
    assert "assistant" in refused(build, chat=[user]).message


# --- exactly one BOS


@pytest.mark.parametrize("template", [CHAT, CHAT_WITH_BOS])
def test_one_bos_whether_or_not_the_chat_template_writes_it(template: str) -> None:
    ids = built(builder(byte_level(template, bos=True), column="q"), q="one two").ids.tolist()
    assert ids[0] == 0
    assert ids.count(0) == 1


@pytest.mark.parametrize("text", ["one two", "<s>one two", "<s><s>one two"])
def test_one_bos_in_front_of_plain_text(text: str) -> None:
    tokenizer = byte_level(bos=True)
    ids = built(builder(tokenizer, column="q", chat=ChatMode.none), q=text).ids.tolist()
    assert ids == tokenizer("one two")["input_ids"]
    assert ids.count(0) == 1


def test_no_bos_when_the_tokenizer_adds_none_and_the_template_writes_none() -> None:
    assert 0 not in built(builder(byte_level(CHAT), column="q"), q="one").ids
    assert built(builder(byte_level(CHAT_WITH_BOS), column="q"), q="one").ids.tolist().count(0) == 1


def test_no_eos_behind_a_prompt_that_is_to_be_continued() -> None:
    tokenizer = byte_level(bos=True, eos=True)
    ids = built(builder(tokenizer, column="q", chat=ChatMode.none), q="one two").ids.tolist()
    assert ids == tokenizer("one two")["input_ids"][:-1]


def test_a_prompt_of_bos_alone_is_a_prompt() -> None:
    assert built(builder(byte_level(bos=True), column="q", chat=ChatMode.none), q="").ids.tolist() == [0]


# --- too long


def test_one_long_row_does_not_end_the_job() -> None:
    limit = 30_000
    build = builder(input_ids="ids", limit=limit)
    rows = rows_of({"ids": [70] * 10}, {"ids": [70] * (limit + 1)}, {"ids": [70] * 10})
    first, long, last = build.build_all(rows)
    assert (len(first.ids), len(last.ids)) == (10, 10)
    assert long.error.code == "prompt_too_long"
    assert "30001" in long.error.message
    assert "30000" in long.error.message
    assert "row 1" in long.error.message
    # exactly at the limit is not too long
    assert len(built(build, ids=[70] * limit).ids) == limit


def test_skip_ends_a_long_row_as_skipped() -> None:
    build = builder(column="q", limit=8, too_long=OverLong.skip)
    assert build.build(FakeRow({"q": "a long question " * 9})) == Refusal(FinishReason.SKIPPED)
    assert isinstance(build.build(FakeRow({"q": "hi"})), Prompt)


@pytest.mark.parametrize("side", [OverLong.truncate_left, OverLong.truncate_right])
def test_truncation_keeps_bos_and_counts_what_it_cut(side: OverLong) -> None:
    tokenizer = byte_level(bos=True)
    whole = tokenizer("one two three four five six seven eight")["input_ids"]
    build = builder(tokenizer, limit=6, column="q", chat=ChatMode.none, too_long=side)
    prompt = built(build, q="one two three four five six seven eight")
    expected = whole[:6] if side is OverLong.truncate_right else [0, *whole[-5:]]
    assert prompt.ids.tolist() == expected
    assert prompt.truncated_tokens == len(whole) - 6
    assert prompt.text == tokenizer.decode(expected[1:])


@pytest.mark.parametrize("side", [OverLong.truncate_left, OverLong.truncate_right])
def test_truncated_input_ids_keep_bos_and_say_their_text(side: OverLong) -> None:
    tokenizer = byte_level(bos=True)
    whole = tokenizer("one two three four five six")["input_ids"]
    prompt = built(builder(tokenizer, limit=4, input_ids="ids", too_long=side), ids=whole)
    assert prompt.ids.tolist() == (whole[:4] if side is OverLong.truncate_right else [0, *whole[-3:]])
    assert prompt.text == tokenizer.decode(prompt.ids)


def test_truncation_that_leaves_nothing_is_too_long() -> None:
    build = builder(limit=2, column="q", chat=ChatMode.none, too_long=OverLong.truncate_right)
    error = refused(build, q="🎉🎉")  # each takes four ids
    assert error.code == "prompt_too_long"
    assert "8 tokens, the limit is 2" in error.message


INSTRUCTION = "Summarise:\n{{ text }}\nIn one sentence, for {{ who }}."


def column_builder(limit: int, at: TruncateAt = TruncateAt.token, left: bool = False) -> Any:
    side = OverLong.truncate_left if left else OverLong.truncate_right
    return builder(
        limit=limit,
        template=INSTRUCTION,
        too_long=side,
        truncate_column="text",
        truncate_at=at,
        system="Be kind.",
    )


def document_of(prompt: Prompt) -> str:
    """What is left of the document; fails unless everything around it is whole."""
    before = "<|system|>Be kind.<|end|><|user|>Summarise:\n"
    after = "\nIn one sentence, for a child.<|end|><|assistant|>"
    assert prompt.text.startswith(before)
    assert prompt.text.endswith(after)
    return prompt.text[len(before) : len(prompt.text) - len(after)]


@pytest.mark.parametrize("left", [False, True])
@given(document=st.text(alphabet="the cat 🎉é\n", min_size=60, max_size=120), limit=st.integers(50, 80))
@settings(max_examples=40, deadline=None)
def test_the_document_is_shortened_never_the_instruction(left: bool, document: str, limit: int) -> None:
    build = column_builder(limit, left=left)
    whole = built(column_builder(1000), text=document, who="a child")
    prompt = built(build, text=document, who="a child")
    kept = document_of(prompt)
    assert document.endswith(kept) if left else document.startswith(kept)
    # The ids are those of the text, and they fit.
    assert prompt.ids.tolist() == tiny()(prompt.text)["input_ids"]
    assert len(prompt.ids) <= limit
    assert prompt.truncated_tokens == len(whole.ids) - len(prompt.ids)
    if len(whole.ids) <= limit:
        assert kept == document
        return
    # Nothing longer would have fitted: one more whole token of the document is too much.
    spans = tiny()(document, return_offsets_mapping=True)["offset_mapping"]
    ends = sorted({end for (_, end), (start, _) in zip(spans, spans[1:], strict=False) if start >= end})
    ends = [0, *ends, len(document)]
    longer = (
        min(e for e in ends if e > len(kept))
        if not left
        else max(e for e in ends if e < len(document) - len(kept))
    )
    more = document[:longer] if not left else document[longer:]
    assert len(built(column_builder(1000), text=more, who="a child").ids) > limit


@pytest.mark.parametrize("left", [False, True])
def test_the_document_is_shortened_by_whole_lines(left: bool) -> None:
    lines = [f"line {i} {'words ' * (i % 3)}end" for i in range(40)]
    document = "\n".join(lines)
    prompt = built(column_builder(200, TruncateAt.line, left), text=document, who="a child")
    kept = document_of(prompt).split("\n")
    count = len(kept)
    assert 0 < count < 40
    assert kept == (lines[-count:] if left else lines[:count])
    more = "\n".join(lines[-count - 1 :] if left else lines[: count + 1])
    assert len(built(column_builder(1000), text=more, who="a child").ids) > 200


def test_a_very_long_document_is_shortened_quickly_to_fill_the_limit() -> None:
    document = "A sentence about nothing in particular, number seven. " * 2000
    prompt = built(column_builder(300), text=document, who="a child")
    assert 298 <= len(prompt.ids) <= 300
    assert document.startswith(document_of(prompt))
    assert prompt.truncated_tokens > 10_000


def test_an_instruction_that_does_not_fit_by_itself_is_too_long() -> None:
    error = refused(column_builder(20), text="abc", who="a child")
    assert error.code == "prompt_too_long"
    assert "limit is 20" in error.message
    # A document that is null cannot be shortened either, where the template copes with it.
    build = builder(
        limit=5,
        template="{{ text or '' }} and something else",
        too_long=OverLong.truncate_right,
        truncate_column="text",
    )
    assert refused(build, text=None).code == "prompt_too_long"


def test_a_document_that_is_the_whole_prompt_is_never_cut_to_nothing() -> None:
    build = builder(
        byte_level(bos=True),
        limit=2,
        column="q",
        chat=ChatMode.none,
        too_long=OverLong.truncate_right,
        truncate_column="q",
    )
    assert refused(build, q="🎉🎉").code == "prompt_too_long"
    assert built(build, q="one🎉").text == "one"


def test_a_column_prompt_is_shortened_inside_the_chat_markup() -> None:
    build = builder(limit=20, column="q", too_long=OverLong.truncate_left, truncate_column="q")
    prompt = built(build, q="what is the sum of all these numbers " * 9 + "??")
    assert len(prompt.ids) == 20
    assert prompt.text.startswith("<|user|>")
    assert prompt.text.endswith("??<|end|><|assistant|>")


# --- rows that are wrong: a refusal with the row's place, never an exception


@pytest.mark.parametrize(
    ("prompt", "value", "said"),
    [
        ({"column": "x"}, None, "null"),
        ({"column": "x"}, 7, "int"),
        ({"column": "x", "chat": ChatMode.none}, "", "empty"),
        ({"template": "{{ x }}"}, None, "prompt.template"),
        ({"template": "{{ x.title }}"}, {"name": "n"}, "title"),
        ({"template": "{{ 1 // x }}"}, 0, "prompt.template"),
        ({"template": "{{ x }}", "chat": ChatMode.none}, "", "empty"),
        ({"messages": "x"}, None, "at least one message"),
        ({"messages": "x"}, [], "at least one message"),
        ({"messages": "x"}, "[{", "JSON"),
        ({"messages": "x"}, ["hi"], "message 0"),
        ({"messages": "x"}, [{"role": "user", "content": None}], "message 0 (user)"),
        (
            {"messages": "x"},
            [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
            "text as content",
        ),
        ({"messages": "x"}, [{"from": "human", "value": "hi"}], "role"),
        ({"messages": "x"}, '[{"role": "user", "content": "\\ud800"}]', "Unicode"),
        ({"input_ids": "x"}, None, "prompt.input_ids"),
        ({"input_ids": "x"}, [], "empty"),
        ({"input_ids": "x"}, [1, None], "prompt.input_ids"),
        ({"input_ids": "x"}, [1.0, 2.0], "prompt.input_ids"),
        ({"input_ids": "x"}, [True], "prompt.input_ids"),
        ({"input_ids": "x"}, [[1], [2, 3]], "prompt.input_ids"),
        ({"input_ids": "x"}, [0, 1024], "token id 1024 at position 1"),
        ({"input_ids": "x"}, [-1], "token id -1"),
        ({"input_ids": "x"}, "one two", "prompt.input_ids"),
    ],
)
def test_a_bad_row_is_a_refusal_and_its_neighbours_are_not(
    prompt: dict[str, Any], value: Any, said: str
) -> None:
    good: Any = {
        "column": "hi",
        "template": "hi",
        "input_ids": [5],
        "messages": [{"role": "user", "content": "hi"}],
    }
    good = good[next(iter(prompt))]
    good = {"title": "hi"} if "title" in prompt.get("template", "") else good
    good = 1 if "//" in prompt.get("template", "") else good
    before, bad, after = builder(**prompt).build_all(rows_of({"x": good}, {"x": value}, {"x": good}))
    assert isinstance(before, Prompt)
    assert isinstance(after, Prompt)
    assert bad.finish_reason is FinishReason.ERROR
    assert bad.error.code == "prompt_invalid"
    assert said in bad.error.message
    assert "file 0, row 1" in bad.error.message


def test_a_chat_template_that_dislikes_one_row_refuses_that_row() -> None:
    tokenizer = byte_level(
        "{% if messages[0].content == 'bad' %}{{ raise_exception('no!') }}{% endif %}" + CHAT
    )
    build = builder(tokenizer, column="q")
    assert "no!" in refused(build, q="bad").message
    build.check(FakeRow({"q": "bad"}))


# --- what is wrong for all rows is said at the start


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ({"column": "txt"}, r"prompt\.column=txt .*'txt'.* text, id"),
        ({"messages": "txt"}, r"prompt\.messages=txt .* text, id"),
        ({"input_ids": "txt"}, r"prompt\.input_ids=txt .* text, id"),
        ({"template": "{{ text }} {{ tilte }}"}, r"prompt\.template .*'tilte'.* text, id"),
        ({"template": "{{ text }"}, r"prompt\.template is not a valid Jinja template in line 1"),
        ({"template": "{{ text | nofilter }}"}, r"prompt\.template is not a valid Jinja template.*nofilter"),
        (
            {"template": "{{ id }}", "too_long": OverLong.truncate_left, "truncate_column": "text"},
            r"prompt\.truncate_column=text is not part of the prompt.*: id",
        ),
        (
            {"messages": "text", "too_long": OverLong.truncate_left, "truncate_column": "text"},
            r"prompt\.truncate_column=text .*prompt\.template",
        ),
        ({"messages": "text", "chat": ChatMode.none}, r"prompt\.messages.*prompt\.chat=model"),
        ({"column": "text", "chat": ChatMode.none, "system": "S"}, r"prompt\.system.*prompt\.chat=model"),
        ({"input_ids": "id", "system": "S"}, r"prompt\.system.*prompt\.input_ids"),
        ({"column": "text", "continue_final_message": True}, r"prompt\.continue_final_message.*messages"),
        ({"column": "text", "chat_template_kwargs": {"tokenize": True}}, r"chat_template_kwargs\.tokenize"),
    ],
)
def test_a_setting_that_cannot_work_names_key_value_and_remedy(prompt: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        builder(available=["text", "id"], **prompt)


def test_a_model_without_chat_template_is_named_with_the_way_out() -> None:
    with pytest.raises(ValueError, match=r"model\.path=some/model.*prompt\.chat=none"):
        builder(byte_level(), column="q")
    builder(byte_level(), column="q", chat=ChatMode.none)
    builder(byte_level(), input_ids="ids")


def test_an_input_without_columns_is_no_error_when_it_is_empty() -> None:
    build = builder(column="q", available=None)
    build.check(None)
    assert list(build.requests([], SamplingParams())) == []


@pytest.mark.parametrize("template", [REFUSES_SYSTEM, DROPS_SYSTEM])
def test_a_template_that_takes_no_system_role_is_found_before_the_model_loads(template: str) -> None:
    row = FakeRow({"q": "hi"})
    with pytest.raises(ValueError, match=r"prompt\.system='Be brief\.'.*file 0, row 0") as caught:
        builder(byte_level(template), column="q", system="Be brief.").check(row)
    assert ("System role not supported" in str(caught.value)) == (template == REFUSES_SYSTEM)
    builder(byte_level(template), column="q").check(row)
    builder(byte_level(CHAT), column="q", system="Be brief.").check(row)


def test_a_system_message_of_the_rows_is_found_too() -> None:
    build = builder(byte_level(REFUSES_SYSTEM), messages="chat")
    system, user = {"role": "system", "content": "S"}, {"role": "user", "content": "hi"}
    with pytest.raises(ValueError, match=r"file 0, row 0.*System role not supported"):
        build.check(FakeRow({"chat": [system, user]}))
    build.check(FakeRow({"chat": [user]}))
    build.check(FakeRow({"chat": None}))


def test_a_template_that_fails_on_everything_is_found_at_the_start() -> None:
    tokenizer = byte_level("{{ raise_exception('tools are required') }}")
    with pytest.raises(ValueError, match="tools are required"):
        builder(tokenizer, column="q").check(FakeRow({"q": "hi"}))


def test_longest_prompt_leaves_room_for_a_token() -> None:
    assert longest_prompt(PromptConfig(column="q"), 512) == 511
    assert longest_prompt(PromptConfig(column="q", max_tokens=100), 512) == 100
    with pytest.raises(ValueError, match=r"prompt\.max_tokens=512 .*model\.max_model_len=512.*511"):
        longest_prompt(PromptConfig(column="q", max_tokens=512), 512)


# --- requests


def test_requests_keep_order_and_carry_their_rows() -> None:
    texts = ["hi", None, "x" * 5000, *(f"question {i}" for i in range(300))]
    rows = rows_of(*({"q": text} for text in texts))
    build = builder(column="q", limit=300)
    params = SamplingParams(n=2)
    requests = list(build.requests(rows, params))
    assert [request.key for request in requests] == [row.key for row in rows]
    assert all(request.payload.row is row for request, row in zip(requests, rows, strict=True))
    assert all(request.params is params and request.samples == (0, 1) for request in requests)
    assert [r.refusal.error.code for r in requests if r.refusal] == ["prompt_invalid", "prompt_too_long"]
    assert len(requests[1].prompt_ids) == 0
    # Tokenised together or alone: the same ids.
    for request, row in list(zip(requests, rows, strict=True))[3::50]:
        np.testing.assert_array_equal(request.prompt_ids, build.build(row).ids)
        assert request.prompt == f"<|user|>{row.columns['q']}<|end|><|assistant|>"


def test_requests_ask_only_for_missing_samples_and_kept_rows() -> None:
    rows = rows_of({"q": "a"}, {"q": "b"}, {"q": None})
    skipped = Refusal(FinishReason.SKIPPED)
    requests = list(
        builder(column="q").requests(
            rows,
            SamplingParams(n=4),
            samples=lambda row: (1, 3) if row.key.row == 0 else (2,),
            refuse=lambda row: skipped if row.key.row == 2 else None,
        )
    )
    assert [request.samples for request in requests] == [(1, 3), (2,), (2,)]
    # The filter is asked first: a row that is left out is not judged as a prompt.
    assert [request.refusal for request in requests] == [None, None, skipped]


def test_truncation_is_recorded_in_the_payload() -> None:
    build = builder(limit=5, column="q", chat=ChatMode.none, too_long=OverLong.truncate_right)
    text = "one two three four five"
    (request,) = build.requests(rows_of({"q": text}), SamplingParams())
    assert request.payload.truncated_tokens == len(tiny()(text)["input_ids"]) - 5
    assert len(request.prompt_ids) == 5


@pytest.mark.parametrize(("size", "ahead"), [(10, 64), (400_000, 3)])
def test_reads_few_rows_ahead_and_fewer_when_they_are_large(size: int, ahead: int) -> None:
    read: list[int] = []

    def rows() -> Any:
        for row in rows_of(*({"q": "word " * (size // 5)} for _ in range(100 if size == 10 else 5))):
            read.append(row.ordinal)
            yield row

    requests = builder(column="q", limit=10**6).requests(rows(), SamplingParams())
    next(requests)
    assert len(read) == ahead
