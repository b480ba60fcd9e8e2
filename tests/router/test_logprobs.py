import json
import math

import pytest
from tokenizers import Tokenizer, decoders, models

from pdserve.core.logprobs import TokenLogprob
from pdserve.router.logprobs import (
    FLOOR,
    ChatListing,
    CompletionListing,
    ListedToken,
    PromptListing,
    TokenNames,
)
from pdserve.router.vocabulary import Vocabulary

# "â" and "Ģ" are the bytes E2 and 80, two of the three of a dash.
TOKENS = ["a", "Ġb", "â", "âĢ", "Ãī", '"']
A, B, E2, E280, LETTER, QUOTE = range(6)
UNKNOWN, UNKNOWN_TOO = 100, 101


def make_vocabulary() -> Vocabulary:
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(TOKENS)}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    return Vocabulary(tokenizer)


NAMES = TokenNames(make_vocabulary())
COMPLETION, CHAT, PROMPT = CompletionListing(NAMES), ChatListing(make_vocabulary()), PromptListing(NAMES)


def listed(*entries: tuple[int, float], offset: int = 0) -> ListedToken:
    return ListedToken(entries[0][0], [TokenLogprob(*entry) for entry in entries], offset)


def shown(listing, *tokens: ListedToken, num_top: int = 2):
    return json.loads(listing.join([listing.run(tokens, num_top)]))


def test_a_completion_lists_names_numbers_likeliest_and_offsets():
    assert shown(COMPLETION, listed((A, -0.5), (A, -0.5), (B, -1.5), offset=3), listed((QUOTE, -2.0), offset=4)) == {
        "tokens": ["a", '"'],
        "token_logprobs": [-0.5, -2.0],
        "top_logprobs": [{"a": -0.5, " b": -1.5}, {'"': -2.0}],
        "text_offset": [3, 4],
    }


def test_the_token_itself_is_among_the_likeliest_of_a_completion_even_if_it_is_not():
    assert shown(COMPLETION, listed((A, -9.0), (B, -0.25)), num_top=1)["top_logprobs"] == [{" b": -0.25, "a": -9.0}]
    assert shown(COMPLETION, listed((A, -9.0)), num_top=0)["top_logprobs"] == [{"a": -9.0}]


def test_the_first_token_of_a_prompt_has_no_log_probability():
    choice = shown(COMPLETION, ListedToken(A, (), 0), listed((B, -1.0), offset=1))
    assert choice["token_logprobs"] == [None, -1.0]
    assert choice["top_logprobs"] == [None, {" b": -1.0}]
    assert choice["tokens"] == ["a", " b"]


def test_a_chat_lists_each_token_with_its_bytes_and_the_likeliest():
    entry = {"token": "É", "bytes": [0xC3, 0x89], "logprob": -1.0}
    other = {"token": " b", "bytes": [0x20, 0x62], "logprob": -0.5}
    assert shown(CHAT, listed((LETTER, -1.0), (B, -0.5), (LETTER, -1.0))) == {
        "content": [{**entry, "top_logprobs": [other, entry]}],
        "refusal": None,
    }
    assert shown(CHAT, listed((LETTER, -1.0), (B, -0.5)), num_top=0)["content"] == [{**entry, "top_logprobs": []}]


def test_tokens_that_are_not_whole_characters_are_named_by_their_bytes_and_kept_apart():
    row = listed((E2, -1.0), (E280, -0.5), (E2, -1.0))
    assert shown(COMPLETION, row)["top_logprobs"] == [{"bytes:\\xe2\\x80": -0.5, "bytes:\\xe2": -1.0}]
    [entry] = shown(CHAT, row)["content"]
    assert (entry["token"], entry["bytes"]) == ("\\xe2", [0xE2])


def test_of_tokens_of_one_name_the_likeliest_is_shown():
    [top] = shown(COMPLETION, listed((UNKNOWN, -3.0), (UNKNOWN_TOO, -0.5)))["top_logprobs"]
    assert top == {"": -0.5}


def test_runs_are_joined_in_order_and_no_tokens_are_null():
    for listing in (COMPLETION, CHAT):
        one, two = listed((A, -1.0)), listed((B, -2.0), offset=1)
        runs = [listing.run(tokens, 1) for tokens in ([one], [], [two])]
        assert listing.join(runs) == listing.join([listing.run([one, two], 1)])
        assert json.loads(listing.join([])) is None
        assert json.loads(listing.join([listing.run([], 1)])) is None


@pytest.mark.parametrize("value", [-math.inf, math.nan, -1e30])
def test_what_json_cannot_say_is_the_floor(value):
    for listing in (COMPLETION, CHAT):
        assert str(FLOOR) in listing.join([listing.run([listed((A, value), (B, value))], 1)]).decode()
        assert json.loads(listing.join([listing.run([listed((A, value))], 0)]), parse_constant=pytest.fail)


def test_a_prompts_tokens_are_told_by_id_with_a_rank_where_it_is_known():
    tokens = [ListedToken(A, (), 0), listed((B, -2.0), (A, -0.5), (B, -2.0)), listed((A, -7.0), (E2, -0.5))]
    assert json.loads(PROMPT.encode(tokens, 2)) == [
        None,
        {
            "1": {"logprob": -2.0, "rank": 2, "decoded_token": " b"},
            "0": {"logprob": -0.5, "rank": 1, "decoded_token": "a"},
        },
        {
            "0": {"logprob": -7.0, "decoded_token": "a"},
            "2": {"logprob": -0.5, "rank": 1, "decoded_token": "bytes:\\xe2"},
        },
    ]


def test_a_prompts_row_is_cut_to_what_was_asked_for():
    tokens = [ListedToken(A, (), 0), listed((B, -2.0), (A, -0.5), (B, -2.0))]
    assert json.loads(PROMPT.encode(tokens, 0)) == [None, {"1": {"logprob": -2.0, "decoded_token": " b"}}]
