"""A seeded generator of requests for every route and parameter of the application, with values as large, as
many and as strange as their schema says, and beyond it.

Routes and schemas come from the application itself, so none is forgotten. Values that name something (a
model, a session, a file) mostly name one that there is, so that requests get as far as they can.
"""

import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import quote

from fastapi import FastAPI
from fastapi.routing import iter_route_contexts
from pydantic import BaseModel, TypeAdapter

from coserve.serve.web.routes import LIVE

INTEGERS: Final = (
    -1, 0, 1, 2, 16, 255, 257, 4096, 8_000_000, 2**31 - 1, 2**31, 2**53, 2**62, 2**63 - 1, 2**63, 2**64,
    -(2**63), -(2**64), 10**39, 10**4000, 1.5, 1e308,
)  # fmt: skip
NUMBERS: Final = (
    0.0,
    -0.0,
    1e-320,
    0.5,
    1.0,
    1e30,
    1e308,
    -1e308,
    float("inf"),
    float("-inf"),
    float("nan"),
    10**400,
)
LETTERS: Final = (
    "a",
    "0",
    '"',
    "\\",
    "\n",
    "\x00",
    "é",
    "\U0001f600",
    "\ud800",
    " ",
    "<|im_start|>",
    "<tool_call>",
)
Schema = Mapping[str, Any]


@dataclass(frozen=True)
class Asked:
    """A request, and what it is a case of."""

    method: str
    path: str
    body: bytes | None = None
    what: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Route:
    """A route, and the schemas of its parameters and body."""

    method: str
    path: str
    path_names: tuple[str, ...]
    query: Mapping[str, Schema]
    body: Schema | None


def routes_of(app: FastAPI) -> list[Route]:
    """All routes of an application."""
    found = []
    for route in iter_route_contexts(app.routes):
        dependant: Any = getattr(route, "dependant", None)
        if dependant is None or route.path in (None, LIVE):  # LIVE is a stream that does not end
            continue
        query = {
            one.name: TypeAdapter(one.field_info.annotation).json_schema() for one in dependant.query_params
        }
        kinds = [one.field_info.annotation for one in dependant.body_params]
        models = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]
        body = models[0].model_json_schema() if models else None
        names = tuple(one.name for one in dependant.path_params)
        found += [Route(method, route.path, names, query, body) for method in sorted(route.methods or ())]
    return found


def leaves(schema: Schema, defs: Mapping[str, Any], place: str = "") -> Iterator[tuple[str, Schema]]:
    """Every value that a schema has a place for, with its own schema."""
    if "$ref" in schema:
        yield from leaves(defs[schema["$ref"].rpartition("/")[2]], defs, place)
        return
    if "const" in schema or "enum" in schema:
        return
    for word in ("anyOf", "oneOf", "allOf"):
        for inner in schema.get(word, ()):
            yield from leaves(inner, defs, place)
    if any(word in schema for word in ("anyOf", "oneOf", "allOf")):
        return
    yield place, schema
    if schema.get("type") == "array":
        yield from leaves(schema.get("items", {}), defs, f"{place}[]")
    for name, inner in schema.get("properties", {}).items():
        yield from leaves(inner, defs, f"{place}.{name}")
    if isinstance(inner := schema.get("additionalProperties"), dict):
        yield from leaves(inner, defs, f"{place}{{}}")


