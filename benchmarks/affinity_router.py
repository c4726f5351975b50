"""Serve's PrefixCacheAffinityRouter (ray.llm) before our engines, to compare with. Not a part of the product."""

from typing import Any

from ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router import PrefixCacheAffinityRouter


class AffinityRouter(PrefixCacheAffinityRouter):
    """With its defaults. It compares texts: each token is a character."""

    def _extract_text_from_request(self, pending_request: Any) -> str:
        return "".join(map(chr, pending_request.args[0].prompt_token_ids))
