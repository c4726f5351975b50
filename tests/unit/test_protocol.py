"""Request bodies to sampling parameters: every field, its limits, and the words of a refusal."""

import math
from typing import Any

import pytest
from api_fakes import DEFAULTS, EOS, MODEL, VOCAB

from cluster.errors import RequestError
from cluster.frontend.generation_defaults import GenerationDefaults
from cluster.frontend.json_body import parse_json_object
from cluster.frontend.protocol import BodyParser, ChatRequest, CompletionRequest
from cluster.frontend.settings import FrontendSettings

PARSER = BodyParser(FrontendSettings("/nowhere", MODEL, max_choices=16), DEFAULTS)
NAN, INF, HUGE = math.nan, math.inf, 10**400


def completion(**fields: Any) -> CompletionRequest:
    return PARSER.completion({"model": MODEL, "prompt": "hi", **fields}, VOCAB)


def chat(**fields: Any) -> ChatRequest:
    return PARSER.chat({"model": MODEL, "messages": [{"role": "user", "content": "hi"}], **fields}, VOCAB)


BAD_SHARED: list[tuple[str, Any]] = [
    *(("temperature", value) for value in (-0.1, 2.1, NAN, INF, -INF, HUGE, -HUGE, True, "1", [], {})),
    *(("top_p", value) for value in (0, 0.0, -0.1, 1.1, NAN, INF, HUGE, True, "1")),
    *(("min_p", value) for value in (-0.1, 1.1, NAN, True, "0")),
    *(("top_k", value) for value in (-2, 1.5, 1.0, True, "5", HUGE, NAN)),
    *(("presence_penalty", value) for value in (-2.1, 2.1, NAN, INF, True)),
    *(("frequency_penalty", value) for value in (-2.1, 2.1, NAN, INF, "0")),
    *(("repetition_penalty", value) for value in (0, -1, NAN, INF, HUGE, True)),
    *(("n", value) for value in (0, -1, 129, 17, 1.0, True, "1", HUGE)),
    *(("max_tokens", value) for value in (-1, 0, 1.5, True, "16", HUGE, NAN)),
    *(("max_completion_tokens", value) for value in (-1, 0, True, "16", HUGE)),
    *(("min_tokens", value) for value in (-1, 1.5, True, "1", HUGE)),
    *(("seed", value) for value in (-(2**63) - 1, 2**64, 1.5, True, "1", HUGE)),
    *(("stop", value) for value in ("", [""], ["a"] * 17, "a" * 1025, 5, True, [5], {}, [None])),
    *(("stop_token_ids", value) for value in ([-1], [VOCAB], [True], [1.0], 5, "5", [0] * 129, [HUGE])),
    *(("ignore_eos", value) for value in (1, "true", [])),
    *(("skip_special_tokens", value) for value in (1, "true")),
    *(("include_stop_str_in_output", value) for value in (0, "false")),
    *(("stream", value) for value in (1, "true", {})),
    *(("logit_bias", value) for value in ([], "x", {"x": 1}, {"-1": 1}, {"01": 1}, {" 1": 1}, {"1_0": 1}, {"٣": 1})),
    *(("logit_bias", {"1": value}) for value in (101, -101, NAN, True, "1", None, HUGE)),
    *(("logit_bias", value) for value in ({str(VOCAB): 1}, {"9" * 400: 1}, {str(i): 1 for i in range(1025)})),
    *(("priority", value) for value in (1.5, True, "1", HUGE)),
    *(("cache_salt", value) for value in ("", 5, "a" * 257, True)),
    *(("user", value) for value in (5, "a" * 4097)),
    *(("stream_options", value) for value in ([], "x", True, {"include_usage": True}, {})),
    ("model", None),
    ("model", 5),
    *(
        (name, value)
        for name in ("best_of", "chat_template", "itl_slo_ms", "guided_json")
        for value in (1, "x", {}, False)
    ),
    *(("response_format", value) for value in ({"type": "json_object"}, {"type": "json_schema"}, "text", {})),
    ("store", True),
    ("service_tier", "flex"),
    ("use_beam_search", True),
]
BAD_COMPLETION: list[tuple[str, Any]] = [
    *(("prompt", value) for value in (None, [], 5, True, {}, [[]], [1, "a"], ["a", 1], [[1], "a"], [[1], 1], [None])),
    *(("prompt", value) for value in ([-1], [VOCAB], [True], [1.5], [HUGE], [[0, VOCAB]], ["a"] * 17)),
    *(("logprobs", value) for value in (-1, 21, True, False, "1", 1.0)),
    *(("echo", value) for value in (1, "true")),
    ("suffix", "x"),
    ("suffix", ""),
]
BAD_CHAT: list[tuple[str, Any]] = [
    *(("messages", value) for value in (None, [], "hi", {}, [5], ["hi"], [None], [{}], [{"role": "user"}])),
    *(("messages", [{"role": role, "content": "x"}]) for role in ("", "tool", "function", "nobody", None, 5, [], {})),
    *(("messages", [{"role": "user", "content": content}]) for content in (None, 5, [], {}, [5], ["x"], [{}])),
    *(("messages", [{"role": "user", "content": [part]}]) for part in ({"type": "image_url"}, {"type": "text"})),
    ("messages", [{"role": "user", "content": [{"type": "text", "text": 5}]}]),
    ("messages", [{"role": "user", "content": "x", "name": 5}]),
    ("messages", [{"role": "assistant", "content": "x", "tool_calls": []}]),
    *(("logprobs", value) for value in (1, 0, "true")),
    *(("tools", value) for value in ([], [{}], {}, False)),
    *(("tool_choice", value) for value in ("auto", "required", {}, "")),
    *((name, value) for name in ("functions", "audio", "prediction", "verbosity") for value in ([], "x")),
    ("function_call", "auto"),
    ("modalities", ["text", "audio"]),
    ("reasoning_effort", "high"),
    ("parallel_tool_calls", 1),
    ("echo", True),
    *(("add_generation_prompt", value) for value in (1, "x")),
    *(("continue_final_message", value) for value in (1, "x")),
    *(("chat_template_kwargs", value) for value in ([], "x", {"tokenize": True}, {"messages": []}, {"self": 1})),
]


