"""Prompts as token ids."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

from cluster.errors import RequestError
from cluster.frontend.protocol import ChatRequest, CompletionRequest
from cluster.frontend.tokenizer import Tokenizer

T = TypeVar("T")

INLINE_CHARACTERS = 2000
"""Shorter texts are encoded on the event loop: a thread would cost more than it saves."""


class PromptEncoder:
    """Templates and encodes prompts. Long ones in a thread, so that running streams do not wait for them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    async def completion(self, request: CompletionRequest) -> list[list[int]]:
        """Token ids of each prompt. Raises RequestError for an empty text that no token can stand for."""
        texts = [prompt for prompt in request.prompts if isinstance(prompt, str)]
        if not texts:
            return [ids for ids in request.prompts if isinstance(ids, list)]
        return await _off_loop(sum(map(len, texts)), lambda: [self._encode_text(text) for text in texts])

    async def chat(self, request: ChatRequest) -> list[int]:
        """Token ids of the templated chat. Raises RequestError when the template refuses it."""
        size = sum(len(message["content"]) for message in request.messages)
        return await _off_loop(size, lambda: self._encode_chat(request))

    def _encode_text(self, text: str) -> list[int]:
        ids = self._tokenizer.encode(text)
        if ids:
            return ids
        # As in the API reference: without a prompt the model begins a new document.
        if self._tokenizer.document_start is None:
            raise RequestError("prompt must have at least one token", param="prompt")
        return [self._tokenizer.document_start]

    def _encode_chat(self, request: ChatRequest) -> list[int]:
        text = self._tokenizer.render_chat(
            request.messages,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
            template_kwargs=request.template_kwargs,
        )
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        if not ids:
            raise RequestError("messages: the chat template leaves no text of them", param="messages")
        return ids


async def _off_loop(size: int, work: Callable[[], T]) -> T:
    return work() if size <= INLINE_CHARACTERS else await asyncio.to_thread(work)
