"""Options of who asks an OpenAI-compatible server, and what its URL must be."""

import urllib.parse
from typing import Annotated

from annotated_types import Ge, Gt

from jaxrl.schema.declared import Cap, shown
from jaxrl.schema.limits import MAX_WAIT
from jaxrl.schema.section import Section


class EndpointOptions(Section):
    """Part of a section, whose model is on the run's devices or at an endpoint."""

    endpoint: Annotated[str, "URL of an OpenAI-compatible server, up to `/v1`; empty: the model on the devices."] = ""
    endpoint_model: Annotated[str, "The name of the model that the endpoint is asked for."] = ""
    api_key_env: Annotated[str, "Environment variable that holds the endpoint's key; empty: no key is sent."] = ""
    requests_per_minute: Annotated[float, Ge(0), "The most requests to the endpoint in a minute; 0: no limit."] = 0.0
    max_requests: Annotated[int, Ge(1), Cap(1024, "each is a connection"), "Requests to the endpoint at once."] = 8
    request_timeout_s: Annotated[float, Gt(0), MAX_WAIT, "Seconds until a request to the endpoint is given up."] = 60.0
    max_retries: Annotated[
        int, Ge(0), Cap(100, "an endpoint that fails so often is down"), "Times that a failed request is sent again."
    ] = 4


PACE = frozenset({"requests_per_minute", "max_requests", "request_timeout_s", "max_retries"})
"""The options that say how an endpoint is asked, and not which one."""


def endpoint_problem(section: str, options: EndpointOptions) -> str | None:
    """Why its endpoint cannot be asked, as a sentence; None if it can."""
    endpoint, rule = options.endpoint, f"{section}.endpoint must be a URL such as http://localhost:8000/v1"
    if "@" in endpoint:  # config.yaml would keep it
        return f"{rule}, found one with a name or password in it: give the key by {section}.api_key_env"
    try:
        url = urllib.parse.urlsplit(endpoint)
        port_is_right = url.port is None or url.port > 0  # reading the port may raise
    except ValueError as error:
        return f"{rule}, found {shown(endpoint)} ({error})"
    is_plain = endpoint.isascii() and endpoint.isprintable() and " " not in endpoint
    is_base = not (url.query or url.fragment or url.path.rstrip("/").endswith("/completions"))
    if url.scheme not in ("http", "https") or not url.hostname or not (port_is_right and is_plain and is_base):
        return f"{rule}, up to what comes before /chat/completions, found {shown(endpoint)}"
    if not options.endpoint_model:
        return f"{section}.endpoint_model is missing: name the model that the endpoint is asked for"
    return None
