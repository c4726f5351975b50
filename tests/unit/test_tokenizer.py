"""The tokenizer's wrapper, the chat template, and what a checkpoint says about generating."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from api_fakes import BACKEND, TEMPLATE, TOKENIZER, byte_level_backend, save_model_files
from transformers import PreTrainedTokenizerFast

from cluster.errors import ModelError, RequestError
from cluster.frontend.generation_defaults import GenerationDefaults
from cluster.frontend.tokenizer import Tokenizer

USER = {"role": "user", "content": "hi"}


def test_a_saved_tokenizer_loads_with_its_template(tmp_path: Path) -> None:
    saved = PreTrainedTokenizerFast(tokenizer_object=byte_level_backend(), eos_token="<|im_end|>")
    saved.chat_template = TEMPLATE
    saved.save_pretrained(tmp_path)
    tokenizer = Tokenizer.load(str(tmp_path))
    assert tokenizer.encode("Hello world") == TOKENIZER.encode("Hello world")
    assert tokenizer.render_chat([USER]) == TOKENIZER.render_chat([USER])
    assert tokenizer.document_start == BACKEND.token_to_id("<|im_end|>")


def test_a_directory_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=str(tmp_path)):
        Tokenizer.load(str(tmp_path))


def test_truncation_and_padding_of_the_file_do_not_apply() -> None:
    backend = byte_level_backend()
    backend.enable_truncation(3)
    backend.enable_padding(length=50)
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))
    assert tokenizer.encode("Hello world, how are you?") == TOKENIZER.encode("Hello world, how are you?")


def test_the_chat_template_is_the_models() -> None:
    assert TOKENIZER.render_chat([USER]) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert TOKENIZER.render_chat([USER], add_generation_prompt=False) == "<|im_start|>user\nhi<|im_end|>\n"
    styled = TOKENIZER.render_chat([USER], add_generation_prompt=False, template_kwargs={"style": "plain"})
    assert styled.endswith("[plain]")


def test_a_final_message_can_be_continued() -> None:
    messages = [USER, {"role": "assistant", "content": "The answer"}]
    text = TOKENIZER.render_chat(messages, add_generation_prompt=False, continue_final_message=True)
    assert text.endswith("<|im_start|>assistant\nThe answer")


def test_what_the_template_says_is_repeated_and_what_breaks_it_is_not() -> None:
    with pytest.raises(RequestError, match="Roles must alternate") as caught:
        TOKENIZER.render_chat([{"role": "user", "content": "refuse me"}])
    assert caught.value.param == "messages"
    with pytest.raises(RequestError) as caught:
        TOKENIZER.render_chat([{"role": "user", "content": "break me"}])
    assert caught.value.message == "messages: the model's chat template refuses this request"


def test_a_model_without_a_template_says_so() -> None:
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=byte_level_backend()))
    with pytest.raises(RequestError, match="no chat template"):
        tokenizer.render_chat([USER])
    assert tokenizer.document_start is None


def test_threads_may_encode_at_once() -> None:
    texts = [f"{index} " * 500 for index in range(16)]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(TOKENIZER.encode, texts)) == [TOKENIZER.encode(text) for text in texts]


def test_eos_is_the_union_of_both_files(tmp_path: Path) -> None:
    save_model_files(tmp_path, config={"eos_token_id": 7}, generation_config={"eos_token_id": [9, 7], "top_k": 20})
    defaults = GenerationDefaults.load(str(tmp_path))
    assert defaults.eos_token_ids == (7, 9)
    assert (defaults.top_k, defaults.temperature) == (20, 1.0)


def test_generation_defaults_may_be_missing_or_null(tmp_path: Path) -> None:
    assert GenerationDefaults.load(str(tmp_path)) == GenerationDefaults()
    save_model_files(tmp_path, config={"eos_token_id": None}, generation_config={"temperature": None, "top_k": -1})
    assert GenerationDefaults.load(str(tmp_path)) == GenerationDefaults()


@pytest.mark.parametrize("values", [{"temperature": -1}, {"top_p": 0}, {"eos_token_id": "x"}, {"eos_token_id": [True]}])
def test_bad_generation_defaults_are_named(tmp_path: Path, values: dict[str, object]) -> None:
    save_model_files(tmp_path, generation_config=values)
    with pytest.raises(ModelError, match=next(iter(values))):
        GenerationDefaults.load(str(tmp_path))


def test_an_unreadable_generation_config_is_named(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(ModelError, match=r"generation_config\.json"):
        GenerationDefaults.load(str(tmp_path))
