"""No value under storage_options gets through, however it is written."""

from __future__ import annotations

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from pipeline.masking import mask


@pytest.mark.parametrize(
    "text",
    [
        "source:\n  storage_options:\n    key: geheim\n  path: a",
        "source:\n  storage_options:\n    client:\n      deep:\n      - geheim\n      - x: geheim\n  path: a",
        "source.storage_options.key=geheim",
        "- +source.storage_options={a:{b:geheim},c:geheim}",
        "- '+source.storage_options.a=''geheim'''",
        "ValueError: storage_options: {'key': 'geheim', 'b': 2}",
        "storage_options:\n  key: >-\n    geheim\n    geheim\nnext: 1",
    ],
)
def test_values_are_masked(text):
    assert "geheim" not in mask(text)
    assert "***" in mask(text)


@pytest.mark.parametrize(
    "text",
    [
        "source:\n  storage_options: {}\n  path: a\n  split: b",
        "source.storage_options.key=${oc.env:KEY}",
        "model:\n  path: a\n\nseed: 0\n",
    ],
)
def test_what_is_no_secret_stays(text):
    assert mask(text) == text


def test_what_follows_the_block_stays():
    masked = mask("source:\n  storage_options:\n    a: x\n\n    b: y\n  path: p\nseed: 1\n")
    assert masked == "source:\n  storage_options: '***'\n  path: p\nseed: 1\n"
    assert mask("source:\n  storage_options:\n    a: x\n") == "source:\n  storage_options: '***'\n"


# Marked, so that a key or the YAML around it cannot hold the secret by chance; long ones get folded.
secrets = st.text(st.characters(min_codepoint=32, max_codepoint=0x2FF), max_size=200).map(
    "geheim {}geheim".format
)
trees = st.recursive(
    secrets, lambda t: st.lists(t, max_size=3) | st.dictionaries(st.text("abc"), t, max_size=3)
)


@given(st.dictionaries(st.text("abc", min_size=1), trees, min_size=1, max_size=3))
def test_any_tree_of_values_is_masked_in_yaml(options):
    text = yaml.safe_dump({"source": {"path": "before", "storage_options": options, "zone": "after"}})
    assert mask(text) == "source:\n  path: before\n  storage_options: '***'\n  zone: after\n"


@given(secrets)
def test_any_override_is_masked_in_a_list(secret):
    text = yaml.safe_dump([f"+source.storage_options.key={secret}", "seed=1"])
    assert "geheim" not in mask(text)
    assert yaml.safe_load(mask(text)) == ["+source.storage_options.key=***", "seed=1"]
