"""Lark rules for the values of a JSON schema in a notation with bare keys and marks as quotes.

`{city:<mark>Paris<mark>,days:[1,2.5]}`. llguidance writes JSON only, whose keys and strings have
quotation marks; other values are left to it. A keyword that has no rule is refused by name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from layerskip.texts.grammars import IN_A_LINE, referenced, search_terminal

_TYPES = {str: "string", list: "array", dict: "object", bool: "boolean", type(None): "null"}
_ALL = ("string", "number", "boolean", "null", "array", "object")
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_ALONE = ("$ref", "anyOf", "oneOf", "allOf", "enum", "const")  # beside these, only a type is held
_HELD: tuple[str, ...] = ("properties", "required", "additionalProperties", "items", "minItems")
_HELD += ("maxItems", "minLength", "maxLength", "pattern", "format", *_NUMBERS)
_NOT_HELD: tuple[str, ...] = ("not", "if", "then", "else", "contains", "prefixItems", "uniqueItems")
_NOT_HELD += ("additionalItems", "unevaluatedItems", "minProperties", "maxProperties")
_NOT_HELD += ("propertyNames", "patternProperties", "unevaluatedProperties", "dependencies")
_NOT_HELD += ("dependentRequired", "dependentSchemas", "$dynamicRef", "$recursiveRef")
_DAYS = r"(0[13578]|1[02])-(0[1-9]|[12]\d|3[01])|(0[469]|11)-(0[1-9]|[12]\d|30)|02-(0[1-9]|[12]\d)"
_DATE, _CLOCK = rf"\d{{4}}-({_DAYS})", r"([01]\d|2[0-3]):[0-5]\d"
_ZONED = rf"{_CLOCK}:[0-5]\d(\.\d+)?([zZ]|[+-]{_CLOCK})"
_FORMATS = {"date": f"^{_DATE}$", "time": f"^{_ZONED}$", "date-time": f"^{_DATE}[tT]{_ZONED}$"}
_FORMATS["uuid"] = r"^[\da-fA-F]{8}(-[\da-fA-F]{4}){3}-[\da-fA-F]{12}$"
_FORMATS["email"] = r"^[\w.+-]+@[\w-]+(\.[\w-]+)+$"
_KEY = r"[^\s:,{}\[\]<]([^:,{}\[\]<]*[^\s:,{}\[\]<])?"  # other keys are written between marks


class Rules:
    """Adds rules for the values of one schema to a grammar.

    Args:
        schema: the root, to which references lead.
        quote: the mark around strings.
        mark: the same in a grammar.
        rules: all rules of the grammar by their names.
    """

    def __init__(
        self, schema: Mapping[str, Any], quote: str, mark: str, rules: dict[str, str]
    ) -> None:
        self._root, self._quote, self._mark, self._rules = schema, quote, mark, rules
        self._known: dict[str, str] = {}  # names of rules by their schemas

    def value(self, schema: Any) -> str:
        """The name of the rule for values of a schema, which may contain itself.

        Raises:
            ValueError: there is no rule for a keyword.
        """
        text = json.dumps(schema)
        if text not in self._known:
            name = self._known[text] = self._add("")
            self._rules[name] = self._body({} if schema is True else schema)
        return self._known[text]

    def _add(self, body: str, kind: str = "value") -> str:
        name = f"{kind}{len(self._rules)}"
        self._rules[name] = body
        return name

    def _body(self, schema: Any) -> str:
        if not isinstance(schema, Mapping):
            raise ValueError(f"{json.dumps(schema)}, used as a schema, has no values; leave it out")
        types = schema.get("type", _ALL)
        types = [types] if isinstance(types, str) else types
        alone = [name for name in _ALONE if name in schema]
        others = {*alone[1:], *_NOT_HELD, *(_HELD if alone else ())}
        if refused := sorted(schema.keys() & others):
            raise _not_held(refused[0], schema)
        if not alone:
            return " | ".join(self._typed(each, schema) for each in types)
        [name], options = alone, schema[alone[0]]
        if name in ("enum", "const"):
            values = options if name == "enum" else [options]
            return " | ".join(self._written(each) for each in values if _is_of(each, types))
        options = [referenced(options, self._root)] if name == "$ref" else options
        if name == "allOf" and len(options) > 1:
            raise _not_held(name, schema)
        # llguidance has checked that of `oneOf` no value fits two
        return " | ".join(self.value(_beside(each, schema)) for each in options)

    def _typed(self, kind: str, schema: Mapping[str, Any]) -> str:
        own = {"string": self._string, "array": self._array, "object": self._object}
        if kind in own:
            return own[kind](schema)
        limits = {name: schema[name] for name in _NUMBERS if name in schema}
        return f"%json {json.dumps({'type': kind, **limits, 'x-guidance': IN_A_LINE})}"

    def _written(self, value: Any) -> str:
        """One value."""
        match value:
            case str():
                return self._quoted(value)
            case list():
                return f'"[" {_COMMA.join(map(self._written, value))} "]"'
            case dict():
                pairs = (f"{self._key(name)} {self._written(value[name])}" for name in value)
                return f'"{{" {_COMMA.join(pairs)} "}}"'
        return json.dumps(json.dumps(value))

    def _quoted(self, text: str) -> str:
        if self._quote in text:
            raise ValueError(f"{text!r} cannot be written, as {self._quote} ends a string here")
        return f"{self._mark} {_literal(text)} {self._mark}"

    def _key(self, name: str) -> str:
        bare = re.fullmatch(_KEY, name)
        return _literal(f"{name}:") if bare else f'{self._quoted(name)} ":"'

    def _string(self, schema: Mapping[str, Any]) -> str:
        few, most = schema.get("minLength", 0), schema.get("maxLength", "")
        parts = [f"/(?s:.){{{few},{most}}}/", f"~/(?s:.*){re.escape(self._quote)}(?s:.*)/"]
        for name in ("pattern", "format"):
            if name in schema:
                pattern = schema[name] if name == "pattern" else _FORMATS.get(schema[name])
                if pattern is None or (found := search_terminal(pattern)) is None:
                    raise _not_held(name, schema)
                parts.append(found)
        text = " & ".join(parts)
        if self._mark.startswith("<["):  # a token, which is not part of a terminal
            return f"{self._mark} {self._add(text, 'TEXT')} {self._mark}"
        return self._add(f"{self._mark} ({text}) {self._mark}", "TEXT")

    def _array(self, schema: Mapping[str, Any]) -> str:
        few, most = schema.get("minItems", 0), schema.get("maxItems")
        items = schema.get("items", True)
        if most == 0 or items is False:
            return '"[" "]"'
        item = self.value(items)
        filled = f'{item} ("," {item}){{{max(few - 1, 0)},{"" if most is None else most - 1}}}'
        return f'"[" {filled} "]"' if few else f'"[" ({filled})? "]"'

    def _object(self, schema: Mapping[str, Any]) -> str:
        """Properties in the order of the schema, then others."""
        more, required = schema.get("additionalProperties", True), schema.get("required", ())
        listed = schema.get("properties", {})
        listed = listed | {name: more for name in required if name not in listed}
        first = rest = self._add('""')  # what follows no pair, and what follows a pair
        if more is not False:
            others = "".join(f" & ~{_literal(name)}" for name in listed)
            pair = f"{self._add(f'(/{_KEY}/{others}) ' + _COLON, 'KEY')} {self.value(more)}"
            first, rest = self._add(f'({pair} ("," {pair})*)?'), self._add(f'("," {pair})*')
        for name in reversed(listed):
            pair = f"{self._key(name)} {self.value(listed[name])}"
            if name in required:
                first, rest = self._add(f"{pair} {rest}"), self._add(f'"," {pair} {rest}')
            else:
                first = self._add(f"{pair} {rest} | {first}")
                rest = self._add(f'("," {pair})? {rest}')
        return f'"{{" {first} "}}"'


_COMMA, _COLON = ' "," ', '":"'


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _is_of(value: Any, types: Any) -> bool:
    kinds = {_TYPES.get(type(value), "number")}
    kinds |= {"integer"} if type(value) is int else set()
    return bool(kinds & {*types})


def _beside(option: Any, schema: Mapping[str, Any]) -> Any:
    """One of the schemas that a schema names, with the type that is said beside them."""
    if "type" not in schema or not isinstance(option, Mapping):
        return option
    if option.get("type", schema["type"]) != schema["type"]:
        raise _not_held("type", schema)
    return {**option, "type": schema["type"]}


def _not_held(keyword: str, schema: Mapping[str, Any]) -> ValueError:
    shown = json.dumps(schema)
    return ValueError(
        f"this model's notation of calls has no rule for {keyword!r} in "
        f"{shown if len(shown) < 80 else shown[:80] + '...'}; leave it out, or let tool_choice be "
        "auto, which holds no call to its schema"
    )
