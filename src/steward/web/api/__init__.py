"""HTTP API below /api/v1: one route for each path of the endpoint table, plus openapi.json.

``endpoints.py`` lists the endpoints and reads requests, ``responses.py`` answers them,
``openapi.py`` describes them. ``web/application.py`` mounts ``ROUTES``.
"""

from typing import Any, Final

from litestar import Request, Response, get, route
from litestar.enums import HttpMethod

from steward.web.api.endpoints import ASKS, ENDPOINTS, Endpoint
from steward.web.api.openapi import description
from steward.web.api.responses import answer, events_stream
from steward.web.authentication import Visit

Ask = Request[Any, Any, Any]
ROOT: Final = "/api/v1"
"""Path of the API, below the prefix of the pages."""


def routes() -> tuple[Any, ...]:
    """Return a Litestar handler for each path, the OpenAPI document and the event stream."""
    paths: dict[str, dict[str, Endpoint]] = {}
    for endpoint in (*ENDPOINTS, *ASKS):
        paths.setdefault(endpoint.path, {})[endpoint.method] = endpoint
    return (*(_handler(path, methods) for path, methods in paths.items()), described, events_stream)


def _handler(path: str, methods: dict[str, Endpoint]) -> Any:
    """Return the Litestar handler of a path for all its methods."""
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
    """Return the OpenAPI document."""
    text = description(f"{request.app.state.pages.prefix}{ROOT}")
    return Response(text, media_type="application/json", headers={"Cache-Control": "no-cache"})


ROUTES: Final[tuple[Any, ...]] = routes()
"""Handlers of all API paths."""
