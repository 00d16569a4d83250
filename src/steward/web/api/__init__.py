"""The API below /api/v1: a table of endpoints, each an action of the registry."""

from typing import Any, Final

from litestar import Request, Response, get, route
from litestar.enums import HttpMethod

from steward.web.api.endpoints import ASKS, ENDPOINTS, Endpoint
from steward.web.api.openapi import description
from steward.web.api.responses import answer, events_stream
from steward.web.authentication import Visit

Ask = Request[Any, Any, Any]
ROOT: Final = "/api/v1"


def routes() -> tuple[Any, ...]:
    """A handler for each path."""
    paths: dict[str, dict[str, Endpoint]] = {}
    for endpoint in (*ENDPOINTS, *ASKS):
        paths.setdefault(endpoint.path, {})[endpoint.method] = endpoint
    return (*(_handler(path, methods) for path, methods in paths.items()), described, events_stream)


def _handler(path: str, methods: dict[str, Endpoint]) -> Any:
    typed = "/".join(
        f"{part[:-1]}:str}}" if part.startswith("{") else part for part in path.split("/")
    )

    async def handler(request: Ask, visit: Visit) -> Response[Any]:
        return await answer(methods[request.method], request, visit)

    return route(
        f"{ROOT}{typed}",
        http_method=[HttpMethod(method) for method in methods],
        status_code=200,
        include_in_schema=False,
        name=f"api {path}",
    )(handler)


@get(f"{ROOT}/openapi.json", include_in_schema=False, sync_to_thread=False)
def described(request: Ask) -> Response[bytes]:
    """What there is, for programs that read OpenAPI."""
    text = description(f"{request.app.state.pages.prefix}{ROOT}")
    return Response(text, media_type="application/json", headers={"Cache-Control": "no-cache"})


ROUTES: Final[tuple[Any, ...]] = routes()
"""Every path of the API."""
