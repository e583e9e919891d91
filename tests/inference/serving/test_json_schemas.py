"""Schemas that grammars would not honour are found; those that they honour pass."""

import json
from typing import Any

import pytest

from draftsmith.inference.serving.json_schemas import find_ignored

TEXT, NUMBER = {"type": "string"}, {"type": "integer"}

# Of each schema: a value that breaks it, and what is found.
BROKEN: list[tuple[dict[str, Any], Any, str]] = [
    ({"type": "array", "items": NUMBER, "uniqueItems": True}, [1, 1], "uniqueItems"),
    ({"type": "string", "pattern": "^a+$", "maxLength": 3}, "aaaa", "maxLength beside pattern"),
    ({"type": "string", "format": "color"}, "x", "format 'color'"),
    ({"type": "string", "not": {"const": "a"}}, "a", "not"),
    ({"allOf": [{"type": "object", "properties": {"a": TEXT}, "required": ["a"]}, {}]}, 1, "allOf of more than one"),
    ({"$ref": "#/$defs/A", "minimum": 5, "$defs": {"A": NUMBER}}, 1, "minimum beside $ref"),
    ({"minLength": 3}, "a", "minLength without a type"),
    ({"type": "array", "items": {"type": "integer", "maxLength": 1}}, None, "items: maxLength of type integer"),
    ({"type": "number", "multipleOf": 0.5}, 0.3, "multipleOf of type number"),
    ({"$ref": "#/other/A", "other": {"A": NUMBER}}, None, "$ref '#/other/A'"),
    ({"$ref": "#/$defs/A", "type": "string", "$defs": {"A": NUMBER}}, 1, "type beside $ref"),
    ({"type": "string", "enum": ["a", 1]}, 1, "enum with a value that is not of the type"),
    ({"type": "object", "required": ["a"], "propertyNames": {"pattern": "^a"}}, {}, "required beside propertyNames"),
    ({"additionalProperties": False, "anyOf": [{"type": "object"}]}, None, "additionalProperties beside anyOf"),
]
HONOURED: list[tuple[dict[str, Any], Any, Any]] = [
    ({"type": "integer", "multipleOf": 7, "minimum": 10}, 14, 7),
    ({"type": "array", "prefixItems": [NUMBER], "items": False}, [1], [1, 2]),
    ({"type": "object", "properties": {"a": TEXT}, "required": ["a"], "additionalProperties": False}, {"a": "x"}, {}),
    ({"$ref": "#/$defs/A", "description": "x", "$defs": {"A": NUMBER}}, 1, "a"),
    ({"anyOf": [TEXT, {"type": ["integer", "null"], "maximum": 3}]}, None, 4),
    ({"type": "string", "format": "date"}, "2026-12-01", "soon"),
    ({"allOf": [NUMBER]}, 1, "a"),
    ({"type": "string", "const": "a"}, "a", "b"),
]


def accepts(schema: dict[str, Any], value: Any) -> bool:
    xgrammar = pytest.importorskip("xgrammar", reason="replies by a grammar need xgrammar")
    tokens = [*map(chr, range(128)), "<eos>"]
    compiler = xgrammar.GrammarCompiler(xgrammar.TokenizerInfo(tokens, stop_token_ids=[128]))
    grammar = compiler.compile_json_schema(json.dumps(schema), any_whitespace=False)
    matcher = xgrammar.GrammarMatcher(grammar, terminate_without_stop_token=True)
    return matcher.accept_string(json.dumps(value)) and matcher.is_terminated()


@pytest.mark.parametrize(("schema", "value", "found"), BROKEN, ids=[found for *_, found in BROKEN])
def test_what_grammars_would_ignore_is_found(schema: dict[str, Any], value: Any, found: str) -> None:
    assert value is None or accepts(schema, value), "then it need not be refused"
    assert found in next(find_ignored(schema))


@pytest.mark.parametrize(("schema", "good", "bad"), HONOURED)
def test_what_grammars_honour_passes(schema: dict[str, Any], good: Any, bad: Any) -> None:
    assert list(find_ignored(schema)) == []
    assert accepts(schema, good)
    assert not accepts(schema, bad)
