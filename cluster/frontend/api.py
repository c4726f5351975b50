"""The OpenAI API as a FastAPI app. Knows neither Ray nor where engines live."""

import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response

from cluster.frontend.api_keys import ApiKeys
from cluster.frontend.deadline import Deadline
from cluster.frontend.generation import Generation
from cluster.frontend.generation_defaults import GenerationDefaults
from cluster.frontend.generation_response import GenerationResponse
from cluster.frontend.health import Health
from cluster.frontend.http_body import read_json
from cluster.frontend.http_errors import error_body, error_response, install_error_handlers
from cluster.frontend.http_gate import HttpGate
from cluster.frontend.open_generations import OpenGenerations
from cluster.frontend.prompts import PromptEncoder
from cluster.frontend.protocol import BodyParser, GenerationOptions, unknown_model
from cluster.frontend.responses import ChatShape, CompletionShape, encode_json
from cluster.frontend.settings import FrontendSettings
from cluster.frontend.tokenizer import Tokenizer
from cluster.links.engine_client import EngineClient
from cluster.metrics.frontend import FrontendMetrics

RenderMetrics = Callable[[], Awaitable[tuple[bytes, str]]]
"""The metrics page and its content type."""
CheckHealth = Callable[[], Awaitable[Health]]

_BYTES_PER_MB = 1 << 20


class ApiServer:
    """The handlers of the routes. `open_generations` knows what is under way, and drains."""

    def __init__(
        self,
        settings: FrontendSettings,
        tokenizer: Tokenizer,
        defaults: GenerationDefaults,
        engine_client: EngineClient,
        render_metrics: RenderMetrics,
        check_health: CheckHealth,
        frontend_metrics: FrontendMetrics,
    ) -> None:
        self.open_generations = OpenGenerations()
        self._settings = settings
        self._tokenizer = tokenizer
        self._client = engine_client
        self._render_metrics = render_metrics
        self._check_health = check_health
        self._frontend_metrics = frontend_metrics
        self._parser = BodyParser(settings, defaults)
        self._prompts = PromptEncoder(tokenizer)
        self._max_body_bytes = int(settings.max_body_mb * _BYTES_PER_MB)
        self._created = int(time.time())

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions."""
        arrived = time.perf_counter()
        with self._frontend_metrics.counting_refusals():
            deadline = Deadline(request.headers)
            body = await self._read_body(request, deadline)
            limits = await self._client.limits()
            parsed = self._parser.completion(body, limits.vocab_size)
            options = parsed.options
            generation = Generation(
                self._client,
                self._tokenizer.table,
                options,
                await self._prompts.completion(parsed),
                limits.max_model_len,
                echo=parsed.echo,
                continues_prompt=True,
            )
        return self._answer(generation, CompletionShape, options, deadline, arrived)

    async def chat_completions(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        arrived = time.perf_counter()
        with self._frontend_metrics.counting_refusals():
            deadline = Deadline(request.headers)
            body = await self._read_body(request, deadline)
            limits = await self._client.limits()
            parsed = self._parser.chat(body, limits.vocab_size)
            options = parsed.options
            generation = Generation(
                self._client,
                self._tokenizer.table,
                options,
                [await self._prompts.chat(parsed)],
                limits.max_model_len,
                prompt_field="messages",
                continues_prompt=parsed.continue_final_message,
            )
        return self._answer(generation, ChatShape, options, deadline, arrived)

    async def models(self) -> Response:
        """GET /v1/models."""
        return _json({"object": "list", "data": [await self._model()]})

    async def model(self, name: str) -> Response:
        """GET /v1/models/{name}."""
        if name != self._settings.model_name:
            raise unknown_model(self._settings.model_name)
        return _json(await self._model())

    async def health(self) -> Response:
        """GET /health: 200 when an engine is ready, or is started by the next request; else 503 with the phase."""
        draining = not self.open_generations.accepting
        health = Health(False, True, "draining") if draining else await self._check_health()
        if health.ready:
            return _json({"status": health.phase})
        return error_response(503, error_body(503, f"not ready: {health.phase}", None, "not_ready"))

    async def live(self) -> Response:
        """GET /health/live: 200 when this process answers and some engine gets on, starts, recovers or is idle."""
        health = await self._check_health()
        if health.live:
            return _json({"status": "live"})
        return error_response(503, error_body(503, f"not live: {health.phase}", None, "not_live"))

    async def metrics(self) -> Response:
        """GET /metrics: the whole service's."""
        body, content_type = await self._render_metrics()
        return Response(body, headers={"content-type": content_type})

    async def _read_body(self, request: Request, deadline: Deadline) -> dict[str, Any]:
        self.open_generations.check_accepting()
        async with deadline.limit():
            return await read_json(request, self._max_body_bytes)

    def _answer(
        self,
        generation: Generation,
        make_shape: type[ChatShape | CompletionShape],
        options: GenerationOptions,
        deadline: Deadline,
        arrived: float,
    ) -> GenerationResponse:
        self._frontend_metrics.observe_overhead(time.perf_counter() - arrived)
        shape = make_shape(
            self._settings.model_name, self._tokenizer.table, options.sampling.num_logprobs, options.include_usage
        )
        return GenerationResponse(
            generation,
            self.open_generations,
            self._frontend_metrics,
            shape,
            deadline,
            stream=options.stream,
            include_usage=options.include_usage,
        )

    async def _model(self) -> dict[str, Any]:
        limits = await self._client.limits(renew=False)
        return {
            "id": self._settings.model_name,
            "object": "model",
            "created": self._created,
            "owned_by": "chunkserve",
            "max_model_len": limits.max_model_len,
        }


def build_app(
    settings: FrontendSettings,
    tokenizer: Tokenizer,
    defaults: GenerationDefaults,
    engine_client: EngineClient,
    render_metrics: RenderMetrics,
    check_health: CheckHealth,
    frontend_metrics: FrontendMetrics,
    *,
    echo_request_id: bool = True,
) -> FastAPI:
    """The app; `app.state.server` is its ApiServer. Raises ConfigError if `api_key_file` gives no keys.

    `echo_request_id` False when whoever calls the app puts x-request-id on the answers itself.
    """
    server = ApiServer(
        settings,
        tokenizer,
        defaults,
        engine_client,
        render_metrics,
        check_health,
        frontend_metrics,
    )
    api_keys = ApiKeys(settings.api_key, Path(settings.api_key_file) if settings.api_key_file is not None else None)
    app = FastAPI(openapi_url=None, redirect_slashes=False)
    app.state.server = server
    install_error_handlers(app)
    app.add_middleware(HttpGate, api_keys=api_keys, echo_request_id=echo_request_id)
    routes: list[tuple[str, str, Callable[..., Awaitable[Response]]]] = [
        ("POST", "/v1/completions", server.completions),
        ("POST", "/v1/chat/completions", server.chat_completions),
        ("GET", "/v1/models", server.models),
        ("GET", "/v1/models/{name:path}", server.model),
        ("GET", "/health", server.health),
        ("GET", "/health/live", server.live),
        ("GET", "/metrics", server.metrics),
    ]
    for method, path, handler in routes:
        app.add_api_route(path, handler, methods=[method], response_model=None)
    return app


def _json(value: dict[str, Any]) -> Response:
    return Response(encode_json(value), media_type="application/json")