class Generator:
    """Draws requests. `known` are values by the names of parameters, or by `METHOD path parameter`."""

    def __init__(self, app: FastAPI, draw: random.Random, known: dict[str, list[Any]]) -> None:
        self.routes, self.known, self._draw = routes_of(app), known, draw

    def each(self) -> Iterator[Asked]:
        """A request for every route and every leaf of its body or query, with an extreme value there."""
        for route in self.routes:
            yield self.request(route, 400)
            for name in route.query:
                yield self.request(route, 400, f".{name}")
            if route.body is not None:
                places = dict.fromkeys(
                    place for place, _ in leaves(route.body, route.body.get("$defs", {})) if place
                )
                for place in places:
                    yield self.request(route, 4000, place)

    def any(self) -> Asked:
        """A request of any route, mostly small, with any number of extreme values."""
        nbytes = self._draw.choices((300, 5_000, 100_000, 900_000), (60, 30, 9, 1))[0]
        route = self._draw.choice(self.routes)
        place = None
        if route.body is not None and self._draw.random() < 0.7:
            places = [place for place, _ in leaves(route.body, route.body.get("$defs", {})) if place]
            place = self._draw.choice(places)
        return self.request(route, nbytes, place)

    def request(self, route: Route, nbytes: int, place: str | None = None) -> Asked:
        """A request of about so many bytes whose value at `place` is an extreme one."""
        path = route.path
        for name in route.path_names:
            value = quote(str(self._named(name, nbytes)), safe="", errors="surrogatepass")[:3000]
            path = path.replace(f"{{{name}:path}}", value).replace(f"{{{name}}}", value)
        wanted = []
        for name, schema in route.query.items():
            if place == f".{name}" or self._draw.random() < 0.4:
                value = str(self._query(name, schema, place == f".{name}"))
                wanted.append(f"{name}={quote(value, safe='', errors='surrogatepass')[:4000]}")
        body = None
        if route.body is not None:
            made = self._value(route.body, route.body.get("$defs", {}), "", place, nbytes)
            body = json.dumps(made).encode("utf-8", "surrogatepass")
        what = f"{route.method} {route.path} {place or ''} {nbytes}"
        return Asked(route.method, path + (f"?{'&'.join(wanted)}" if wanted else ""), body, what)

    def _named(self, name: str, nbytes: int) -> Any:
        if self.known.get(name) and self._draw.random() < 0.85:
            return self._draw.choice(self.known[name])
        return self._text({"maxLength": 300}, nbytes, self._draw.random() < 0.5)

    def _query(self, name: str, schema: Schema, is_extreme: bool) -> Any:
        if self.known.get(name) and not is_extreme:
            return self._draw.choice(self.known[name])
        return self._value(schema, schema.get("$defs", {}), "", "" if is_extreme else None, 1000)

    def _value(
        self, schema: Schema, defs: Mapping[str, Any], at: str, place: str | None, nbytes: int, depth: int = 0
    ) -> Any:
        draw, is_extreme = self._draw, at == place
        if "$ref" in schema:
            return self._value(defs[schema["$ref"].rpartition("/")[2]], defs, at, place, nbytes, depth)
        name = at.rpartition(".")[2].removesuffix("[]")
        if at and not is_extreme and self.known.get(name) and draw.random() < 0.9:
            return draw.choice(self.known[name])
        if is_extreme and draw.random() < 0.1:
            return self._anything(nbytes)
        for word in ("anyOf", "oneOf", "allOf"):
            if word in schema:
                chosen = draw.choice(
                    [one for one in schema[word] if one.get("type") != "null"] or schema[word]
                )
                return self._value(chosen, defs, at, place, nbytes, depth)
        if "const" in schema:
            return schema["const"]
        if "enum" in schema:
            return draw.choice(schema["enum"])
        match schema.get("type"):
            case "integer":
                return self._integer(schema, is_extreme)
            case "number":
                least = float(schema.get("minimum", schema.get("exclusiveMinimum", 0.0)))
                most = float(schema.get("maximum", schema.get("exclusiveMaximum", 1.0)))
                return (
                    draw.choice((least, most, *NUMBERS))
                    if is_extreme
                    else draw.uniform(least, min(most, 1.0))
                )
            case "string":
                return self._text(schema, nbytes, is_extreme)
            case "boolean":
                return draw.random() < 0.5
            case "null":
                return None
            case "array":
                return self._list(schema, defs, at, place, nbytes, depth, is_extreme)
            case "object":
                return self._object(schema, defs, at, place, nbytes, depth, is_extreme)
        return self._anything(nbytes)

    def _integer(self, schema: Schema, is_extreme: bool) -> Any:
        least = int(schema.get("minimum", schema.get("exclusiveMinimum", 0)))
        most = int(schema.get("maximum", schema.get("exclusiveMaximum", 2**31)))
        if is_extreme:
            return self._draw.choice((least, least - 1, most, most + 1, *INTEGERS))
        return self._draw.randint(least, min(most, max(least, 0) + 8))

    def _text(self, schema: Schema, nbytes: int, is_extreme: bool) -> str:
        draw, most = self._draw, int(schema.get("maxLength", nbytes))
        if is_extreme:
            return draw.choice(LETTERS) * min(draw.choice((0, 1, most, most + 1)), nbytes)
        return "a" * max(int(schema.get("minLength", 1)), min(8, most))

    def _list(
        self, schema: Schema, defs: Mapping[str, Any], at: str, place: str | None, nbytes: int, depth: int,
        is_extreme: bool,
    ) -> list[Any]:  # fmt: skip
        one = [self._value(schema.get("items", {}), defs, f"{at}[]", place, nbytes // 2, depth + 1)]
        if not is_extreme:
            return one * max(int(schema.get("minItems", 1)), 1)
        most = int(schema.get("maxItems", nbytes))
        fits = max(nbytes // max(len(json.dumps(one)), 1), 1)
        return one * min(self._draw.choice((0, 1, most, most + 1)), fits)

    def _object(
        self, schema: Schema, defs: Mapping[str, Any], at: str, place: str | None, nbytes: int, depth: int,
        is_extreme: bool,
    ) -> dict[str, Any]:  # fmt: skip
        draw, made = self._draw, dict[str, Any]()
        for name, inner in schema.get("properties", {}).items():
            here = f"{at}.{name}"
            is_on_the_way = place is not None and (place + ".").startswith(
                (f"{here}.", f"{here}[", f"{here}{{")
            )
            if (
                is_on_the_way
                or name in schema.get("required", ())
                or draw.random() < (0.3 if depth < 2 else 0.1)
            ):
                made[name] = self._value(inner, defs, here, place, nbytes // 2, depth + 1)
        extra = schema.get("additionalProperties")
        if is_extreme or extra:
            count = draw.choice((0, 1, 17, 65, 1025, nbytes // 8)) if is_extreme else 2
            inner = extra if isinstance(extra, dict) else {}
            value = self._value(inner, defs, f"{at}{{}}", place, 40, depth + 1)
            made |= {str(number): value for number in range(min(count, nbytes // 8))}
        return made

    def _anything(self, nbytes: int) -> Any:
        draw, many = self._draw, nbytes // 8
        deep: Any = []
        for _ in range(draw.choice((3, 50, 900))):
            deep = [deep]
        return draw.choice((
            None, True, 1e308, 10**40, 10**4000, "x", [], {}, deep, [0] * many, [1e308] * many, [[]] * many,
            {str(number): number for number in range(many)}, "a" * nbytes,
        ))  # fmt: skip
