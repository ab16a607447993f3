"""The server's routes as an OpenAPI 3.1 document (`GET /openapi.json`), made from the bodies that it checks."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from jaxrl import __version__
from jaxrl.serving.bodies import ChatBody, CompletionBody, GenerateBody

BODIES: dict[str, tuple[type[BaseModel], str]] = {
    "/v1/completions": (CompletionBody, "Responses to prompts of text or token ids."),
    "/v1/chat/completions": (ChatBody, "The next message of a conversation."),
    "/inference/v1/generate": (GenerateBody, "Token ids in, token ids out."),
}
ANSWERS = {
    "/v1/models": "The model that is served.",
    "/health": "That the server answers.",
    "/metrics": "Counts and latencies, as Prometheus reads them.",
    "/openapi.json": "This document.",
}
REFUSALS = {400: "wrong", 401: "without the key", 404: "for another model", 413: "too large", 503: "one too many"}


def document() -> dict[str, Any]:
    """The OpenAPI document."""
    kinds = [(kind, "validation") for kind, _ in BODIES.values()]
    _, schemas = models_json_schema(kinds, ref_template="#/components/schemas/{model}")  # pyright: ignore
    paths: dict[str, Any] = {
        path: {"get": {"summary": text, "responses": _responses()}} for path, text in ANSWERS.items()
    }
    for path, (kind, text) in BODIES.items():
        body = {"$ref": f"#/components/schemas/{kind.__name__}"}
        paths[path] = {
            "post": {
                "summary": text,
                "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
                "responses": _responses(),
            }
        }
    return {
        "openapi": "3.1.0",
        "info": {"title": "jaxrl serve", "version": __version__},
        "paths": paths,
        "components": {"schemas": schemas["$defs"]},
    }


def _responses() -> dict[str, Any]:
    found = {"200": {"description": "The answer."}}
    return found | {str(status): {"description": f"The request is {why}."} for status, why in REFUSALS.items()}
