"""What xgrammar leaves out of a JSON schema without a word: a reply could then break the schema."""

from collections.abc import Iterator
from typing import Any

# What xgrammar (0.2.4 and later) honours of each type, beside what all have.
OF_TYPES: dict[str, set[str]] = {
    "string": {"minLength", "maxLength", "pattern", "format"},
    "number": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"},
    "array": {"items", "prefixItems", "minItems", "maxItems", "unevaluatedItems"},
    "object": {
        *("properties", "required", "additionalProperties", "patternProperties", "propertyNames"),
        *("minProperties", "maxProperties", "unevaluatedProperties"),
    },
    "boolean": set(),
    "null": set(),
}
OF_TYPES["integer"] = OF_TYPES["number"]
# Whichever stands first decides alone: xgrammar reads no other keyword beside it.
ALONE = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
NEVER = {
    *("not", "if", "then", "else", "uniqueItems", "contains", "minContains", "maxContains", "additionalItems"),
    *("dependentRequired", "dependentSchemas", "dependencies", "$dynamicRef", "$recursiveRef"),
}
KEYWORDS = NEVER.union(ALONE, *OF_TYPES.values())
FORMATS = {
    *("email", "date", "time", "date-time", "duration", "ipv4", "ipv6", "hostname", "uuid", "uri", "uri-reference"),
    *("uri-template", "json-pointer", "relative-json-pointer"),
}


def find_ignored(schema: Any, place: str = "the schema") -> Iterator[str]:
    """What xgrammar would not honour, as "$defs.B: multipleOf", in the order of the schema.

    >>> list(find_ignored({"type": "array", "items": {"type": "string", "format": "color"}, "uniqueItems": True}))
    ['the schema: uniqueItems', "items: format 'color'"]
    """
    if not isinstance(schema, dict):  # true and false
        return
    alone = next((name for name in ALONE if name in schema), None)
    types = schema.get("type")
    types = [types] if isinstance(types, str) else types if isinstance(types, list) else _guess_types(schema)
    known = {alone} if alone else set[str]().union(*(OF_TYPES.get(str(kind), set()) for kind in types))
    why = f" beside {alone}" if alone else f" of type {' or '.join(map(str, types))}" if types else " without a type"
    for name in schema:
        if name in KEYWORDS - known and schema[name] is not False:
            yield f"{place}: {name}{'' if name in NEVER else why}"
    yield from (f"{place}: {text}" for text in _find_ignored_values(schema, alone))
    for name, value in schema.items():
        inner = f"{place}.{name}" if place != "the schema" else name
        if name in ("properties", "patternProperties", "$defs", "definitions") and isinstance(value, dict):
            for key, part in value.items():
                yield from find_ignored(part, f"{inner}.{key}")
        elif name in ("anyOf", "oneOf", "allOf", "prefixItems") and isinstance(value, list):
            for number, part in enumerate(value):
                yield from find_ignored(part, f"{inner}.{number}")
        elif name == "propertyNames" and isinstance(value, dict):
            yield from find_ignored({"type": "string", **value}, inner)
        elif name in ("items", "additionalProperties", "unevaluatedItems", "unevaluatedProperties"):
            yield from find_ignored(value, inner)


def _guess_types(schema: dict[str, Any]) -> list[str]:
    """Without a type, xgrammar takes what has an object's or an array's keywords for one, and anything else as free."""
    return next(([kind] for kind in ("object", "array") if schema.keys() & OF_TYPES[kind]), [])


def _find_ignored_values(schema: dict[str, Any], alone: str | None) -> Iterator[str]:
    if alone == "$ref" and not str(schema["$ref"]).startswith("#/") and schema["$ref"] != "#":
        yield f"$ref {schema['$ref']!r}"
    if alone == "allOf" and len(schema["allOf"]) > 1:
        yield "allOf of more than one schema"
    if alone is None and "format" in schema and schema["format"] not in FORMATS:
        yield f"format {schema['format']!r}"
    if alone is None and {"pattern", "format"} & schema.keys() and (more := {"minLength", "maxLength"} & schema.keys()):
        yield f"{min(more)} beside a pattern or format"
    if alone is None and {"pattern", "format"} <= schema.keys():
        yield "pattern beside format"
