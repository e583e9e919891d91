"""Finds the variables of a chat template that its user may set, such as `enable_thinking`."""

from __future__ import annotations

import re
from functools import cache

from jinja2 import Environment, meta, nodes

# What a template reads beside the variables that a user may set.
_NO_VARIABLES = {"messages", "tools", "raise_exception", "strftime_now"}
# Jinja's tests and filters for variables that may not be set.
_ASKS = {"defined", "undefined", "default", "d"}


@cache
def find_variables(template: str) -> frozenset[str]:
    """Returns the names, those of special tokens among them.

    A name that the template sets itself is one only if the template asks whether it is set:

        {% set content = m.content %}{{ content }}                                    -> none
        {% if style is not defined %}{% set style = 'short' %}{% endif %}{{ style }}   -> style
    """
    # Blocks of transformers' own, which Jinja cannot read, hold nothing back.
    without = re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", template)
    parsed = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(without)
    own = {name.name for name in parsed.find_all(nodes.Name) if name.ctx == "store"}
    arguments = [
        id(name)
        for macro in parsed.find_all(nodes.Macro)
        for name in macro.find_all(nodes.Name)
        if name.name in {argument.name for argument in macro.args}
    ]
    asking = (each.node for each in parsed.find_all((nodes.Test, nodes.Filter)) if each.name in _ASKS)
    asked = {name.name for name in asking if isinstance(name, nodes.Name) and id(name) not in arguments}
    return frozenset(meta.find_undeclared_variables(parsed) - _NO_VARIABLES - (own - asked))