@pytest.mark.parametrize(("name", "value"), BAD_SHARED + BAD_COMPLETION)
def test_a_bad_completion_field_is_a_400_that_names_it(name: str, value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        completion(**{name: value})
    assert (caught.value.status, caught.value.param) == (400, name)
    assert name in caught.value.message


@pytest.mark.parametrize(("name", "value"), BAD_SHARED + BAD_CHAT)
def test_a_bad_chat_field_is_a_400_that_names_it(name: str, value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        chat(**{name: value})
    assert (caught.value.status, caught.value.param) == (400, name)
    assert name in caught.value.message


@pytest.mark.parametrize("value", [-1, 21, True, "5", 1.0])
def test_bad_top_logprobs(value: Any) -> None:
    with pytest.raises(RequestError, match="from 0 to 20") as caught:
        chat(logprobs=True, top_logprobs=value)
    assert caught.value.param == "top_logprobs"


def test_top_logprobs_need_logprobs() -> None:
    with pytest.raises(RequestError) as caught:
        chat(top_logprobs=3)
    assert caught.value.param == "top_logprobs"
    assert chat(top_logprobs=0).options.sampling.num_logprobs is None


def test_the_defaults() -> None:
    options = completion().options
    assert (options.n, options.stream, options.seed, options.priority, options.cache_salt) == (1, False, None, 0, None)
    assert (options.limits.max_tokens, options.limits.min_tokens) == (16, 0)
    assert chat().options.limits.max_tokens is None
    sampling = options.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (1.0, 0, 1.0, 0.0)
    assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (1.0, 0.0, 0.0)
    assert sampling.stop_token_ids == (EOS,)
    assert sampling.num_logprobs is None


def test_null_is_the_default_for_every_field() -> None:
    names = {name for name, _ in BAD_SHARED + BAD_COMPLETION} - {"model", "prompt"}
    assert completion(**dict.fromkeys(names)) == completion()
    names = {name for name, _ in BAD_SHARED + BAD_CHAT} - {"model", "messages"}
    assert chat(**dict.fromkeys(names)) == chat()


def test_every_sampling_field_arrives() -> None:
    sampling = completion(
        temperature=0.5,
        top_k=7,
        top_p=0.9,
        min_p=0.1,
        repetition_penalty=1.2,
        presence_penalty=-1,
        frequency_penalty=2,
        logit_bias={"3": -100, "0": 5.5},
        stop_token_ids=[5, 5, 3],
        min_tokens=2,
        logprobs=4,
    ).options.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.5, 7, 0.9, 0.1)
    assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (1.2, -1.0, 2.0)
    assert sampling.logit_bias == ((3, -100.0), (0, 5.5))
    assert sampling.stop_token_ids == tuple(sorted({3, 5, EOS}))
    assert (sampling.min_tokens, sampling.num_logprobs) == (2, 4)


def test_ignore_eos_keeps_the_callers_own_stop_ids() -> None:
    assert completion(ignore_eos=True).options.sampling.stop_token_ids == ()
    assert completion(ignore_eos=True, stop_token_ids=[5]).options.sampling.stop_token_ids == (5,)


def test_edges_that_are_allowed() -> None:
    assert completion(temperature=1e-300).options.sampling.temperature == 0.0
    assert completion(top_k=-1).options.sampling.top_k == 0
    assert completion(top_k=2**31 - 1).options.sampling.top_k == VOCAB
    assert completion(top_p=1).options.sampling.top_p == 1.0
    assert completion(seed=-1).options.seed == 2**64 - 1
    assert completion(seed=2**64 - 1).options.seed == 2**64 - 1
    assert completion(logprobs=0).options.sampling.num_logprobs == 0
    assert completion(stop=["a", "a", "b"]).options.stop.strings == ("a", "b")
    assert completion(stop=[]).options.stop.strings == ()
    assert completion(echo=True, max_tokens=0).options.limits.max_tokens == 0
    assert completion(max_completion_tokens=5).options.limits.max_tokens == 5
    assert completion(max_completion_tokens=5, max_tokens=5).options.limits.max_tokens == 5
    assert completion(stream=True, stream_options={"include_usage": True}).options.include_usage
    assert not completion(stream=True, stream_options={"other": 5}).options.include_usage
    assert chat(tool_choice="none", response_format={"type": "text"}, store=False).options.n == 1
    assert completion(unknown_field=NAN, another={"a": []}) == completion()


@pytest.mark.parametrize("prompt", ["text", ["a", "b"], [1, 2], [[1], [2, 3]]])
def test_prompt_forms(prompt: Any) -> None:
    many = prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]
    assert completion(prompt=prompt).prompts == many


