"""What xgrammar leaves out of a JSON schema without a word: a reply could then break the schema.

One thing it reads in its own way, and that is not refused: `oneOf` means `anyOf`.
"""

from collections.abc import Iterator
from typing import Any

# What xgrammar (0.2.4 and later) honours of each type, beside what all have.
OF_TYPES: dict[str, set[str]] = {
    "string": {"minLength", "maxLength", "pattern", "format"},
    "number": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"},
    "array": {"items", "prefixItems", "minItems", "maxItems", "unevaluatedItems"},
    "object": {
        *("properties", "required", "additionalProperties", "patternProperties", "propertyNames"),
        *("minProperties", "maxProperties", "unevaluatedProperties"),
    },
    "boolean": set(),
    "null": set(),
}
OF_TYPES["integer"] = {*OF_TYPES["number"], "multipleOf"}
# Of two such keywords in one schema it honours the first only.
BESIDE = (
    ("format", {"pattern", "minLength", "maxLength"}),
    ("pattern", {"minLength", "maxLength"}),
    ("patternProperties", {"properties", "required", "propertyNames"}),
    ("propertyNames", {"properties", "required"}),
)
# Whichever stands first decides alone: xgrammar reads no other keyword beside it.
ALONE = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
NEVER = {
    *("not", "if", "then", "else", "uniqueItems", "contains", "minContains", "maxContains", "additionalItems"),
    *("dependentRequired", "dependentSchemas", "dependencies", "$dynamicRef", "$recursiveRef"),
}
KEYWORDS = NEVER.union(ALONE, *OF_TYPES.values())
REFERENCES = ("#/$defs/", "#/definitions/")
TYPE_NAMES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
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
    known -= {"multipleOf"} if "number" in types else set()
    why = f" beside {alone}" if alone else f" of type {' or '.join(map(str, types))}" if types else " without a type"
    for name in schema:
        if name in KEYWORDS - known and (alone or schema[name] is not False):
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
    value = schema.get(alone or "format")
    if alone in ("const", "enum"):
        values = value if alone == "enum" and isinstance(value, list) else [value]
        if "type" in schema and not all(_is_of_type(one, schema["type"]) for one in values):
            yield f"{alone} with a value that is not of the type"
        return
    if alone is not None and "type" in schema:
        yield f"type beside {alone}"
    if alone == "$ref" and value != "#" and not str(value).startswith(REFERENCES):
        yield f"$ref {value!r}"
    if alone == "allOf" and isinstance(value, list) and len(value) > 1:
        yield "allOf of more than one schema"
    if alone is None and "format" in schema and str(value) not in FORMATS:
        yield f"format {value!r}"
    for one, others in BESIDE if alone is None else ():
        if one in schema and (more := others & schema.keys()):
            yield f"{min(more)} beside {one}"


def _is_of_type(value: Any, types: Any) -> bool:
    name = TYPE_NAMES.get(type(value), "null")
    return name in types or (name == "integer" and "number" in types)
