"""The model's tokenizer and chat template, as the front end uses them."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jinja2.exceptions import TemplateError
from tokenizers import Tokenizer as BackendTokenizer

from cluster.errors import ModelError, RequestError
from cluster.frontend.token_table import TokenTable

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

RESERVED_TEMPLATE_KWARGS = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "conversations",
        "documents",
        "max_length",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "sanitize_control_tokens",
        "self",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)
"""Names that chat_template_kwargs may not use: they are fields of their own or parameters of the renderer."""

_MAX_TEMPLATE_MESSAGE = 200


class Tokenizer:
    """Encodes text and chats; `table` has the way back. Safe to use from several threads."""

    def __init__(self, tokenizer: "PreTrainedTokenizerFast") -> None:
        """Raises ModelError when there is no fast tokenizer behind it, or one with an unknown decoder."""
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if not isinstance(backend, BackendTokenizer):
            raise ModelError("the model has no tokenizer.json that the tokenizers library can read")
        backend.no_truncation()
        backend.no_padding()
        self._tokenizer = tokenizer
        self._backend = backend
        self.table = TokenTable.build(backend)
        self.document_start: int | None = tokenizer.bos_token_id
        """The token that begins a document, where the tokenizer names one; else the one that ends it."""
        if self.document_start is None:
            self.document_start = tokenizer.eos_token_id

    @classmethod
    def load(cls, model_path: str) -> "Tokenizer":
        """From a local directory. Raises ModelError with the cause."""
        from transformers import AutoTokenizer  # seconds, which the launcher, who knows this class, need not wait for

        try:
            tokenizer = AutoTokenizer.from_pretrained(model_path, local_files_only=True)
        except (OSError, ValueError, KeyError) as error:
            raise ModelError(f"the tokenizer in {model_path} cannot be loaded: {error}") from error
        return cls(tokenizer)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. The GIL is released meanwhile."""
        return list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The chat as the model's template writes it; encode it without adding special tokens.

        Raises RequestError when the model has no template or the template refuses the messages.
        """
        if self._tokenizer.chat_template is None:
            raise RequestError("messages: the model has no chat template; use /v1/completions", param="messages")
        try:
            rendered = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **(template_kwargs or {}),
            )
        except Exception as error:
            # A template is a program of the model's author, run on a client's input: whatever it
            # raises is about this request, and only what it says on purpose is fit to be repeated.
            reason = f": {str(error)[:_MAX_TEMPLATE_MESSAGE]}" if type(error) is TemplateError else ""
            raise RequestError(
                f"messages: the model's chat template refuses this request{reason}", "messages"
            ) from error
        return str(rendered)