def test_min_tokens_above_max_tokens_names_both() -> None:
    with pytest.raises(RequestError, match="16") as caught:
        completion(min_tokens=17)
    assert caught.value.param == "min_tokens"
    with pytest.raises(RequestError, match="at most max_tokens, which is 3"):
        chat(min_tokens=4, max_tokens=3)
    assert chat(min_tokens=17).options.limits.min_tokens == 17


def test_max_tokens_and_its_newer_name_must_agree() -> None:
    with pytest.raises(RequestError) as caught:
        chat(max_tokens=3, max_completion_tokens=4)
    assert caught.value.param == "max_completion_tokens"


def test_stream_options_need_a_stream_and_a_bool() -> None:
    for fields in (
        {"stream_options": {"include_usage": True}},
        {"stream": True, "stream_options": {"include_usage": 1}},
    ):
        with pytest.raises(RequestError) as caught:
            completion(**fields)
        assert caught.value.param == "stream_options"


def test_continue_and_generation_prompt_exclude_each_other() -> None:
    assert chat().add_generation_prompt
    assert not chat(continue_final_message=True).add_generation_prompt
    with pytest.raises(RequestError) as caught:
        chat(continue_final_message=True, add_generation_prompt=True)
    assert caught.value.param == "continue_final_message"


def test_messages_take_text_parts_names_and_the_developer_role() -> None:
    messages = chat(
        messages=[
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "me"},
            {"role": "assistant", "content": "", "tool_calls": None},
        ]
    ).messages
    assert messages == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "a\nb", "name": "me"},
        {"role": "assistant", "content": ""},
    ]


def test_an_unknown_model_is_a_404_without_its_name() -> None:
    with pytest.raises(RequestError) as caught:
        completion(model="<script>")
    error = caught.value
    assert (error.status, error.param, error.code) == (404, "model", "model_not_found")
    assert "<script>" not in error.message


def test_sampling_defaults_come_from_the_checkpoint() -> None:
    defaults = GenerationDefaults((1, 2), temperature=0.6, top_k=20, top_p=0.95, min_p=0.05, repetition_penalty=1.1)
    parser = BodyParser(FrontendSettings("/nowhere", MODEL), defaults)
    sampling = parser.completion({"model": MODEL, "prompt": "x"}, VOCAB).options.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.6, 20, 0.95, 0.05)
    assert (sampling.repetition_penalty, sampling.stop_token_ids) == (1.1, (1, 2))
    given = parser.completion({"model": MODEL, "prompt": "x", "temperature": 0, "top_k": -1}, VOCAB).options.sampling
    assert (given.temperature, given.top_k) == (0.0, 0)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"5",
        b"null",
        b'"x"',
        b'{"a": NaN}',
        b'{"a": Infinity}',
        b"\xff",
        b'{"a": "\xed\xa0\x80"}',
        b"{'a': 1}",
    ],
)
def test_what_is_no_json_object_is_a_400(body: bytes) -> None:
    with pytest.raises(RequestError) as caught:
        parse_json_object(body)
    assert (caught.value.status, caught.value.param) == (400, None)


def test_absurd_json_is_a_400() -> None:
    for body in (b"[" * 200_000, b'{"a":' * 200_000, b'{"a": 1' + b"0" * 5000 + b"}", b'{"\\u0061":' * 100_000):
        with pytest.raises(RequestError):
            parse_json_object(body)


def test_lone_surrogates_become_replacement_characters_and_pairs_characters() -> None:
    value = parse_json_object(b'{"a\\ud800": ["\\udfff!", {"b": "\\ud83d\\ude00"}, 1, null]}')
    assert value == {"a\ufffd": ["\ufffd!", {"b": "😀"}, 1, None]}
