"""HTTP API below /api/v1: routes for the endpoint table, openapi.json and the event stream.

``endpoints.py`` lists the endpoints and reads requests, ``responses.py`` answers them,
``openapi.py`` describes them. ``web/application.py`` mounts ``ROUTES``.
"""

from typing import Any, Final

from litestar import Request, Response, get, route
from litestar.enums import HttpMethod

from steward.web.api.endpoints import ACTION_ENDPOINTS, ENDPOINTS, Endpoint
from steward.web.api.openapi import build_openapi_json
from steward.web.api.responses import answer_endpoint, events_stream
from steward.web.authentication import AuthenticatedRequest

HttpRequest = Request[Any, Any, Any]
ROOT: Final = "/api/v1"
"""Path of the API, below the prefix of the pages."""


def make_routes() -> tuple[Any, ...]:
    """Return a Litestar handler for each path, the OpenAPI document and the event stream."""
    paths: dict[str, dict[str, Endpoint]] = {}
    for endpoint in (*ENDPOINTS, *ACTION_ENDPOINTS):
        paths.setdefault(endpoint.path, {})[endpoint.method] = endpoint
    return (
        *(_make_handler(path, methods) for path, methods in paths.items()),
        send_openapi_document,
        events_stream,
    )


def _make_handler(path: str, methods: dict[str, Endpoint]) -> Any:
    """Return the Litestar handler of a path for all its methods."""
    typed_path = "/".join(
        f"{part[:-1]}:str}}" if part.startswith("{") else part for part in path.split("/")
    )

    async def handler(request: HttpRequest, auth: AuthenticatedRequest) -> Response[Any]:
        return await answer_endpoint(methods[request.method], request, auth)

    return route(
        f"{ROOT}{typed_path}",
        http_method=[HttpMethod(method) for method in methods],
        status_code=200,
        include_in_schema=False,
        name=f"api {path}",
    )(handler)


@get(f"{ROOT}/openapi.json", include_in_schema=False, sync_to_thread=False)
def send_openapi_document(request: HttpRequest) -> Response[bytes]:
    """Return the OpenAPI document."""
    text = build_openapi_json(f"{request.app.state.pages.prefix}{ROOT}")
    return Response(text, media_type="application/json", headers={"Cache-Control": "no-cache"})


ROUTES: Final[tuple[Any, ...]] = make_routes()
"""Handlers of all API paths."""
