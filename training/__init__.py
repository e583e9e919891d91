"""Training draft heads on a frozen target: `accelerate launch -m draftsmith train --config FILE.yaml`.

Packages, each of which imports earlier ones only: losses, data -> features -> synthesis -> distributed -> options ->
reporting -> run -> train_heads.
"""

if not __name__.startswith("draftsmith."):  # a second copy of the classes must not come into being
    raise ImportError(f"import draftsmith.{__name__}, not {__name__}")
